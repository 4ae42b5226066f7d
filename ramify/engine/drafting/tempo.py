"""Tempo: how many tokens to draft for each sequence of a step, by what steps took and how many drafts were right.

A device that has steps of many rows in graphs takes a time for each that depends on how many tokens are drafted, and
little on anything else. So times are measured, of several steps of each kind, and the length is taken whose steps draw
the most tokens a second. Where that is none, a token is drafted now and then all the same, since texts change: from an
allowance, so that wrong drafts cost little whatever they take.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from ramify.engine.plan import MOST_DRAFTED

ALLOWANCE = 0.01  # of the time without drafts, for tries
FIRST_RATE = 0.7  # of drafted tokens that are right, as long as nothing is known
FIRST_WEIGHT = 8  # tokens that this counts for
WINDOW, WINDOW_PER_ROW = 24, 8  # drafted tokens that the rate remembers
LEAST_WEIGHT, FADING = 4.0, 0.97  # to which that fades, step by step, while nothing is drafted
LENGTHS = (1, 2, 3, 4, 6, MOST_DRAFTED)  # graphs are few
UNCOUNTED = 3  # steps of a kind, the first ones: they may hold captures, and kernels that are compiled
NEEDED = 3  # times of a kind that say what such steps take
KEPT = 9  # times of a kind
GAIN = 1.03  # what drafts must promise, in tokens a second
FIXED = 0.15  # what checking drafts is taken to cost before it is known, of a step
STALL = 0.5  # and what the host's waiting for a single try costs
MOST_DEBT, MOST_CREDIT = 12.0, 12.0  # steps without drafts


class Tempo:
    def __init__(self, cost: float) -> None:
        """cost: of a drafted token, in steps without drafts, as long as nothing is measured."""
        self._cost = cost
        self._times: dict[tuple[int, int], deque[float]] = {}  # by size and length, seconds
        self._num_seen: dict[tuple[int, int], int] = {}
        self._tried, self._right = float(FIRST_WEIGHT), FIRST_RATE * FIRST_WEIGHT
        self._credit = 0.0  # in seconds

    # -- what was seen ---------------------------------------------------------------------------------------

    @property
    def rate(self) -> float:
        """Of drafted tokens behind right ones, how many are right."""
        return self._right / self._tried

    def note_drafts(self, num_tried: int, num_right: int, num_rows: int) -> None:
        """Of a step: what follows a wrong one was not tried."""
        self._tried, self._right = self._tried + num_tried, self._right + num_right
        kept = min(1.0, (WINDOW + WINDOW_PER_ROW * num_rows) / self._tried)
        self._tried, self._right = self._tried * kept, self._right * kept

    def note_time(
        self, size: int, length: int, seconds: float, num_drawn: float, *, follows_its_like: bool = True
    ) -> None:
        """A step of this many rows, padded, and this many drafted tokens each, in which each drew so many.

        follows_its_like: the step before had drafts if and only if this one has; else it waited for the host.
        """
        kind = (size, length)
        seen = self._num_seen[kind] = self._num_seen.get(kind, 0) + 1
        if seen <= UNCOUNTED:
            return
        if follows_its_like:
            self._times.setdefault(kind, deque(maxlen=KEPT)).append(seconds)
        plain = self.plain(size)
        if plain is None:
            return
        seconds = min(seconds, 4 * (length + 1) * plain)  # something else was in the way
        if not length and self._tried > LEAST_WEIGHT:  # texts change: what is known counts for less and less
            self._tried, self._right = FADING * self._tried, FADING * self._right
        if length:
            earned = num_drawn * plain - seconds
        else:
            earned = ALLOWANCE * plain - (0.0 if follows_its_like else max(0.0, seconds - plain))
        self._credit = min(max(self._credit + earned, -MOST_DEBT * plain), MOST_CREDIT * plain)

    # -- what is expected ------------------------------------------------------------------------------------

    def plain(self, size: int) -> float | None:
        """What a step without drafts takes: of this size, or the nearest one known."""
        known = [kind[0] for kind, times in self._times.items() if kind[1] == 0 and len(times) >= NEEDED]
        if not known:
            return None
        nearest = min(known, key=lambda other: abs(other - size))
        return median(self._times[nearest, 0])

    def seconds(self, size: int, length: int) -> float | None:
        """What a step takes: as measured, or as the nearest kind that was measured lets expect."""
        plain = self.plain(size)
        if plain is None or not length:
            return plain
        known = [kind for kind, times in self._times.items() if kind[1] and len(times) >= NEEDED]
        if (size, length) in known:
            return median(self._times[size, length])
        expected = plain * self._relative(length)
        if not known:
            return expected
        nearest = min(known, key=lambda kind: (abs(kind[0] - size), abs(kind[1] - length)))
        base = self.plain(nearest[0])
        assert base is not None, "there is one for every size if there is one for any"
        return expected * median(self._times[nearest]) / (base * self._relative(nearest[1]))

    def _relative(self, length: int) -> float:
        return 1 + FIXED + self._cost * length

    def drawn(self, length: int) -> float:
        """How many tokens a sequence is expected to draw in a step."""
        rate = self.rate
        return sum(rate**count for count in range(length + 1))

    def lines(self) -> list[str]:
        """What is known, for people."""
        known = sorted((kind, median(times)) for kind, times in self._times.items() if len(times) >= NEEDED)
        told = [f"{size} rows, {length} drafted: {1e3 * seconds:.2f} ms" for (size, length), seconds in known]
        return [f"{self.rate:.2f} of drafts are right", *told]

    # -- what follows ----------------------------------------------------------------------------------------

    def length(self, size: int, most: int, share: float = 1.0) -> int:
        """How many tokens to draft, `most` at most, where a share of the sequences can be drafted for."""
        plain = self.plain(size)
        if plain is None or most < 1 or not share:
            return 0
        best, best_pace = 0, GAIN / plain
        for length in LENGTHS:
            if length > most:
                break
            seconds = self.seconds(size, length)
            pace = (share * self.drawn(length) + 1 - share) / seconds if seconds else 0.0
            if pace > best_pace:
                best, best_pace = length, pace
        if best and self._credit > -MOST_DEBT * plain / 2:
            return best
        try_seconds = self.seconds(size, 1)
        # A single token now and then, when the allowance has come to that.
        if try_seconds and self._credit >= try_seconds + STALL * plain - plain:
            return 1
        return 0
