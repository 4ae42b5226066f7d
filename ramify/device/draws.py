"""The draws of a step: from the logits that lanes leave to tokens, by kernels or by torch's operators.

    captured     every row that left logits for graphs draws one token for its own child: a graph
    going on     members of the cohort in the first rows, and other draws behind them
    fresh        anything else that the kernels serve, into the first rows
    in parts     what the kernels do not serve is drawn by torch's operators from the same logits

What kernels draw stays on the device: the next step reads it there, so it can be launched before the host knows it.
Everything but the draws themselves is begun at once. What grammars allow is asked for when they are made: then the host
knows the tokens before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ramify.device.graphs import Graphs, Shape, padded
from ramify.device.lane import Lane, is_in_order
from ramify.device.last_draws import NO_ROW, LastDraws
from ramify.device.reads import Int64s
from ramify.device.rows import DrawRows, upload
from ramify.device.sampler_kernels import SamplerKernels
from ramify.device.seats import Seats
from ramify.engine.demands import SamplerChoice
from ramify.engine.plan import PENDING, Draw, Member, Plan, StepResult, Ticket
from ramify.sampling import columns as column
from ramify.sampling.columns import Columns
from ramify.sampling.pipeline import Sampler, Source

_NO_ROWS = np.empty(0, np.int64)
Begun = Callable[[], Ticket]  # makes the draws


@dataclass(frozen=True, slots=True)
class DrawTrack:
    """The rows of one model's lane that the draws are from, draw by draw."""

    model: int
    rows: Int64s


@dataclass(frozen=True, slots=True)
class Steady:
    """A captured step. While the same tracks just go on, the next one's numbers follow from it."""

    keys: list[list[str]]  # of each lane's chunks
    drawing_rows: list[Int64s]  # where each of these draws
    rows: Int64s  # of the draws, in their order
    slots: Int64s  # of their controls
    choice: SamplerChoice
    following: Sequence[int]  # draws that follow a grammar

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


class Draws:
    """Of the steps of one device, whose lanes leave the logits. Without kernels, torch's operators draw everything.

    Where draws have two tracks, the first is the teacher's, the second the student's.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        sampler: Sampler,
        kernels: SamplerKernels | None,
        graphs: Graphs,
        *,
        max_num_seqs: int,
        num_tracks: int,
        runs_ahead: bool,
    ) -> None:
        self.device = lanes[0].layers.device
        self._lanes = lanes
        self._sampler = sampler
        self._kernels = kernels
        self._graphs = graphs
        self._runs_ahead = runs_ahead
        self._max_draws = padded(max_num_seqs)
        self._rows = DrawRows(self._max_draws, self.device)
        self._seats = Seats() if num_tracks == 2 else None  # of the draws; those of one track stand where it does
        # The tokens of the last step by the rows they were drawn in, and the row of each track that may go on unseen.
        self.tokens = torch.zeros(self._max_draws, dtype=torch.int64, device=self.device)
        if kernels is not None:
            self.tokens = kernels.tokens
        self.last = LastDraws()
        self.guesses = _NO_ROWS  # where the tokens are that were drafted for the next plan
        self.by_kernels = False  # whether they drew all of the last plan
        self.steady: Steady | None = None
        self._going_on: _GoingOn | None = None

    @property
    def parents(self) -> Tensor:
        """(max_rows,) by the rows of draws: where a beam goes on from, among the rows of its lane."""
        assert self._kernels is not None, "nothing else chooses"
        return self._kernels.parents

    def reset(self) -> None:
        """Nobody of earlier plans goes on."""
        self._seats = None if self._seats is None else Seats()
        self.last = LastDraws()
        self.by_kernels = False
        self.steady = None
        self._going_on = None
        self.guesses = _NO_ROWS
        if self._kernels is not None:
            self._kernels.reset()

    def capture(self, count: int) -> None:
        """Draws of every kind for so many rows, from what the last step, a captured one, left; nobody reads them."""
        if self._kernels is not None:
            for choice in self._kernels.every_choice():
                self._run(self._kernels, padded(count), choice)

    def begin(self, plan: Plan, tracks: Sequence[DrawTrack]) -> Begun:
        """What a plan asks for, from these rows; those of members come first."""
        kernels, onward = self._kernels, plan.onward
        self.by_kernels = False
        going_on, self._going_on = self._going_on, None  # whoever is to go on is noted again
        if kernels is None:
            return partial(self._draw_in_parts, plan.spelled_out(), tracks)
        asked = {draw.demands.choice for draw in plan.draws}
        if onward is not None:
            if going_on is None or going_on.members is not onward.members:
                members = onward.members
                changed = range(len(members)) if going_on is None else onward.changed
                going_on = _GoingOn(members, changed)
            asked |= onward.asked
        is_served = all(map(kernels.serves, asked)) and len(tracks[0].rows) <= self._max_draws
        if not is_served or any(map(_looks_at_guesses, plan.draws)):
            return partial(self._draw_in_parts, plan.spelled_out(), tracks)
        choice = kernels.choose(asked)
        if going_on is not None and onward is not None:
            return self._begin_going_on(kernels, going_on, plan, choice, tracks)
        if self._is_one_to_one(plan.draws, tracks):
            return self._begin_captured(kernels, plan, choice, tracks)
        self.last = LastDraws(plan, np.arange(len(plan.draws)))
        self._select(kernels, plan, choice, np.arange(len(plan.draws)), tracks[0].rows)
        last_rows = self._lanes[0].last_rows(tracks[0].rows)
        return self._begin_fresh(kernels, plan.draws, self._sources(tracks), last_rows=last_rows)

    def go_on(self, steady: Steady, plan: Plan) -> Begun:
        """The draws of the captured step before, one position on."""
        assert self._kernels is not None, "captured steps draw by kernels"
        self._rows.go_on(steady.rows, self._lanes[0].last_rows(steady.rows) if steady.choice.waves > 1 else None)
        self._kernels.go_on(steady.slots)
        self._select(self._kernels, plan, steady.choice, steady.rows, steady.rows)
        return partial(self._replay, self._kernels, steady, plan.draws)

    def _select(
        self, kernels: SamplerKernels, plan: Plan, choice: SamplerChoice, rows: Int64s, lane_rows: Int64s
    ) -> None:
        """Tells the kernels whose beams they choose: the plan's own draws are in these rows, from these of a lane."""
        self.by_kernels = True
        if choice.chooses:
            kernels.select(plan.selections, plan.draws, rows, lane_rows)

    def _draw_in_parts(self, plan: Plan, tracks: Sequence[DrawTrack]) -> Ticket:
        """By kernels what they serve, as many at once as there are rows, and the rest by torch's operators."""
        draws, kernels = plan.draws, self._kernels
        parts: list[tuple[Sequence[int], StepResult]] = []
        sources = self._sources(tracks)
        slow: Sequence[int] = range(len(draws))
        if kernels is not None:
            served = [kernels.serves(draw.demands.choice) and not _looks_at_guesses(draw) for draw in draws]
            quick = [index for index, is_served in enumerate(served) if is_served]
            for start in range(0, len(quick), self._max_draws):  # many children of one prompt are more than the rows
                some = quick[start : start + self._max_draws]
                kernels.select((), (), _NO_ROWS, _NO_ROWS)  # the host chooses
                wave = self._begin_fresh(kernels, *_some(draws, sources, some), at_once=True)()
                parts.append((some, wave()))
            slow = [index for index, is_served in enumerate(served) if not is_served]
        if slow:
            chosen, own = _some(draws, sources, slow)
            parts.append((slow, self._sampler.sample(own, chosen)))
        result = StepResult.of_parts(parts)
        if self._runs_ahead and not any(draw.presumed for draw in draws):  # else nobody goes on unseen
            # Who goes on unseen draws for itself alone: a row each.
            alone = [index for index, draw in enumerate(draws) if draw.child == draw.parent]
            self.tokens[: len(alone)] = upload([result.token_ids[index] for index in alone], self.device)
            rows = np.full(len(draws), NO_ROW)
            rows[alone] = np.arange(len(alone))
            self.last = LastDraws(plan, rows)
        return lambda: result

    def _sources(self, tracks: Sequence[DrawTrack]) -> list[Source]:
        """Of each track, what its draws are from; the rows of one model's tracks are multiplied together."""
        of_lane = {}
        for model in {track.model for track in tracks}:
            of_lane[model] = iter(self._lanes[model].sources([track.rows for track in tracks if track.model == model]))
        return [next(of_lane[track.model]) for track in tracks]

    def _is_one_to_one(self, draws: Sequence[Draw], tracks: Sequence[DrawTrack]) -> bool:
        """Whether every draw has rows to itself whose logits were left for graphs, and no row but these left any."""
        num_rows = sum(len(lane.first_rows) for lane in self._lanes)
        return (
            all(lane.leaves_logits for lane in self._lanes)
            and (self._has_prompts or num_rows == len(draws) * len(tracks))
            and all(len(set(track.rows.tolist())) == len(draws) for track in tracks)
        )

    @property
    def _has_prompts(self) -> bool:
        return any(lane.has_prompts for lane in self._lanes)

    def _begin_captured(
        self, kernels: SamplerKernels, plan: Plan, choice: SamplerChoice, tracks: Sequence[DrawTrack]
    ) -> Begun:
        draws = plan.draws
        keys = [[chunk.key for chunk in work.chunks] for work in plan.works]
        sources = [self._lanes[track.model].places_of(track.rows) for track in tracks]
        rows = sources[0]
        if self._seats is None:
            sources = []
        else:
            rows = np.array(self._seats.take(_names(draws, keys[tracks[0].model])), np.int64)
        slots = kernels.settle(draws)
        last_rows = self._lanes[0].last_rows(tracks[0].rows) if choice.waves > 1 else None
        self._rows.settle(draws, rows, padded(len(draws)), slots=slots, sources=sources, last_rows=last_rows)
        drawing_rows = [np.zeros(len(names), np.int64) for names in keys]
        goes_on = not self._has_prompts
        if goes_on:
            for number, track in enumerate(tracks):
                drawing_rows[track.model][[draw.rows[number].chunk for draw in draws]] = rows
        self._select(kernels, plan, choice, rows, tracks[0].rows)
        self.last = LastDraws(plan, rows)
        steady = Steady(keys, drawing_rows, rows, slots, choice, _following(draws))
        self.steady = steady if goes_on else None
        return partial(self._replay, kernels, steady, draws)

    def _begin_going_on(
        self,
        kernels: SamplerKernels,
        going_on: _GoingOn,
        plan: Plan,
        choice: SamplerChoice,
        tracks: Sequence[DrawTrack],
    ) -> Begun:
        """Members in the first rows, who stay there, and other draws behind them."""
        onward, draws, lane = plan.onward, plan.draws, self._lanes[0]
        assert onward is not None, "somebody goes on"
        rows = np.arange(len(onward.members) + len(draws))
        # Several children may draw from one prompt, and prompts may stand before decodes in the plan.
        is_captured = lane.leaves_logits and is_in_order(lane.places_of(tracks[0].rows), len(rows))
        size = padded(len(rows)) if is_captured else len(rows)
        slots = going_on.slots
        if slots is not None and not draws:
            kernels.go_on(slots)
        elif choice.controls or choice.remembers:
            slots = kernels.settle(plan.spelled_out().draws)
        else:
            slots = np.full(len(rows), column.NO_SLOT)
        count = len(onward.members)
        last_rows = lane.last_rows(tracks[0].rows[count:]) if choice.waves > 1 else None
        self._rows.follow(onward, draws, size, slots=slots, changed=going_on.changed, last_rows=last_rows)
        self._select(kernels, plan, choice, rows[count:], tracks[0].rows[count:])
        self._going_on = replace(going_on, changed=(), slots=None if draws else slots)
        self.last = LastDraws(plan, rows)
        own = [count + index for index in _following(draws)]
        all_of_them: Sequence[Member | Draw] = [*onward.members, *draws] if draws else onward.members
        following = [*onward.following, *own] if own else onward.following

        def make() -> Ticket:
            _tell_grammars(kernels, slots, following, all_of_them)
            if is_captured:
                self._run(kernels, size, choice)
            else:
                [source] = self._sources(tracks)
                kernels.draw([self._logits_of(source)], *self._rows.columns(size), choice)
            return partial(kernels.fetch(choice), rows, all_of_them)

        return make

    def _replay(self, kernels: SamplerKernels, steady: Steady, draws: Sequence[Draw]) -> Ticket:
        _tell_grammars(kernels, steady.slots, steady.following, draws)
        self._run(kernels, padded(len(draws)), steady.choice)
        return partial(kernels.fetch(steady.choice), steady.rows, draws)

    def _run(self, kernels: SamplerKernels, size: int, choice: SamplerChoice) -> None:
        self._graphs.run(Shape("draws", choice, size), lambda: self._draw_all(kernels, size, choice))

    def _draw_all(self, kernels: SamplerKernels, size: int, choice: SamplerChoice) -> None:
        """From the logits that lanes left for graphs."""
        integers, floats = self._rows.columns(size)
        logits = [self._lanes[0].left_logits(size)]
        if self._seats is not None:
            teacher, theta = self._lanes[0], self._lanes[-1]
            logits = [
                teacher.left_logits()[integers[column.TEACHER_ROW]],
                theta.left_logits()[integers[column.THETA_ROW]],
            ]
        kernels.draw(logits, integers, floats, choice)

    def _begin_fresh(
        self,
        kernels: SamplerKernels,
        draws: Sequence[Draw],
        sources: Sequence[Source],
        *,
        last_rows: Int64s | None = None,
        at_once: bool = False,
    ) -> Begun:
        """Into the first rows, whoever stood there; does not wait for them."""
        logits = [self._logits_of(source) for source in sources]
        choice, columns = kernels.choose({draw.demands.choice for draw in draws}), Columns.of(draws)
        slots = columns.integers[column.SLOT] = kernels.settle(draws)
        if last_rows is not None:
            columns.integers[column.LAST_ROW] = last_rows
        numbers = upload(columns.integers, self.device), upload(columns.floats, self.device)

        def make() -> Ticket:
            _tell_grammars(kernels, slots, _following(draws), draws)
            kernels.draw(logits, *numbers, choice)
            return partial(kernels.fetch(choice, at_once=at_once), range(len(draws)), draws)

        return make

    def _logits_of(self, source: Source) -> Tensor:
        """Draw by draw."""
        rows = np.asarray(source.rows, np.int64)
        is_prefix = is_in_order(rows, len(rows))
        return source.logits[: len(rows)] if is_prefix else source.logits[upload(rows, self.device)]


def _following(draws: Sequence[Draw]) -> list[int]:
    return [index for index, draw in enumerate(draws) if draw.matcher is not None]


def _tell_grammars(
    kernels: SamplerKernels, slots: Int64s, following: Sequence[int], drawing: Sequence[Member | Draw]
) -> None:
    if following:
        kernels.follow(slots[following], [drawing[index] for index in following])


def _looks_at_guesses(draw: Draw) -> bool:
    """Whether its controls depend on tokens that are only drafted: kernels count what they have drawn."""
    return draw.presumed > 0 and draw.demands.is_controlled


def _names(draws: Sequence[Draw], keys: Sequence[str]) -> list[str]:
    """Of the draws of two models, by the names of the teacher's chunks."""
    return [
        f"{keys[draw.rows[0].chunk]}+{draw.presumed}" if draw.presumed else keys[draw.rows[0].chunk] for draw in draws
    ]


def _some(
    draws: Sequence[Draw], sources: Sequence[Source], indices: Sequence[int]
) -> tuple[Sequence[Draw], Sequence[Source]]:
    """These draws, and what they are from."""
    if len(indices) == len(draws):
        return draws, sources
    chosen = [Source(source.logits, [source.rows[index] for index in indices]) for source in sources]
    return [draws[index] for index in indices], chosen
