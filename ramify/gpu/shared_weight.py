"""SharedWeight: a weight whose columns ranks share, so that each of them has a part of every sum."""

from __future__ import annotations

from torch import Tensor

from ramify.gpu.kernels.ahead import Ahead
from ramify.gpu.kernels.parts import Parts
from ramify.gpu.kernels.row_product import Norm
from ramify.gpu.product_forms import Pace
from ramify.gpu.products import Stream, Weight
from ramify.models.shards import Ranks


class SharedWeight:
    """`weight` is this rank's part, in whatever form; its products are rounded, added up and then read."""

    def __init__(self, weight: Weight, ranks: Ranks) -> None:
        self._weight = weight
        self._ranks = ranks

    def into_stream(self, x: Tensor, stream: Stream) -> None:
        values = stream.values  # a product of one row adds to what it finds there: here to nothing
        own = Stream(values.new_zeros(values.shape), stream.pace)
        self._weight.into_stream(x, own)
        stream.add(Parts.whole(self._ranks.add_up(own.values)))

    def from_stream(self, stream: Stream, norm: Norm) -> Parts:
        return self._weight.from_stream(stream, norm)

    def gated_from_stream(self, stream: Stream, norm: Norm, out: Tensor) -> None:
        self._weight.gated_from_stream(stream, norm, out)

    def logits(self, x: Tensor, out: Tensor) -> None:
        self._weight.logits(x, out)

    def ahead(self, rows: int, pace: Pace) -> Ahead | None:
        return self._weight.ahead(rows, pace)
