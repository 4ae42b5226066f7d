"""How token spellings become text, one token at a time, for each kind of decoder.

ByteLevel   Every token spells bytes, which are decoded as UTF-8 with bad bytes replaced. At most the three bytes of an
            unfinished character are held back.
Pieces      As in SentencePiece: tokens spell text, and `<0xNN>` tokens spell one byte. The decoder reads a run of byte
            tokens as a whole: as text if all of it is valid UTF-8, else as one U+FFFD per byte. So a run is held back
            until it ends or can no longer become valid; from then on each of its bytes is returned at once. Only the
            decoder's state is kept, so a token of a long run costs no more than one of a short run.
Spaced      No decoder: tokens are joined by spaces.
Whole       Any other decoder: nothing is certain before the end, so all text comes with `flush`. The text is exact, but
            it does not stream.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ramify.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Two hexadecimal digits as Rust parses them: the first may be a plus sign.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


class TextAssembler(Protocol):
    """Turns token spellings into text; skipped special tokens never get here."""

    def push(self, token: str) -> str: ...

    def flush(self) -> str: ...

    def fork(self) -> TextAssembler: ...


def assembler_for(tokenizer: Tokenizer) -> TextAssembler:
    """The assembler that gives the same text as the tokenizer's decoder."""
    description = tokenizer.decoder_description
    if description is None:
        return Spaced()
    stages = description["decoders"] if description["type"] == "Sequence" else [description]
    kinds = [stage["type"] for stage in stages]
    if kinds == ["ByteLevel"]:
        return ByteLevel(byte_of_character())
    pieces = _pieces_of(stages) if "Fuse" in kinds else None
    return Whole(tokenizer.decode_tokens) if pieces is None else pieces


def spelled_bytes(tokenizer: Tokenizer) -> list[bytes] | None:
    """What each token adds to a text, in bytes, special tokens written out; ids without a token add nothing.

    None where that depends on the tokens around it. What a decoder strips from the start of a text is not stripped.
    """
    assembler = assembler_for(tokenizer)
    if not isinstance(assembler, ByteLevel | Pieces):
        return None
    tokens = [tokenizer.id_to_token(token_id) for token_id in range(tokenizer.vocab_size)]
    return [b"" if token is None else assembler.spelled(token) for token in tokens]


def _pieces_of(stages: list[Mapping[str, Any]]) -> Pieces | None:
    """From Replace stages, ByteFallback or not, Fuse, and at most one Strip of the start; None for anything else."""
    replacements: list[tuple[str, str]] = []
    byte_fallback = False
    remaining = list(stages)
    while remaining and remaining[0]["type"] == "Replace" and "String" in remaining[0]["pattern"]:
        stage = remaining.pop(0)
        replacements.append((stage["pattern"]["String"], stage["content"]))
    if remaining and remaining[0]["type"] == "ByteFallback":
        byte_fallback = True
        remaining.pop(0)
    if not remaining or remaining.pop(0)["type"] != "Fuse":
        return None
    if not remaining:
        return Pieces(tuple(replacements), byte_fallback=byte_fallback)
    strip = remaining.pop(0)
    if remaining or strip["type"] != "Strip" or strip["stop"] != 0:
        return None
    return Pieces(
        tuple(replacements),
        byte_fallback=byte_fallback,
        stripped=strip["content"],
        strip_count=strip["start"],
    )


def byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable bytes stand for themselves, the others for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


class ByteLevel:
    def __init__(self, alphabet: Mapping[str, int]) -> None:
        self._alphabet = alphabet
        self._reader = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> str:
        return self._reader.decode(self.spelled(token))

    def spelled(self, token: str) -> bytes:
        try:
            return bytes([self._alphabet[character] for character in token])
        except KeyError:
            # An added token, written as plain text.
            return token.encode("utf-8")

    def flush(self) -> str:
        return self._reader.decode(b"", final=True)

    def fork(self) -> ByteLevel:
        copy = ByteLevel(self._alphabet)
        copy._reader.setstate(self._reader.getstate())
        return copy


class Pieces:
    def __init__(
        self,
        replacements: tuple[tuple[str, str], ...],
        *,
        byte_fallback: bool,
        stripped: str = " ",
        strip_count: int = 0,
    ) -> None:
        self._replacements = replacements
        self._byte_fallback = byte_fallback
        self._stripped = stripped
        self._strip_count = strip_count  # how many leading characters may still be dropped
        self._reader = codecs.getincrementaldecoder("utf-8")("strict")
        self._run_text: list[str] = []
        self._run_length = 0
        self._run_is_valid = True

    @property
    def strips(self) -> bool:
        """Whether a text may lose some of its start."""
        return self._strip_count > 0

    def within(self) -> Pieces:
        """A new one, for a text that goes on after another."""
        return Pieces(self._replacements, byte_fallback=self._byte_fallback)

    def push(self, token: str) -> str:
        token, byte = self._read(token)
        if byte is not None:
            return self._strip(self._push_byte(byte))
        return self._strip(self._end_run() + token)

    def spelled(self, token: str) -> bytes:
        token, byte = self._read(token)
        return token.encode("utf-8") if byte is None else bytes([byte])

    def _read(self, token: str) -> tuple[str, int | None]:
        """Its text, and the byte if it stands for one."""
        for old, new in self._replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        return token, None if byte is None else int(byte[1], 16)

    def flush(self) -> str:
        return self._strip(self._end_run())

    def fork(self) -> Pieces:
        copy = Pieces(
            self._replacements,
            byte_fallback=self._byte_fallback,
            stripped=self._stripped,
            strip_count=self._strip_count,
        )
        copy._reader.setstate(self._reader.getstate())
        copy._run_text = list(self._run_text)
        copy._run_length = self._run_length
        copy._run_is_valid = self._run_is_valid
        return copy

    def _push_byte(self, byte: int) -> str:
        if not self._run_is_valid:
            return _REPLACEMENT
        self._run_length += 1
        try:
            self._run_text.append(self._reader.decode(bytes([byte])))
        except UnicodeDecodeError:
            self._run_is_valid = False
            self._run_text.clear()
            return _REPLACEMENT * self._run_length
        return ""

    def _end_run(self) -> str:
        text = ""
        if self._run_is_valid and self._run_length:
            unfinished, _ = self._reader.getstate()
            text = _REPLACEMENT * self._run_length if unfinished else "".join(self._run_text)
        self._reader.reset()
        self._run_text.clear()
        self._run_length = 0
        self._run_is_valid = True
        return text

    def _strip(self, text: str) -> str:
        while self._strip_count and text:
            if not text.startswith(self._stripped):
                self._strip_count = 0
                break
            text = text[len(self._stripped) :]
            self._strip_count -= 1
        return text


class Spaced:
    def __init__(self, separator: str = "") -> None:
        self._separator = separator

    def push(self, token: str) -> str:
        text = self._separator + token
        self._separator = " "
        return text

    def flush(self) -> str:
        return ""

    def fork(self) -> Spaced:
        return Spaced(self._separator)


class Whole:
    def __init__(self, decode: Callable[[list[str]], str], tokens: tuple[str, ...] = ()) -> None:
        self._decode = decode
        self._tokens = list(tokens)

    def push(self, token: str) -> str:
        self._tokens.append(token)
        return ""

    def flush(self) -> str:
        tokens, self._tokens = self._tokens, []
        return self._decode(tokens)

    def fork(self) -> Whole:
        return Whole(self._decode, tuple(self._tokens))
