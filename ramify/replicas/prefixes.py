"""Prefixes: which leading blocks of prompts an engine was given lately, and so probably still has in its cache.

An engine's own cache is not asked: that would cost a message for every request. What is remembered here is bounded by
the engine's blocks, the least recently used forgotten first, as there. A wrong guess costs time, never a wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_BLOCKS = 256  # of a prompt that are looked at: beyond, where it is computed matters less than how long it waits


def chain_of(token_ids: Sequence[int], block_size: int) -> tuple[int, ...]:
    """A number for each leading block, that depends on all before it. The last token is always computed."""
    chain: list[int] = []
    number = 0
    most = min(len(token_ids) - 1, MOST_BLOCKS * block_size)
    for end in range(block_size, most + 1, block_size):
        number = hash((number, *token_ids[end - block_size : end]))
        chain.append(number)
    return tuple(chain)


class Prefixes:
    """Of one engine."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[int, None] = {}  # from the least recently used on

    def num_known(self, chain: Sequence[int]) -> int:
        """How many leading blocks it was given before."""
        known = self._known
        for count, number in enumerate(chain):
            if number not in known:
                return count
        return len(chain)

    def note(self, chain: Sequence[int]) -> None:
        """The last first, so that the beginning of a prompt is forgotten after what follows it."""
        known = self._known
        for number in reversed(chain):
            known.pop(number, None)
            known[number] = None
        while len(known) > self._most:
            del known[next(iter(known))]

    def clear(self) -> None:
        self._known.clear()
