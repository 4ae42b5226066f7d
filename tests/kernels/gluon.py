"""Runs Gluon kernels without a GPU: their own source, on torch's operators.

A program is a Python function of whole tensors; layouts and warps are not looked at. What a GPU may do early or late,
and nobody can count on, is done here in the way that hurts most:

    copies              read memory when they are asked for, and land when they are waited for; until then, NaN
    matrix units        may not find other numbers in shared memory when they are waited for than when they began, and
                        none that threads wrote without a fence
    the kernel before   has written nothing until it is waited for (`arriving`)
    roles of warps      take turns in an order drawn from a seed, as do copies that a barrier counts
    programs            run one after the other, in such an order too

So a wait that is missing, a place that is filled too early or a signal that nobody gives is an error here every time,
and not on a bad day. What the compiler does by itself, such as barriers between threads of a role, cannot be seen.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.experimental.gluon import language

from ramify.gpu.kernels.overlap import can_overlap

Arriving = Callable[..., AbstractContextManager[None]]  # of tensors: what the kernel before writes
LAUNCH_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
BARRIERS = object()  # the layout of barriers
BY_FIRST = object()  # a layout in which neighbours of the first dimension lie side by side
PATIENCE = 60.0  # seconds for one turn of a role


class Pointer:
    """Places in a tensor; past its ends nothing may be read or written."""

    def __init__(self, tensor: Tensor, places: Tensor | int = 0) -> None:
        if tensor.is_contiguous():
            self.tensor, self.places = tensor.view(-1), places
        else:  # a view: what surrounds it can be reached too
            whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
            self.tensor, self.places = whole, places + int(tensor.storage_offset())
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, places: Tensor | int) -> Pointer:
        moved = Pointer.__new__(Pointer)
        moved.tensor, moved.places, moved.dtype = self.tensor, self.places + places, self.dtype
        return moved

    def __getitem__(self, index: Any) -> Pointer:
        moved = self + 0
        moved.places = torch.as_tensor(self.places)[index]
        return moved

    def inside(self, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Places, the first one for those that the mask leaves out."""
        places = torch.as_tensor(self.places)
        if mask is not None:
            mask = torch.as_tensor(mask)
            places = torch.where(mask, places, 0)
            mask = mask.expand(places.shape)
        assert int(places.min()) >= 0, "before the first number"
        assert int(places.max()) < len(self.tensor), "past the last number"
        return places, mask

    def load(self, mask: Tensor | None = None, other: float = 0) -> Tensor:
        places, mask = self.inside(mask)
        found = self.tensor[places]
        return found if mask is None else torch.where(mask, found, torch.tensor(other, dtype=self.tensor.dtype))

    def store(self, value: Tensor | float, mask: Tensor | None = None) -> None:
        places, mask = self.inside(mask)
        values = torch.as_tensor(value, dtype=self.tensor.dtype).expand(places.shape)
        if mask is not None:
            places, values = places[mask], values[mask]
        flat = places.reshape(-1)
        assert bool((flat.sort().values.diff() > 0).all()), "every place is written once"
        self.tensor[flat] = values.reshape(-1)


class Shared:
    """A view of shared memory; `unfenced` tells of each number whether matrix units may not see yet who wrote it."""

    def __init__(self, values: Tensor, unfenced: Tensor, *, by_first: bool = False) -> None:
        self.values, self.unfenced, self._by_first = values, unfenced, by_first
        self.dtype, self.shape = values.dtype, values.shape

    @property
    def extent(self) -> tuple[int, int]:
        """Addresses of the first byte and of the first one behind it."""
        assert self.values.is_contiguous(), "a piece of an allocation"
        return self.values.data_ptr(), self.values.data_ptr() + self.values.nbytes

    def index(self, place: Tensor | int) -> Shared:
        return Shared(self.values[int(place)], self.unfenced[int(place)])

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.values[start : start + length], self.unfenced[start : start + length])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.values.permute(*order), self.unfenced.permute(*order))

    def load(self, _layout: Any = None) -> Tensor:
        return self.values.clone()

    def store(self, value: Tensor) -> None:
        if self._by_first:
            value = value.permute(*reversed(range(value.dim()))).reshape(self.shape)
        self.values.copy_(value)
        self.unfenced.fill_(True)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], _layout: Any) -> Shared:
        assert self.values.is_contiguous(), "all of an allocation"
        size = self.dtype.itemsize
        flags = self.unfenced.view(-1)
        flags = flags.as_strided((math.prod(shape),), (dtype.itemsize // size,)) if dtype.itemsize >= size else flags
        return _Reinterpreted(self.values.view(-1).view(dtype).view(shape), self, flags.view(shape))


class _Reinterpreted(Shared):
    """The same memory with another type; whatever is stored to it stands unfenced in the whole allocation."""

    def __init__(self, values: Tensor, owner: Shared, unfenced: Tensor) -> None:
        super().__init__(values, unfenced)
        self._owner = owner

    def index(self, place: Tensor | int) -> Shared:
        of_owner = self._owner.index(place) if self._owner.shape[0] == self.shape[0] else self._owner
        return _Reinterpreted(self.values[int(place)], of_owner, self.unfenced[int(place)])

    def store(self, value: Tensor) -> None:
        self.values.copy_(value)
        self._owner.unfenced.fill_(True)


class Barrier:
    """Phases end when so many arrivals were counted."""

    def __init__(self) -> None:
        self.count = self._missing = self._phase = 0

    def begin(self, count: int) -> None:
        assert self.count == 0, "a barrier begins once"
        self.count = self._missing = count

    def arrive(self, count: int = 1) -> None:
        assert 0 < count <= self._missing, "more arrivals than the barrier waits for"
        self._missing -= count
        if not self._missing:
            self._missing, self._phase = self.count, self._phase + 1

    def has_ended(self, parity: int) -> bool:
        """Whether the phase of this parity is over, of the two that can be asked about."""
        assert self.count, "a barrier that never began"
        return self._phase % 2 != int(parity)


class _Copy:
    """Reads at once, lands when it is told to."""

    def __init__(self, target: Shared, source: Pointer, mask: Tensor | None) -> None:
        target.values.fill_(torch.nan if target.dtype.is_floating_point else 0)
        self._target, self._values = target, source.load(mask).expand(target.shape)
        assert self._values.dtype == target.dtype, "numbers are copied as they are"

    def land(self) -> None:
        self._target.values.copy_(self._values)

    def meets(self, other: _Copy) -> bool:
        """Whether both write to some of the same memory."""
        ours, theirs = self._target.extent, other._target.extent
        return ours[0] < theirs[1] and theirs[0] < ours[1]


_Event = tuple[list[_Copy], Barrier, int]  # copies that land, and so many arrivals at a barrier


class _Product:
    """Of the matrix units, on its way: what stood there when it began must still stand there in the end."""

    def __init__(self, left: Shared | Tensor, right: Shared, sums: Tensor | _Product, use_acc: bool) -> None:
        self._operands = [each for each in (left, right) if isinstance(each, Shared)]
        assert not any(bool(each.unfenced.any()) for each in self._operands), "threads wrote it, and no fence since"
        self._before = [each.load() for each in self._operands]
        first, second = (each.load() if isinstance(each, Shared) else each for each in (left, right))
        added = sums.found if isinstance(sums, _Product) else sums
        product = first.float() @ second.float()
        self.found: Tensor = product + added if use_acc else product.expand(added.shape)

    def end(self) -> Tensor:
        for operand, before in zip(self._operands, self._before, strict=True):
            assert same_bits(operand.values, before), "written to while the matrix units read it"
        return self.found


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


class _Role:
    """Warps with one program text: all of a program, or those that warp_specialize gave it to."""

    def __init__(self, function: Callable[[], None], warps: int) -> None:
        self.warps = warps
        self.groups: list[list[_Copy]] = [[]]  # of copies; the last is not committed yet
        self.products: list[_Product] = []
        self.can_go_on: Callable[[], bool] = lambda: True
        self.fault: BaseException | None = None
        self.has_ended = False
        self._function, self._turn, self._rest = function, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self._turn.wait()
        try:
            self._function()
        except BaseException as fault:  # told to whoever waits for the role
            self.fault = fault
        self.has_ended = True
        self._rest.set()

    def take_turn(self) -> None:
        """Until it waits for something, or ends."""
        if not self._thread.ident:
            self._thread.start()
        self._rest.clear()
        self._turn.set()
        assert self._rest.wait(PATIENCE), "a role does not come to an end"
        if self.fault is not None:
            raise self.fault

    def wait_until(self, can_go_on: Callable[[], bool]) -> None:
        """From within the role."""
        self.can_go_on = can_go_on
        self._turn.clear()
        self._rest.set()
        self._turn.wait()


class Late:
    """What the kernel before writes, hidden from each program until it has waited."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        self._hidden: list[Tensor] = []

    def hide(self) -> None:
        assert not self._hidden, "what is hidden is shown before it is hidden again"
        self._hidden = [tensor.clone() for tensor in self._tensors]
        for tensor in self._tensors:
            tensor.fill_(torch.nan)

    def show(self) -> None:
        for tensor, content in zip(self._tensors, self._hidden, strict=False):
            assert bool(tensor.isnan().all()), "written to while the kernel before may still read it"
            tensor.copy_(content)
        self._hidden = []


class Machine(SimpleNamespace):
    """What kernels ask of `gl` and of what stands beside it, for one program at a time."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._program: tuple[int, ...] = (0, 0, 0)
        self._grid = (1, 1, 1)
        self._memory: list[Shared] = []
        self._role = _Role(lambda: None, 0)
        self._events: list[_Event] = []
        self._late = Late()
        super().__init__(
            constexpr=None,
            static_range=range,
            int32=torch.int32,
            uint32=torch.int64,  # no kernel relies on numbers that wrap
            int64=torch.int64,
            float32=torch.float32,
            BlockedLayout=_layout,
            SliceLayout=_layout,
            DotOperandLayout=_layout,
            NVMMADistributedLayout=_layout,
            NVMMASharedLayout=_layout,
            SwizzledSharedLayout=_layout,
            num_warps=lambda: self._role.warps,
            program_id=lambda axis: torch.tensor(self._program[axis]),
            num_programs=lambda axis: torch.tensor(self._grid[axis]),
            arange=lambda start, end, layout: torch.arange(start, end),  # noqa: ARG005
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),  # noqa: ARG005
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),  # noqa: ARG005
            cast=lambda value, dtype: torch.as_tensor(value).to(dtype),
            cdiv=lambda one, other: torch.as_tensor((one + other - 1) // other),
            where=lambda *each: torch.where(*map(torch.as_tensor, each)),
            minimum=lambda one, other: torch.minimum(*map(torch.as_tensor, (one, other))),
            maximum=lambda one, other: torch.maximum(*map(torch.as_tensor, (one, other))),
            max=lambda values, axis: values.amax(axis),
            sum=lambda values, axis: values.sum(axis),
            exp=torch.exp,
            exp2=torch.exp2,
            log=torch.log,
            rsqrt=torch.rsqrt,
            split=lambda pairs: pairs.unbind(-1),
            join=lambda one, other: torch.stack((one, other), -1),
            convert_layout=lambda value, _: value,
            load=lambda pointer, mask=None, other=0.0, volatile=False, cache_modifier="": pointer.load(mask, other),  # noqa: ARG005
            store=lambda pointer, value, mask=None: pointer.store(value, mask),
            atomic_add=_atomic_add,
            thread_barrier=lambda: None,
            inline_asm_elementwise=_assembly,
            allocate_shared_memory=self._allocate,
            warp_specialize=self._divide,
        )

    def names(self) -> dict[str, Any]:
        """What kernels' modules import besides `gl`."""
        return {
            "gl": self,
            "gdc_wait": self._wait_for_last,
            "gdc_launch_dependents": lambda: None,
            "fence_async_shared": self._fence,
            "mma_v2": lambda left, right, sums: sums + left.float() @ right.float(),
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._wait_for_products,
            "async_copy": SimpleNamespace(
                async_copy_global_to_shared=self._copy,
                commit_group=lambda: self._role.groups.append([]),
                wait_group=self._wait_for_copies,
                mbarrier_arrive=self._arrive_with_copies,
            ),
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: BARRIERS,
                init=lambda barrier, count: barrier.begin(count),
                arrive=lambda barrier, count=1: barrier.arrive(count),
                wait=lambda barrier, phase: self._role.wait_until(lambda: barrier.has_ended(phase)),
            ),
        }

    def run(self, kernel: Callable[[], None], grid: tuple[int, int, int], warps: int, late: Late) -> None:
        """Every program of a launch."""
        programs = list(itertools.product(*map(range, grid)))
        self._chance.shuffle(programs)
        self._grid, self._late = grid, late
        for self._program in programs:
            late.hide()
            self._memory, self._events = [], []
            role = _Role(kernel, warps)
            self._take_turns([role])
            late.show()
            assert not self._events, "copies that nobody waited for"
            assert not any(role.groups), "copies that nobody waited for"

    def _wait_for_last(self) -> None:
        self._late.show()

    def _take_turns(self, roles: list[_Role]) -> None:
        outer = self._role
        while not all(role.has_ended for role in roles):
            able = [role for role in roles if not role.has_ended and role.can_go_on()]
            assert able or self._events, "every role waits, and nothing comes"
            choices: list[_Role | _Event] = [*able, *self._events]
            chosen = self._chance.choice(choices)
            if isinstance(chosen, _Role):
                self._role = chosen
                chosen.take_turn()
            else:
                copies, barrier, count = chosen
                self._events.remove(chosen)
                for copy in copies:
                    copy.land()
                barrier.arrive(count)
        self._role = outer

    def _divide(
        self,
        parts: Sequence[tuple[Callable[..., None], tuple[Any, ...]]],
        warps: Sequence[int],
        _registers: Sequence[int],
    ) -> None:
        sizes = (self._role.warps, *warps)
        roles = [_Role(partial(function, *own), size) for (function, own), size in zip(parts, sizes, strict=True)]
        self._take_turns(roles)
        assert not any(any(role.groups) for role in roles), "copies that nobody waited for"

    def _allocate(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
        if layout is BARRIERS:
            return SimpleNamespace(index=[Barrier() for _ in range(shape[0])].__getitem__)
        unknown = torch.nan if dtype.is_floating_point else 0
        shared = Shared(
            torch.full(tuple(shape), unknown, dtype=dtype),
            torch.zeros(tuple(shape), dtype=torch.bool),
            by_first=layout is BY_FIRST,
        )
        self._memory.append(shared)
        return shared

    def _fence(self) -> None:
        for shared in self._memory:
            shared.unfenced.fill_(False)

    def _copy(self, target: Shared, source: Pointer, mask: Tensor | None = None) -> None:
        copy = _Copy(target, source, mask)
        coming = (*itertools.chain(*self._role.groups), *itertools.chain(*(copies for copies, _, _ in self._events)))
        assert not any(copy.meets(other) for other in coming), "two copies on their way to one place"
        self._role.groups[-1].append(copy)

    def _wait_for_copies(self, outstanding: int) -> None:
        committed = self._role.groups[:-1]
        done = committed[: max(0, len(committed) - outstanding)]
        for copy in itertools.chain(*done):
            copy.land()
        self._role.groups = self._role.groups[len(done) :]

    def _arrive_with_copies(self, barrier: Barrier, *, increment_count: bool) -> None:
        """Every thread arrives once its own copies are there."""
        assert not increment_count, "the barrier was told of all arrivals"
        self._role.groups, copies = [[]], list(itertools.chain(*self._role.groups))
        self._events.append((copies, barrier, 32 * self._role.warps))

    def _multiply(
        self,
        left: Shared | Tensor,
        right: Shared,
        sums: Tensor | _Product,
        *,
        use_acc: bool = True,
        is_async: bool = False,
    ) -> Tensor | _Product:
        product = _Product(left, right, sums, use_acc)
        if not is_async:
            return product.end()
        self._role.products.append(product)
        return product

    def _wait_for_products(self, outstanding: int, deps: Sequence[Tensor | _Product]) -> Any:
        products = self._role.products
        for product in products[: max(0, len(products) - outstanding)]:
            product.end()
        self._role.products = products[max(0, len(products) - outstanding) :]
        assert not any(each in self._role.products for each in deps if isinstance(each, _Product)), "not waited for"
        found = tuple(each.found if isinstance(each, _Product) else each for each in deps)
        return found[0] if len(found) == 1 else found


def _layout(*_: Any) -> None:
    """Of a tensor: not looked at."""


def _atomic_add(pointer: Pointer, value: int, sem: str) -> Tensor:  # noqa: ARG001
    before = pointer.load().clone()
    pointer.store(before + value)
    return before


def _assembly(text: str, *_: Any, **__: Any) -> None:
    assert text.startswith("prefetch"), "an instruction that no number depends on"


class Simulation:
    """Kernels that run here when they are launched."""

    def __init__(self, seed: int = 0, names: dict[str, Any] | None = None) -> None:
        self._machine = Machine(seed)
        self._names = {**self._machine.names(), **(names or {})}
        self._scopes: dict[str, dict[str, Any]] = {}
        self._late = Late()

    @contextmanager
    def arriving(self, *tensors: Tensor) -> Iterator[None]:
        """What these hold is written by the kernel before: each program finds NaN there until it has waited."""
        self._late = Late(*tensors)
        yield
        self._late = Late()

    def kernel(self, compiled: Any) -> _Launcher:
        """In the place of a compiled one."""
        source = self._function(compiled.fn)
        return _Launcher(self, source, source.__code__.co_varnames[: source.__code__.co_argcount])

    def launch(self, source: FunctionType, grid: tuple[int, ...], arguments: Sequence[Any], options: Any) -> None:
        warps = options["num_warps"]
        constants = {name: value for name, value in options.items() if name not in LAUNCH_OPTIONS}
        values = [_argument(each) for each in arguments]
        whole = (*grid, 1, 1)[:3]
        with pytest.MonkeyPatch.context() as changes:
            for name in ("add", "sub", "mul", "truediv", "and", "or"):  # a name is given another value, not the value
                changes.setattr(Tensor, f"__i{name}__", getattr(Tensor, f"__{name}__"))
            self._machine.run(lambda: source(*values, **constants), whole, warps, self._late)  # type: ignore[arg-type]

    def _function(self, source: FunctionType) -> FunctionType:
        found: FunctionType = self._scope(sys.modules[source.__module__])[source.__name__]
        return found

    def _scope(self, module: ModuleType) -> dict[str, Any]:
        """A module's names as kernels find them: other kernels run here too, constants are plain."""
        if module.__name__ in self._scopes:
            return self._scopes[module.__name__]
        scope = self._scopes[module.__name__] = {}
        for name, value in vars(module).items():
            inner = getattr(value, "fn", None)
            if name in self._names:
                scope[name] = self._names[name]
            elif isinstance(inner, FunctionType) and inner.__module__ == module.__name__:
                scope[name] = FunctionType(inner.__code__, scope, name, inner.__defaults__)
            elif isinstance(inner, FunctionType):
                scope[name] = self._function(inner)
            elif isinstance(value, language.constexpr):
                scope[name] = value.value
            else:
                scope[name] = value
        return scope


class _Launcher:
    def __init__(self, simulation: Simulation, source: FunctionType, parameters: Sequence[str]) -> None:
        self._simulation, self._source, self._parameters = simulation, source, parameters

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            unknown = set(options) - set(self._parameters) - set(LAUNCH_OPTIONS)
            assert not unknown, f"no parameters: {unknown}"
            self._simulation.launch(self._source, grid, arguments, options)

        return launch


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Pointer(value)
    return torch.tensor(value) if isinstance(value, int | float) else value


@contextmanager
def simulated(
    *kernels: tuple[ModuleType, str], seed: int = 0, names: dict[str, Any] | None = None
) -> Iterator[Simulation]:
    """Launches of these kernels inside run here."""
    simulation = Simulation(seed, names)
    with pytest.MonkeyPatch.context() as changes:
        for module, name in kernels:
            changes.setattr(module, name, simulation.kernel(getattr(module, name)))
        yield simulation


@contextmanager
def prepared(
    device: torch.device, *kernels: tuple[ModuleType, str], names: dict[str, Any] | None = None
) -> Iterator[Arriving]:
    """Compiled on a GPU, elsewhere run here. Gives `Simulation.arriving`, which says nothing to a GPU."""
    if device.type == "cuda":
        yield lambda *_: nullcontext()
        return
    with simulated(*kernels, names=names) as simulation:
        yield simulation.arriving


def overlaps(device: torch.device) -> bool:
    """Whether kernels are launched as where they overlap: here they are, to be held to their waits."""
    return device.type == "cpu" or can_overlap(device)
