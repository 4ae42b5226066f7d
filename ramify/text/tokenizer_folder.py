"""The tokenizer of a Hugging Face model folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ramify.errors import FileFormatError, ModelNotFoundError, UnsupportedModelError
from ramify.files.json_file import read_optional_json, read_text
from ramify.text.tokenizer import Tokenizer, backend_panics_become
from ramify.text.tokenizer_limits import MOST_ADDED_TOKENS

LARGEST_TOKENIZER_FILE = 64 * 2**20


def load_folder(folder: Path) -> Tokenizer:
    """The tokenizer of `folder`, which gives the same ids as in `transformers`.

    tokenizer.json decides: like `transformers` we leave BOS and EOS to its post-processor and ignore `add_bos_token`
    and `add_eos_token` in tokenizer_config.json. A folder without it needs `transformers` to convert its files.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder} is not a folder")
    config = read_optional_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(folder, config)
    tokenizer_file = folder / "tokenizer.json"
    if tokenizer_file.is_file():
        backend = _read_backend(tokenizer_file)
        _add_missing_tokens(backend, config, special_tokens)
    else:
        backend, converted = _convert_with_transformers(folder)
        special_tokens = {**converted, **special_tokens}
    return Tokenizer(backend, special_tokens=special_tokens, chat_templates=_chat_templates(folder, config))


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    text = read_text(path, LARGEST_TOKENIZER_FILE)
    with backend_panics_become(FileFormatError, f"{path.name} is not a tokenizer file"):
        try:
            return tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the backend has no other kind
            raise FileFormatError(f"{path.name} is not a tokenizer file: {str(error)[:200]}") from None


def _token_text(value: object) -> str | None:
    """The text of a token that is given as a text, or as an object with its text as `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of special tokens by role: everything called `..._token`, since chat templates may use it."""
    sources = [config]
    if "added_tokens_decoder" not in config:
        # The older layout, in which this file decides.
        sources.append(read_optional_json(folder / "special_tokens_map.json"))
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        sources.append(extra)
    texts: dict[str, str] = {}
    for source in sources:
        for role, value in source.items():
            text = _token_text(value)
            if role.endswith("_token") and text is not None:
                texts[role] = text
    return texts


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Adds the tokens that the configuration names and tokenizer.json lacks, in the order of `transformers`.

    Each call of the backend goes over all added tokens, hence one call for many.
    """
    declared = config.get("added_tokens_decoder", {})
    if not isinstance(declared, dict):
        raise FileFormatError("tokenizer_config.json: added_tokens_decoder must be an object")
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra_texts = [_token_text(token) for token in extra] if isinstance(extra, list) else []
    if len(declared) + len(extra_texts) > MOST_ADDED_TOKENS:
        raise FileFormatError(f"tokenizer_config.json adds more than {MOST_ADDED_TOKENS} tokens")
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing: dict[str, AddedToken] = {}
    try:
        for _, entry in sorted(declared.items(), key=lambda id_and_entry: int(id_and_entry[0])):
            fields = {key: value for key, value in entry.items() if key != "__type"}
            if fields["content"] not in known:
                missing.setdefault(fields["content"], AddedToken(**fields))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FileFormatError(f"tokenizer_config.json: added_tokens_decoder is malformed: {str(error)[:200]}") from None
    backend.add_tokens(list(missing.values()))
    _make_special(backend, [text for text in [*special_tokens.values(), *extra_texts] if text])


def _make_special(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> None:
    """Makes each text a special token; a token that is there already keeps its other properties."""
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    changed = []
    for text in dict.fromkeys(texts):
        token = added.get(text)
        if token is None:
            token = AddedToken(text, special=True, normalized=False)
        elif token.special:
            continue
        token.special = True
        changed.append(token)
    backend.add_special_tokens(changed)


def _convert_with_transformers(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The backend that `transformers` makes from older vocabulary files, and its special tokens."""
    older = [["tokenizer.model"], ["vocab.json", "merges.txt"]]
    if not any(all((folder / name).is_file() for name in names) for names in older):
        raise ModelNotFoundError(
            f"{folder} has no tokenizer.json, no tokenizer.model, and no vocab.json with merges.txt"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UnsupportedModelError(
            f"{folder} has no tokenizer.json; converting its older tokenizer files needs the package"
            " `transformers` (pip install transformers sentencepiece)"
        ) from None
    try:
        converted = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        backend = converted.backend_tokenizer
    except Exception as error:
        # Its many converters may raise anything.
        raise UnsupportedModelError(
            f"transformers cannot convert the tokenizer of {folder} (there is no tokenizer.json): {error}"
        ) from error
    texts = {role: str(token) for role, token in converted.special_tokens_map.items() if isinstance(token, str)}
    return backend, texts


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: from .jinja files, else from tokenizer_config.json, else from chat_template.json."""
    templates: dict[str, str] = {}
    default = folder / "chat_template.jinja"
    if default.is_file():
        templates["default"] = read_text(default)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text(path)
    if templates:
        return templates
    for path, content in (
        (folder / "tokenizer_config.json", config),
        (folder / "chat_template.json", read_optional_json(folder / "chat_template.json")),
    ):
        templates = _templates_of(content.get("chat_template"), path)
        if templates:
            return templates
    return {}


def _templates_of(value: object, path: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        value = [{"name": name, "template": template} for name, template in value.items()]
    if not isinstance(value, list):
        raise FileFormatError(f"{path}: chat_template must be a text or a list of named templates")
    templates: dict[str, str] = {}
    for entry in value:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise FileFormatError(f"{path}: each chat template needs a name and a template")
        if not isinstance(entry.get("template"), str):
            raise FileFormatError(f"{path}: chat template {entry['name']!r} is not a text")
        templates[entry["name"]] = entry["template"]
    return templates
