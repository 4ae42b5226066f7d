"""What host and device tell each other: a frozen Plan goes down, a StepResult comes up.

What is made for every row of every step is a NamedTuple: as frozen as a dataclass, and several times quicker to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ramify.sampling_params import SamplingParams


class Chunk(NamedTuple):
    """Positions start, start + 1, … of one track: the tokens there, and the blocks of all positions up to the last."""

    model: int
    token_ids: Sequence[int]
    start: int
    block_table: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class Draw(NamedTuple):
    """One token to draw for one child, from the logits after the last position of its chunks (one per track).

    Siblings that still share everything draw from the same chunk. `position` is the index in the output, so that
    the noise does not know how long the prompt was.
    """

    request_id: str
    seq_id: str
    child: int
    position: int
    seed: int
    chunks: tuple[int, ...]
    params: SamplingParams
    end_token_ids: frozenset[int]


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
    """One step. The device first swaps out, then copies, then swaps in, then computes, then draws."""

    chunks: tuple[Chunk, ...]
    draws: tuple[Draw, ...]
    copies: tuple[BlockCopy, ...] = ()
    swaps_out: tuple[BlockCopy, ...] = ()  # from device to host
    swaps_in: tuple[BlockCopy, ...] = ()  # from host to device
    shared: tuple[SharedPrefix, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What was drawn, draw by draw. A draw that failed has an entry in `faults` and a meaningless token."""

    token_ids: list[int]
    logprobs: list[float]  # of the drawn token, by the model's own distribution
    faults: dict[int, str] = field(default_factory=dict)
