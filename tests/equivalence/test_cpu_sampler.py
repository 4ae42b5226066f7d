"""The sampler's kernels against torch's operators and float64: sums, noise, borders, ties, extremes, and their bits."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramify.cpu.library import Library
from ramify.cpu.sampler_operators import CpuOperators
from ramify.sampling.draw import NoiseKeys, block_scores, gumbel
from ramify.sampling.filters import Filters
from tests.native import EVERY_SET, library_for, needs_compiler

pytestmark = needs_compiler

SIZES = [1, 3, 16, 17, 255, 256, 257, 1_000, 5_003]


@pytest.fixture(scope="module", params=EVERY_SET, ids=lambda instructions: instructions.name)
def operators(request: pytest.FixtureRequest) -> CpuOperators:
    return CpuOperators(library_for(request.param))


def _shapes_of_rows(size: int) -> Tensor:
    """Normal, sharp, uniform, all equal, one spike, half ties, nearly all forbidden, beyond what exponentials reach."""
    generator = torch.Generator().manual_seed(size)
    normal = torch.randn(size, generator=generator)
    spike = torch.full((size,), -3.0)
    spike[size // 2] = 40.0
    forbidden = torch.full((size,), -math.inf)
    forbidden[size // 3 :: 97] = normal[size // 3 :: 97]
    return torch.stack(
        [
            normal,
            normal * 12,
            torch.rand(size, generator=generator) * 1e-3,
            torch.full((size,), 7.25),
            spike,
            torch.where(normal > 0, torch.tensor(1.0), normal),
            forbidden,
            normal * 1e30,
        ]
    )


# -- sums of blocks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_blocks_have_the_sums_of_torch(operators: CpuOperators, size: int) -> None:
    rows = _shapes_of_rows(size)
    torch.testing.assert_close(operators.block_scores(rows), block_scores(rows), rtol=1e-6, atol=1e-5)


def test_what_is_no_number_or_nothing_stays_what_it_is(operators: CpuOperators) -> None:
    rows = torch.full((4, 300), -math.inf)
    rows[1, 280], rows[2, 3], rows[3] = 2.5, math.nan, math.nan
    scores = operators.block_scores(rows)
    never = -math.inf
    assert scores[:2].tolist() == [[never, never], [never, pytest.approx(2.5)]]
    assert scores[2:].isnan().tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize("size", [17, 1_000])
def test_rows_may_lie_anywhere(operators: CpuOperators, size: int) -> None:
    """The same row for several draws, rows of a wider matrix, and columns that lie apart."""
    wide = torch.randn(6, size + 40, generator=torch.Generator().manual_seed(1))
    row = wide[2, :size].clone()
    asked = Filters(torch.full((3,), 5), torch.full((3,), 0.7), None)
    alone = operators.block_scores(row[None]), operators.ranked_floors(row[None], asked.of(torch.tensor([0])))
    for rows in (row.expand(3, -1), wide[:, :size][2].expand(3, -1), row.repeat(3, 2).view(3, 2, -1)[:, 1]):
        assert torch.equal(operators.block_scores(rows), alone[0].expand(3, -1))
        assert torch.equal(operators.ranked_floors(rows, asked), alone[1].expand(3, -1))
    assert torch.equal(operators.block_scores(wide[:, :size]), operators.block_scores(wide[:, :size].clone()))
    assert torch.equal(operators.block_scores(wide.T[:size].T), operators.block_scores(wide[:, :size].clone()))


def test_a_row_has_the_same_bits_on_any_number_of_threads(
    operators: CpuOperators, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.randn(11, 3_000, generator=torch.Generator().manual_seed(2)) * 4
    asked = Filters(None, torch.full((11,), 0.9), None)
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(Library, "threads", threads)
        found.append((operators.block_scores(rows), operators.ranked_floors(rows, asked)))
    for scores, floors in found[1:]:
        assert torch.equal(scores, found[0][0])
        assert torch.equal(floors, found[0][1])


# -- noise -------------------------------------------------------------------------------------------------------


@given(
    rows=st.lists(
        st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**14), st.integers(0, 2**20)), min_size=1
    ),
    count=st.sampled_from([1, 3, 192, 256, 1_000]),
    level=st.integers(0, 4),
    block=st.integers(0, 10**6),
)
def test_noise_has_the_words_of_torch(
    operators: CpuOperators, rows: list[tuple[int, int, int]], count: int, level: int, block: int
) -> None:
    keys = NoiseKeys.of(rows, torch.device("cpu"))
    first = torch.full((len(rows), 1), 4 * block)
    noise = operators.gumbel(keys, first, count, level)
    # Logarithms of two libraries may differ in the last bit of float64, and once in a long while of float32.
    torch.testing.assert_close(noise, gumbel(keys, first, count, level), rtol=1e-6, atol=1e-7)


def test_noise_is_the_same_but_for_the_rarest_rounding(operators: CpuOperators) -> None:
    keys = NoiseKeys.of([(seed, 1, 2) for seed in range(200)], torch.device("cpu"))
    first = torch.zeros(200, 1, dtype=torch.int64)
    differing = operators.gumbel(keys, first, 5_000, 0) != gumbel(keys, first, 5_000, 0)
    assert int(differing.sum()) <= 2


# -- borders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("top_k", [1, 2, 40, 999])
def test_top_k_is_the_kth_largest(operators: CpuOperators, size: int, top_k: int) -> None:
    rows = _shapes_of_rows(size)
    count = min(top_k, size)
    floors = operators.ranked_floors(rows, Filters(torch.full((len(rows),), count), None, None))
    expected = rows.sort(descending=True).values[:, count - 1] if count < size else torch.full((len(rows),), -math.inf)
    assert floors[:, 0].tolist() == expected.tolist()


@given(seed=st.integers(0, 10**6), size=st.sampled_from(SIZES[1:]), p=st.floats(0.01, 0.999), narrowed=st.booleans())
@settings(max_examples=60)
def test_top_p_is_where_the_mass_crosses(
    operators: CpuOperators, seed: int, size: int, p: float, narrowed: bool
) -> None:
    """Of what top-k leaves, in float64, but where the mass comes within rounding of p."""
    numbers = random.Random(seed)
    rows = _shapes_of_rows(size)
    rows = rows[:, torch.randperm(size, generator=torch.Generator().manual_seed(seed))]
    share = torch.tensor(p, dtype=torch.float32)
    count = numbers.randint(1, size) if narrowed else size
    asked = Filters(torch.full((len(rows),), count), share.expand(len(rows)), None)
    for row, floor in zip(rows, operators.ranked_floors(rows, asked)[:, 0].tolist(), strict=True):
        ordered = row.double().sort(descending=True).values
        ordered = ordered[ordered >= ordered[count - 1]]  # what ties with the last stays
        reached = ordered.softmax(0).cumsum(0)
        if bool(((reached - share.double()).abs() < 2e-6).any()):
            continue
        crossing = min(int((reached < share.double()).sum()), len(ordered) - 1)
        assert floor == ordered[crossing].item()


def test_a_row_of_no_numbers_has_no_border(operators: CpuOperators) -> None:
    rows = torch.randn(4, 500, generator=torch.Generator().manual_seed(5))
    rows[1, 7], rows[2], rows[3] = math.nan, math.nan, -math.inf
    asked = Filters(torch.full((4,), 500), torch.full((4,), 0.5), None)
    assert operators.ranked_floors(rows, asked)[1:, 0].tolist() == [-math.inf] * 3
    for top_k in (1, 100, 499):  # in what order they come must not matter
        asked = Filters(torch.full((4,), top_k), torch.full((4,), 0.5), None)
        assert not bool(operators.ranked_floors(rows, asked).isnan().any())


@pytest.mark.parametrize("spread", [0.001, 1, 30])
@pytest.mark.parametrize("share", [0.01, 0.4, 0.93])
def test_where_weights_cross_a_share(operators: CpuOperators, spread: float, share: float) -> None:
    numbers = random.Random(int(spread * 1000))
    batch = [[numbers.choice([numbers.gauss(0, spread), 0.5, -math.inf]) for _ in range(93)] for _ in range(40)]
    keys = torch.tensor(batch)
    weights = [numbers.randrange(9) for _ in range(92)] + [1]
    shares = torch.full((len(batch),), share)
    crossed = operators.crossing(keys, torch.tensor([weights] * len(batch)).float(), shares)
    wanted = shares[0].double().item() * sum(weights)
    for row, own in enumerate(keys.tolist()):
        order = sorted(range(len(own)), key=lambda index: -own[index])
        filled = list(itertools.accumulate(weights[index] for index in order))
        assert crossed[row].item() == own[order[next(at for at, mass in enumerate(filled) if mass >= wanted)]]
