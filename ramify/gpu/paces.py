"""At which pace a forward pass of one row is fastest (product_forms.py: `Pace`): measured once.

Overlap gains where starting a kernel takes as long as its work. Where kernels are long it may lose: programs of the
next one take whatever room the last of this one leave, and then stand close on some processors and far apart on others.
Programs that stay have their share of every processor, and their first weights on the way while attention is at work;
those that pass are quicker to begin. A product alone shows none of this. So layers are timed at every pace, as many as
no cache holds, and what was fastest is remembered with the forms of products. Passes of several rows overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ramify.device.graphs import must_run_first
from ramify.gpu.form_cache import FormCache
from ramify.gpu.product_forms import Pace
from ramify.gpu.products import TRIAL_BYTES
from ramify.gpu.tuning import Launch
from ramify.models.families import Architecture


@dataclass(frozen=True, slots=True)
class LayerShape:
    """All that the time of a model's layers depends on, beside their number."""

    arch: Architecture
    dtype: torch.dtype

    @property
    def name(self) -> str:
        arch = self.arch
        heads = f"{arch.num_heads}/{arch.num_kv_heads} heads of {arch.head_dim}"
        extras = f"{' biases' if arch.qkv_bias else ''}{' norms' if arch.qk_norm else ''}"
        sizes = f"{arch.hidden_size}x{arch.intermediate_size}"
        return f"layers of {sizes}, {heads}{extras} {str(self.dtype).removeprefix('torch.')}"

    @property
    def num_tried(self) -> int:
        """So many layers that no cache holds their weights."""
        arch = self.arch
        attention = (2 * arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
        of_layer = self.dtype.itemsize * arch.hidden_size * (attention + 3 * arch.intermediate_size)
        return max(2, -(-TRIAL_BYTES // of_layer))


class MeasuredPace:
    """Of one model's layers."""

    def __init__(
        self, shape: LayerShape, cache: FormCache, stopwatch: Callable[[Sequence[Launch]], Sequence[float]]
    ) -> None:
        self._shape, self._cache, self._stopwatch = shape, cache, stopwatch
        self._known: Pace | None = None

    def of(self, rows: int, launch: Callable[[int, Pace], None]) -> Pace:
        """For so many rows; `launch` launches so many layers at a pace."""
        if rows > 1:
            return Pace(overlaps=1)
        if self._known is None:
            self._known = self._find(rows, partial(launch, self._shape.num_tried))
        return self._known

    def _find(self, rows: int, launch: Callable[[Pace], None]) -> Pace:
        found = self._cache.find(self._shape, rows)
        if isinstance(found, Pace):
            return found
        must_run_first()
        paces = [Pace(overlaps, stays) for stays in (0, 1) for overlaps in (0, 1)]
        launches = [partial(launch, pace) for pace in paces]
        for each in launches:
            each()  # compiles
        fastest = min(zip(self._stopwatch(launches), range(len(paces)), strict=True))[1]
        kept = self._cache.keep(self._shape, rows, paces[fastest])
        return kept if isinstance(kept, Pace) else paces[fastest]
