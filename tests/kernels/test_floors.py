"""Floors against float64 and against the torch filters: exact for top-k, to 1e-5 of the mass for top-p."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ramify.gpu.kernels.floors import SEGMENT, FloorScratch, find_floors
from ramify.gpu.kernels.race import BlockScores, score_blocks
from ramify.gpu.kernels.sieve import PARTS
from ramify.sampling import filters, processors

TOLERANCE = 1e-5
SAMPLE = 1024  # all of most rows below; the real one takes the interpreter its time
# A small sample of a row says as little as a real one of a vocabulary too large for the interpreter; a small segment
# overflows; several programs sift a row.
FEW = {"sample": 128, "segment": 8, "splits": 4}


def _floors(
    logits: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    k: int | Tensor = 0,
    p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    sample: int = SAMPLE,
    segment: int = SEGMENT,
    splits: int = 1,
) -> Tensor:
    rows, vocab_size = logits.shape

    def column(value: float | Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.as_tensor(value, dtype=dtype, device=logits.device).expand(rows).contiguous()

    temperatures = column(temperature)
    scores = BlockScores.empty(rows, vocab_size, logits.device)
    score_blocks(logits, temperatures, scores)
    floors = torch.empty(rows, device=logits.device)
    scratch = FloorScratch.empty(rows, vocab_size, logits.device)._replace(
        parts=torch.empty(rows, PARTS.value, splits, device=logits.device),
        copies=torch.empty(rows, splits, segment, device=logits.device),
    )
    find_floors(
        logits,
        temperatures,
        scores,
        top_k=column(k, torch.int64),
        top_p=column(p),
        min_p=column(min_p),
        scratch=scratch,
        floors=floors,
        sample=sample,
    )
    return floors


def _check(logits: Tensor, floors: Tensor, temperature: float, k: int = 0, p: float = 1.0) -> None:
    """Each floor is a value of its row, and the smallest that top-k and top-p leave, measured in float64."""
    for row, floor in zip(logits.double(), floors.tolist(), strict=True):
        kept = row
        if 0 < k < len(row):
            kth = row.topk(k).values[-1]
            kept = row[row >= kth]
            if p >= 1:  # below the smallest that can be drawn, all floors are one
                assert max(floor, float(row[row > -math.inf].min())) == max(kth, row[row > -math.inf].min())
        if p < 1:
            # p as float32 holds it: near 1 that is a matter of tokens
            wanted = float(torch.tensor(p))
            masses = ((kept - row.max()) / temperature).softmax(0)
            assert floor == -math.inf or bool((kept == floor).any())
            assert float(masses[kept >= floor].sum()) >= wanted * (1 - TOLERANCE)
            assert float(masses[kept > floor].sum()) < wanted + TOLERANCE * min(1.0, wanted)


def _check_against_torch(logits: Tensor, floors: Tensor, temperature: float, chosen: filters.Filters) -> None:
    """The same tokens stay as after the torch filters, but for those within rounding of the floor."""
    scaled = processors.temperature(logits, torch.full_like(logits[:, 0], temperature))
    stay = filters.apply(scaled, chosen) > -torch.inf
    stays = (logits >= floors[:, None]) & (logits > -torch.inf)
    border = (logits - floors[:, None]).abs() < 1e-5 * (1 + logits.abs())
    different = (stay != stays) & ~border
    if chosen.top_p is None:
        assert not different.any()
    else:  # a token whose mass decides by less than the tolerance
        masses = scaled.double().softmax(-1)
        assert float((masses * different).sum(-1).max()) < 1e-4


@pytest.mark.parametrize("k", [1, 2, 7, 50, 200, 999])
@pytest.mark.parametrize("sample", [SAMPLE, 128])
def test_top_k(device: torch.device, k: int, sample: int) -> None:
    torch.manual_seed(k)
    logits = torch.randn(3, 1000, device=device) * 3
    _check(logits, _floors(logits, 0.7, k=k, sample=sample), 0.7, k)


def test_top_k_of_a_longer_row(device: torch.device) -> None:
    logits = torch.randn(2, 4999, device=device)
    _check(logits, _floors(logits, k=200), 1.0, 200)
    _check(logits, _floors(logits, k=4500), 1.0, 4500)


@pytest.mark.parametrize("vocab_size", [7, 256, 515])
def test_small_vocabularies(device: torch.device, vocab_size: int) -> None:
    logits = torch.randn(2, vocab_size, device=device) * 2
    for k in (1, 5, vocab_size - 1):
        _check(logits, _floors(logits, k=k), 1.0, k)
    _check(logits, _floors(logits, p=0.6), 1.0, p=0.6)
    assert (_floors(logits, k=vocab_size) == -torch.inf).all()
    assert (_floors(logits, k=vocab_size + 5, p=1.0) == -torch.inf).all()


def test_ties_stay(device: torch.device) -> None:
    logits = torch.randint(-3, 4, (4, 900), device=device).float()
    logits[0] = 2.5
    logits[1] = torch.where(torch.arange(900, device=device) % 2 == 0, 0.0, -0.0)
    for k in (1, 30, 500):
        _check(logits, _floors(logits, k=k, **FEW), 1.0, k)
    for p in (0.1, 0.9):
        _check(logits, _floors(logits, p=p, **FEW), 1.0, p=p)
        _check(logits, _floors(logits, k=100, p=p), 1.0, 100, p)


@pytest.mark.parametrize("spread", [0.1, 2.0, 8.0])
@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 0.999, 0.999999])
def test_top_p(device: torch.device, spread: float, p: float) -> None:
    torch.manual_seed(int(spread * 10))
    logits = torch.randn(3, 1000, device=device) * spread
    floors = _floors(logits, 1.3, p=p, **FEW)  # flat rows overflow it
    _check(logits, floors, 1.3, p=p)
    chosen = filters.Filters(None, torch.full((3,), p, device=device), None)
    if p < 0.9999:
        _check_against_torch(logits, floors, 1.3, chosen)


def test_top_p_of_a_long_flat_row(device: torch.device) -> None:
    logits = torch.randn(1, 5000, device=device) * 0.01
    for p in (0.5, 0.95):
        _check(logits, _floors(logits, p=p), 1.0, p=p)


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 0.5, 30.0, 1e30])
def test_masses_are_of_the_temperature(device: torch.device, temperature: float) -> None:
    torch.manual_seed(4)
    logits = torch.randn(2, 700, device=device) * 4
    _check(logits, _floors(logits, temperature, p=0.8), temperature, p=0.8)
    _check(logits, _floors(logits, temperature, k=40, p=0.8), temperature, 40, 0.8)


@pytest.mark.parametrize(("k", "p", "min_p"), [(50, 0.9, 0.0), (300, 0.5, 0.02), (5, 0.99, 0.2), (900, 0.95, 0.0)])
def test_together_as_torch_has_them(device: torch.device, k: int, p: float, min_p: float) -> None:
    torch.manual_seed(k)
    logits = torch.randn(4, 1000, device=device) * 2
    logits[0, ::3] = -torch.inf
    floors = _floors(logits, 0.8, k=k, p=p, min_p=min_p, **FEW)
    column = torch.ones(4, device=device)
    chosen = filters.Filters((column * k).long(), column * p, column * min_p if min_p else None)
    _check_against_torch(logits, floors, 0.8, chosen)


@pytest.mark.parametrize("min_p", [1e-4, 0.1, 1.0])
@pytest.mark.parametrize("temperature", [1e-30, 0.6, 1e30])
def test_min_p(device: torch.device, min_p: float, temperature: float) -> None:
    logits = torch.randn(2, 600, device=device) * 3
    logits[1, :100] = -torch.inf
    floors = _floors(logits, temperature, min_p=min_p)
    assert (floors <= logits.amax(-1)).all()
    chosen = filters.Filters(None, None, torch.full((2,), min_p, device=device))
    _check_against_torch(logits, floors, temperature, chosen)


def test_minus_infinity_and_extreme_logits(device: torch.device) -> None:
    logits = torch.full((5, 800), -torch.inf, device=device)
    logits[0, 5] = 1.0
    logits[1, [3, 700]] = torch.tensor([1e38, -1e38], device=device)
    logits[2, :300] = torch.linspace(-1, 1, 300, device=device) * 3e38
    logits[3, :400] = torch.linspace(-1, 1, 400, device=device) * 1e-40
    logits[4, ::2] = torch.randn(400, device=device)
    for k in (1, 2, 350, 500):
        _check(logits, _floors(logits, k=k, **FEW), 1.0, k)
    finite = logits.masked_fill(logits == -torch.inf, -3e38)
    for p in (0.2, 0.9999):
        _check(finite, _floors(logits, p=p, **FEW).clamp_min(-3e38), 1.0, p=p)


def test_rows_without_a_floor(device: torch.device) -> None:
    logits = torch.randn(5, 600, device=device)
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    temperatures = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0], device=device)
    k = torch.tensor([5, 5, 5, -1, 5], device=device)
    p = torch.tensor([0.5, 0.5, 0.5, 1.0, 0.5], device=device)
    floors = _floors(logits, temperatures, k=k, p=p)
    assert (floors[:4] == -torch.inf).all()
    assert floors[4] > -torch.inf


def test_a_row_has_one_floor_in_every_batch(device: torch.device) -> None:
    logits = torch.randn(6, 1000, device=device) * 2
    together = _floors(logits, 1.1, k=300, p=0.77, **FEW)
    for row in range(6):
        assert torch.equal(_floors(logits[row : row + 1], 1.1, k=300, p=0.77, **FEW), together[row : row + 1])


KINDS = ("normal", "wide", "uniform", "equal", "spike", "half ties", "two clumps", "tiny steps")


def _row_of(kind: str, count: int, device: torch.device) -> Tensor:
    noise = torch.randn(count, device=device)
    if kind == "wide":
        return 3 * noise
    if kind == "uniform":
        return torch.rand(count, device=device)
    if kind == "equal":
        return torch.full_like(noise, 1.25)
    if kind == "spike":
        return noise.index_fill_(0, torch.tensor([count // 3], device=device), 40.0)
    if kind == "half ties":
        return torch.where(torch.arange(count, device=device) % 2 == 0, 0.5, noise)
    if kind == "two clumps":
        return torch.where(noise > 0.5, 2.0 + 1e-6 * noise, -1.0 - 1e-6 * noise)
    if kind == "tiny steps":  # neighbours in the list of all float32 numbers
        return torch.randint(0, 3, (count,), device=device).float() * 2**-23 + 1
    return noise


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_row(device: torch.device, kind: str) -> None:
    """What a sample tells, and where it misleads; a small buffer makes rows flat that would fit into the real one."""
    torch.manual_seed(8)
    in_the_interpreter = device.type == "cpu"  # which takes its time
    logits = torch.stack([_row_of(kind, 1100, device) for _ in range(1 if in_the_interpreter else 4)])
    for p in (0.7,) if in_the_interpreter else (0.05, 0.5, 0.95):
        _check(logits, _floors(logits, p=p, **FEW), 1.0, p=p)
    _check(logits, _floors(logits, k=700, p=0.5, **FEW), 1.0, 700, 0.5)
