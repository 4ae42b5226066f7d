"""The device's part of a step on a GPU: decodes as CUDA graphs, sampling included; other steps without a graph.

A step in which every track computes one position and every sequence draws one token is a graph, one per padded number
of rows, with or without shared prefixes, and per kind of sampler: plain (temperature), filtered (top-k, top-p, min-p),
or none, where rows need controls that look at tokens: then the graph ends at the logits and the sampler of the CPU path
takes over. Two models are two lanes in one graph, and their mixture is drawn from.

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
from torch import Tensor

from ramify.attention.slots import slots_of
from ramify.config import LogprobsMode
from ramify.cuda import rows as column
from ramify.cuda.forward import forward, logits
from ramify.cuda.lane import Lane
from ramify.cuda.prefill import ChunkAttention
from ramify.cuda.sampler import GraphSampler, SamplerChoice
from ramify.cuda.upload import upload
from ramify.kv.pool import KVPool
from ramify.models.decoder import Decoder
from ramify.plan import Plan, SharedPrefix, StepResult, Ticket
from ramify.runner import move_blocks
from ramify.sampling.mixing import Mixer
from ramify.sampling.pipeline import Sampler, Source
from ramify.sequence import PENDING
from ramify.step import prompt_reports


class Model(NamedTuple):
    """Weights, and the cache that belongs to them."""

    decoder: Decoder
    pool: KVPool


class _Shape(NamedTuple):
    """What a graph is captured for: padded rows, which lanes have groups, and the sampler."""

    size: int
    has_groups: tuple[bool, ...]
    choice: SamplerChoice


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step, and the logits of each lane that it leaves where no sampler follows."""

    graph: torch.cuda.CUDAGraph | None  # None: run the steps one by one
    logits: list[Tensor]


class CudaStep:
    """`roles` names for each track of a sequence the model that it belongs to; several tracks need a mixer."""

    runs_ahead = True

    def __init__(
        self,
        models: Sequence[Model],
        roles: Sequence[int] = (0,),
        *,
        max_num_seqs: int,
        max_model_len: int,
        logprobs_mode: LogprobsMode = "raw",
        use_graphs: bool = True,
        mixer: Mixer | None = None,
    ) -> None:
        self.models = models
        self.device = models[0].decoder.device
        most = padded(max_num_seqs)
        self.lanes = [Lane(model, *models[model], max_rows=most, max_model_len=max_model_len) for model in roles]
        self.sampler = Sampler(logprobs_mode, mixer)
        vocab_size = min(model.decoder.arch.vocab_size for model in models)
        self._graph_sampler = GraphSampler(most, vocab_size, self.device, logprobs_mode, mixer)
        self._use_graphs = use_graphs and self.device.type == "cuda"
        self._graphs: dict[_Shape, _Graph] = {}
        # Where the last step's tokens are: on the device, by the row that drew for their track, or known to the host.
        self._steady: _Steady | None = None
        self._last_rows: dict[str, int] = {}
        self._last_known: dict[str, int] = {}

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Ticket:
        for model, (_, pool) in enumerate(self.models):
            move_blocks(pool, plan if len(self.models) == 1 else plan.of_model(model))
        if not plan.chunks:
            return partial(StepResult, [], [])
        if plan.prompt_reports or any(len(chunk.token_ids) > 1 for chunk in plan.chunks):
            return self._mixed(plan)
        return self._decode(plan)

    # -- decodes ---------------------------------------------------------------------------------------------

    def _decode(self, plan: Plan) -> Ticket:
        places = [range(len(plan.chunks))] if len(self.lanes) == 1 else self._places(plan)
        parts = [[plan.chunks[place] for place in own] for own in places]
        size = padded(max(len(part) for part in parts))
        steady = self._steady
        if steady is not None and steady.goes_on_as(plan):
            rows, choice = steady.rows, steady.choice
            for lane, part, own in zip(self.lanes, parts, rows, strict=True):
                lane.fill_next(part, own, rows[0])
        else:
            rows = [lane.rows.place(part) for lane, part in zip(self.lanes, parts, strict=True)]
            for lane, part, own in zip(self.lanes, parts, rows, strict=True):
                lane.fill(part, own, size, drawn_in=self._last_rows, drawn=self._last_known)
            choice = SamplerChoice("full")
            if _is_one_to_one(plan, places):
                choice = self._graph_sampler.settle(plan.draws, rows[0], self.lanes[0].rows)
                for own in rows[1:]:
                    self.lanes[0].rows.integer_mirror[column.PARTNER, rows[0]] = own
        has_groups = []
        for lane, own, some in zip(self.lanes, rows, places, strict=True):
            shared = plan.shared if len(self.lanes) == 1 else _among(plan.shared, some)
            has_groups.append(lane.list_work(shared, own, size))
            lane.rows.upload()
        shape = _Shape(size, tuple(has_groups), choice)
        graph = self._graph(shape)
        if graph.graph is not None:
            graph.graph.replay()
            left = graph.logits
        else:
            left = self._body(shape)
        if choice.kind == "full":
            row_of = {
                place: row for own, some in zip(rows, places, strict=True) for place, row in zip(some, own, strict=True)
            }
            drawn = zip(*(item.chunks for item in plan.draws), strict=True)
            return self._sample(
                plan, [Source(out, [row_of[place] for place in own]) for out, own in zip(left, drawn, strict=True)]
            )
        if steady is None or rows is not steady.rows:
            self._steady = _Steady([chunk.key for chunk in plan.chunks], rows, choice)
            self._last_rows = {chunk.key: row for part in parts for chunk, row in zip(part, rows[0], strict=True)}
            self._last_known = {}
        return partial(self._graph_sampler.fetch(choice).read, rows[0], plan.draws)

    def _places(self, plan: Plan) -> list[list[int]]:
        """The chunks of each lane."""
        places: list[list[int]] = [[] for _ in self.lanes]
        for place, chunk in enumerate(plan.chunks):
            places[chunk.role].append(place)
        return places

    # -- graphs ----------------------------------------------------------------------------------------------

    def _graph(self, shape: _Shape) -> _Graph:
        if not self._use_graphs:
            return _Graph(None, [])
        if shape not in self._graphs:
            drawn = self._graph_sampler.drawn.token_ids
            tokens = drawn.clone()
            self._body(shape)  # compiles what is not compiled yet, which a capture could not
            drawn.copy_(tokens)  # the step is still to come, and reads the tokens of the one before
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            pool = next((other.graph.pool() for other in self._graphs.values() if other.graph is not None), None)
            with torch.cuda.graph(graph, pool=pool):
                left = self._body(shape)
            self._graphs[shape] = _Graph(graph, left)
        return self._graphs[shape]

    def _body(self, shape: _Shape) -> list[Tensor]:
        """From numbers in the buffers to tokens in the buffers, or to the logits of each lane, which are returned."""
        size = shape.size
        outs: list[Tensor] = []
        for model, (decoder, pool) in enumerate(self.models):
            lanes = [lane for lane in self.lanes if lane.model == model]
            groups = [has for lane, has in zip(self.lanes, shape.has_groups, strict=True) if lane.model == model]
            numbers = [lane.rows.integers[:, :size] for lane in lanes]
            hidden = forward(
                decoder,
                pool,
                partial(_attend_lanes, lanes, groups, size),
                token_ids=_joined([lane.token_ids(size, self._graph_sampler.drawn.token_ids) for lane in lanes]),
                positions=_joined([item[column.POSITION] for item in numbers]),
                slots=_joined([item[column.SLOT] for item in numbers]),
            )
            outs += torch.split(logits(decoder, hidden), size)
        if shape.choice.kind == "full":
            return outs
        self._graph_sampler.draw_rows(outs, self.lanes[0].rows, shape.choice)
        return []

    # -- steps with prompts ----------------------------------------------------------------------------------

    def _mixed(self, plan: Plan) -> Ticket:
        """Without a graph; the host goes on without its tokens where it can."""
        self._steady = None
        computed = [self._compute(plan, model) for model in range(len(self.models))]
        first_rows = {place: row for item in computed for place, row in item.first_rows.items()}

        def logits_after(model: int, some: Sequence[int]) -> Tensor:
            return logits(self.models[model].decoder, computed[model].hidden[self._numbers(list(some))])

        in_order = [first_rows[place] for place in range(len(plan.chunks))]
        told = prompt_reports(plan, in_order, partial(logits_after, 0))
        if not plan.draws:
            return partial(StepResult, [], [], prompts=told)
        sources = []
        for lane, places in zip(self.lanes, zip(*(item.chunks for item in plan.draws), strict=True), strict=True):
            drawn = sorted(set(places))
            last = [first_rows[place] + len(plan.chunks[place].token_ids) - 1 for place in drawn]
            row_of = {place: row for row, place in enumerate(drawn)}
            sources.append(Source(logits_after(lane.model, last), [row_of[place] for place in places]))
        ticket = self._sample(plan, sources)
        if not told:
            return ticket
        result = ticket()
        result.prompts.extend(told)
        return lambda: result

    def _compute(self, plan: Plan, model: int) -> _Computed:
        """One model's chunks: decodes first, lane by lane and row by row, then the chunks of prompts."""
        decoder, pool = self.models[model]
        first_rows: dict[int, int] = {}
        token_ids, positions, slots = [], [], []
        attended: list[tuple[Lane, int, bool]] = []
        total = 0
        for role, lane in enumerate(self.lanes):
            if lane.model != model:
                continue
            places = [
                place for place, chunk in enumerate(plan.chunks) if chunk.role == role and len(chunk.token_ids) == 1
            ]
            part = [plan.chunks[place] for place in places]
            rows = lane.rows.place(part)
            if not rows:
                continue
            lane.fill(part, rows, len(rows), drawn_in=self._last_rows, drawn=self._last_known)
            has_groups = lane.list_work(_among(plan.shared, places), rows, len(rows))
            lane.rows.upload()
            attended.append((lane, len(rows), has_groups))
            first_rows.update({place: total + row for place, row in zip(places, rows, strict=True)})
            numbers = lane.rows.integers[:, : len(rows)]
            token_ids.append(lane.token_ids(len(rows), self._graph_sampler.drawn.token_ids))
            positions.append(numbers[column.POSITION])
            slots.append(numbers[column.SLOT])
            total += len(rows)
        num_decodes = total
        prompts = []
        for place, chunk in enumerate(plan.chunks):
            if chunk.model == model and len(chunk.token_ids) > 1:
                prompts.append(chunk)
                first_rows[place] = total
                total += len(chunk.token_ids)
        if prompts:
            token_ids.append(self._numbers([token for chunk in prompts for token in chunk.token_ids]))
            positions.append(self._numbers([place for chunk in prompts for place in range(chunk.start, chunk.end)]))
            written = np.concatenate([slots_of(chunk, pool.block_size, chunk.start) for chunk in prompts])
            slots.append(upload(written, self.device))
        if not total:  # another model's step
            return _Computed(torch.empty(0, decoder.arch.hidden_size, device=self.device), first_rows)
        chunks = ChunkAttention(prompts, pool, self.device) if prompts else None

        def attend(layer: int, queries: Tensor) -> Tensor:
            parts, row = [], 0
            for lane, count, has_groups in attended:
                parts.append(lane.attend(layer, queries[row : row + count], has_groups=has_groups))
                row += count
            if chunks is not None:
                parts.append(chunks.attend(layer, queries[num_decodes:]))
            return _joined(parts)

        hidden = forward(
            decoder,
            pool,
            attend,
            token_ids=_joined(token_ids),
            positions=_joined(positions),
            slots=_joined(slots),
        )
        return _Computed(hidden, first_rows)

    def _sample(self, plan: Plan, sources: Sequence[Source]) -> Ticket:
        """Without a graph. Where the graphs' kernels serve all, tokens stay on the device; else the host waits."""
        self._steady = None
        choice = SamplerChoice.for_draws(plan.draws)
        is_full = choice.kind == "full" or len(sources) > 1
        if not is_full and len(plan.draws) <= self._graph_sampler.max_rows:
            self._last_rows = {plan.chunks[item.chunks[0]].key: row for row, item in enumerate(plan.draws)}
            self._last_known = {}
            results = self._graph_sampler.draw_some(*sources[0], plan.draws, choice)
            return partial(results.read, range(len(plan.draws)), plan.draws)
        if is_full:
            result = self.sampler.sample(sources, plan.draws)
        else:
            result = self._graph_sampler.draw_now(*sources[0], plan.draws, choice)
        self._last_rows = {}
        self._last_known = {
            plan.chunks[chunk].key: token
            for item, token in zip(plan.draws, result.token_ids, strict=True)
            for chunk in item.chunks
        }
        return lambda: result

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return upload(values, self.device)


class _Computed(NamedTuple):
    """One model's hidden states, and the first row of each of its chunks, by the chunk's place in the plan."""

    hidden: Tensor
    first_rows: dict[int, int]


class _Steady:
    """The rows of a graph's step: while the same tracks just go on, the next step's numbers follow from the last's."""

    def __init__(self, keys: list[str], rows: list[list[int]], choice: SamplerChoice) -> None:
        self.keys = keys
        self.rows = rows  # of each lane
        self.choice = choice

    def goes_on_as(self, plan: Plan) -> bool:
        """Whether a plan has the same tracks, each to compute the token that it drew in the last step."""
        chunks = plan.chunks
        return (
            len(chunks) == len(plan.draws) * len(self.rows) == len(self.keys)
            and all(chunk.token_ids[0] == PENDING for chunk in chunks)
            and [chunk.key for chunk in chunks] == self.keys
        )


def padded(count: int) -> int:
    """The size of the graph that serves so many rows: coarse where rows are many, so that graphs are few."""
    for most, step in ((4, 1), (16, 4), (64, 8), (256, 16)):
        if count <= most:
            return -(-count // step) * step
    return -(-count // 32) * 32


def _attend_lanes(lanes: Sequence[Lane], has_groups: Sequence[bool], size: int, layer: int, queries: Tensor) -> Tensor:
    pieces = torch.split(queries, size)
    return _joined(
        [lane.attend(layer, piece, has_groups=has) for lane, piece, has in zip(lanes, pieces, has_groups, strict=True)]
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _is_one_to_one(plan: Plan, places: Sequence[Sequence[int]]) -> bool:
    """Whether every row draws one token for its own child."""
    if any(len(own) != len(plan.draws) for own in places):
        return False
    return all(item.chunks == own for item, own in zip(plan.draws, zip(*places, strict=True), strict=True))


def _among(shared: Sequence[SharedPrefix], some: Sequence[int]) -> list[SharedPrefix]:
    """Groups among some chunks of a step, by their places among these."""
    place_of = {chunk: place for place, chunk in enumerate(some)}
    groups = [
        SharedPrefix(group.num_blocks, tuple(place_of[chunk] for chunk in group.chunks if chunk in place_of))
        for group in shared
    ]
    return [group for group in groups if len(group.chunks) > 1]
