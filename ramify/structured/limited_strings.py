"""LimitedStrings: masks of outputs whose string must end soon, without a walk through the whole vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ramify.structured.mask_threads import WORD, Mask, MaskThreads
from ramify.structured.plain_tokens import PlainTokens
from ramify.structured.string_limits import StringLimits
from ramify.structured.string_position import StringPosition


class LimitedStrings:
    """Of one output. A second state follows its bytes over a vocabulary without plain tokens, once it is needed."""

    __slots__ = ("_deal", "_limits", "_num_told", "_text", "plain", "position", "root", "state")

    def __init__(self, deal: Callable[[], Any], limits: StringLimits, plain: PlainTokens) -> None:
        """deal: gives a root of the grammar over the second vocabulary."""
        self._deal, self._limits, self.plain = deal, limits, plain
        self.position = StringPosition()
        self._text = bytearray()
        self._num_told = 0  # bytes
        self.root: Any = None
        self.state: Any = None

    def fork(self) -> LimitedStrings:
        other = LimitedStrings(self._deal, self._limits, self.plain)
        other.position, other._text = self.position.copy(), bytearray(self._text)
        if self.state is not None:
            other.root, other.state, other._num_told = self.root, self.state.deep_copy(), self._num_told
        return other

    def take(self, token_ids: Iterable[int]) -> None:
        tokens, lengths = self.plain.tokens, self.plain.lengths
        for token_id in token_ids:
            self._text += tokens[token_id]
            self.position.take(tokens[token_id], lengths[token_id])

    @property
    def are_near(self) -> bool:
        """Whether a string may have to end before some tokens do."""
        position = self.position
        return position.is_inside and position.num_characters + self.plain.near > self._limits.least

    def tell(self) -> None:
        """The second state learns what it does not know yet."""
        if self.state is None:
            self.root = self._deal()
            self.state = self.root.deep_copy()
        first = self.plain.first_byte
        self.state.consume_tokens([first + byte for byte in self._text[self._num_told :]])
        self._num_told = len(self._text)

    def named_tokens(self, longest: int) -> list[int] | None:
        """Plain tokens of more characters with which a string goes on that the schema names; None: too many to tell."""
        found: list[int] = []
        rest = self._limits.named_after(self.position.content)
        if rest is None:
            return None
        for each in rest:
            text = each.decode(errors="ignore")
            for length in range(longest + 1, len(text) + 1):
                found += self.plain.ids_of.get(text[:length].encode(), ())
        return found


class Near(NamedTuple):
    strings: LimitedStrings
    state: Any  # over the whole vocabulary
    row: int


def write_near(asked: Sequence[Near], threads: MaskThreads, into: Mask) -> list[Near]:
    """into (R, words): the masks of these rows. Returns of which they could not be told in this way."""
    if not asked:
        return []
    for strings, _, _ in asked:
        strings.tell()
    asked = sorted(asked, key=lambda each: id(each.strings.root))
    plain = asked[0].strings.plain
    masks = np.empty((len(asked), plain.num_words), np.uint32)
    threads.find([strings.state for strings, _, _ in asked], range(len(asked)), masks)
    left, num_words = [], into.shape[1]
    last = np.uint32((1 << (plain.first_probe % WORD)) - 1)
    masks_of_room = plain.fitting
    for each, mask, room in zip(asked, masks, plain.room_told(masks), strict=True):
        strings, state, row = each
        named = [] if plain.takes_all(room) else strings.named_tokens(plain.longest(room))
        if named is None or strings.state.is_error() or state.is_error():
            left.append(each)
            continue
        np.bitwise_or(mask[:num_words], masks_of_room[room], out=into[row])
        into[row, -1] &= last
        for token_id in named:
            if state.validate_tokens([token_id]):
                into[row, token_id // WORD] |= np.uint32(1 << (token_id % WORD))
    return left
