"""What host and device tell each other: a Plan goes down, a StepResult comes up.

What is made for every row of every step is a NamedTuple: as frozen as a dataclass, and several times quicker to make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ramify.engine.demands import Demands, SamplerChoice
from ramify.outputs import Kept, MixtureReport
from ramify.structured.matcher import Matcher

NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
PENDING = -1  # stands for a token that the device has drawn and the host does not know yet
# And for tokens that it has drafted: GUESS for the first of the first row, and one less for each further one.
GUESS = -2
MOST_DRAFTED = 8  # tokens of a sequence in a step
# Makes a NamedTuple from a tuple of its fields in 0.13 us where calling its name takes 0.25: every row of every step
# needs five of them, a tenth of the host's time for 256 rows.
quickly = tuple.__new__
Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


class Chunk(NamedTuple):
    """Positions start, start + 1, … of one track: the tokens there, and the blocks of all positions up to the last."""

    token_ids: Sequence[int]
    start: int
    block_table: tuple[int, ...]
    key: str = ""  # the track's name

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class BlockCopy(NamedTuple):
    """The target block gets the source's content, in all layers."""

    source: int
    target: int


class SharedPrefix(NamedTuple):
    """Chunks whose tracks hold the same leading blocks, computed before this step: they may be read once for all.

    `sharers` are always indices among the chunks of the work that this belongs to, behind those who just go on.
    """

    num_blocks: int
    sharers: tuple[int, ...]


@dataclass(slots=True)
class Work:
    """What one model moves and computes in one step; the scheduler fills it, and from then on it is only read.

    The device swaps out, copies, swaps in, makes the late copies, and computes, in this order. All of it is plain data:
    it can be written to a wire and read in another process.
    """

    chunks: list[Chunk] = field(default_factory=list)
    shared: list[SharedPrefix] = field(default_factory=list)
    swaps_out: list[BlockCopy] = field(default_factory=list)  # from device to host
    copies: list[BlockCopy] = field(default_factory=list)
    swaps_in: list[BlockCopy] = field(default_factory=list)  # from host to device
    late_copies: list[BlockCopy] = field(default_factory=list)  # of what came back in this step

    @property
    def is_empty(self) -> bool:
        return not (self.chunks or self.swaps_out or self.copies or self.swaps_in or self.late_copies)


class Row(NamedTuple):
    """One position of a step: of a model's work, which chunk, and which of the chunk's tokens.

    A model that drafts has computed its positions before: chunk -1 is then the first of the sequences that it drafted
    for, -2 the second, and so on.
    """

    model: int
    chunk: int
    offset: int


class Draw(NamedTuple):
    """One token to draw for one child, from the logits after these rows (one for each track).

    Siblings that still share everything draw from the same rows. `position` is the index in the output, so that the
    noise does not know how long the prompt was. `output` is what the child has so far, and `presumed` how many of its
    last tokens are only drafted: the draw counts if those before it draw them.
    """

    request_id: str
    parent: int  # the child whose sequence this draw continues
    child: int
    position: int
    rows: tuple[Row, ...]
    demands: Demands
    output: Sequence[int] = ()
    presumed: int = 0
    matcher: Matcher | None = None  # says what the grammar allows, where there is one

    def run_over(self, drafted: Sequence[int]) -> list[Draw]:
        """This draw and one after each drafted token; its rows are then those after the last of them.

        Who is drafted for on the device alone asks for nothing that looks at its output.
        """
        back = len(drafted)
        is_guessed = drafted[0] <= GUESS
        return [
            self._replace(
                position=self.position + count,
                rows=tuple([quickly(Row, (model, chunk, last - back + count)) for model, chunk, last in self.rows]),
                output=self.output if is_guessed else [*self.output, *drafted[:count]],
                presumed=count,
            )
            for count in range(back + 1)
        ]

    def goes_on_from(self, output: Sequence[int], drafted: Sequence[int]) -> bool:
        """Whether a child whose output this is has drawn all that was presumed, while draws are recorded in order."""
        return not self.presumed or (len(output) == self.position and output[-1] == drafted[self.presumed - 1])


class Asking(Protocol):
    """What a token is drawn for: a draw, or a member."""

    @property
    def demands(self) -> Demands: ...

    @property
    def output(self) -> Sequence[int]: ...

    @property
    def matcher(self) -> Matcher | None: ...


class Member(NamedTuple):
    """Who just goes on, a sequence of one track: what of it stays the same from step to step."""

    key: str  # the track's name
    request_id: str
    child: int
    demands: Demands
    output: Sequence[int]  # what the host knows of it
    matcher: Matcher | None = None

    def draw(self, place: int, index: int) -> Draw:
        """The token of this place in its output, after what the chunk of this index computes."""
        row = Row(0, index, 0)
        return Draw(
            self.request_id, self.child, self.child, place, (row,), self.demands, self.output, matcher=self.matcher
        )


@dataclass(frozen=True, slots=True, eq=False)
class Onward:
    """Tracks of the first model that just go on: each computes the token that the step before drew for it, which the
    host does not know yet, and draws the next one.

    That is most of what there is to do in most steps, so it is told in columns, an entry for each member, and a step
    costs what changed in it. Members are the same list for as long as nobody comes or leaves.
    """

    members: Sequence[Member]
    changed: Sequence[int]  # where another member stands than in the step before, if that had members
    asked: Set[SamplerChoice]  # what all of them ask a sampler for
    positions: Integers  # (M,) what is computed
    places: Integers  # (M,) what is drawn, in the output
    blocks: Integers  # (M,) of these positions
    tables: Sequence[tuple[int, ...]]  # (M) the blocks of all positions up to these
    sources: Integers  # (M,) which draw of the plan before drew the token
    following: Sequence[int] = ()  # members that follow a grammar
    matchers: Sequence[Matcher] = ()  # theirs

    def keys(self) -> list[str]:
        return [member.key for member in self.members]

    def draw(self, index: int) -> Draw:
        return self.members[index].draw(int(self.places[index]), index)

    def draws(self) -> list[Draw]:
        drawn = zip(self.members, self.places.tolist(), strict=True)
        return [member.draw(place, index) for index, (member, place) in enumerate(drawn)]

    def chunks(self) -> list[Chunk]:
        columns = zip(self.members, self.positions.tolist(), self.tables, strict=True)
        return [Chunk((PENDING,), position, table, member.key) for member, position, table in columns]


class Selection(NamedTuple):
    """All beams of one search, whose continuations the device chooses by itself: it can go on before the host knows."""

    number: int  # of the request: names the search from step to step
    draws: range  # of the plan's own draws, those of its beams
    totals: Sequence[float] | None  # of each beam, the sum of its weights; None: as the device's last choice left them
    order: Sequence[int] = ()  # of each beam, how many stand before it; told with the totals


class PromptReport(NamedTuple):
    """Logprobs to report of `targets`, which follow this row and those after it, and of the likeliest tokens there.

    `second` is where the same targets begin for the second of two models, which are compared there.
    """

    request_id: str
    first: Row
    targets: Sequence[int]
    demands: Demands
    second: Row | None = None

    def rows(self) -> tuple[Row, ...]:
        return (self.first,) if self.second is None else (self.first, self.second)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: every model's work, then what is drawn and reported from the logits it gives.

    Who just goes on stands before all others: among the chunks of the first model that its shared prefixes name, and
    among the draws in the result.
    """

    works: Sequence[Work]
    draws: Sequence[Draw] = ()
    prompt_reports: Sequence[PromptReport] = ()
    onward: Onward | None = None
    selections: Sequence[Selection] = ()

    def spelled_out(self) -> Plan:
        """The same with a chunk and a draw for everyone."""
        if self.onward is None:
            return self
        count = len(self.onward.members)

        def behind(row: Row) -> Row:
            return Row(row.model, row.chunk + count, row.offset) if row.model == 0 else row

        draws = [draw._replace(rows=tuple(map(behind, draw.rows))) for draw in self.draws]
        reports = [
            report._replace(first=behind(report.first), second=None if report.second is None else behind(report.second))
            for report in self.prompt_reports
        ]
        first, *others = self.works
        whole = replace(first, chunks=[*self.onward.chunks(), *first.chunks])
        return Plan([whole, *others], [*self.onward.draws(), *draws], reports)


class TokenReport(NamedTuple):
    """One token's logprob and rank, and the likeliest tokens in its stead, likeliest first.

    `processed` says the same of the distribution that the token was drawn from, where both were asked for.
    """

    logprob: float
    rank: int
    top_token_ids: Integers
    top_logprobs: Floats
    processed: TokenReport | None = None
    kept: Kept | None = None  # what it was drawn from, where that was asked for

    def first(self, count: int) -> TokenReport:
        """With no more than `count` of the likeliest."""
        return self._replace(
            top_token_ids=self.top_token_ids[:count],
            top_logprobs=self.top_logprobs[:count],
            processed=None if self.processed is None else self.processed.first(count),
        )


class Comparison(NamedTuple):
    """What the second of two models says of a token that the first reports too, and how far apart they are there."""

    report: TokenReport
    forward_kl: float  # KL(first || second) over the whole vocabulary
    reverse_kl: float  # KL(second || first)


class Expansions(NamedTuple):
    """The tokens that could continue a beam, likeliest first, in columns: of nine, one is taken.

    Their raw logprobs, their logprobs after all controls, and what is told of each if that was asked.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    weights: Sequence[float]
    reports: Sequence[TokenReport] | None = None
    mixtures: Sequence[MixtureReport] | None = None
    keys: Sequence[float] | None = None  # without replacement: their logprobs with their noise, largest first


class Selected(NamedTuple):
    """What the device chose for the place of a beam: its draw's token is the one that it goes on with.

    Told where this is all that happened: as many go on as there are beams, and nothing ended.
    """

    parent: int  # the place, among the beams of its search, of the one that it goes on from
    standing: int  # how many stand before it
    total: float  # the sum of its weights


@dataclass(frozen=True, slots=True)
class StepResult:
    """What was drawn, draw by draw. A draw that failed has an entry in `faults` and a meaningless token."""

    token_ids: list[int]
    logprobs: list[float]  # of the drawn token, by the model's own distribution
    faults: dict[int, str] = field(default_factory=dict)
    reports: dict[int, TokenReport] = field(default_factory=dict)  # of draws that asked for logprobs, or what was kept
    expansions: dict[int, Expansions] = field(default_factory=dict)  # of draws that asked for candidates
    prompts: list[list[TokenReport]] = field(default_factory=list)  # one list per prompt report of the plan
    mixtures: dict[int, MixtureReport] = field(default_factory=dict)  # of draws from two models
    comparisons: dict[int, list[Comparison]] = field(default_factory=dict)  # of prompt reports on two models
    selected: dict[int, Selected] = field(default_factory=dict)  # of beams, instead of their candidates
    guesses: list[int] = field(default_factory=list)  # what stood for GUESS, GUESS - 1, …: MOST_DRAFTED for each row

    @classmethod
    def of_parts(cls, parts: Sequence[tuple[Sequence[int], StepResult]]) -> StepResult:
        """One result of several, each with the draws that it tells of; together they tell of every draw once."""
        count = sum(len(indices) for indices, _ in parts)
        whole = cls([0] * count, [0.0] * count)
        for indices, part in parts:
            for index, token_id, logprob in zip(indices, part.token_ids, part.logprobs, strict=True):
                whole.token_ids[index], whole.logprobs[index] = token_id, logprob
            whole.faults.update({indices[own]: fault for own, fault in part.faults.items()})
            whole.reports.update({indices[own]: report for own, report in part.reports.items()})
            whole.expansions.update({indices[own]: told for own, told in part.expansions.items()})
            whole.mixtures.update({indices[own]: mixture for own, mixture in part.mixtures.items()})
        return whole


Ticket = Callable[[], StepResult]  # waits for the result of a launched plan


def guessed(row: int, count: int) -> tuple[int, ...]:
    """What stands for the first tokens that the device has drafted for a row."""
    first = GUESS - row * MOST_DRAFTED
    return tuple(range(first, first - count, -1))
