"""A chain: passes of one model, each from the token that was drawn after the one before, all launched at once.

    pass 0    the last token of each sequence, which the host knows     -> logits -> a drafted token
    pass 1    that token, one position on                               -> logits -> another
    pass k    the last drafted token                                    -> logits

A pass is the graph of a step of decodes, and a draw with the noise that the draft will meet. The passes write keys and
values of all drafted tokens. Where the model is one of those that are drafted for, their logits are left for the step
that checks the drafts: it need not compute them again.
Nobody drafts from the last pass, so it runs aside, while the other model checks: both read their weights, and neither
fills the device. What was drafted for a sequence is in `tokens`, MOST_DRAFTED entries for each, behind what steps draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ramify.device.aside import Aside
from ramify.device.graphs import Graphs, Shape
from ramify.device.lane import Lane
from ramify.device.last_draws import LastDraws
from ramify.device.reads import Int64s
from ramify.device.rows import DrawRows
from ramify.device.sampler_kernels import SamplerKernels
from ramify.engine.demands import SamplerChoice
from ramify.engine.plan import MOST_DRAFTED, Draw, StepResult, Ticket, Work
from ramify.sampling import columns as column

_NO_ROWS = np.empty(0, np.int64)


class Room(NamedTuple):
    """What whoever checks drafts has room for: sequences, and tokens that it knows."""

    max_rows: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class _Passes:
    work: Work
    length: int  # of each draft
    rows: Int64s  # of each chunk
    firsts: Int64s  # where the drafts of each begin in the tokens
    guesses: Int64s  # where those are that GUESS, GUESS - 1, … stand for
    choice: SamplerChoice

    @property
    def starts(self) -> Int64s:
        return np.array([chunk.start for chunk in self.work.chunks], np.int64)


class Chain:
    def __init__(
        self,
        lane: Lane,
        kernels: SamplerKernels,
        graphs: Graphs,
        aside: Aside,
        *,
        tokens: Tensor,
        room: Room,
        leaves_logits: bool = False,
    ) -> None:
        """kernels: for one model, that nothing else draws with meanwhile. graphs: of its passes but the last, which
        runs aside. tokens: what steps draw, with room for drafts behind it. leaves_logits: the step that checks them
        reads them."""
        self.room = room
        # Models of one tokenizer may be padded to different sizes.
        self._num_known = min(room.vocab_size, lane.layers.vocab_size)
        self._leaves_logits = leaves_logits
        max_rows = room.max_rows
        self._lane = lane
        self._kernels = kernels
        self._graphs, self._aside = graphs, aside
        self._tokens = tokens
        self._first = len(tokens) - max_rows * MOST_DRAFTED  # of the room for drafts
        self._drafts = tokens[self._first :].view(max_rows, MOST_DRAFTED)
        self._rows = DrawRows(max_rows, tokens.device)
        on_gpu = tokens.device.type == "cuda"
        self._told = torch.zeros(max_rows, MOST_DRAFTED, dtype=torch.int64, pin_memory=on_gpu)
        self._drawn = torch.zeros(self._first, dtype=torch.int64, pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self.reset()

    def reset(self) -> None:
        """Nothing is drafted."""
        self._lane.foresee(_NO_ROWS)
        self._last: _Passes | None = None
        self._armed: _Passes | None = None

    def launch(self, work: Work, draws: Sequence[Draw], length: int) -> Int64s:
        """Drafts so many tokens behind the last one of each chunk; does not wait for them.

        Returns where the tokens are that stand for GUESS, GUESS - 1, …
        """
        self._armed = None
        passes = self._place(work, draws, length)
        self._run(passes)
        return passes.guesses

    def arm(self, work: Work, draws: Sequence[Draw], length: int) -> Int64s:
        """The same as soon as the step under way is known, which checks drafts of the same sequences, in this order:
        each chunk stands where the last one stood, and its blocks reach as far as it may come.

        All is made ready that does not depend on what was drawn: the device waits for the rest.
        """
        self._armed = self._place(work, draws, length)
        return self._armed.guesses

    def _place(self, work: Work, draws: Sequence[Draw], length: int) -> _Passes:
        """Gives chunks their rows, and these their numbers."""
        lane, count = self._lane, len(work.chunks)
        self._aside.join()
        lane.layers.pool.move(work)
        lane.begin(work, LastDraws(), num_wanted=count)
        rows = lane.first_rows  # all of the first ones
        if self._leaves_logits:
            lane.foresee(rows * (length + 1))
        asked = {draw.demands.choice._replace(reports=False, controls=False, charges=False) for draw in draws}
        self._rows.settle(draws, rows, lane.size, slots=np.full(count, column.NO_SLOT))
        firsts = self._first + rows * MOST_DRAFTED
        guesses = (firsts[:, None] + np.arange(MOST_DRAFTED)).reshape(-1)
        return _Passes(work, length, rows, firsts, guesses, self._kernels.choose(asked))

    def _run(self, passes: _Passes) -> None:
        lane, length, count = self._lane, passes.length, len(passes.rows)
        for turn in range(length):
            if turn:
                lane.go_on(passes.work, passes.firsts + turn - 1)
                self._rows.go_on(passes.rows)
            lane.compute(_NO_ROWS, self._tokens, graphs=self._graphs)
            self._leave_logits(passes, turn)
            self._draw(lane.size, passes.choice)
            # Whatever is drawn from logits that mean nothing must still be a token.
            torch.clamp(self._kernels.tokens[:count], 0, self._num_known - 1, out=self._drafts[:count, turn])
        self._told[:count].copy_(self._drafts[:count], non_blocking=True)
        with self._aside.running():
            lane.go_on(passes.work, passes.firsts + length - 1)
            lane.compute(_NO_ROWS, self._tokens, graphs=self._aside.graphs)
            self._leave_logits(passes, length)
        self._last = passes

    def _leave_logits(self, passes: _Passes, turn: int) -> None:
        if self._leaves_logits:
            count, each = len(passes.rows), passes.length + 1
            left = self._lane.foreseen_logits[: count * each].view(count, each, -1)
            left[:, turn].copy_(self._lane.left_logits(count))

    # -- what is drawn where tokens were drafted ---------------------------------------------------------------

    def told_with(self, ticket: Ticket, draws: Int64s, rows: Int64s | None, places: Int64s) -> Ticket:
        """The result of the step that checks the drafts, with what was drafted.

        draws (n, length + 1): of each sequence, which draws of the step those are after its last token and its drafts.
        rows: of all draws; None: only the result knows what they drew. places (n,): of each sequence, its place among
        those that were drafted for.
        """
        last = self._last
        assert last is not None, "somebody drafted"
        if rows is not None:
            # All of them: nobody waits for the result any longer than for these.
            self._drawn.copy_(self._tokens[: len(self._drawn)], non_blocking=True)
            if self._arrived is not None:
                self._arrived.record()

        def told() -> StepResult:
            result = None
            if rows is None:
                result = ticket()
                drawn = np.array(result.token_ids, np.int64)[draws]
            else:
                if self._arrived is not None:
                    self._arrived.synchronize()
                drawn = self._drawn.numpy()[rows[draws]]
            drafted = self._told.numpy()
            right = self._count_right(drawn, drafted, last.rows[places])
            guesses = drafted[last.rows].reshape(-1).tolist()
            armed, self._armed = self._armed, None
            if armed is not None:
                # A token beyond what it knows is not drafted behind again; until then it must be one that it knows.
                last_drawn = np.minimum(drawn[np.arange(len(right)), right], self._num_known - 1)
                self._lane.move_to(armed.work, armed.starts + right + 1, last_drawn)
                self._rows.go_on(armed.rows, by=right + 1)
                self._run(armed)
            return replace(ticket() if result is None else result, guesses=guesses)

        return told

    @staticmethod
    def _count_right(drawn: Int64s, drafted: Int64s, rows: Int64s) -> Int64s:
        """Of what was drafted (max_rows, MOST_DRAFTED) for these rows, how many are what was drawn (n, length + 1), up
        to the first that is not."""
        same = drawn[:, :-1] == drafted[rows, : drawn.shape[1] - 1]
        count: Int64s = np.logical_and.accumulate(same, axis=1).sum(1)
        return count

    def forget_addresses(self) -> None:
        self._graphs.forget()

    def _draw(self, size: int, choice: SamplerChoice) -> None:
        def body() -> None:
            self._kernels.draw([self._lane.left_logits(size)], *self._rows.columns(size), choice)

        self._graphs.run(Shape("drafts", choice, size), body)
