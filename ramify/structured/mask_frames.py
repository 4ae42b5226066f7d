"""What is said to processes that find masks, and the memory they share: what both sides know, and no more."""

from __future__ import annotations

import json
import mmap
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

STEP, REQUEST = b"SR"  # first bytes of frames
MASK, NO_WAY, FAULT = b"M", b"N", b"F"  # first bytes of what is said of presumed tokens
NOTHING = -1  # in the place of a token
PAGE_WORDS = 1_024


class Setup(NamedTuple):
    """The first frame."""

    tokens: list[bytes]
    special_token_ids: list[int]
    file: int  # memory that is shared: a page, in which each worker says how far it is, then areas of masks
    shape: tuple[int, int, int]  # areas, rows, words of uint32
    place: int  # of this worker, among all

    def spelled(self) -> bytes:
        return json.dumps([[token.hex() for token in self.tokens], *self[1:]]).encode()

    @classmethod
    def read(cls, frame: bytes) -> Setup:
        tokens, special_token_ids, file, shape, place = json.loads(frame)
        areas, rows, words = shape
        return cls([bytes.fromhex(token) for token in tokens], special_token_ids, file, (areas, rows, words), place)


def shared(file: int, shape: tuple[int, int, int]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """How far each worker is, and the areas."""
    memory = mmap.mmap(file, num_bytes(shape))
    words = np.frombuffer(memory, np.uint32)
    return words[:PAGE_WORDS], words[PAGE_WORDS:].reshape(shape)


def num_bytes(shape: tuple[int, int, int]) -> int:
    return 4 * (PAGE_WORDS + int(np.prod(shape)))
