"""What runs Gluon kernels without a GPU finds every mistake that it is for: each kernel here makes one, or none."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from tests.kernels.gluon import Simulation, simulated

SIZE = gl.constexpr(16)
TILES = 3


@gluon.jit
def _copied(source, out, STAGES: gl.constexpr, AHEAD: gl.constexpr, WAIT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Tiles by way of shared memory, some on their way: WAIT is right if it is AHEAD, AHEAD if it is below STAGES."""
    place = gl.arange(0, SIZE, layout=gl.BlockedLayout([1], [32], [1], [0]))
    held = gl.allocate_shared_memory(source.dtype.element_ty, [STAGES, SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for tile in gl.static_range(AHEAD):
        async_copy.async_copy_global_to_shared(held.index(tile % STAGES), source + tile * SIZE + place)
        async_copy.commit_group()
    for tile in range(3):
        inside = place < (3 - tile - AHEAD) * SIZE
        coming = gl.minimum(tile + AHEAD, 2)
        async_copy.async_copy_global_to_shared(
            held.index((tile + AHEAD) % STAGES), source + coming * SIZE + place, mask=inside
        )
        async_copy.commit_group()
        async_copy.wait_group(WAIT)
        gl.store(out + tile * SIZE + place, held.index(tile % STAGES).load(gl.BlockedLayout([1], [32], [1], [0])))
    async_copy.wait_group(0)


@gluon.jit
def _left_behind(source, out):  # type: ignore[no-untyped-def]
    place = gl.arange(0, SIZE, layout=gl.BlockedLayout([1], [32], [1], [0]))
    held = gl.allocate_shared_memory(source.dtype.element_ty, [SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    async_copy.async_copy_global_to_shared(held, source + place)
    async_copy.commit_group()
    gl.store(out + place, gl.load(source + place))


@gluon.jit
def _multiplied(  # type: ignore[no-untyped-def]
    left, right, out, FENCES: gl.constexpr, OVERWRITES: gl.constexpr, WAITS: gl.constexpr
):
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 1], [1, 0])
    row = gl.arange(0, SIZE, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))
    place = row[:, None] * SIZE + column[None, :]
    shared: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    first = gl.allocate_shared_memory(left.dtype.element_ty, [SIZE, SIZE], shared)
    second = gl.allocate_shared_memory(left.dtype.element_ty, [SIZE, SIZE], shared)
    first.store(gl.load(left + place))
    second.store(gl.load(right + place))
    if FENCES:
        fence_async_shared()
    nothing = gl.zeros([SIZE, SIZE], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [1, 1], [16, 16, 16]))
    found = warpgroup_mma(first, second, nothing, is_async=True)
    other = warpgroup_mma(first, second, nothing, is_async=True)
    if OVERWRITES:
        second.store(gl.load(left + place))
    gl.store(out + place, warpgroup_mma_wait(WAITS, deps=[other]) + warpgroup_mma_wait(WAITS, deps=[found]))


@gluon.jit
def _giving(source, held, full, free, GIVES: gl.constexpr):  # type: ignore[no-untyped-def]
    place = gl.arange(0, SIZE, layout=gl.BlockedLayout([1], [32], [4], [0]))
    for tile in range(3):
        mbarrier.wait(free, tile % 2 ^ 1)
        async_copy.async_copy_global_to_shared(held, source + tile * SIZE + place)
        if GIVES:
            async_copy.mbarrier_arrive(full, increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def _taking(out, held, full, free, WAITS: gl.constexpr, FREES: gl.constexpr):  # type: ignore[no-untyped-def]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    place = gl.arange(0, SIZE, layout=layout)
    for tile in range(3):
        if WAITS:
            mbarrier.wait(full, tile % 2)
        if FREES == 2:  # before it has read
            mbarrier.arrive(free)
            mbarrier.wait(full, tile % 2 ^ 1)
        gl.store(out + tile * SIZE + place, held.load(layout))
        if FREES == 1:
            mbarrier.arrive(free)


@gluon.jit
def _by_roles(source, out, GIVES: gl.constexpr, WAITS: gl.constexpr, FREES: gl.constexpr):  # type: ignore[no-untyped-def]
    held = gl.allocate_shared_memory(source.dtype.element_ty, [SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = barriers.index(0)
    free = barriers.index(1)
    mbarrier.init(full, count=128)
    mbarrier.init(free, count=1)
    gl.warp_specialize(
        [(_taking, (out, held, full, free, WAITS, FREES)), (_giving, (source, held, full, free, GIVES))], [4], [40]
    )


@gluon.jit
def _behind_another(source, out, WAITS: gl.constexpr, EARLY: gl.constexpr):  # type: ignore[no-untyped-def]
    at = gl.program_id(0) * SIZE + gl.arange(0, SIZE, layout=gl.BlockedLayout([1], [32], [1], [0]))
    if EARLY:
        gl.store(source + at, gl.load(out + at))
    if WAITS:
        gdc_wait()
    gl.store(out + at, gl.load(source + at))


@gluon.jit
def _moved(source, out, FROM: gl.constexpr, TO: gl.constexpr, TWICE: gl.constexpr):  # type: ignore[no-untyped-def]
    place = gl.arange(0, SIZE, layout=gl.BlockedLayout([1], [32], [1], [0]))
    gl.store(out + TO + (place // 2 if TWICE else place), gl.load(source + FROM + place))


KERNELS = ("_copied", "_left_behind", "_multiplied", "_by_roles", "_behind_another", "_moved")


@pytest.fixture(params=range(4))
def simulation(request: pytest.FixtureRequest) -> Iterator[Simulation]:
    """Whatever the order of what may happen in any order."""
    module = sys.modules[__name__]
    with simulated(*((module, name) for name in KERNELS), seed=request.param) as simulation:
        yield simulation


@pytest.fixture
def source() -> Tensor:
    return torch.arange(1.0, 1 + TILES * 16)


@pytest.fixture
def out(source: Tensor) -> Tensor:
    return torch.full_like(source, torch.nan)


@pytest.mark.usefixtures("simulation")
@pytest.mark.parametrize(("stages", "ahead"), [(2, 1), (3, 1), (3, 2), (4, 3)])
def test_copies_that_are_waited_for(stages: int, ahead: int, source: Tensor, out: Tensor) -> None:
    _copied[(1,)](source, out, STAGES=stages, AHEAD=ahead, WAIT=ahead, num_warps=1)
    assert torch.equal(out, source)


@pytest.mark.usefixtures("simulation")
def test_a_copy_that_is_read_too_early(source: Tensor, out: Tensor) -> None:
    _copied[(1,)](source, out, STAGES=3, AHEAD=1, WAIT=2, num_warps=1)
    assert out[:16].isnan().all()


@pytest.mark.usefixtures("simulation")
def test_a_place_that_is_filled_too_early(source: Tensor, out: Tensor) -> None:
    with pytest.raises(AssertionError, match="on their way to one place"):
        _copied[(1,)](source, out, STAGES=2, AHEAD=2, WAIT=2, num_warps=1)


@pytest.mark.usefixtures("simulation")
def test_a_copy_that_nobody_waits_for(source: Tensor, out: Tensor) -> None:
    with pytest.raises(AssertionError, match="nobody waited"):
        _left_behind[(1,)](source, out, num_warps=1)


Matrices = tuple[Tensor, Tensor, Tensor]


@pytest.fixture
def matrices() -> Matrices:
    torch.manual_seed(0)
    return torch.randn(16, 16).half(), torch.randn(16, 16).half(), torch.full((16, 16), torch.nan)


@pytest.mark.usefixtures("simulation")
def test_products(matrices: Matrices) -> None:
    left, right, out = matrices
    _multiplied[(1,)](left, right, out, FENCES=True, OVERWRITES=False, WAITS=0, num_warps=4)
    torch.testing.assert_close(out, 2 * left.float() @ right.float())


@pytest.mark.usefixtures("simulation")
@pytest.mark.parametrize(
    ("fences", "overwrites", "waits", "message"),
    [
        (False, False, 0, "no fence"),
        (True, True, 0, "while the matrix units read it"),
        (True, False, 1, "not waited for"),
    ],
)
def test_products_gone_wrong(matrices: Matrices, fences: bool, overwrites: bool, waits: int, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        _multiplied[(1,)](*matrices, FENCES=fences, OVERWRITES=overwrites, WAITS=waits, num_warps=4)


@pytest.mark.usefixtures("simulation")
def test_roles(source: Tensor, out: Tensor) -> None:
    _by_roles[(1,)](source, out, GIVES=True, WAITS=True, FREES=1, num_warps=4)
    assert torch.equal(out, source)


@pytest.mark.usefixtures("simulation")
@pytest.mark.parametrize(("gives", "frees"), [(False, 1), (True, 0)])
def test_roles_that_wait_for_ever(gives: bool, frees: int, source: Tensor, out: Tensor) -> None:
    with pytest.raises(AssertionError, match="every role waits"):
        _by_roles[(1,)](source, out, GIVES=gives, WAITS=True, FREES=frees, num_warps=4)


@pytest.mark.usefixtures("simulation")
def test_a_role_that_does_not_wait(source: Tensor, out: Tensor) -> None:
    try:
        _by_roles[(1,)](source, out, GIVES=True, WAITS=False, FREES=1, num_warps=4)
    except AssertionError:  # where more was given back than was taken
        return
    assert out.isnan().any()


def test_a_kernel_that_waits_for_the_one_before(simulation: Simulation, source: Tensor, out: Tensor) -> None:
    with simulation.arriving(source):
        _behind_another[(3,)](source, out, WAITS=True, EARLY=False, num_warps=1)
    assert torch.equal(out, source)


def test_a_kernel_that_does_not(simulation: Simulation, source: Tensor, out: Tensor) -> None:
    with simulation.arriving(source):
        _behind_another[(3,)](source, out, WAITS=False, EARLY=False, num_warps=1)
    assert out.isnan().all()
    assert not source.isnan().any()


def test_a_kernel_that_writes_before_it_waits(simulation: Simulation, source: Tensor) -> None:
    out = torch.zeros_like(source)
    with simulation.arriving(source), pytest.raises(AssertionError, match="may still read it"):
        _behind_another[(3,)](source, out, WAITS=True, EARLY=True, num_warps=1)


@pytest.mark.usefixtures("simulation")
@pytest.mark.parametrize(
    ("begin", "end", "twice", "message"),
    [
        (-1, 0, False, "before the first"),
        (33, 0, False, "past the last"),
        (0, 40, False, "past the last"),
        (0, 0, True, "once"),
    ],
)
def test_places(begin: int, end: int, twice: bool, message: str, source: Tensor, out: Tensor) -> None:
    _moved[(1,)](source, out, FROM=32, TO=32, TWICE=False, num_warps=1)
    assert torch.equal(out[32:], source[32:])
    with pytest.raises(AssertionError, match=message):
        _moved[(1,)](source, out, FROM=begin, TO=end, TWICE=twice, num_warps=1)


@pytest.mark.usefixtures("simulation")
def test_what_a_kernel_has_no_parameter_for(source: Tensor, out: Tensor) -> None:
    with pytest.raises(AssertionError, match="no parameters"):
        _moved[(1,)](source, out, FROM=0, TO=0, TWICE=False, ELSE=1, num_warps=1)
