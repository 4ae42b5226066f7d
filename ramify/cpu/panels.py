"""Weights packed for multiplication: panels of as many outputs as a tile of registers holds, in any number format.

weight (outputs, depth) -> panels (outputs / C, depth, C), C = 64 with AVX-512, 16 with AVX2; the last is padded with
zeros. Panels are read one after the other from end to end, whatever the number of rows, and each element of a product
is summed in the order of depth: a row's result does not depend on the rows beside it.

Weights keep the bits they have in their checkpoint (formats.h): they are unpacked in registers, or, for many rows, a
piece at a time into the cache. The numbers are those that dequantising gives, bit for bit.

A gated weight is two, gate and up: a tile of each is multiplied, and silu(gate) * up goes to the output.

Where weights are integers and scales, rows of x take the form in which they are multiplied fastest:
    fixed   fixed-point numbers of 24 bits (fixed_tiles.h): sums of integers are exact, so a product is nearer to the
            true one than a sum of float32. Where a processor adds four products of bytes at once (VNNI), any number
            of rows, or the first dozens if its products of float32 are as wide; with AVX2 or AVX-512 alone, two.
    int8    with int8 activations, integers of 8 bits in blocks of 32 (int8_tiles.h), where rows are so many that this
            is faster. It is no longer the dequantised model.
Whatever the form, a row does not depend on others; its last bits may depend on how many there are, except with
`batch_invariant`.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

import torch
from torch import Tensor

from ramify.cpu.library import Library, floats
from ramify.cpu.structures import PartFields, WeightFields
from ramify.models.gguf_quants import QuantFormat
from ramify.models.linear import Linear
from ramify.models.stored import StoredTensor


class Ending(IntEnum):
    """What becomes of a product; as in products.h."""

    PLAIN = 0
    ADD = 1  # to what the output holds
    GATED = 2  # silu(first part) * second part


class Panels:
    """Some outputs of a weight, of one number format."""

    def __init__(self, library: Library, weight: StoredTensor, memory: PanelMemory | None = None) -> None:
        self._library = library
        self.stored_in: QuantFormat = weight.quant_format
        self.num_rows, self.depth = weight.shape
        self.order = weight.order
        size = library.panels_size(self.stored_in.type_id, self.num_rows, self.depth)
        if size >= HUGE_PAGE:
            self.data = _in_huge_pages(library, size)
        elif memory is None or not self.stored_in.holds_integers:
            self.data = torch.empty(size, dtype=torch.uint8, device="cpu")
        else:
            self.data = memory.take(size)
        library.pack(
            self.stored_in.type_id,
            weight.data.data_ptr(),
            self.data.data_ptr(),
            self.num_rows,
            self.depth,
            self._library.threads,
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.data,)

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def rows(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """int64 (T,) -> these rows as float32 (T, depth)."""
        found = floats(len(ids), self.depth) if out is None else out
        dense = ids.contiguous()  # held until it has been read
        self._library.unpack_rows(
            self.stored_in.type_id,
            self.data.data_ptr(),
            dense.data_ptr(),
            found.data_ptr(),
            len(dense),
            self.depth,
            1 if len(dense) < ROWS_PER_THREAD else self._library.threads,
        )
        if self.order is not None:
            found.index_copy_(1, self.order.long(), found.clone())
        return found


class PanelMemory:
    """Small weights one after the other in larger pieces.

    A piece is given back when none of its weights is left: so only weights that are never replaced share one.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._piece: Tensor | None = None
        self._used = 0

    def take(self, size: int) -> Tensor:
        if self._piece is None or self._used + size > len(self._piece):
            self._piece, self._used = _in_huge_pages(self._library, PIECE), 0
        found = self._piece[self._used : self._used + size]
        self._used += -(-size // 64) * 64
        return found


HUGE_PAGE, PIECE = 2 << 20, 16 << 20  # bytes


def _in_huge_pages(library: Library, size: int) -> Tensor:
    """Where the system has them. Weights are read from end to end for every token: a core then reads a third faster."""
    whole = torch.empty(size + HUGE_PAGE, dtype=torch.uint8, device="cpu")
    first = -whole.data_ptr() % HUGE_PAGE
    library.ask_for_huge_pages(whole.data_ptr() + first, size)
    return whole[first : first + size]


ROWS_PER_THREAD = 16  # with fewer, one thread is done before a second has woken up


class RowMemory:
    """Memory for a product's rows in another form, kept from one product to the next; one thread at a time."""

    def __init__(self) -> None:
        self._memory, self._size = torch.empty(0, dtype=torch.uint8, device="cpu"), 0

    def address(self, size: int) -> int:
        if self._size < size:
            self._memory, self._size = torch.empty(size, dtype=torch.uint8, device="cpu"), size
        return self._memory.data_ptr()


class Product:
    """A linear layer's parts as the kernels read them."""

    def __init__(
        self,
        library: Library,
        linear: Linear,
        memory: RowMemory | None = None,
        *,
        gated: bool = False,
        int8: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        self.linear = linear
        self._library = library
        self._memory = RowMemory() if memory is None else memory
        self._int8 = int8
        self._batch_invariant = batch_invariant
        self._gated = gated
        outputs, self._depth = linear.weight.shape
        self._columns = outputs // 2 if gated else outputs
        self._fields = WeightFields()
        self._order: Tensor | None = None
        self._made_of = -1

    def multiply(self, x: Tensor, out: Tensor, ending: Ending = Ending.PLAIN) -> None:
        """x (T, depth) dense -> out (T, outputs) dense."""
        rows, depth = x.shape
        assert x.is_contiguous(), "rows of x must lie one after the other"
        assert out.is_contiguous(), "rows of the output must lie one after the other"
        assert (depth, out.numel()) == (self._depth, rows * self._columns), "x or the output is of another shape"
        assert (ending is Ending.GATED) == self._gated, "a gated weight is for that ending alone"
        weight = ctypes.byref(self.fields())
        self._library.multiply_packed(
            weight,
            x.data_ptr(),
            out.data_ptr(),
            rows,
            ending,
            self._memory.address(self._library.product_memory(weight, rows)),
            self._library.threads,
        )

    def fields(self) -> WeightFields:
        """True until the weight is packed again."""
        if self._made_of != self.linear.times_packed:
            self._fields = self._read()
            self._made_of = self.linear.times_packed
        return self._fields

    def _read(self) -> WeightFields:
        parts, bias = sorted(self.linear.parts.items()), self.linear.bias
        first = parts[0][1]
        assert isinstance(first, Panels)
        self._order = None if first.order is None else first.order.to(torch.int64).contiguous()
        told, most_fixed_rows, least_int8_rows = [], 0, 0
        for first_row, part in parts:
            assert isinstance(part, Panels)
            assert (part.order is None) == (first.order is None), "all parts multiply columns in one order"
            number_format = part.stored_in.type_id
            most = self._library.most_fixed_rows(number_format, alike=self._batch_invariant)
            most_fixed_rows = max(most_fixed_rows, most)
            least = self._library.least_int8_rows(number_format, alike=self._batch_invariant)
            least_int8_rows = max(least_int8_rows, least)
            address = None if bias is None else bias.data_ptr() + first_row * bias.itemsize
            told.append(PartFields(number_format, part.data.data_ptr(), address, part.num_rows))
        assert sum(part.columns for part in told) == len(self.linear.weight), "some rows of the weight were not packed"
        return WeightFields(
            (PartFields * len(told))(*told),
            len(told),
            self._depth,
            self._columns,
            None if self._order is None else self._order.data_ptr(),
            most_fixed_rows,
            least_int8_rows if self._int8 else 0,
        )


class PanelPacking:
    """Packs weights in the format they come in, or all of them as float32."""

    def __init__(self, library: Library, *, dequantize: bool = False, int8_activations: bool = False) -> None:
        self.library = library
        self.int8_activations = int8_activations
        self.memory = RowMemory()
        self._panel_memory = PanelMemory(library)
        self._dequantize = dequantize

    def pack(self, weight: StoredTensor) -> Panels:
        return Panels(self.library, weight.in_float32() if self._dequantize else weight, self._panel_memory)

    def product(self, linear: Linear, *, gated: bool = False, batch_invariant: bool = False) -> Product:
        return Product(
            self.library,
            linear,
            self.memory,
            gated=gated,
            int8=self.int8_activations,
            batch_invariant=batch_invariant,
        )
