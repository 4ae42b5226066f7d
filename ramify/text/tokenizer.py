"""Tokenizer: text to token ids and back, and what a model says about its special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tokenizers

from ramify.errors import FileFormatError, InvalidInputError
from ramify.text.encoding_process import EncodingProcess
from ramify.text.tokenizer_limits import check_tokenizer

_MANY = 10_000  # characters or ids: some milliseconds of work


class Tokenizer:
    """A `tokenizers.Tokenizer`, the backend, with what else the engine needs to know.

    `encode` gives the ids that `transformers` gives for the same files: BOS and EOS are where the backend's
    post-processor puts them, and special tokens written out in the text become their ids. Nothing is truncated or
    padded. `decode` is the backend's decoding, without any clean-up of spaces.

    A backend whose cost is not bounded by its parts (`tokenizer_limits`) encodes in a process of its own.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: frozenset[int] | None = None,
        bos_token_id: int | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """`special_tokens` maps roles ("bos_token") to texts; ids that are not given are looked up there."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens: dict[str, str] = dict(special_tokens or {})
        self.chat_templates: dict[str, str] = dict(chat_templates or {})
        vocabulary = backend.get_vocab(with_added_tokens=True)
        unproven = check_tokenizer(backend, vocabulary)
        self._process = EncodingProcess(backend.to_str()) if unproven else None
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self.bos_token_id = self._role_id("bos_token") if bos_token_id is None else bos_token_id
        if eos_token_ids is None:
            eos_token_id = self._role_id("eos_token")
            eos_token_ids = frozenset() if eos_token_id is None else frozenset({eos_token_id})
        self.eos_token_ids: frozenset[int] = eos_token_ids
        self.special_token_ids: frozenset[int] = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The wrapped tokenizer; whoever changes it breaks the promises above."""
        return self._backend

    @property
    def chat_template(self) -> str | None:
        """The only chat template, or the one named "default"; `chat_templates` has all."""
        if len(self.chat_templates) == 1:
            return next(iter(self.chat_templates.values()))
        return self.chat_templates.get("default")

    @property
    def decoder_description(self) -> dict[str, Any] | None:
        """The backend's decoder as the JSON object that tokenizer.json holds for it."""
        if self._backend.decoder is None:
            return None
        description: dict[str, Any] = json.loads(self._backend.decoder.__getstate__())
        return description

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` says whether the post-processor may add BOS and EOS."""
        if not isinstance(text, str):
            raise InvalidInputError(f"text must be a str, not {type(text).__name__}")
        try:
            # Python strings can hold a lone surrogate, which the backend would refuse as "not a str".
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidInputError(
                f"text has a lone surrogate at position {error.start}: it is no valid Unicode"
            ) from None
        if self._process is not None:
            return self._process.encode(text, add_special_tokens=add_special_tokens)
        try:
            with backend_panics_become(InvalidInputError, "text cannot be tokenized"):
                if len(text) < _MANY:
                    return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
                # The same ids, and other threads run meanwhile: `encode` holds the interpreter's lock, a second a
                # megabyte.
                [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except InvalidInputError:
            raise
        except Exception as error:  # a text with no token for it, in a vocabulary without a token for the unknown
            place = self._first_unknown(text)
            where = "" if place is None else f" from character {place} on ({text[place : place + 20]!r})"
            raise InvalidInputError(f"text cannot be tokenized{where}: {str(error)[:200]}") from None
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids that name no token give no text, as in `tokenizers`."""
        try:
            with backend_panics_become(FileFormatError, "the tokens cannot be decoded"):
                if len(ids) < _MANY:
                    return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
                [text] = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise InvalidInputError(f"ids must be token ids (integers from 0 on): {error}") from None
        except FileFormatError:
            skipped = self.special_token_ids if skip_special_tokens else frozenset()
            return self.decode_tokens([self.id_to_token(each) or "" for each in ids if each not in skipped])
        return str(text)

    def decode_tokens(self, tokens: Sequence[str]) -> str:
        """Text of tokens in the vocabulary's spelling, by the backend's decoder; just their spelling where that fails.

        Decoders run in the middle of a step, which one that fails (on an empty token, say) must not break.
        """
        if self._backend.decoder is None:
            return " ".join(tokens)
        try:
            with backend_panics_become(FileFormatError, "the tokens cannot be decoded"):
                return str(self._backend.decoder.decode(list(tokens)))
        except Exception:
            return "".join(tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token; None if there is no such id."""
        if not 0 <= token_id < self.vocab_size:
            return None
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's spelling; None if there is no such token."""
        return self._backend.token_to_id(token)

    def special_token(self, role: str) -> str | None:
        """The text of the token with this role ("eos_token"): as the files name it, else that of the id it has."""
        if role in self.special_tokens:
            return self.special_tokens[role]
        ids = {"bos_token": self.bos_token_id, "eos_token": min(self.eos_token_ids, default=None)}
        token_id = ids.get(role)
        return None if token_id is None else self.id_to_token(token_id)

    def _first_unknown(self, text: str) -> int | None:
        """Where the first piece of the text begins that the model has no tokens for; None if that cannot be told."""
        if self._backend.normalizer is not None:
            return None  # places are those of another text
        splitter = self._backend.pre_tokenizer
        pieces = [(text, (0, len(text)))] if splitter is None else splitter.pre_tokenize_str(text)
        for piece, (start, _) in pieces:
            try:
                self._backend.model.tokenize(piece)
            except Exception:  # the backend has no other kind
                return int(start)
        return None

    def _role_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self._backend.token_to_id(token)


@contextmanager
def backend_panics_become(kind: type[InvalidInputError] | type[FileFormatError], what: str) -> Iterator[None]:
    """Turns a panic of the Rust backend into an error of ours.

    A panic is a BaseException but no Exception, so it would end a server's thread. A known cause: the engine of regular
    expressions gives up on ten million white-space characters in a row.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {error}") from None
