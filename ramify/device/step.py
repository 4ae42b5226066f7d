"""The device's part of a step, for every device: a Plan down, a StepResult up.

    move      blocks are copied and swapped, as every model's work says
    compute   each model's lane: tokens to hidden rows to logits              lane.py
    draw      from the logits of one model, or from the mixture of two        sampling/pipeline.py

Where the sampler's kernels serve all draws, tokens stay on the device: the next step reads them there, so it can be
launched before the host knows them, and the result is fetched when it is asked for. A step of decodes alone is then two
kinds of graphs, forward (rows × shared or not) for each model and draw (rows × kind of sampler), and while the same
tracks just go on, its numbers follow from those of the step before. The rows that these kernels do not serve are drawn
by torch's operators from the same logits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ramify.config import LogprobsMode
from ramify.device.graphs import Graphs, padded
from ramify.device.lane import Lane, is_in_order, most_rows
from ramify.device.last_draws import NO_ROW, LastDraws
from ramify.device.layers import Layers
from ramify.device.prompt_reports import report_prompts, rows_asked
from ramify.device.reads import Int64s
from ramify.device.rows import DrawRows, upload
from ramify.device.seats import Seats
from ramify.engine.demands import SamplerChoice
from ramify.engine.plan import PENDING, Asking, Draw, Member, Plan, StepResult, Ticket
from ramify.sampling import columns as column
from ramify.sampling.columns import Columns
from ramify.sampling.mixing import Mixer
from ramify.sampling.pipeline import ROWS_AT_ONCE, Sampler, Source

# Waits for what was drawn in these rows, and tells it in the order of the draws.
Read = Callable[[Sequence[int] | Int64s, Sequence[Asking]], StepResult]


class SamplerKernels(Protocol):
    """Draws from logits and columns to tokens in buffers, without the host; gpu/sampler.py."""

    @property
    def tokens(self) -> Tensor:
        """(max_rows,) what was drawn last, row by row."""

    def serves(self, asked: SamplerChoice) -> bool:
        """Whether it can draw what a request asks for."""

    def choose(self, asked: Collection[SamplerChoice]) -> SamplerChoice:
        """The cheapest that serves all that is asked for, each of which it can."""

    def settle(self, draws: Sequence[Draw]) -> Int64s:
        """Where each draw's controls find what they look at: the slots that `draw` is told in a column."""

    def go_on(self, slots: Int64s) -> None:
        """The draws that settled there, one position on."""

    def draw(self, logits: Sequence[Tensor], integers: Tensor, floats: Tensor, choice: SamplerChoice) -> None:
        """From the logits (R, vocabulary) of each track, and the columns of R draws."""

    def every_choice(self) -> Sequence[SamplerChoice]:
        """All that `choose` may answer."""

    def fetch(self, choice: SamplerChoice, *, at_once: bool = False) -> Read:
        """Asks for what was drawn last; `at_once`: it is read before anything else is fetched."""


@dataclass(frozen=True, slots=True)
class _Steady:
    """A captured step. While the same tracks just go on, the next one's numbers follow from it."""

    keys: list[list[str]]  # of each lane's chunks
    drawing_rows: list[Int64s]  # where each of these draws
    rows: Int64s  # of the draws, in their order
    slots: Int64s  # of their controls
    choice: SamplerChoice

    def goes_on_as(self, plan: Plan) -> bool:
        """Whether a plan has the same tracks, each to compute the token that it drew in the last step."""
        return (
            plan.onward is None
            and len(plan.draws) == len(self.rows)
            and all(
                [chunk.key for chunk in work.chunks] == keys
                and all(chunk.token_ids[0] == PENDING for chunk in work.chunks)
                for work, keys in zip(plan.works, self.keys, strict=True)
            )
        )


@dataclass(frozen=True, slots=True)
class _GoingOn:
    """Members whose draws stand in the first rows. While they are the same, little of them changes."""

    members: Sequence[Member]
    changed: Sequence[int]  # whose rows may hold others' numbers
    slots: Int64s | None = None  # of their controls, if the last step drew for nobody else


class DeviceStep:
    """One `Layers` per model. Where draws have two tracks, the first is the teacher's, the second the student's."""

    def __init__(
        self,
        layers: Sequence[Layers],
        *,
        max_num_seqs: int,
        logprobs_mode: LogprobsMode = "raw",
        mixer: Mixer | None = None,
        kernels: SamplerKernels | None = None,
        use_graphs: bool = True,
        runs_ahead: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        self.device = layers[0].device
        self.runs_ahead = runs_ahead
        # torch's operators sum in an order that follows from the number of rows: invariant, each row comes alone.
        self.sampler = Sampler(logprobs_mode, mixer, rows_at_once=1 if batch_invariant else ROWS_AT_ONCE)
        self._batch_invariant = batch_invariant
        self.graphs = Graphs(self.device, use_graphs=use_graphs)
        num_tracks = 1 if mixer is None else 2
        max_rows = most_rows(max_num_seqs, num_tracks, len(layers))
        self.lanes = [Lane(each, max_rows, self.graphs if kernels is not None else None) for each in layers]
        self._kernels = kernels
        self._max_draws = padded(max_num_seqs)
        self._draw_rows = DrawRows(self._max_draws, self.device)
        self._seats = Seats() if num_tracks == 2 else None  # of the draws; those of one track stand where it does
        # The tokens of the last step by the rows they were drawn in, and the row of each track that may go on unseen.
        self._tokens = torch.zeros(self._max_draws, dtype=torch.int64, device=self.device)
        if kernels is not None:
            self._tokens = kernels.tokens
        self._drawn = LastDraws()
        self._steady: _Steady | None = None
        self._going_on: _GoingOn | None = None

    @property
    def looks_back(self) -> bool:
        return self._kernels is not None

    def reset(self) -> None:
        """Nobody of earlier plans goes on, and what they left on the way to the device has arrived."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._seats = None if self._seats is None else Seats()
        self._drawn = LastDraws()
        self._steady = None
        self._going_on = None
        for lane in self.lanes:
            lane.reset()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Ticket:
        for lane, work in zip(self.lanes, plan.works, strict=True):
            lane.layers.pool.move(work)
        if not any(work.chunks for work in plan.works) and plan.onward is None:
            return partial(StepResult, [], [])
        if self._steady is not None and self._steady.goes_on_as(plan):
            return self._go_on(self._steady, plan)
        self._steady = None
        for lane, work, onward in zip_longest(self.lanes, plan.works, (plan.onward,)):
            lane.begin(work, self._drawn, onward)
        tracks = self._tracks(plan)
        for lane, wanted in zip(self.lanes, self._wanted(plan, tracks), strict=True):
            lane.compute(wanted, self._tokens)
        told = report_prompts(self.lanes, plan.prompt_reports, batch_invariant=self._batch_invariant)
        ticket = self._draw(plan, tracks) if tracks else partial(StepResult, [], [])
        if not told.reports:
            return ticket
        result = ticket()
        result.prompts.extend(told.reports)
        result.comparisons.update(told.comparisons)
        return lambda: result

    @torch.inference_mode()
    def capture_draws(self, count: int) -> None:
        """Draws of every kind for so many rows, from what the last step, a captured one, left; nobody reads them."""
        if self._kernels is not None:
            for choice in self._kernels.every_choice():
                self._run_draws(self._kernels, padded(count), choice)

    def _tracks(self, plan: Plan) -> list[_Track]:
        """Where the draws of a plan are from, those of members first."""
        if plan.onward is None:
            by_track = zip(*(draw.rows for draw in plan.draws), strict=True)
            return [_Track(rows[0].model, self.lanes[rows[0].model].rows_of(rows)) for rows in by_track]
        lane, count = self.lanes[0], len(plan.onward.members)
        return [
            _Track(0, np.concatenate([lane.first_rows[:count], lane.rows_of([draw.rows[0] for draw in plan.draws])]))
        ]

    def _wanted(self, plan: Plan, tracks: Sequence[_Track]) -> list[Int64s]:
        """The rows of each lane whose logits somebody needs, ascending."""
        wanted: list[list[Int64s]] = [[] for _ in self.lanes]
        for track in tracks:
            if not self.lanes[track.model].is_captured:  # else all rows leave theirs
                wanted[track.model].append(track.rows)
        for asked in plan.prompt_reports:
            for row in asked.rows():
                wanted[row.model].append(rows_asked(self.lanes, row, len(asked.targets)))
        return [np.unique(np.concatenate(rows)) if rows else np.empty(0, np.int64) for rows in wanted]

    # -- draws -----------------------------------------------------------------------------------------------

    def _draw(self, plan: Plan, tracks: Sequence[_Track]) -> Ticket:
        kernels, onward = self._kernels, plan.onward
        going_on, self._going_on = self._going_on, None  # whoever is to go on is noted again
        if kernels is None:
            return self._draw_in_parts(plan.spelled_out(), tracks)
        asked = {draw.demands.choice for draw in plan.draws}
        if onward is not None:
            if going_on is None or going_on.members is not onward.members:
                members = onward.members
                changed = range(len(members)) if going_on is None else onward.changed
                going_on = _GoingOn(members, changed)
            asked |= onward.asked
        if not all(map(kernels.serves, asked)) or len(tracks[0].rows) > self._max_draws:
            return self._draw_in_parts(plan.spelled_out(), tracks)
        choice = kernels.choose(asked)
        if going_on is not None and onward is not None:
            return self._draw_going_on(kernels, going_on, plan, choice, tracks)
        if self._is_one_to_one(plan.draws, tracks):
            return self._draw_captured(kernels, plan, choice, tracks)
        self._drawn = LastDraws(plan, np.arange(len(plan.draws)))
        return self._draw_fresh(kernels, plan.draws, self._sources(tracks))

    def _draw_in_parts(self, plan: Plan, tracks: Sequence[_Track]) -> Ticket:
        """By kernels what they serve, as many at once as there are rows, and the rest by torch's operators."""
        draws, kernels = plan.draws, self._kernels
        parts: list[tuple[Sequence[int], StepResult]] = []
        sources = self._sources(tracks)
        slow: Sequence[int] = range(len(draws))
        if kernels is not None:
            served = [kernels.serves(draw.demands.choice) for draw in draws]
            quick = [index for index, is_served in enumerate(served) if is_served]
            for start in range(0, len(quick), self._max_draws):  # many children of one prompt are more than the rows
                some = quick[start : start + self._max_draws]
                wave = self._draw_fresh(kernels, *_some(draws, sources, some), at_once=True)
                parts.append((some, wave()))
            slow = [index for index, is_served in enumerate(served) if not is_served]
        if slow:
            chosen, own = _some(draws, sources, slow)
            parts.append((slow, self.sampler.sample(own, chosen)))
        result = StepResult.of_parts(parts)
        if self.runs_ahead:
            # Who goes on unseen draws for itself alone: a row each.
            alone = [index for index, draw in enumerate(draws) if draw.child == draw.parent]
            self._tokens[: len(alone)] = upload([result.token_ids[index] for index in alone], self.device)
            rows = np.full(len(draws), NO_ROW)
            rows[alone] = np.arange(len(alone))
            self._drawn = LastDraws(plan, rows)
        return lambda: result

    def _sources(self, tracks: Sequence[_Track]) -> list[Source]:
        """Of each track, what its draws are from; the rows of one model's tracks are multiplied together."""
        of_lane = {}
        for model in {track.model for track in tracks}:
            of_lane[model] = iter(self.lanes[model].sources([track.rows for track in tracks if track.model == model]))
        return [next(of_lane[track.model]) for track in tracks]

    def _is_one_to_one(self, draws: Sequence[Draw], tracks: Sequence[_Track]) -> bool:
        """Whether all is captured, and every row draws one token for its own child."""
        num_rows = sum(len(lane.first_rows) for lane in self.lanes)
        return (
            all(lane.is_captured for lane in self.lanes)
            and num_rows == len(draws) * len(tracks)
            and all(len(set(track.rows.tolist())) == len(draws) for track in tracks)
        )

    def _draw_captured(
        self, kernels: SamplerKernels, plan: Plan, choice: SamplerChoice, tracks: Sequence[_Track]
    ) -> Ticket:
        draws = plan.draws
        keys = [[chunk.key for chunk in work.chunks] for work in plan.works]
        rows, sources = tracks[0].rows, [track.rows for track in tracks] if len(tracks) > 1 else []
        if self._seats is not None:
            names = keys[tracks[0].model]
            rows = np.array(self._seats.take([names[draw.rows[0].chunk] for draw in draws]), np.int64)
        slots = kernels.settle(draws)
        self._draw_rows.settle(draws, rows, padded(len(draws)), slots=slots, sources=sources)
        drawing_rows = [np.zeros(len(names), np.int64) for names in keys]
        for draw, row in zip(draws, rows.tolist(), strict=True):
            for model, chunk, _ in draw.rows:
                drawing_rows[model][chunk] = row
        self._drawn = LastDraws(plan, rows)
        self._steady = _Steady(keys, drawing_rows, rows, slots, choice)
        return self._replay(kernels, self._steady, draws)

    def _draw_going_on(
        self,
        kernels: SamplerKernels,
        going_on: _GoingOn,
        plan: Plan,
        choice: SamplerChoice,
        tracks: Sequence[_Track],
    ) -> Ticket:
        """Members in the first rows, who stay there, and other draws behind them."""
        onward, draws, lane = plan.onward, plan.draws, self.lanes[0]
        assert onward is not None, "somebody goes on"
        rows = np.arange(len(onward.members) + len(draws))
        is_captured = lane.is_captured and is_in_order(tracks[0].rows, len(lane.first_rows))
        size = padded(len(rows)) if is_captured else len(rows)
        slots = going_on.slots
        if slots is not None and not draws:
            kernels.go_on(slots)
        elif choice.controls:
            slots = kernels.settle(plan.spelled_out().draws)
        else:
            slots = np.full(len(rows), column.NO_SLOT)
        self._draw_rows.follow(onward, draws, size, slots=slots, changed=going_on.changed)
        self._going_on = replace(going_on, changed=(), slots=None if draws else slots)
        self._drawn = LastDraws(plan, rows)
        if is_captured:
            self._run_draws(kernels, size, choice)
        else:
            [source] = self._sources(tracks)
            kernels.draw([self._logits_of(source)], *self._draw_rows.columns(size), choice)
        return partial(kernels.fetch(choice), rows, [*onward.members, *draws] if draws else onward.members)

    def _go_on(self, steady: _Steady, plan: Plan) -> Ticket:
        for lane, work, drawing_rows in zip(self.lanes, plan.works, steady.drawing_rows, strict=True):
            lane.go_on(work, drawing_rows)
        for lane in self.lanes:
            lane.compute(np.empty(0, np.int64), self._tokens)
        assert self._kernels is not None, "captured steps draw by kernels"
        self._draw_rows.go_on(steady.rows)
        self._kernels.go_on(steady.slots)
        return self._replay(self._kernels, steady, plan.draws)

    def _replay(self, kernels: SamplerKernels, steady: _Steady, draws: Sequence[Draw]) -> Ticket:
        self._run_draws(kernels, padded(len(draws)), steady.choice)
        return partial(kernels.fetch(steady.choice), steady.rows, draws)

    def _run_draws(self, kernels: SamplerKernels, size: int, choice: SamplerChoice) -> None:
        self.graphs.run((size, choice), lambda: self._draw_all(kernels, size, choice))

    def _draw_all(self, kernels: SamplerKernels, size: int, choice: SamplerChoice) -> None:
        """From the logits that captured lanes left, row by row."""
        integers, floats = self._draw_rows.columns(size)
        logits = [self.lanes[0].all_logits()]
        if self._seats is not None:
            teacher, theta = self.lanes[0], self.lanes[-1]
            logits = [
                teacher.all_logits()[integers[column.TEACHER_ROW]],
                theta.all_logits()[integers[column.THETA_ROW]],
            ]
        kernels.draw(logits, integers, floats, choice)

    def _draw_fresh(
        self, kernels: SamplerKernels, draws: Sequence[Draw], sources: Sequence[Source], *, at_once: bool = False
    ) -> Ticket:
        """Into the first rows, whoever stood there; does not wait for them."""
        logits = [self._logits_of(source) for source in sources]
        choice, columns = kernels.choose({draw.demands.choice for draw in draws}), Columns.of(draws)
        columns.integers[column.SLOT] = kernels.settle(draws)
        kernels.draw(logits, upload(columns.integers, self.device), upload(columns.floats, self.device), choice)
        return partial(kernels.fetch(choice, at_once=at_once), range(len(draws)), draws)

    def _logits_of(self, source: Source) -> Tensor:
        """Draw by draw."""
        rows = np.asarray(source.rows, np.int64)
        return source.logits if is_in_order(rows, len(source.logits)) else source.logits[upload(rows, self.device)]


@dataclass(frozen=True, slots=True)
class _Track:
    """The rows of one model's lane that the draws are from, draw by draw."""

    model: int
    rows: Int64s


def _some(
    draws: Sequence[Draw], sources: Sequence[Source], indices: Sequence[int]
) -> tuple[Sequence[Draw], Sequence[Source]]:
    """These draws, and what they are from."""
    if len(indices) == len(draws):
        return draws, sources
    chosen = [Source(source.logits, [source.rows[index] for index in indices]) for source in sources]
    return [draws[index] for index in indices], chosen
