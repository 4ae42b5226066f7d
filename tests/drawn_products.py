"""Products on a CPU for properties: any number of rows, weights of several formats side by side, any threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from ramify.cpu.panels import Ending, PanelPacking, Product
from ramify.models.linear import Linear
from ramify.models.stored import StoredTensor
from tests.quantised import EVERY_FORMAT, stored


class DrawnProduct(NamedTuple):
    parts: list[StoredTensor]  # one below the other; two alike, gate and up, where it is gated
    rows: int
    gated: bool
    threads: int
    alike: bool  # rows of any number in one form
    seed: int

    @property
    def depth(self) -> int:
        return self.parts[0].shape[1]

    def of(self, x: Tensor, packing: PanelPacking) -> Tensor:
        """x (rows, depth) -> (rows, outputs), in float64."""
        outputs = [part.shape[0] for part in self.parts]
        out = torch.empty(len(x), outputs[0] if self.gated else sum(outputs))
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(self.threads)
            ending = Ending.GATED if self.gated else Ending.PLAIN
            product = product_of(packing, self.parts, gated=self.gated, batch_invariant=self.alike)
            product.multiply(x, out, ending)
        finally:
            torch.set_num_threads(before)
        return out.double()


def product_of(
    packing: PanelPacking, parts: list[StoredTensor], *, gated: bool = False, batch_invariant: bool = False
) -> Product:
    linear = Linear(torch.empty(sum(part.shape[0] for part in parts), parts[0].shape[1], device="meta"))
    first = 0
    for part in parts:
        linear.put(first, part, packing)
        first += part.shape[0]
    return packing.product(linear, gated=gated, batch_invariant=batch_invariant)


@st.composite
def drawn_products(draw: Callable[..., Any], *, step: int = 1) -> DrawnProduct:
    """step: what depths are multiples of, beside the blocks of the formats."""
    rows = draw(st.one_of(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 13]), st.integers(1, 300)))
    outputs = draw(st.lists(st.sampled_from([1, 16, 40, 64, 65, 130]), min_size=1, max_size=3))
    gated = draw(st.booleans())
    outputs = [outputs[0], outputs[0]] if gated else outputs
    names = draw(st.lists(st.sampled_from(list(EVERY_FORMAT)), min_size=len(outputs), max_size=len(outputs)))
    depth = draw(st.integers(1, 5)) * max(EVERY_FORMAT[name].block_size for name in names)
    depth = -(-depth // step) * step
    seed = draw(st.integers(0, 1000))
    parts = [
        stored(name, count, depth, seed + number)
        for number, (name, count) in enumerate(zip(names, outputs, strict=True))
    ]
    return DrawnProduct(parts, rows, gated, draw(st.integers(1, 2)), draw(st.booleans()), seed)
