"""The device's part of a step, for every device: a Plan down, a StepResult up.

    move      blocks are copied and swapped, as every model's work says
    compute   each model's lane: tokens to hidden rows to logits              lane.py; decodes of two at once: aside.py
    draw      from the logits of one model, or from the mixture of two        draws.py

Where the sampler's kernels serve all draws, tokens stay on the device: the next step reads them there, so it can be
launched before the host knows them, and the result is fetched when it is asked for. A step is then graphs: forward
(rows × shared or not; lane.py) for each model, and draw (rows × kind of sampler). Between them the host may wait for
the tokens of the step before, and tell what grammars allow after them. While the same tracks just decode, a step's
numbers follow from those of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Literal

import numpy as np
import torch

from ramify.config import LogprobsMode
from ramify.device.aside import Aside
from ramify.device.chain import Chain, Room
from ramify.device.draws import Begun, Draws, DrawTrack, Steady
from ramify.device.graphs import Graphs, Kind, Tally, padded
from ramify.device.guard import on
from ramify.device.lane import Lane, Moving, most_rows
from ramify.device.layers import Layers
from ramify.device.prompt_reports import Told, report_prompts, rows_asked
from ramify.device.reads import Int64s
from ramify.device.sampler_kernels import SamplerKernels
from ramify.engine.demands import SamplerChoice
from ramify.engine.plan import GUESS, MOST_DRAFTED, Draw, Plan, StepResult, Ticket, Work
from ramify.sampling.mixing import Mixer
from ramify.sampling.pipeline import ROWS_AT_ONCE, Sampler

# Who captures a model's part of a step: the step, together with all else; the layers themselves, to whom the step
# gives rows that are as many as a graph has; or nobody.
Capture = Literal["step", "layers", "nobody"]


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
        captures: Sequence[Capture] | None = None,
        checks: Sequence[Callable[[], None]] = (),
        use_graphs: bool = True,
        runs_ahead: bool = False,
        chooses: bool = False,
        batch_invariant: bool = False,
        drafting: SamplerKernels | None = None,
    ) -> None:
        """captures: of each model, who captures it where there are kernels that draw; default: the step.

        checks: asked when results are read; they raise where what was computed means nothing.

        chooses: the layers can follow beams whose choice only the device knows (`Reads.followed`).

        drafting: what draws from the last model alone, which then drafts tokens in this step's own cache (chain.py).
        """
        self._checks = checks
        self.device = layers[0].device
        self.runs_ahead = runs_ahead
        # torch's operators sum in an order that follows from the number of rows: invariant, each row comes alone.
        self.sampler = Sampler(logprobs_mode, mixer, rows_at_once=1 if batch_invariant else ROWS_AT_ONCE)
        self._batch_invariant, self._kernels = batch_invariant, kernels
        self.graphs = Graphs(self.device, use_graphs=use_graphs)
        num_tracks = 1 if mixer is None else 2
        max_rows = most_rows(max_num_seqs, num_tracks, len(layers))
        self._max_num_seqs, self._rows_each = max_num_seqs, num_tracks // len(layers)
        if kernels is None or captures is None:
            captures = ["nobody" if kernels is None else "step"] * len(layers)
        # Invariant attention of prompts writes its lists anew in every step; layers capture decodes alone.
        self.captures_prompts = not batch_invariant and all(who == "step" for who in captures)
        graphs = {"step": self.graphs, "layers": Graphs(self.device, use_graphs=False), "nobody": None}
        self.lanes = [
            Lane(
                each,
                max_rows,
                graphs[who],
                number=number,
                captures_prompts=self.captures_prompts,
                num_foreseen=max_rows if drafting is not None and number == len(layers) - 1 else 0,
            )
            for number, (each, who) in enumerate(zip(layers, captures, strict=True))
        ]
        self.chooses = chooses and runs_ahead and kernels is not None and num_tracks == 1
        self._draws = Draws(
            self.lanes,
            self.sampler,
            kernels,
            self.graphs,
            max_num_seqs=max_num_seqs,
            num_tracks=num_tracks,
            runs_ahead=runs_ahead,
        )
        self._aside = Aside(self.device, use_graphs=use_graphs)
        # Decodes of a second model run beside those of the first, where both are graphs of this step.
        self.computes_both = len(layers) > 1 and self.graphs.are_on and all(who == "step" for who in captures)
        self._chain: Chain | None = None
        if drafting is not None:
            self._chain = Chain(
                self.lanes[-1],
                drafting,
                self.graphs,
                self._aside,
                tokens=self._draws.tokens,
                room=self._room,
                leaves_logits=True,
            )

    @property
    def _room(self) -> Room:
        """For drafts, of who checks them here."""
        return Room(padded(self._max_num_seqs), min(lane.layers.vocab_size for lane in self.lanes))

    @property
    def has_room_for_drafts(self) -> bool:
        """Whether tokens that are drafted on this device can be kept beside those that steps draw here."""
        return self._kernels is not None and len(self._draws.tokens) >= self._room.max_rows * (1 + MOST_DRAFTED)

    def check_drafts_of(self, other: DeviceStep) -> None:
        """The one model of another step on this device drafts for this one."""
        assert other._kernels is not None, "it draws on the device"
        other._aside = self._aside  # what it is asked for otherwise waits for the last pass, which reads its buffers
        graphs = Graphs(self.device, use_graphs=self.graphs.are_on)
        self._chain = Chain(
            other.lanes[0], other._kernels, graphs, self._aside, tokens=self._draws.tokens, room=self._room
        )

    @property
    def most_drafting(self) -> int:
        """How many positions may be computed for drafts at once; 0: nobody drafts here."""
        return 0 if self._chain is None else self._chain.room.max_rows

    @property
    def drew_by_kernels(self) -> bool:
        """Whether kernels drew all of the last plan: whoever goes on finds what they left."""
        return self._draws.by_kernels

    def looks_back(self, asked: SamplerChoice) -> bool:
        return self._kernels is not None and self._kernels.serves(asked)

    def reset(self) -> None:
        """Nobody of earlier plans goes on, and what they left on the way to the device has arrived."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._draws.reset()
        if self._chain is not None:
            self._chain.reset()
        for lane in self.lanes:
            lane.reset()

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Inside, graphs are captured as soon as they are needed."""
        with self.graphs.warming_up(), self._aside.graphs.warming_up():
            yield

    @property
    def made(self) -> dict[Kind, Tally]:
        """What was captured, and what that took."""
        made = dict(self.graphs.made)
        for kind, tally in self._aside.graphs.made.items():
            before = made.get(kind, Tally())
            made[kind] = Tally(before.number + tally.number, before.seconds + tally.seconds)
        return made

    def forget_addresses(self) -> None:
        """Weights and blocks are about to be elsewhere in memory: graphs that read them there are captured anew."""
        self.reset()
        self.graphs.forget()
        self._aside.graphs.forget()
        if self._chain is not None:
            self._chain.forget_addresses()

    @torch.inference_mode()
    def draft(self, work: Work, draws: Sequence[Draw], length: int) -> None:
        """Drafts so many tokens behind the last one of each chunk, for the next plan; does not wait for them.

        The last model computes them all, and the plan need not: it names their rows by chunks -1, -2, … and the tokens
        by GUESS, GUESS - 1, …
        """
        assert self._chain is not None, "nobody drafts here"
        with on(self.device):
            self._draws.steady = None  # its rows are taken
            self._draws.guesses = self._chain.launch(work, draws, length)

    @torch.inference_mode()
    def draft_next(self, work: Work, draws: Sequence[Draw], length: int) -> None:
        """The same as soon as the plan under way is known, which checks what was drafted for these sequences, in this
        order; chunks and draws say where that plan began, and their blocks reach as far as they may come."""
        assert self._chain is not None, "nobody drafts here"
        with on(self.device):
            self._draws.guesses = self._chain.arm(work, draws, length)

    def launch(self, plan: Plan) -> Ticket:
        return self.begin(plan)()

    @torch.inference_mode()
    def begin(self, plan: Plan) -> Callable[[], Ticket]:
        """All but the draws, which are left to be made before the next plan comes."""
        with on(self.device):
            return partial(self._draw, plan, self._begin(plan))

    @torch.inference_mode()
    def _draw(self, plan: Plan, begun: Begun) -> Ticket:
        with on(self.device):
            ticket = begun()
            if self._chain is not None:
                ticket = self._told_with_drafts(self._chain, plan, ticket)
        return partial(self._checked, ticket) if self._checks else ticket

    def _told_with_drafts(self, chain: Chain, plan: Plan, ticket: Ticket) -> Ticket:
        """What was drafted is told with what was drawn, if this plan checks drafts: as many of each sequence."""
        num_members = 0 if plan.onward is None else len(plan.onward.members)
        firsts, places, length = [], [], 0
        for index, draw in enumerate(plan.draws, start=num_members):
            if draw.presumed == 1:
                model, chunk, _ = draw.rows[0]
                token_id = plan.works[model].chunks[chunk].token_ids[1]
                if token_id <= GUESS:
                    firsts.append(index - 1)
                    places.append((GUESS - token_id) // MOST_DRAFTED)
            length = max(length, draw.presumed)
        if not firsts:
            return ticket
        draws = np.array(firsts)[:, None] + np.arange(length + 1)
        rows = self._draws.last.rows if self._draws.by_kernels else None
        told = chain.told_with(ticket, draws, rows, np.array(places, np.int64))

        def told_there() -> StepResult:
            with torch.inference_mode(), on(self.device):
                return told()

        return told_there

    def _checked(self, ticket: Ticket) -> StepResult:
        result = ticket()
        for check in self._checks:
            check()
        return result

    def _begin(self, plan: Plan) -> Begun:
        if not plan.works[-1].is_empty:
            self._aside.join()
        for lane, work in zip(self.lanes, plan.works, strict=True):
            lane.layers.pool.move(work)
        if not any(work.chunks for work in plan.works) and plan.onward is None:
            return _nothing_drawn
        draws = self._draws
        if draws.steady is not None and draws.steady.goes_on_as(plan):
            return self._go_on(draws.steady, plan)
        draws.steady = None
        moving, last = self._moving(plan), replace(draws.last, guesses=draws.guesses)
        for lane, work, onward in zip_longest(self.lanes, plan.works, (plan.onward,)):
            lane.begin(work, last, onward, num_wanted=self._num_wanted(plan), moving=moving)
        tracks = self._tracks(plan)
        self._compute(self._wanted(plan, tracks))
        told = report_prompts(
            self.lanes, plan.prompt_reports, batch_invariant=self._batch_invariant, kernels=self._kernels
        )
        begun = draws.begin(plan, tracks) if tracks else _nothing_drawn
        return partial(_drawn_and_told, begun, told) if told.reports else begun

    @torch.inference_mode()
    def capture_draws(self, count: int) -> None:
        """Draws of every kind for so many rows, from what the last step, a captured one, left; nobody reads them."""
        with on(self.device):
            self._draws.capture(count)

    @torch.inference_mode()
    def capture_logits(self, count: int) -> None:
        """After as many rows as so many draws may be from, in a step with prompts; one has come before."""
        with on(self.device):
            for lane in self.lanes:
                lane.capture_logits(count)

    def _go_on(self, steady: Steady, plan: Plan) -> Begun:
        moving = self._moving(plan)
        for lane, work, drawing_rows in zip(self.lanes, plan.works, steady.drawing_rows, strict=True):
            lane.go_on(work, drawing_rows, moving)
        self._compute([np.empty(0, np.int64)] * len(self.lanes))
        return self._draws.go_on(steady, plan)

    def _compute(self, wanted: Sequence[Int64s]) -> None:
        """All lanes. Decodes of a second model run beside those of the first."""
        first, *others = zip(self.lanes, wanted, strict=True)
        for lane, rows in others:
            if self.computes_both and lane.leaves_all and first[0].leaves_all:
                with self._aside.running():
                    lane.compute(rows, self._draws.tokens, graphs=self._aside.graphs)
            else:
                lane.compute(rows, self._draws.tokens)
        first[0].compute(first[1], self._draws.tokens)
        self._aside.join()

    def _moving(self, plan: Plan) -> Moving | None:
        chunks = [
            plan.draws[index].rows[0].chunk
            for selection in plan.selections
            if selection.totals is None
            for index in selection.draws
        ]
        return Moving(np.array(chunks, np.int64), self._draws.parents) if chunks else None

    def _tracks(self, plan: Plan) -> list[DrawTrack]:
        """Where the draws of a plan are from, those of members first."""
        if plan.onward is None:
            by_track = zip(*(draw.rows for draw in plan.draws), strict=True)
            return [DrawTrack(rows[0].model, self.lanes[rows[0].model].rows_of(rows)) for rows in by_track]
        lane, count = self.lanes[0], len(plan.onward.members)
        return [
            DrawTrack(0, np.concatenate([lane.first_rows[:count], lane.rows_of([draw.rows[0] for draw in plan.draws])]))
        ]

    def _num_wanted(self, plan: Plan) -> int | None:
        """The most rows of one lane whose logits draws need; None where prompts are told of too."""
        if plan.prompt_reports:
            return None
        num_members = 0 if plan.onward is None else len(plan.onward.members)
        num_draws = len(plan.draws)
        if num_members + num_draws > self._max_num_seqs:  # many children may draw from one prompt
            num_draws = len({draw.rows for draw in plan.draws})
        return (num_members + num_draws) * self._rows_each

    def _wanted(self, plan: Plan, tracks: Sequence[DrawTrack]) -> list[Int64s]:
        """The rows of each lane whose logits somebody needs, ascending."""
        wanted: list[list[Int64s]] = [[] for _ in self.lanes]
        for track in tracks:
            if not self.lanes[track.model].leaves_all:
                wanted[track.model].append(self.lanes[track.model].own(track.rows))
        for asked in plan.prompt_reports:
            for row in asked.rows():
                wanted[row.model].append(rows_asked(self.lanes, row, len(asked.targets)))
        return [np.unique(np.concatenate(rows)) if rows else np.empty(0, np.int64) for rows in wanted]


def _nothing_drawn() -> Ticket:
    return partial(StepResult, [], [])


def _drawn_and_told(begun: Begun, told: Told) -> Ticket:
    result = begun()()
    result.prompts.extend(told.reports)
    result.comparisons.update(told.comparisons)
    return lambda: result
