"""The device's part of a step on a GPU: decodes as CUDA graphs, sampling included; other steps without a graph.

A step in which every track computes one position and draws one token is a graph, one per padded number of rows, with
or without shared prefixes, and per kind of sampler: plain (temperature), filtered (top-k, top-p, min-p), or none, where
rows need controls that look at tokens: then the graph ends at the logits and the sampler of the CPU path takes over.

Tokens stay on the device: the next step reads them there, so it can be launched before the host knows them. Results
come back through pinned memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.attention.paged import PagedDecode
from ramify.attention.slots import slots_of
from ramify.config import LogprobsMode
from ramify.cuda import rows as column
from ramify.cuda.forward import forward, logits
from ramify.cuda.prefill import ChunkAttention
from ramify.cuda.results import Drawn, Results
from ramify.cuda.rows import PADDING_SLOT, DeviceRows
from ramify.kernels.draw import BlockScores, KeyWords, draw_tokens, keep_above, score_blocks
from ramify.kernels.floors import FloorScratch, find_floors
from ramify.kernels.reports import Processing, report
from ramify.kernels.work_list import OWN_SPLIT
from ramify.kv.pool import KVPool
from ramify.models.decoder import Decoder
from ramify.plan import Chunk, Draw, Plan, SamplerKind, SharedPrefix, StepResult, Ticket
from ramify.runner import move_blocks
from ramify.sampling.pipeline import Sampler
from ramify.sequence import PENDING
from ramify.step import prompt_reports

FEWEST_SHARED_POSITIONS = 512  # reads that a group must save before a second kernel pays
MOST_REPORTED = 20  # likeliest tokens that a graph reports; who asks for more gets them without a graph


class _Sampler(NamedTuple):
    """The sampler at the end of a graph: its kind, and whether logprobs of several tokens are reported."""

    kind: SamplerKind
    reports: bool = False


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step, and the logits it leaves where no sampler follows."""

    graph: torch.cuda.CUDAGraph | None  # None: run the steps one by one
    logits: Tensor | None


class CudaStep:
    runs_ahead = True

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        *,
        max_num_seqs: int,
        max_model_len: int,
        logprobs_mode: LogprobsMode = "raw",
        use_graphs: bool = True,
    ) -> None:
        self.decoder = decoder
        self.pool = pool
        self.sampler = Sampler(logprobs_mode)
        arch, device = decoder.arch, decoder.device
        most = padded(max_num_seqs)
        max_blocks = -(-max_model_len // pool.block_size)
        self.attention = PagedDecode(
            max_rows=most,
            max_parts=most * (-(-max_model_len // OWN_SPLIT) + 1),
            max_blocks=max_blocks,
            heads=arch.num_heads,
            kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            block_size=pool.block_size,
            dtype=decoder.dtype,
            device=device,
        )
        self.rows = DeviceRows(self.attention.tables)
        self._use_graphs = use_graphs and device.type == "cuda"
        self._graphs: dict[tuple[int, bool, _Sampler], _Graph] = {}
        self._scores = BlockScores.empty(most, arch.vocab_size, device)
        self._floors = torch.empty(most, device=device)
        self._no_floors = torch.full((most,), -torch.inf, device=device)
        self._scratch = FloorScratch.empty(most, arch.vocab_size, device)
        num_reported = min(MOST_REPORTED, arch.vocab_size)
        self._drawn = Drawn.empty(most, num_reported, device)
        self._results = [Results(most, num_reported, device) for _ in range(2)]
        # Where the last step's tokens are: on the device, by the row their track had then, or known to the host.
        self._steady: _Steady | None = None
        self._last_rows: dict[str, int] = {}
        self._last_known: dict[str, int] = {}

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Ticket:
        move_blocks(self.pool, plan)
        if not plan.chunks:
            return partial(StepResult, [], [])
        if plan.prompt_reports or any(len(chunk.token_ids) > 1 for chunk in plan.chunks):
            return self._mixed(plan)
        return self._decode(plan)

    # -- decodes ---------------------------------------------------------------------------------------------

    def _decode(self, plan: Plan) -> Ticket:
        size = padded(len(plan.chunks))
        steady = self._steady
        if steady is not None and steady.goes_on_as(plan):
            rows, sampler = steady.rows, steady.sampler
            self._fill_next(plan.chunks, steady)
        else:
            rows = self.rows.place(plan.chunks)
            self._fill(plan.chunks, rows, size)
            sampler = self._settle(plan.draws, rows) if _is_one_to_one(plan) else _Sampler("full")
        has_groups = self._list_work(plan.chunks, plan.shared, rows, size)
        self.rows.upload()
        graph = self._graph(size, has_groups, sampler)
        if graph.graph is not None:
            graph.graph.replay()
            left = graph.logits
        else:
            left = self._body(size, has_groups, sampler)
        if sampler.kind == "full":
            assert left is not None, "the sampler takes over where the graph ends"
            return self._sample(plan, left, [rows[item.chunks[0]] for item in plan.draws])
        if steady is None or rows is not steady.rows:
            self._steady = _Steady([chunk.key for chunk in plan.chunks], rows, sampler)
            self._last_rows = {chunk.key: row for chunk, row in zip(plan.chunks, rows, strict=True)}
            self._last_known = {}
        result = self._results[0]
        self._results.reverse()
        result.fetch(self._drawn, with_reports=sampler.reports)
        return partial(result.read, rows, plan.draws)

    def _fill(self, chunks: Sequence[Chunk], rows: Sequence[int], size: int) -> None:
        """This step's numbers of every row; rows beyond the real ones compute nothing that anybody reads."""
        numbers, index, block_size = self.rows.integer_mirror, np.asarray(rows, dtype=np.int64), self.pool.block_size
        numbers[column.SLOT, len(rows) : size] = PADDING_SLOT
        numbers[column.TOKEN : column.POSITION + 1, len(rows) : size] = 0
        numbers[column.SOURCE, :size] = -1
        self.rows.float_mirror[column.TEMPERATURE, len(rows) : size] = 0
        tokens = [chunk.token_ids[0] for chunk in chunks]
        if PENDING in tokens:
            for place, chunk in enumerate(chunks):
                if tokens[place] == PENDING:
                    tokens[place] = self._last_known.get(chunk.key, 0)
                    numbers[column.SOURCE, rows[place]] = self._last_rows.get(chunk.key, -1)
        numbers[column.TOKEN, index] = tokens
        numbers[column.POSITION, index] = [chunk.start for chunk in chunks]
        numbers[column.SLOT, index] = [
            chunk.block_table[chunk.start // block_size] * block_size + chunk.start % block_size for chunk in chunks
        ]

    def _fill_next(self, chunks: Sequence[Chunk], steady: _Steady) -> None:
        """The rows of the step before, one position on, each with the token that it drew there."""
        numbers, index, block_size = self.rows.integer_mirror, steady.index, self.pool.block_size
        moved = self.rows.follow_tables(chunks, steady.rows)
        positions = numbers[column.POSITION, index] + 1
        slots = numbers[column.SLOT, index] + 1
        for place in {*moved, *np.flatnonzero(positions % block_size == 0).tolist()}:
            block, offset = divmod(int(positions[place]), block_size)
            slots[place] = chunks[place].block_table[block] * block_size + offset
        numbers[column.POSITION, index] = positions
        numbers[column.SLOT, index] = slots
        numbers[column.SOURCE, index] = index
        numbers[column.OUTPUT_POSITION, index] += 1

    def _list_work(
        self, chunks: Sequence[Chunk], shared: Sequence[SharedPrefix], rows: Sequence[int], size: int
    ) -> bool:
        """Tells attention who reads what; returns whether there are groups."""
        lengths = np.zeros(size, np.int64)
        lengths[np.asarray(rows, dtype=np.int64)] = [chunk.end for chunk in chunks]
        groups = [
            SharedPrefix(group.num_blocks, tuple(rows[chunk] for chunk in group.chunks))
            for group in shared
            if (len(group.chunks) - 1) * group.num_blocks * self.pool.block_size >= FEWEST_SHARED_POSITIONS
        ]
        self.attention.write_list(self.attention.work_list(lengths, groups))
        return bool(groups)

    def _settle(self, draws: Sequence[Draw], rows: Sequence[int]) -> _Sampler:
        """Sampling numbers of rows that are new here, output positions of all; returns the sampler that serves all."""
        numbers, floats = self.rows.integer_mirror, self.rows.float_mirror
        for item, row in zip(draws, rows, strict=True):
            if self.rows.rules[row] is item.rules:
                continue
            self.rows.rules[row] = item.rules
            write_draw(item, numbers[:, row], floats[:, row])
        numbers[column.OUTPUT_POSITION, np.asarray(rows, dtype=np.int64)] = [item.position for item in draws]
        return _sampler_for(draws)

    # -- graphs ----------------------------------------------------------------------------------------------

    def _graph(self, size: int, has_groups: bool, sampler: _Sampler) -> _Graph:
        key = (size, has_groups, sampler)
        if not self._use_graphs:
            return _Graph(None, None)
        if key not in self._graphs:
            tokens = self._drawn.token_ids.clone()
            self._body(*key)  # compiles what is not compiled yet, which a capture could not
            self._drawn.token_ids.copy_(tokens)  # the step is still to come, and reads the tokens of the one before
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            pool = next((other.graph.pool() for other in self._graphs.values() if other.graph is not None), None)
            with torch.cuda.graph(graph, pool=pool):
                left = self._body(*key)
            self._graphs[key] = _Graph(graph, left)
        return self._graphs[key]

    def _body(self, size: int, has_groups: bool, sampler: _Sampler) -> Tensor | None:
        """From numbers in the buffers to tokens in the buffers, or to logits that are returned."""
        numbers = self.rows.integers[:, :size]
        source = numbers[column.SOURCE]
        known = self._drawn.token_ids[source.clamp_min(0)]
        token_ids = torch.where(source >= 0, known, numbers[column.TOKEN])
        attend = partial(self._attend, size=size, has_groups=has_groups)
        hidden = forward(
            self.decoder,
            self.pool,
            attend,
            token_ids=token_ids,
            positions=numbers[column.POSITION],
            slots=numbers[column.SLOT],
        )
        out = logits(self.decoder, hidden)
        if sampler.kind == "full":
            return out
        self._draw(out, numbers, self.rows.floats[:, :size], sampler, self._drawn.of(size))
        return None

    def _draw(self, out: Tensor, numbers: Tensor, floats: Tensor, sampler: _Sampler, drawn: Drawn) -> None:
        """From logits (R, vocabulary) and the rows' numbers (columns, R) to tokens, and reports if asked for."""
        temperatures, top_p, min_p = floats
        size = out.shape[0]
        scores = BlockScores(*(part[:size] for part in self._scores))
        score_blocks(out, temperatures, scores)
        floor = None
        if sampler.kind == "filtered":
            floor = self._floors[:size]
            find_floors(
                out,
                temperatures,
                scores,
                top_k=numbers[column.TOP_K],
                top_p=top_p,
                min_p=min_p,
                scratch=FloorScratch(*(part[:size] for part in self._scratch)),
                floors=floor,
            )
            keep_above(out, temperatures, floor, scores)
        keys = (column.SEED_LOW, column.SEED_HIGH, column.CHILD, column.OUTPUT_POSITION)
        draw_tokens(
            out,
            temperatures,
            KeyWords(*(numbers[key] for key in keys)),
            scores,
            token_ids=drawn.token_ids,
            logprobs=drawn.logprobs,
            faults=drawn.faults,
            floors=floor,
        )
        if sampler.reports:
            processing = None
            if self.sampler.logprobs_mode == "processed":
                processing = Processing(temperatures, self._no_floors[:size] if floor is None else floor)
            report(out, scores, drawn.token_ids, drawn.reports, processing)

    def _attend(self, layer: int, queries: Tensor, *, size: int, has_groups: bool) -> Tensor:
        out = queries.new_empty(size, queries.shape[1] * queries.shape[2])
        self.attention.attend(queries, self.pool.kv[layer], out, with_prefix=has_groups)
        return out

    # -- steps with prompts ----------------------------------------------------------------------------------

    def _mixed(self, plan: Plan) -> Ticket:
        """Decodes first, row by row, then the chunks of prompts; no graph, and the host waits for its tokens."""
        self._steady = None
        singles = [index for index, chunk in enumerate(plan.chunks) if len(chunk.token_ids) == 1]
        longer = [index for index, chunk in enumerate(plan.chunks) if len(chunk.token_ids) > 1]
        decodes = [plan.chunks[index] for index in singles]
        prompts = [plan.chunks[index] for index in longer]
        rows = self.rows.place(decodes)
        first_row = dict(zip(singles, rows, strict=True))
        self._fill(decodes, rows, len(rows))
        has_groups = bool(decodes) and self._list_work(decodes, _among(plan.shared, singles), rows, len(rows))
        self.rows.upload()
        # Rows of the step: decodes by the row of their track, then prompts token by token.
        total = len(rows)
        for index in longer:
            first_row[index] = total
            total += len(plan.chunks[index].token_ids)
        numbers = self.rows.integers[:, : len(rows)]
        source = numbers[column.SOURCE]
        known = torch.where(source >= 0, self._drawn.token_ids[source.clamp_min(0)], numbers[column.TOKEN])
        token_ids = [known, self._numbers([token for chunk in prompts for token in chunk.token_ids])]
        positions = [
            numbers[column.POSITION],
            self._numbers([place for chunk in prompts for place in range(chunk.start, chunk.end)]),
        ]
        written = [slots_of(chunk, self.pool.block_size, chunk.start) for chunk in prompts]
        slots = [
            numbers[column.SLOT],
            torch.from_numpy(np.concatenate(written or [np.zeros(0, np.int64)])).to(self.device),
        ]
        chunks = ChunkAttention(prompts, self.pool, self.device) if prompts else None

        def attend(layer: int, queries: Tensor) -> Tensor:
            parts = []
            if rows:
                parts.append(self._attend(layer, queries[: len(rows)], size=len(rows), has_groups=has_groups))
            if chunks is not None:
                parts.append(chunks.attend(layer, queries[len(rows) :]))
            return torch.cat(parts) if len(parts) > 1 else parts[0]

        hidden = forward(
            self.decoder,
            self.pool,
            attend,
            token_ids=torch.cat(token_ids),
            positions=torch.cat(positions),
            slots=torch.cat(slots),
        )

        def logits_after(some: Sequence[int]) -> Tensor:
            return logits(self.decoder, hidden[self._numbers(list(some))])

        told = prompt_reports(plan, [first_row[index] for index in range(len(plan.chunks))], logits_after)
        drawn = sorted({item.chunks[0] for item in plan.draws})
        if not drawn:
            return partial(StepResult, [], [], prompts=told)
        last = [first_row[index] + len(plan.chunks[index].token_ids) - 1 for index in drawn]
        place_of = {chunk: place for place, chunk in enumerate(drawn)}
        ticket = self._sample(plan, logits_after(last), [place_of[item.chunks[0]] for item in plan.draws])
        ticket().prompts.extend(told)
        return ticket

    def _sample(self, plan: Plan, out: Tensor, rows: list[int]) -> Ticket:
        """Without a graph; the host knows the tokens at once."""
        self._steady = None
        sampler = _sampler_for(plan.draws)
        if sampler.kind == "full":
            result = self.sampler.sample(out, rows, plan.draws)
        else:
            result = self._draw_now(out, rows, plan.draws, sampler)
        self._last_rows = {}
        self._last_known = {
            plan.chunks[item.chunks[0]].key: token for item, token in zip(plan.draws, result.token_ids, strict=True)
        }
        return lambda: result

    def _draw_now(self, out: Tensor, rows: list[int], draws: Sequence[Draw], sampler: _Sampler) -> StepResult:
        """Draws from these rows of the logits with the graphs' kernels, as many at a time as their buffers take."""
        whole = StepResult([], [])
        most = self._floors.shape[0]
        for start in range(0, len(draws), most):
            some = draws[start : start + most]
            numbers = np.zeros((column.NUM_INTEGERS, len(some)), np.int64)
            floats = np.zeros((column.NUM_FLOATS, len(some)), np.float32)
            for place, item in enumerate(some):
                write_draw(item, numbers[:, place], floats[:, place])
            drawn = Drawn.empty(len(some), self._drawn.reports.top_ids.shape[1], self.device)
            self._draw(
                out[self._numbers(rows[start : start + most])],
                torch.from_numpy(numbers).to(self.device),
                torch.from_numpy(floats).to(self.device),
                sampler,
                drawn,
            )
            self._results[0].fetch(drawn, with_reports=sampler.reports)
            part = self._results[0].read(range(len(some)), some)
            whole.token_ids.extend(part.token_ids)
            whole.logprobs.extend(part.logprobs)
            whole.faults.update({start + place: fault for place, fault in part.faults.items()})
            whole.reports.update({start + place: told for place, told in part.reports.items()})
        return whole

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


class _Steady:
    """The rows of a graph's step: while the same tracks just go on, the next step's numbers follow from the last's."""

    def __init__(self, keys: list[str], rows: list[int], sampler: _Sampler) -> None:
        self.keys = keys
        self.rows = rows
        self.index = np.asarray(rows, dtype=np.int64)
        self.sampler = sampler

    def goes_on_as(self, plan: Plan) -> bool:
        """Whether a plan has the same tracks, each to compute the token that it drew in the last step."""
        chunks = plan.chunks
        return (
            len(chunks) == len(plan.draws) == len(self.keys)
            and all(chunk.token_ids[0] == PENDING for chunk in chunks)
            and [chunk.key for chunk in chunks] == self.keys
        )


def padded(count: int) -> int:
    """The size of the graph that serves so many rows: coarse where rows are many, so that graphs are few."""
    for most, step in ((4, 1), (16, 4), (64, 8), (256, 16)):
        if count <= most:
            return -(-count // step) * step
    return -(-count // 32) * 32


def write_draw(item: Draw, numbers: NDArray[np.int64], floats: NDArray[np.float32]) -> None:
    """What names a draw's noise and filters, into a row's columns; the words are those of `NoiseKeys.of`."""
    mask, params = 0xFFFFFFFF, item.rules.params
    numbers[column.SEED_LOW] = item.seed & mask
    numbers[column.SEED_HIGH] = (item.seed >> 32) & mask
    numbers[column.CHILD] = item.child | (1 << 31 if item.seed < 0 else 0)
    numbers[column.OUTPUT_POSITION] = item.position
    numbers[column.TOP_K] = min(max(params.top_k, 0), 2**31 - 1)
    floats[:] = params.temperature, params.top_p, params.min_p


def _sampler_for(draws: Sequence[Draw]) -> _Sampler:
    """The cheapest that serves all."""
    kinds = {item.rules.sampler_kind for item in draws}
    most = max(-1 if item.rules.params.logprobs is None else item.rules.params.logprobs for item in draws)
    if "full" in kinds or most > MOST_REPORTED:
        return _Sampler("full")
    return _Sampler("filtered" if "filtered" in kinds else "plain", reports=most >= 0)


def _is_one_to_one(plan: Plan) -> bool:
    """Whether every row draws one token for its own child."""
    return len(plan.draws) == len(plan.chunks) and all(item.chunks == (place,) for place, item in enumerate(plan.draws))


def _among(shared: Sequence[SharedPrefix], singles: Sequence[int]) -> list[SharedPrefix]:
    """Groups of the decodes of a step, by their places among the decodes."""
    place_of = {chunk: place for place, chunk in enumerate(singles)}
    groups = [
        SharedPrefix(group.num_blocks, tuple(place_of[chunk] for chunk in group.chunks if chunk in place_of))
        for group in shared
    ]
    return [group for group in groups if len(group.chunks) > 1]
