"""What host and device tell each other: a frozen Plan goes down, a StepResult comes up.

What is made for every row of every step is a NamedTuple: as frozen as a dataclass, and several times quicker to make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ramify.outputs import MixtureReport
from ramify.sampling_params import SamplingParams, SamplingStrategy

SamplerKind = Literal["plain", "filtered", "full"]  # temperature alone; top-k, top-p and min-p too; anything
NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
# Makes a NamedTuple from a tuple of its fields at half the cost of calling its name: for what every row of every step
# needs one of.
quickly = tuple.__new__
Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


class Chunk(NamedTuple):
    """Positions start, start + 1, … of one track: the tokens there, and the blocks of all positions up to the last."""

    model: int
    token_ids: Sequence[int]
    start: int
    block_table: tuple[int, ...]
    key: str = ""  # the track's name
    role: int = 0  # its place among the tracks of its sequence

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, eq=False)
class Rules:
    """What a request's parameters mean to the sampler, resolved once. All its rows share one object."""

    params: SamplingParams
    end_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()  # as token ids
    prompts: tuple[Sequence[int], ...] = ((),)  # of each track
    num_candidates: int = 0  # beams: how many of the likeliest tokens to report instead of drawing one

    @property
    def diversity_penalty(self) -> float:
        """What a token loses per earlier sibling that took it in this step; beams do that sum on the host."""
        diverse = self.params.resolved_strategy is SamplingStrategy.DIVERSE
        return self.params.diversity_penalty if diverse else 0.0

    @cached_property
    def sampler_kind(self) -> SamplerKind:
        """The cheapest sampler that serves a row of this request."""
        params = self.params
        if (
            params.looks_back
            or params.logit_bias
            or params.allowed_token_ids
            or params.min_tokens
            or params.num_together is not None
        ):
            return "full"
        narrows = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        return "filtered" if narrows and params.temperature else "plain"

    @cached_property
    def distinct_prompts(self) -> tuple[Integers, ...]:
        return tuple(np.unique(np.asarray(prompt, dtype=np.int64)) for prompt in self.prompts)


class Draw(NamedTuple):
    """One token to draw for one child, from the logits after the last position of its chunks (one per track).

    Siblings that still share everything draw from the same chunk. `position` is the index in the output, so that
    the noise does not know how long the prompt was. `output` is what the child has so far.
    """

    request_id: str
    parent: int  # the child whose sequence this draw continues
    child: int
    position: int
    seed: int
    chunks: tuple[int, ...]
    rules: Rules
    output: Sequence[int] = ()


class PromptReport(NamedTuple):
    """Logprobs to report of `targets`, which follow rows first, first + 1, … of a chunk, and of the likeliest there."""

    request_id: str
    chunk: int
    first: int
    targets: Sequence[int]
    num_top: int


class BlockCopy(NamedTuple):
    """The target block gets the source's content, in all layers, before anything of this step is computed."""

    model: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Chunks whose tracks hold the same leading blocks, computed before this step: they may be read once for all."""

    num_blocks: int
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. The device swaps out, copies, swaps in, makes the late copies, computes, and draws, in this order."""

    chunks: tuple[Chunk, ...]
    draws: tuple[Draw, ...]
    copies: tuple[BlockCopy, ...] = ()
    swaps_out: tuple[BlockCopy, ...] = ()  # from device to host
    swaps_in: tuple[BlockCopy, ...] = ()  # from host to device
    late_copies: tuple[BlockCopy, ...] = ()
    shared: tuple[SharedPrefix, ...] = ()
    prompt_reports: tuple[PromptReport, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    def of_model(self, model: int) -> Work:
        """What one model computes and moves."""
        places = [place for place, chunk in enumerate(self.chunks) if chunk.model == model]
        own = {place: number for number, place in enumerate(places)}
        return Work(
            chunks=tuple(self.chunks[place] for place in places),
            places=tuple(places),
            shared=tuple(
                SharedPrefix(group.num_blocks, tuple(own[chunk] for chunk in group.chunks))
                for group in self.shared
                if group.chunks[0] in own
            ),
            copies=tuple(copy for copy in self.copies if copy.model == model),
            swaps_out=tuple(copy for copy in self.swaps_out if copy.model == model),
            swaps_in=tuple(copy for copy in self.swaps_in if copy.model == model),
            late_copies=tuple(copy for copy in self.late_copies if copy.model == model),
        )


@dataclass(frozen=True, slots=True)
class Work:
    """One model's part of a plan: `places` are its chunks' in the plan; groups name its chunks by their places here."""

    chunks: tuple[Chunk, ...]
    places: tuple[int, ...]
    shared: tuple[SharedPrefix, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    swaps_out: tuple[BlockCopy, ...] = ()
    swaps_in: tuple[BlockCopy, ...] = ()
    late_copies: tuple[BlockCopy, ...] = ()


class TokenReport(NamedTuple):
    """One token's logprob and rank, and the likeliest tokens at its place, likeliest first."""

    logprob: float
    rank: int
    top_token_ids: Integers
    top_logprobs: Floats

    def first(self, count: int) -> TokenReport:
        """With no more than `count` of the likeliest."""
        return self._replace(top_token_ids=self.top_token_ids[:count], top_logprobs=self.top_logprobs[:count])


class Expansion(NamedTuple):
    """A token that could continue a beam: its raw logprob, its logprob after all controls, and its report if asked."""

    token_id: int
    logprob: float
    weight: float
    report: TokenReport | None = None
    mixture: MixtureReport | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What was drawn, draw by draw. A draw that failed has an entry in `faults` and a meaningless token."""

    token_ids: list[int]
    logprobs: list[float]  # of the drawn token, by the model's own distribution
    faults: dict[int, str] = field(default_factory=dict)
    reports: dict[int, TokenReport] = field(default_factory=dict)  # of draws that asked for logprobs
    expansions: dict[int, list[Expansion]] = field(default_factory=dict)  # of draws that asked for candidates
    prompts: list[list[TokenReport]] = field(default_factory=list)  # one list per prompt report of the plan
    mixtures: dict[int, MixtureReport] = field(default_factory=dict)  # of draws from two models


Ticket = Callable[[], StepResult]  # waits for the result of a launched plan
