"""Tokens that are nothing but plain characters of a JSON string: which of them fit into what a string still takes.

A matcher whose string must end within a few characters walks through all of the vocabulary to find that out, for a
millisecond or two. But in a free string all plain characters are alike. So a second vocabulary has none of these
tokens, and in their stead one probe of each length, made of a character that no grammar names: the mask of a matcher
over it is found in microseconds, and its probes tell how long plain tokens may be.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ramify.structured.mask_threads import WORD, Mask

NEUTRAL = "\ue000"  # of the private use area: no schema names it, or its strings are not looked at in this way
LONGEST = 64  # characters of a plain token; longer ones are left to the walk
FEW = 2_000  # tokens to walk through
SLICES = (10, 30)  # characters of plain tokens that llguidance need not walk through where a string takes so many

_PLAIN = re.compile(r'[^"\\\x00-\x1f\x7f]+')


class PlainTokens:
    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int]) -> None:
        """The last token is the end of a text, as llguidance sees it."""
        special = set(special_token_ids)
        self.tokens = tokens
        self.lengths = [0 if token_id in special else _length(token) for token_id, token in enumerate(tokens)]
        present = np.bincount(self.lengths, minlength=LONGEST + 1)
        longer = len(tokens) - np.cumsum(present)
        self._kinds = [int(length) for length in np.flatnonzero(present) if length]  # lengths that there are
        # Where a string takes so many characters more, the walk is short.
        self.near = next((length for length in SLICES if longer[length] <= FEW), LONGEST)
        self.ids_of: dict[bytes, list[int]] = {}
        for token_id, (token, length) in enumerate(zip(tokens, self.lengths, strict=True)):
            if length:
                self.ids_of.setdefault(token, []).append(token_id)
        self.tokenizer = self._second_tokenizer(special_token_ids)
        # (lengths + 1, words): plain tokens of the first so many of the lengths that there are.
        self.fitting = np.stack([self._no_longer_than(longest) for longest in (0, *self._kinds)])

    def _second_tokenizer(self, special_token_ids: Sequence[int]) -> Any:
        """Token ids are the same, but plain tokens are not there: bytes are, and probes, of which no text has any."""
        from ramify.structured.grammar_child import Vocabulary

        tokens = [b"" if length else token for token, length in zip(self.tokens, self.lengths, strict=True)][:-1]
        probes = [(NEUTRAL * length).encode() for length in self._kinds]
        spelled = [*tokens, *probes, *(bytes([byte]) for byte in range(256)), b"<end>"]
        return Vocabulary(spelled, [*special_token_ids[:-1], len(spelled) - 1]).tokenizer(slices=[])

    def _no_longer_than(self, longest: int) -> Mask:
        lengths = np.array(self.lengths)
        flags = np.pad((lengths > 0) & (lengths <= longest), (0, -len(lengths) % WORD))
        return np.packbits(flags, bitorder="little").view(np.uint32)

    @property
    def num_words(self) -> int:
        """Of a mask over the second vocabulary."""
        return -(-(len(self.tokens) + len(self._kinds) + 256) // WORD)

    @property
    def first_probe(self) -> int:
        """Its id."""
        return len(self.tokens) - 1

    @property
    def first_byte(self) -> int:
        """The id of the byte 0 there."""
        return self.first_probe + len(self._kinds)

    def room_told(self, masks: Mask) -> list[int]:
        """Of masks (R, words) over the second vocabulary: how many of the lengths that there are each still takes."""
        words = np.ascontiguousarray(masks[:, self.first_probe // WORD : self.first_byte // WORD + 1])
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, self.first_probe % WORD :]
        room: list[int] = bits[:, : len(self._kinds)].sum(1).tolist()
        return room

    def longest(self, room: int) -> int:
        """Characters of the longest plain token of the first so many lengths."""
        return self._kinds[room - 1] if room else 0

    def takes_all(self, room: int) -> bool:
        return room == len(self._kinds)


def _length(token: bytes) -> int:
    """In characters, if it has only plain ones; else 0."""
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return 0
    return len(text) if len(text) <= LONGEST and _PLAIN.fullmatch(text) else 0
