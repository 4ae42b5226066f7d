"""Decode attention on a GPU: buffers that outlive a step, so that a CUDA graph of the kernels stays valid.

once a step     write_list      a WorkList to the device, in one copy
once a layer    attend          decode_attention, or with shared prefixes
                                a kernel of prefixes (prefix_ways.py) -> decode_attention, which merges,
                                or own_parts at the same time -> merge

the list, one int32 buffer
| header | first_part | num_parts | shared_parts | groups | members | own items | prefix items |  unused  |
  16       max_rows     max_rows    max_rows       2 each   max_rows  wherever the one before ends
header: number of own items, where they begin, number of prefix items, where they begin
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ramify.device.reads import Reads
from ramify.device.staging import OF_PASSES, Staging
from ramify.gpu.kernels import block_decode as blocks
from ramify.gpu.kernels import decode_attention as decode
from ramify.gpu.kernels import own_parts as own
from ramify.gpu.kernels.attention_task import AttentionTask, Merging, Sharing
from ramify.gpu.kernels.early_decode import MOST_PAIRS, TAIL, early_decode
from ramify.gpu.kernels.merge import merge
from ramify.gpu.kernels.overlap import can_overlap
from ramify.gpu.kernels.stretches import Cuts, EvenCuts, PositionCuts, PrefixTiles
from ramify.gpu.kernels.work_list import (
    GROUP_FIELDS,
    PREFIX_FIELDS,
    WorkList,
    build_work_list,
)
from ramify.gpu.prefix_ways import PrefixWay, way_for

_HEADER = 16
_ALIGNED = 4  # int32s in 16 bytes: Triton compiles for aligned pointers apart
_PROCESSORS_WITHOUT_A_GPU = 1
SHARED_MEMORY = 227 * 1024
WALKS_PER_PROCESSOR = 4  # at a time, of exact decodes


class PagedDecode:
    """`tables` (max_rows, max_blocks) is the caller's to write: the blocks of each row, in order.

    `max_parts` bounds the parts of one step (see WorkList) and with them the items. Where rows are cut follows from
    their number unless `cuts` says it; `exact`: a row's output has the same bits in any company (kernels/walk.py), if
    cuts are by position. The options are keyword arguments of the kernels' launch functions, for measuring.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_parts: int,
        max_blocks: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        cuts: Cuts | None = None,
        exact: bool = False,
        decode_options: Mapping[str, Any] | None = None,
        prefix_options: Mapping[str, int] | None = None,
        way: PrefixWay | None = None,
    ) -> None:
        processors = _PROCESSORS_WITHOUT_A_GPU
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._processors, self._kv_heads = processors, kv_heads
        self._decode_options = dict(decode_options or {})
        self._block_tiles = (
            None if exact or decode_options else blocks.tiles_for(device, dtype, heads, kv_heads, head_dim)
        )
        self._fewest_pairs = blocks.FEWEST_PAIRS
        if "tiles" in self._decode_options:
            self._block_tiles, self._fewest_pairs = self._decode_options.pop("tiles"), 0
        # A block that a row completes may be read by the next row of the same step: with small ones by a chain of rows.
        self._can_read_early = not exact and block_size >= TAIL
        self._overlap = can_overlap(device)
        self._way = way = way or way_for(device, dtype, head_dim, exact=exact)
        self._prefix_options: dict[str, Any] = {
            "num_programs": processors * way.programs,
            **way.options,
            **(prefix_options or {}),
        }
        self._queries_per_row = heads // kv_heads
        self._tiles = PrefixTiles(
            queries=self._prefix_options.get("block_m", way.queries),
            positions=way.positions,
            programs=self._prefix_options["num_programs"],
            kv_heads=kv_heads,
            queries_per_row=self._queries_per_row,
        )
        if self._queries_per_row > self._tiles.queries:
            raise ValueError(f"{self._queries_per_row} query heads of one key-value head are more than a tile takes")
        self._block_size = block_size
        self._cuts, self._exact = cuts, exact
        self._positions: Tensor | None = None  # of cuts, where the kernel must know them
        if exact:
            assert isinstance(cuts, PositionCuts), "where rows are cut depends on positions alone"
            self._positions = torch.from_numpy(cuts.positions).to(device, torch.int32)
        self._max_rows, self._max_parts = max_rows, max_parts
        self.tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._partials = torch.empty(max_parts, heads, head_dim, dtype=torch.float32, device=device)
        self._lse = torch.empty(max_parts, heads, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(max_rows, kv_heads, dtype=torch.int32, device=device)
        self._taken = torch.zeros(1, dtype=torch.int32, device=device)  # of own stretches, in a launch beside another

        rows = -(-max_rows // _ALIGNED) * _ALIGNED
        self._sections = [_HEADER + rows * number for number in (0, 1, 2, 3, 3 + GROUP_FIELDS, 4 + GROUP_FIELDS)]
        size = self._sections[-1] + PREFIX_FIELDS * max_parts
        self._list = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = Staging(size, dtype=torch.int32, device=device, turns=OF_PASSES)
        self._own_count, self._prefix_count = self._list[0:2], self._list[2:4]
        parts, counts, shared, groups, members, _ = self._sections
        self._first_part, self._num_parts = self._list[parts:counts], self._list[counts:shared]
        self._shared_parts = self._list[shared:groups]
        self._groups, self._members = self._list[groups:members], self._list[members:]

    def work_list(self, reads: Reads) -> WorkList:
        """The single rows of a step, cut as these kernels want it; see build_work_list."""
        return build_work_list(
            reads,
            queries_per_row=self._queries_per_row,
            query_tile=self._tiles.queries,
            cuts=self._cuts or EvenCuts.of(reads.num_singles, self._kv_heads, self._tiles),
            programs=max(1, WALKS_PER_PROCESSOR * self._processors // self._kv_heads) if self._exact else None,
        )

    def write_list(self, work: WorkList) -> None:
        """From now on `attend` does this work; rows that the list does not know are padding."""
        rows = len(work.num_parts)
        if max(rows, len(work.groups), len(work.members)) > self._max_rows:
            raise ValueError(f"a list of {rows} rows; there is room for {self._max_rows}")
        if work.total_parts > self._max_parts:
            raise ValueError(f"a list of {work.total_parts} parts; there is room for {self._max_parts}")
        staging = self._staging.take()
        packed = staging.numpy()
        first_part, num_parts, shared_parts, groups, members, own = self._sections
        prefix_items = own + work.own.size
        end = prefix_items + work.prefix.size
        packed[:4] = len(work.own), own, len(work.prefix), prefix_items
        packed[first_part : first_part + rows] = work.first_part
        packed[num_parts : num_parts + rows] = work.num_parts
        packed[num_parts + rows : shared_parts] = 0
        packed[shared_parts : shared_parts + rows] = work.shared_parts
        packed[shared_parts + rows : groups] = 0
        packed[groups : groups + work.groups.size] = work.groups.reshape(-1)
        packed[members : members + len(work.members)] = work.members
        packed[own:prefix_items] = work.own.reshape(-1)
        packed[prefix_items:end] = work.prefix.reshape(-1)
        self._list[:end].copy_(staging[:end], non_blocking=True)
        self._staging.sent()

    def attend(
        self,
        queries: Tensor,
        kv_layer: Tensor,
        out: Tensor,
        *,
        with_prefix: bool,
        beside_prompts: bool = False,
        overlap: bool | None = None,
        reads_early: bool = False,
    ) -> None:
        """queries (rows, heads, head_dim), kv_layer (slots, 2, kv_heads, head_dim) -> out (rows, heads * head_dim).

        Allocates nothing and waits for nothing. Without prefix the list must hold no shared prefixes: who counts the
        parts would wait for some that nobody writes. beside_prompts: the step computes pieces of prompts too, and a row
        may read what one of them writes. reads_early: few rows by kernels/early_decode.py, where it can serve them.
        """
        if with_prefix:
            self.attend_shared(queries, kv_layer, overlap=overlap)
            if self._way.own_options is not None:
                self.attend_beside(queries, kv_layer, out, overlap=overlap)
                return
        is_few = queries.shape[0] * self._kv_heads <= MOST_PAIRS
        early = reads_early and self._can_read_early and is_few and not with_prefix and not beside_prompts
        self.attend_own(queries, kv_layer, out, with_prefix=with_prefix, overlap=overlap, reads_early=early)

    def attend_shared(self, queries: Tensor, kv_layer: Tensor, *, overlap: bool | None = None) -> None:
        task = self._task(queries, kv_layer, self._prefix_count)
        options = self._prefix_options
        if self._way.overlaps:
            options = {**options, "overlap": self._overlap if overlap is None else overlap}
        self._way.launch(task, Sharing(self._groups, self._members, self._first_part), **options)

    def attend_beside(self, queries: Tensor, kv_layer: Tensor, out: Tensor, *, overlap: bool | None = None) -> None:
        """Own positions while the kernel of prefixes computes, then all parts of both merged."""
        assert self._way.own_options is not None
        overlap = self._overlap if overlap is None else overlap
        task = self._task(queries, kv_layer, self._own_count)
        options = {"num_programs": self._processors * own.PROGRAMS_PER_PROCESSOR, **self._way.own_options}
        own.own_parts(task, self._taken, overlap=overlap, **options)
        merge(*task.parts, self._first_part, self._num_parts, self._taken, out, overlap=overlap)

    def attend_own(
        self,
        queries: Tensor,
        kv_layer: Tensor,
        out: Tensor | None = None,
        *,
        with_prefix: bool = False,
        overlap: bool | None = None,
        reads_early: bool = False,
    ) -> None:
        """Writes parts or, where an output is given, what they and those of prefixes come to."""
        overlap = self._overlap if overlap is None else overlap
        merging = None
        if out is not None:
            shared = self._shared_parts if with_prefix else None
            merging = Merging(self._first_part, self._num_parts, shared, self._arrived, out)
        task = self._task(queries, kv_layer, self._own_count)
        options: dict[str, Any] = {"overlap": overlap}
        tiles = self._block_tiles
        if tiles is not None and queries.shape[0] * self._kv_heads >= self._fewest_pairs:
            together = max(1, SHARED_MEMORY // tiles.shared_memory(queries.shape[2], queries.itemsize))
            programs = self._processors * together * blocks.TURNS
            options |= {"num_programs": programs, **self._decode_options}
            blocks.block_decode(task, merging, tiles=tiles, **options)
            return
        # Where rows are few, programs that would find nothing to do take their time to start and end.
        expected = queries.shape[0] * self._kv_heads * decode.PARTS_OF_A_ROW
        fewest, most = (self._processors * each for each in decode.PROGRAMS_PER_PROCESSOR)
        programs = min(max(expected, fewest), most)
        options |= {"num_programs": programs, **self._decode_options}
        if reads_early and merging is not None:
            early_decode(task, merging, **options)
            return
        decode.decode_attention(task, merging, exact=self._exact, cuts=self._positions, **options)

    def _task(self, queries: Tensor, kv_layer: Tensor, count: Tensor) -> AttentionTask:
        lists = (self.tables, count, self._list)
        return AttentionTask(queries, kv_layer, *lists, self._partials, self._lse, self._block_size)
