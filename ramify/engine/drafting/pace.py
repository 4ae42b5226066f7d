"""Pace: how many tokens to draft for one sequence, by how many of those before were drawn.

Prices are told in tokens of the sequence: what it would draw in the time. A sequence drafts as far as that is expected
to pay, and only from what drafts have saved it and an allowance of so much a token: whatever its text does, speculation
costs it no more than the allowance.
"""

from __future__ import annotations

from typing import NamedTuple

from ramify.engine.plan import MOST_DRAFTED

MOST = MOST_DRAFTED  # tokens that are drafted at a time
ALLOWANCE = 0.02  # of a token, for each that is drawn
FIRST_CREDIT = 0.5
MOST_CREDIT = 6.0  # what went well long ago pays for little
FIRST_RATE = 0.7  # of drafted tokens that are drawn, as long as nothing is known
MEMORY = 0.8  # of the rate, from one drafted token to the next
MARGIN = 0.1  # what a drafted token is to save beyond its cost


class Prices(NamedTuple):
    """In a step: what a drafted token costs, what drafting any costs besides, and what one that is drawn saves."""

    drafted: float
    fixed: float = 0.0
    drawn: float = 1.0


class Pace:
    __slots__ = ("_credit", "rate")

    def __init__(self, rate: float = FIRST_RATE) -> None:
        self.rate = rate
        self._credit = FIRST_CREDIT

    def length(self, prices: Prices) -> int:
        """How many tokens to draft."""
        cost, fixed, drawn = prices
        count, gain, reached = 0, -fixed, self.rate
        while count < MOST and reached * drawn > cost + MARGIN:
            count, gain, reached = count + 1, gain + reached * drawn - cost, reached * self.rate
        affordable = int((self._credit - fixed) / cost) if cost > 0 else MOST
        if gain > 0 and min(count, affordable) > 0:
            return min(count, affordable)
        # A single token now and then, when the allowance has come to that: texts change.
        return int(self._credit >= FIRST_CREDIT and self._credit >= cost + fixed)

    def note_plain(self) -> None:
        """A token was drawn without a draft."""
        self._earn(ALLOWANCE)

    def note(self, num_drafted: int, num_accepted: int, prices: Prices) -> None:
        """So many were drafted, so many of them drawn."""
        cost, fixed, drawn = prices
        self._earn(num_accepted * (drawn + ALLOWANCE) + ALLOWANCE - num_drafted * cost - fixed)
        tried = min(num_drafted, num_accepted + 1)  # what follows the first that is not drawn says nothing
        for number in range(tried):
            self.rate = MEMORY * self.rate + (1 - MEMORY) * (number < num_accepted)

    def _earn(self, amount: float) -> None:
        self._credit = min(self._credit + amount, MOST_CREDIT)
