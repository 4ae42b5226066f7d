"""At which pace the decodes of a step are fastest (product_forms.py: `Pace`): measured once for each number of rows.

Overlap gains where starting a kernel takes as long as its work. Where kernels are long it may lose: programs of the
next one take whatever room the last of this one leave, and then stand close on some processors and far apart on others.
Programs that stay have their share of every processor, and their first weights on the way while attention is at work;
those that pass are quicker to begin, which small weights need. Where rows are few, attention waits for one thing after
the other, and reading early spares it the longest wait, unless it takes room from the kernel before. The memory is idle
meanwhile, and weights that are asked for then are nearer when they are read, unless they stand in attention's way. A
product alone shows none of this. So layers are timed at every pace, as many as no cache holds, and what was fastest is
remembered with the forms of products. Beyond a few rows all passes overlap; where they share prefixes, matrix units are
what attention waits for, and again the memory is idle.

Engines choose among paces that are proven (`Pace.is_proven`); bench/forward.py times the others beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ramify.device.graphs import must_run_first, padded
from ramify.gpu.form_cache import FormCache
from ramify.gpu.kernels.early_decode import MOST_PAIRS
from ramify.gpu.product_forms import ALWAYS, MIB, MOST_ROWS, NEVER, Pace
from ramify.gpu.products import TRIAL_BYTES
from ramify.gpu.tuning import Launch
from ramify.models.decoder import Decoder
from ramify.models.families import Architecture

STAYING_FROM = (ALWAYS, 16, 64, NEVER)  # MiB of a weight
AHEAD = (8, 16, 32)  # MiB of a weight; a cache of 50 to 60 MB holds them until they are read


@dataclass(frozen=True, slots=True)
class LayerShape:
    """All that the time of a model's layers depends on, beside their number."""

    arch: Architecture
    dtype: torch.dtype
    is_shared: bool = False  # whether rows read prefixes together

    @classmethod
    def of(cls, decoder: Decoder) -> LayerShape:
        """As its weights are held: those of a quantised folder may be numbers, and are then like any others."""
        is_packed = any(linear.parts for layer in decoder.layers for linear in layer.linears)
        return cls(decoder.arch if is_packed else replace(decoder.arch, quantization=None), decoder.dtype)

    @property
    def name(self) -> str:
        arch = self.arch
        heads = f"{arch.num_heads}/{arch.num_kv_heads} heads of {arch.head_dim}"
        extras = f"{' biases' if arch.qkv_bias else ''}{' norms' if arch.qk_norm else ''}"
        sizes = f"{arch.hidden_size}x{arch.intermediate_size}"
        held = "" if arch.quantization is None else f" in {arch.quantization.label}"
        shared = ", prefixes shared" if self.is_shared else ""
        return f"layers of {sizes}, {heads}{extras} {str(self.dtype).removeprefix('torch.')}{held}{shared}"

    @property
    def weights(self) -> tuple[int, int, int, int]:
        """The numbers in a layer's matrices: queries, keys and values; output; gate and up; down."""
        arch = self.arch
        queries, both = arch.num_heads * arch.head_dim, 2 * arch.num_kv_heads * arch.head_dim
        inner = arch.hidden_size * arch.intermediate_size
        return arch.hidden_size * (queries + both), arch.hidden_size * queries, 2 * inner, inner

    @property
    def num_tried(self) -> int:
        """So many layers that no cache holds their weights."""
        return max(2, -(-TRIAL_BYTES // (sum(self.weights) * self._bits // 8)))

    def paces(self, rows: int) -> list[Pace]:
        """Those worth a measurement. Without overlap nothing is early, and one kind of programs serves all weights."""
        early = (0, 1) if rows * self.arch.num_kv_heads <= MOST_PAIRS and not self.is_shared else (0,)
        if rows > 1:
            return [Pace(1, reads_early=each) for each in early]
        stays_from = list(self._stays_from())
        without = [Pace(0, each) for each in stays_from if each in (ALWAYS, NEVER)]
        return without + [Pace(1, size, each) for size in stays_from for each in early]

    def asking(self, pace: Pace, rows: int) -> list[Pace]:
        """The same pace with more or less of gate and up asked for ahead: up to all of it.

        Many rows that have nothing in common read so much that the memory is never idle.
        """
        if not pace.overlaps or (rows > MOST_ROWS and not self.is_shared):
            return []
        enough = self.weights[2] * self._bits // 8
        asked = [size for size in AHEAD if size * MIB < 2 * enough]
        return [replace(pace, asks_ahead=size) for size in asked]

    @property
    def _bits(self) -> int:
        return 8 * self.dtype.itemsize if self.arch.quantization is None else self.arch.quantization.bits

    def _stays_from(self) -> Iterator[int]:
        """Sizes that part the weights differently. Packed ones have no programs that stay."""
        if self.arch.quantization is not None:
            yield NEVER
            return
        found: set[tuple[bool, ...]] = set()
        for size in (ALWAYS, NEVER, *STAYING_FROM):
            parted = tuple(numbers * self.dtype.itemsize >= size * MIB for numbers in self.weights)
            if parted not in found:
                found.add(parted)
                yield size


class MeasuredPace:
    """Of one model's layers. `unproven`: chosen among paces that no GPU has proven too."""

    def __init__(
        self,
        shape: LayerShape,
        cache: FormCache,
        stopwatch: Callable[[Sequence[Launch]], Sequence[float]],
        *,
        unproven: bool = False,
    ) -> None:
        self._unproven = unproven
        self._shapes = {each: replace(shape, is_shared=each) for each in (False, True)}
        self._cache, self._stopwatch = cache, stopwatch
        self._known: dict[tuple[int, bool], Pace] = {}

    def shape(self, *, is_shared: bool = False) -> LayerShape:
        return self._shapes[is_shared]

    def of(self, rows: int, launch: Callable[[int, Pace], None], *, is_shared: bool = False) -> Pace:
        """For so many rows, with prefixes that some share or without; `launch` launches so many layers at a pace."""
        key = padded(rows), is_shared
        if key not in self._known:
            shape = self.shape(is_shared=is_shared)
            self._known[key] = self._find(shape, padded(rows), partial(launch, shape.num_tried))
        return self._known[key]

    def _find(self, shape: LayerShape, rows: int, launch: Callable[[Pace], None]) -> Pace:
        found = self._cache.find(shape, rows)
        if isinstance(found, Pace) and self._may_take(found):
            return found
        paces = self._takeable(shape.paces(rows))
        if len(paces) == 1 and not self._takeable(shape.asking(paces[0], rows)):
            return paces[0]
        must_run_first()
        fastest = self._fastest(paces, launch)
        fastest = self._fastest([fastest, *self._takeable(shape.asking(fastest, rows))], launch)
        kept = self._cache.keep(shape, rows, fastest)
        return kept if isinstance(kept, Pace) and self._may_take(kept) else fastest

    def _may_take(self, pace: Pace) -> bool:
        return pace.is_proven or self._unproven

    def _takeable(self, paces: Sequence[Pace]) -> list[Pace]:
        return [pace for pace in paces if self._may_take(pace)]

    def _fastest(self, paces: Sequence[Pace], launch: Callable[[Pace], None]) -> Pace:
        if len(paces) == 1:
            return paces[0]
        launches = [partial(launch, pace) for pace in paces]
        for each in launches:
            each()  # compiles
        return paces[min(zip(self._stopwatch(launches), range(len(paces)), strict=True))[1]]
