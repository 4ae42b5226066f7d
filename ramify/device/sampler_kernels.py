"""What a device step asks of kernels that draw: gpu/sampler.py has them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from torch import Tensor

from ramify.device.reads import Int64s
from ramify.engine.demands import SamplerChoice
from ramify.engine.plan import Asking, Draw, Selection, StepResult, TokenReport

# Waits for what was drawn in these rows, and tells it in the order of the draws.
Read = Callable[[Sequence[int] | Int64s, Sequence[Asking]], StepResult]


class SamplerKernels(Protocol):
    """Draws from logits and columns to tokens in buffers, without the host."""

    @property
    def tokens(self) -> Tensor:
        """(max_rows + num_drafts,) what was drawn last, row by row, and behind it room for what others draft."""

    @property
    def most_reported(self) -> int:
        """How many of the likeliest tokens it can tell of."""

    def tell(self, logits: Tensor, token_ids: Tensor, count: int) -> list[TokenReport]:
        """Of given tokens (R,), one of each row of logits (R, vocabulary), beside its `count` likeliest tokens."""

    @property
    def parents(self) -> Tensor:
        """(max_rows,) of the beams that were chosen last, row by row: the rows of their lane that they go on from."""

    def reset(self) -> None:
        """Nobody of earlier draws goes on, in whatever state one that was broken off left what is kept of them."""

    def serves(self, asked: SamplerChoice) -> bool:
        """Whether it can draw what a request asks for."""

    def choose(self, asked: Collection[SamplerChoice]) -> SamplerChoice:
        """The cheapest that serves all that is asked for, each of which it can."""

    def settle(self, draws: Sequence[Draw]) -> Int64s:
        """Where each draw's controls find what they look at: the slots that `draw` is told in a column."""

    def go_on(self, slots: Int64s) -> None:
        """The draws that settled there, one position on."""

    def follow(self, slots: Int64s, drawing: Sequence[Asking]) -> None:
        """From now on, draws that settled there may draw what their grammars allow after all that is known of them."""

    def select(self, selections: Sequence[Selection], draws: Sequence[Draw], rows: Int64s, lane_rows: Int64s) -> None:
        """From now on, draws whose choice says so choose the continuations of these beams, which draw in these rows."""

    def draw(self, logits: Sequence[Tensor], integers: Tensor, floats: Tensor, choice: SamplerChoice) -> None:
        """From the logits (R, vocabulary) of each track, and the columns of R draws."""

    def every_choice(self) -> Sequence[SamplerChoice]:
        """All that `choose` may answer."""

    def fetch(self, choice: SamplerChoice, *, at_once: bool = False) -> Read:
        """Asks for what was drawn last; `at_once`: it is read before anything else is fetched."""
