"""The tokenizer that a GGUF file's metadata describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from ramify.errors import FileFormatError, UnsupportedModelError
from ramify.text.gguf_vocabulary import TokenType, Vocabulary, optional_bool, optional_id, read_vocabulary
from ramify.text.split_patterns import LLAMA3, QWEN2
from ramify.text.tokenizer import Tokenizer, backend_panics_become
from ramify.validation import shown

_BYTE_LEVEL_FAMILIES = ("gpt-2", "llama-bpe", "qwen2", "smollm")
# Other names for the same splitting, as in llama.cpp: earlier files of Llama 3, and DeepSeek's distilled Qwen2.5.
_OTHER_NAMES = MappingProxyType({"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"})
_MOST_CUT_CHARACTERS = 2**28  # every cut of every piece is copied; real vocabularies need an eighth of this
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's visible space


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer from `tokenizer.*` keys; arrays may be lists or numpy arrays.

    Generation ends at the tokens named as end of sequence, of turn and of message, as in llama.cpp. llama.cpp also
    guesses further ones by their spelling; we go by the file alone.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise FileFormatError("the GGUF file has no tokenizer (no tokenizer.ggml.model)")
    if not isinstance(kind, str) or kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"GGUF tokenizer model {shown(kind)} is not supported; known are 'gpt2' and 'llama'"
        )
    vocabulary = read_vocabulary(metadata)
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is not None and not isinstance(pre, str):
        raise FileFormatError(f"tokenizer.ggml.pre must be a text, got {shown(pre)}")
    pre = None if pre is None else _OTHER_NAMES.get(pre, pre)
    with backend_panics_become(FileFormatError, "the GGUF tokenizer cannot be built"):
        backend = (
            _byte_level_backend(vocabulary, metadata, pre)
            if kind == "gpt2"
            else _sentencepiece_backend(vocabulary, metadata)
        )
        _add_special_tokens(backend, vocabulary)
    # The defaults are llama.cpp's.
    add_bos = optional_bool(metadata, "add_bos_token", default=kind == "llama" or pre == "llama-bpe")
    add_eos = optional_bool(metadata, "add_eos_token", default=False)
    ids = _role_ids(vocabulary, metadata, kind)
    backend.post_processor = _post_processor(
        vocabulary, ids.get("bos_token") if add_bos else None, ids.get("eos_token") if add_eos else None
    )
    ends = [
        ids.get("eos_token"),
        *(optional_id(metadata, f"{end}_token_id", vocabulary) for end in ("eot", "eom")),
    ]
    return Tokenizer(
        backend,
        special_tokens={role: vocabulary.tokens[token_id] for role, token_id in ids.items()},
        eos_token_ids=frozenset(token_id for token_id in ends if token_id is not None),
        bos_token_id=ids.get("bos_token"),
        chat_templates=_chat_templates(metadata),
    )


def _byte_level_backend(vocabulary: Vocabulary, metadata: Mapping[str, Any], pre: str | None) -> tokenizers.Tokenizer:
    if pre not in _BYTE_LEVEL_FAMILIES:
        raise UnsupportedModelError(
            f"GGUF pre-tokenizer {shown(pre)} (tokenizer.ggml.pre) is not supported; known are "
            + ", ".join(map(repr, (*_BYTE_LEVEL_FAMILIES, *_OTHER_NAMES)))
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not set(map(type, merges)) <= {str}:
        raise FileFormatError("tokenizer.ggml.merges must be an array of texts")
    # No piece contains a space: the byte-level alphabet has another character for it.
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if not set(map(len, pairs)) <= {2}:
        wrong = next(merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2)
        raise FileFormatError(f"tokenizer.ggml.merges: {shown(wrong)} is not two pieces with a space between")
    backend = _backend(vocabulary, pairs, ignore_merges=pre == "llama-bpe")
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _byte_level_pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_level_pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "gpt-2":
        return gpt2
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    pattern = Regex(LLAMA3 if pre == "llama-bpe" else QWEN2)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece_backend(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    unknown = optional_id(metadata, "unknown_token_id", vocabulary)
    if unknown is None and TokenType.UNKNOWN in vocabulary.types:
        unknown = vocabulary.types.index(TokenType.UNKNOWN)
    backend = _backend(
        vocabulary,
        _merges_by_score(vocabulary),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    stages: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if optional_bool(metadata, "add_space_prefix", default=True):
        # As in llama.cpp, the text after every special token gets a space of its own.
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
        stages.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.decoder = decoders.Sequence(stages)
    return backend


def _merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, best first, so that merging by rank is merging by score.

    SentencePiece breaks ties by position in the text, leftmost first, which ranks cannot express. Since the scores of a
    trained model differ, only different cuts of the same piece tie. Of these the one with the longer left part goes
    first, because merging from the left leaves the short rest at the right. Unused pieces are left out; SentencePiece
    would merge them and split them again.
    """
    scores = vocabulary.scores
    if scores is None:
        raise FileFormatError("tokenizer.ggml.scores is missing")
    ordinary = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == TokenType.NORMAL
    }
    if sum(len(token) ** 2 for token in ordinary) > _MOST_CUT_CHARACTERS:
        raise FileFormatError("tokenizer.ggml.tokens has too many long texts to find the merges that make them")
    merges: list[tuple[str, str]] = []
    for token in sorted(ordinary, key=lambda token: (-scores[ordinary[token]], ordinary[token])):
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in ordinary and right in ordinary:
                merges.append((left, right))
    return merges


def _backend(vocabulary: Vocabulary, merges: Sequence[tuple[str, ...]], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(
            models.BPE(vocab=vocabulary.id_of_token, merges=cast(list[tuple[str, str]], merges), **options)
        )
    except Exception as error:
        # For instance, a merge of pieces that are not in the vocabulary.
        raise FileFormatError(f"the GGUF tokenizer's vocabulary and merges do not fit: {error}") from None


def _add_special_tokens(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    special, defined = [], []
    for token_id, kind in enumerate(vocabulary.types):
        if kind == TokenType.NORMAL:
            continue
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.append(vocabulary.tokens[token_id])
        elif kind == TokenType.USER_DEFINED:
            defined.append(vocabulary.tokens[token_id])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in defined])


def _role_ids(vocabulary: Vocabulary, metadata: Mapping[str, Any], kind: str) -> dict[str, int]:
    # SentencePiece's customary ids, which llama.cpp assumes too.
    defaults = {"bos_token": 1, "eos_token": 2} if kind == "llama" and len(vocabulary.tokens) > 2 else {}
    ids = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = optional_id(metadata, f"{key}_token_id", vocabulary)
        if token_id is None:
            token_id = defaults.get(f"{role}_token")
        if token_id is not None:
            ids[f"{role}_token"] = token_id
    return ids


def _post_processor(vocabulary: Vocabulary, bos: int | None, eos: int | None) -> processors.PostProcessor | None:
    before, after = (["BOS"] if bos is not None else []), (["EOS"] if eos is not None else [])
    named = [
        {"id": name, "ids": [token_id], "tokens": [vocabulary.tokens[token_id]]}
        for name, token_id in (("BOS", bos), ("EOS", eos))
        if token_id is not None
    ]
    if not named:
        return None
    single = [*before, "$A", *after]
    return processors.TemplateProcessing(single=single, pair=[*single, "$B"], special_tokens=named)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    templates = {}
    for name, value in metadata.items():
        if name == f"{key}s" or (name != key and not name.startswith(f"{key}.")):
            continue  # the plural key only lists the names
        if not isinstance(value, str):
            raise FileFormatError(f"{name} must be a text")
        templates["default" if name == key else name.removeprefix(f"{key}.")] = value
    return templates
