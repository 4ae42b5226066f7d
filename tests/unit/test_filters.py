"""The filters against a slow reference: the set they keep, ties and extremes included."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.sampling import filters, processors
from ramify.sampling.filters import Filters

values = st.one_of(st.integers(-4, 4).map(float), st.floats(-60, 60, width=32), st.just(-math.inf))
rows = st.lists(values, min_size=1, max_size=40).filter(lambda row: max(row) > -math.inf)


def _apply(
    logits: torch.Tensor, *, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> torch.Tensor:
    chosen = Filters(
        None if top_k is None else torch.tensor([min(top_k, logits.shape[1])]),
        None if top_p is None else torch.tensor([top_p]),
        None if min_p is None else torch.tensor([min_p]),
    )
    return filters.apply(logits, chosen)


def _kept(logits: torch.Tensor) -> set[int]:
    return {index for index, value in enumerate(logits[0].tolist()) if value > -math.inf}


def _probabilities(row: list[float]) -> list[float]:
    top = max(row)
    weights = [math.exp(value - top) for value in row]
    return [weight / sum(weights) for weight in weights]


@given(row=rows, k=st.integers(1, 60))
def test_top_k_keeps_the_k_largest_and_their_ties(row: list[float], k: int) -> None:
    border = sorted(row, reverse=True)[min(k, len(row)) - 1]
    expected = {index for index, value in enumerate(row) if value >= border and value > -math.inf}
    assert _kept(_apply(torch.tensor([row]), top_k=k)) == expected


@given(row=rows, p=st.floats(0.01, 1.0))
@settings(max_examples=300)
def test_top_p_keeps_the_smallest_set_that_reaches_p(row: list[float], p: float) -> None:
    probabilities = _probabilities(row)
    order = sorted(range(len(row)), key=lambda index: -row[index])
    mass = 0.0
    border = row[order[-1]]
    for index in order:
        mass += probabilities[index]
        if abs(mass - p) < 1e-6:
            return  # float32 and this sum may disagree about which side of p they are on
        if mass >= p:
            border = row[index]
            break
    expected = {index for index, value in enumerate(row) if value >= border and value > -math.inf}
    assert _kept(_apply(torch.tensor([row]), top_p=p)) == expected


def test_top_p_keeps_the_crossing_token() -> None:
    """The seeds' formula drops it: 0.4 + 0.3 + 0.15 = 0.85 does not reach 0.9, so 0.1 must stay."""
    logits = torch.tensor([[0.4, 0.3, 0.15, 0.1, 0.05]]).log()
    assert _kept(_apply(logits, top_p=0.9)) == {0, 1, 2, 3}


@pytest.mark.parametrize("p", [1e-9, 0.1, 1.0])
def test_top_p_is_never_empty(p: float) -> None:
    assert _kept(_apply(torch.zeros(1, 9), top_p=p)) == set(range(9))  # ties all stay
    assert 0 in _kept(_apply(torch.tensor([[5.0, 1.0]]), top_p=p))


@given(row=rows, share=st.floats(1e-6, 1.0))
def test_min_p_keeps_what_is_likely_enough(row: list[float], share: float) -> None:
    floor = max(row) + math.log(share)
    if any(abs(value - floor) < 1e-4 for value in row):
        return
    expected = {index for index, value in enumerate(row) if value >= floor}
    assert _kept(_apply(torch.tensor([row]), min_p=share)) == expected


@given(row=rows, temperature=st.floats(1e-12, 1e6).filter(lambda value: value != 1))
def test_no_temperature_overflows(row: list[float], temperature: float) -> None:
    scaled = processors.temperature(torch.tensor([row]), torch.tensor([temperature]))
    assert not scaled.isnan().any()
    assert scaled.max() == 0
    assert scaled[0, int(torch.tensor(row).argmax())] == 0  # the likeliest stays the likeliest, if not alone


@given(row=rows)
def test_temperature_1_changes_no_bit(row: list[float]) -> None:
    logits = torch.tensor([row, row])
    assert torch.equal(processors.temperature(logits, torch.tensor([1.0, 0.5]))[0], logits[0])


@given(row=rows, k=st.integers(1, 60), p=st.floats(0.01, 1.0))
def test_what_stays_keeps_its_bits(row: list[float], k: int, p: float) -> None:
    logits = torch.tensor([row])
    kept = _apply(logits, top_k=k, top_p=p)
    assert torch.equal(kept[kept > -math.inf], logits[kept > -math.inf])


@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.001, 1, 30]), share=st.floats(0.01, 0.99))
def test_where_weights_cross_a_share(seed: int, spread: float, share: float) -> None:
    """The rows of a batch together, each against its own sorted list: few buckets and many, ties, -inf."""
    numbers = random.Random(seed)
    batch = [[numbers.choice([numbers.gauss(0, spread), 0.5, -math.inf]) for _ in range(90)] for _ in range(3)]
    keys = torch.tensor(batch)
    weights = [numbers.randrange(9) for _ in range(89)] + [1]
    crossed = filters.crossing(keys, torch.tensor([weights] * 3).float(), torch.full((3,), share, dtype=torch.float64))
    for row, own in enumerate(keys.tolist()):
        order = sorted(range(90), key=lambda index: -own[index])
        filled = list(itertools.accumulate(weights[index] for index in order))
        wanted = share * filled[-1]
        if not any(abs(mass - wanted) < 1e-6 for mass in filled):
            assert crossed[row].item() == own[order[next(at for at, mass in enumerate(filled) if mass >= wanted)]]


def test_flat_rows_cross_together_as_they_do_alone() -> None:
    """Among them rows that top-k narrows, and one that holds no number."""
    logits = torch.randn(6, 5_000, generator=torch.Generator().manual_seed(3))
    logits[2] *= 8
    logits[4] = math.nan
    chosen = Filters(
        torch.tensor([5_000, 900, 5_000, 300, 5_000, 5_000]), torch.tensor([0.9, 0.95, 0.5, 0.7, 0.9, 0.2]), None
    )
    together = filters.apply(logits, chosen)
    for row in range(6):
        alone = filters.apply(logits[row : row + 1], chosen.of(torch.tensor([row])))
        assert torch.equal(together[row].nan_to_num(nan=1.0), alone[0].nan_to_num(nan=1.0))
    assert together[4].isnan().all()
    assert 1 < int((together[1] > -math.inf).sum()) < 900
