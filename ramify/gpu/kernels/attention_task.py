"""What every attention kernel of a decode step is given, whichever it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ramify.gpu.kernels.walk import LOG2_OF_E


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """queries (rows, heads, head_dim), each row contiguous; kv (slots, 2, kv_heads, head_dim); tables int32 (rows,
    max_blocks); count int32 (2,): the number of items, and where in `items` (flat int32) the first begins; partials
    float32 (parts, heads, head_dim) and lse float32 (parts, heads) are written."""

    queries: Tensor
    kv: Tensor
    tables: Tensor
    count: Tensor
    items: Tensor
    partials: Tensor
    lse: Tensor
    block_size: int

    @property
    def read(self) -> tuple[Tensor, ...]:
        return self.queries, self.kv, self.tables, self.count, self.items

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        return self.partials, self.lse

    @property
    def strides(self) -> tuple[int, int]:
        return self.queries.stride(0), self.tables.stride(0)

    @property
    def scale(self) -> float:
        """Of scores in powers of two."""
        return float(self.queries.shape[2] ** -0.5 * LOG2_OF_E)

    @property
    def shape(self) -> dict[str, int]:
        """The constants of all kernels."""
        _, heads, head_dim = self.queries.shape
        kv_heads = self.kv.shape[2]
        return {
            "KV_HEADS": kv_heads,
            "QUERIES_PER_ROW": heads // kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": self.block_size,
        }


class Sharing(NamedTuple):
    """Prefixes, the rows that share them, and where each row's parts begin, as in a WorkList (int32, flat or not). It
    must have been built with the kernel's tile of queries as `query_tile` and `queries_per_row` = heads // kv_heads."""

    prefixes: Tensor
    sharers: Tensor
    first_part: Tensor


class Merging(NamedTuple):
    """What turns parts into outputs: where each row's parts begin and how many they are, int32 (rows,); how many of
    them are there already, int32 (rows, kv_heads), all 0 between launches; and out (rows, heads * head_dim)."""

    first_part: Tensor
    num_parts: Tensor
    shared_parts: Tensor | None
    arrived: Tensor
    out: Tensor

    @property
    def lists(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shared = self.num_parts if self.shared_parts is None else self.shared_parts
        return self.first_part, self.num_parts, shared, self.arrived


def merged_into(task: AttentionTask, merging: Merging | None) -> tuple[tuple[Tensor, ...], int, dict[str, bool]]:
    """The lists and the output of a kernel that may merge, the stride of its output, and its constants. Without
    `merging` a kernel looks at none of them."""
    if merging is None:
        return (task.count,) * 4 + (task.partials,), 0, {"MERGES": False, "SHARED": False}
    constants = {"MERGES": True, "SHARED": merging.shared_parts is not None}
    return (*merging.lists, merging.out), merging.out.stride(0), constants
