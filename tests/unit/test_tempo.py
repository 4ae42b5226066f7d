"""How many tokens are drafted, by what steps take: what is lost where drafts are wrong, and won where they are not."""

from __future__ import annotations

import random

import pytest

from ramify.engine.drafting.tempo import Tempo

PLAIN, STALL = 4.8, 2.0  # of a step, and of the first one after those that ran ahead


class World:
    """A device whose steps take known times, told with noise; a first step of each kind takes very long."""

    def __init__(self, rates: dict[int, float], *, passes: float = 1.8, check: float = 0.8, num_rows: int = 32) -> None:
        """rates: how many drafted tokens are right, from which step on."""
        self.tempo = Tempo(0.35)
        self._rates, self._passes, self._check, self._num_rows = rates, passes, check, num_rows
        self._chance = random.Random(1)
        self._seen: set[int] = set()
        self._last = 0
        self.lengths: list[int] = []

    def run(self, num_steps: int) -> float:
        """Tokens a second, in those of steps without drafts."""
        seconds = tokens = 0.0
        for _ in range(num_steps):
            rate = self._rates[max(step for step in self._rates if step <= len(self.lengths))]
            length = self.tempo.length(self._num_rows, 8)
            rights = [self._right(rate, length) for _ in range(self._num_rows)]
            taken = PLAIN + length * self._passes + bool(length) * self._check
            alike = bool(length) == bool(self._last)
            taken = (taken + (0 if alike else STALL)) * self._chance.uniform(0.97, 1.03)
            drawn = 1 + sum(rights) / self._num_rows
            seconds, tokens = seconds + taken, tokens + drawn
            if length not in self._seen:
                self._seen.add(length)
                taken += 800
            if length:
                tried = sum(min(length, right + 1) for right in rights)
                self.tempo.note_drafts(tried, sum(rights), self._num_rows)
            self.tempo.note_time(self._num_rows, length, taken, drawn, follows_its_like=alike)
            self._last = length
            self.lengths.append(length)
        return tokens / seconds * PLAIN

    def _right(self, rate: float, length: int) -> int:
        return next((place for place in range(length) if self._chance.random() >= rate), length)


@pytest.mark.parametrize("num_rows", [1, 8, 32])
@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_wrong_drafts_cost_little(rate: float, num_rows: int) -> None:
    world = World({0: rate}, num_rows=num_rows)
    world.run(100)
    assert world.run(1_500) > 0.975
    assert any(world.lengths[100:]), "they are tried now and then"


@pytest.mark.parametrize("num_rows", [1, 8, 32])
def test_right_drafts_pay(num_rows: int) -> None:
    world = World({0: 0.85}, num_rows=num_rows)
    world.run(50)
    best = max(sum(0.85**n for n in range(k + 1)) * PLAIN / (PLAIN + 0.8 + 1.8 * k) for k in (1, 2, 3, 4, 6, 8))
    assert world.run(500) > 0.96 * best


@pytest.mark.parametrize("num_rows", [1, 32])
def test_texts_change(num_rows: int) -> None:
    world = World({0: 0.85, 300: 0.0, 900: 0.85}, num_rows=num_rows)
    world.run(300)
    assert world.run(600) > 0.94
    world.run(600)
    assert world.run(200) > 1.2


def test_what_takes_longer_than_it_should_is_left() -> None:
    """Drafts are right, and a step with them takes three times what was expected."""
    world = World({0: 0.85}, passes=9.0)
    world.run(60)
    assert world.run(1_000) > 0.97


def test_single_times_are_not_the_rule() -> None:
    tempo = Tempo(0.35)
    for seconds in (900.0, 5.0, 5.0, 5.0, 5.2, 4.8, 90.0, 5.0):
        tempo.note_time(32, 0, seconds, 1.0)
    assert tempo.plain(32) == 5.0
    assert tempo.seconds(32, 2) == pytest.approx(5.0 * (1.15 + 0.7))
    for seconds in (900.0, 10.0, 10.0, 10.0, 8.0, 8.1, 40.0):
        tempo.note_time(32, 2, seconds, 2.0)
    assert tempo.seconds(32, 2) == 9.05
    assert tempo.seconds(40, 2) == pytest.approx(9.05)
    assert 9.05 < (tempo.seconds(32, 4) or 0) < 16
