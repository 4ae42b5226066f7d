"""Runs the kernels for weights of few bits without a GPU: their source, with torch's operators in it.

Nearly every tensor there has one element a thread, so a program is a few vectors. The functions that are one
instruction or a few of assembly have counterparts here, which do with threads and bits what the instructions do; all
else, what is loaded from where, multiplied with what and written to where, is the kernels' own. It shows no race.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ramify.gpu.kernels import packed_rows, packed_sums, packed_tiles, packed_words, unpacked

HALVES = (torch.bfloat16, torch.float16)
SOURCES: dict[str, FunctionType] = {
    name: value.fn
    for module in (packed_words, packed_sums, packed_rows, packed_tiles, unpacked)
    for name, value in vars(module).items()
    if isinstance(getattr(value, "fn", None), FunctionType)
}


class Pointer:
    """Places in a tensor; past its ends nothing may be read or written."""

    def __init__(self, tensor: Tensor, places: Tensor | int = 0) -> None:
        assert tensor.is_contiguous()
        self.tensor, self.places = tensor.view(-1), places
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, places: Tensor | int) -> Pointer:
        return Pointer(self.tensor, self.places + places)

    def load(self, mask: Tensor | None = None, other: float = 0) -> Tensor:
        places = torch.as_tensor(self.places)
        if mask is None:
            return self.tensor[places]
        return torch.where(
            mask, self.tensor[torch.where(mask, places, 0)], torch.tensor(other, dtype=self.tensor.dtype)
        )

    def words(self, count: int, inside: Tensor) -> tuple[Tensor, ...]:
        """int32, however the tensor is typed."""
        width = 4 // self.tensor.itemsize
        assert not bool((torch.as_tensor(self.places) % (count * width)).any()), "aligned"
        words, first = self.tensor.view(torch.int32), self.places // width
        return tuple(torch.where(inside, words[torch.where(inside, first + each, 0)], 0) for each in range(count))


class Shared:
    """Shared memory; by_threads: the first dimension lies one after the other, else the last."""

    def __init__(self, flat: Tensor, shape: tuple[int, ...], *, by_threads: bool) -> None:
        self._flat, self._shape, self._by_threads = flat, shape, by_threads

    def store(self, value: Tensor) -> None:
        order = tuple(reversed(range(value.dim()))) if self._by_threads else tuple(range(value.dim()))
        self._flat.copy_(value.permute(*order).reshape(-1))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], _layout: Any) -> Shared:
        return Shared(self._flat.view(dtype), tuple(shape), by_threads=False)

    def slice(self, start: int, length: int) -> Shared:
        size = math.prod(self._shape[1:])
        flat = self._flat[start * size : (start + length) * size]
        return Shared(flat, (length, *self._shape[1:]), by_threads=False)

    def index(self, place: int) -> Shared:
        size = math.prod(self._shape[1:])
        return Shared(self._flat[place * size : (place + 1) * size], self._shape[1:], by_threads=False)

    def permute(self, order: tuple[int, ...]) -> Tensor:
        return self.load(None).permute(order)

    def load(self, _layout: Any) -> Tensor:
        return self._flat.view(self._shape)


class Language(SimpleNamespace):
    """What the kernel asks of `gl`, for one program."""

    def __init__(self, program: tuple[int, ...], warps: int) -> None:
        layout = lambda *_: None  # noqa: E731
        super().__init__(
            constexpr=None,
            static_range=range,
            num_warps=lambda: warps,
            program_id=lambda axis: torch.tensor(program[axis]),
            arange=lambda start, end, layout: torch.arange(start, end),  # noqa: ARG005
            minimum=lambda one, other: torch.minimum(torch.as_tensor(one), torch.as_tensor(other)),
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),  # noqa: ARG005
            load=lambda pointer, mask=None, other=0.0: pointer.load(mask, other),
            store=_store,
            sum=lambda values, axis: values.sum(axis),
            rsqrt=torch.rsqrt,
            exp=torch.exp,
            thread_barrier=lambda: None,
            split=lambda pairs: pairs.unbind(-1),
            join=lambda one, other: torch.stack((one, other), -1),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),  # noqa: ARG005
            convert_layout=lambda value, _: value,
            allocate_shared_memory=lambda dtype, shape, by_threads: Shared(
                torch.full([math.prod(shape)], torch.nan, dtype=dtype), tuple(shape), by_threads=bool(by_threads)
            ),
            BlockedLayout=layout,
            SliceLayout=layout,
            NVMMADistributedLayout=layout,
            NVMMASharedLayout=layout,
            SwizzledSharedLayout=layout,
            int32=torch.int32,
            int64=torch.int64,
            float32=torch.float32,
        )


def _store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    places = torch.as_tensor(pointer.places).expand(mask.shape)[mask]
    assert len(set(places.tolist())) == len(places), "every place is written once"
    pointer.tensor[places] = value.expand(mask.shape)[mask]


class Instructions:
    """The functions of the kernel that are written in assembly."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def _halves(self, word: Tensor) -> Tensor:
        """(threads,) -> (threads, 2) float32: the two numbers of a word, low half first."""
        return word.view(torch.int16).view(-1, 2).view(self._dtype).float()

    def _word(self, halves: Tensor) -> Tensor:
        """(threads, 2) -> (threads,): exact, or rounded once."""
        return halves.to(self._dtype).contiguous().view(torch.int32)[:, 0]

    def _bits(self, halves: Tensor) -> Tensor:
        return halves.to(torch.int16).contiguous().view(torch.int32)[:, 0]

    def _constant(self, text: str, name: str) -> Tensor:
        bits = int(text.split(f"mov.b32 {name}, 0x")[1][:4], 16)
        return torch.tensor([bits], dtype=torch.int32).to(torch.int16).view(self._dtype).float()

    def decode_scale(self, word: Tensor, text: str) -> tuple[Tensor, Tensor]:
        halves = word.view(torch.int16).view(-1, 2)
        zero = self._halves(self._bits(halves[:, 1:].expand(-1, 2))) * self._constant(text, "m")
        return halves[:, 0].contiguous().view(torch.float16).float(), self._word(zero)

    def unpack_nibbles(self, word: Tensor, zero: Tensor, other_zero: Tensor, text: str) -> tuple[Tensor, ...]:
        low, high, found = self._constant(text, "l"), self._constant(text, "h"), []
        for moved in (word, word >> 8):
            found.append(self._word(self._halves(moved & 0x000F000F) * low + self._halves(zero)))
            found.append(self._word(self._halves(moved & 0x00F000F0) * high + self._halves(other_zero)))
        return tuple(found)

    def unpack_octets(self, word: Tensor, zero: Tensor, other_zero: Tensor, text: str) -> tuple[Tensor, ...]:
        if "or.b32" not in text:
            scale = self._constant(text, "l")
            first = self._halves(word & 0x00FF00FF) * scale + self._halves(zero)
            other = self._halves(word >> 8 & 0x00FF00FF) * scale + self._halves(other_zero)
            return self._word(first), self._word(other)
        octets = word.view(torch.uint8).view(-1, 2, 2).view(torch.float8_e4m3fn).float()
        return self._word(octets[:, :, 0]), self._word(octets[:, :, 1])

    def normed(self, word: Tensor, weight: Tensor, scale: Tensor, _text: str) -> Tensor:
        rounded = (self._halves(word) * scale[:, None]).to(self._dtype).float()
        return self._word(rounded * self._halves(weight))

    def scaled(self, word: Tensor, scale: Tensor, _text: str) -> Tensor:
        return self._word(self._halves(word) * scale[:, None])

    def store_words(self, pointer: Pointer, *words: Tensor) -> None:
        inside, places = words[-1].bool(), torch.as_tensor(pointer.places)
        assert not bool((places % 8).any()), "aligned"
        pointer.tensor.view(-1, 8)[places[inside] // 8] = torch.stack(words[:-1], 1)[inside].view(self._dtype)

    def multiply(
        self, left: tuple[Tensor, ...], inputs: Tensor, other_inputs: Tensor, sums: tuple[Tensor, ...], _text: str
    ) -> tuple[Tensor, ...]:
        """By the picture of mma.m16n8k16 in the PTX manual: thread 4 g + q."""
        warps = len(inputs) // 32
        # (warps, g, q, half)
        a = [self._halves(each).view(warps, 8, 4, 2) for each in left]
        b = [self._halves(each).view(warps, 8, 4, 2) for each in (inputs, other_inputs)]
        matrix = torch.cat((torch.cat((a[0], a[2]), 2), torch.cat((a[1], a[3]), 2)), 1).reshape(warps, 16, 16)
        columns = torch.cat(b, 2).reshape(warps, 8, 16)
        product = matrix @ columns.transpose(1, 2)  # (warps, 16, 8)
        halves = product.view(warps, 2, 8, 4, 2)
        return tuple(
            sums[2 * half + column] + halves[:, half, :, :, column].reshape(-1)
            for half, column in itertools.product(range(2), range(2))
        )


def run(kernel: str, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Every program of a launch, one after the other."""
    warps = options["num_warps"]
    instructions = Instructions(
        next(each.dtype for each in arguments if isinstance(each, Tensor) and each.dtype in HALVES)
    )
    everywhere = torch.ones(32 * warps, dtype=torch.bool)
    scope: dict[str, Any] = {}
    for name, source in SOURCES.items():
        scope[name] = FunctionType(source.__code__, scope, name, source.__defaults__)
    scope |= {name: getattr(instructions, name) for name in vars(Instructions) if not name.startswith("_")}
    scope |= {
        "load_words": lambda pointer, inside, where: pointer.words(4, inside.bool() if where else everywhere),
        "load_pair": lambda pointer, inside, where: pointer.words(2, inside.bool() if where else everywhere),
        "load_inputs": lambda pointer: pointer.words(4, everywhere),
        "load_input_pair": lambda pointer: pointer.words(2, everywhere),
        "from_lane": lambda word, lane: word.view(-1, 32).gather(1, lane.view(-1, 32)).view(-1),
        "as_float": lambda word: word.view(torch.float32),
        "start_next": lambda overlap: None,  # noqa: ARG005
        "wait_for_last": lambda overlap: None,  # noqa: ARG005
        "_by_parts": lambda rank: True,  # noqa: ARG005
        "async_copy": SimpleNamespace(
            async_copy_global_to_shared=lambda target, source: target.store(source.load()),
            commit_group=lambda: None,
            wait_group=lambda _: None,
        ),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": lambda left, right, sums, is_async: sums + left.load(None).float() @ right.float(),  # noqa: ARG005
        "warpgroup_mma_wait": lambda _, deps: deps[0],
    }
    constants = {name: value for name, value in options.items() if name not in ("num_warps", "launch_pdl")}
    pointers = [Pointer(each) if isinstance(each, Tensor) else each for each in arguments]
    for program in itertools.product(*map(range, grid)):
        scope["gl"] = Language(program, warps)
        scope[kernel](*pointers, **constants)


class _Kernel:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: run(self._name, (*grid, 1, 1)[:3], arguments, options)


@contextmanager
def simulated() -> Iterator[None]:
    """Launches inside run here."""
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(packed_rows, "_packed_rows", _Kernel("_packed_rows"))
        changes.setattr(packed_tiles, "_packed_tiles", _Kernel("_packed_tiles"))
        changes.setattr(unpacked, "_write_out", _Kernel("_write_out"))
        yield
