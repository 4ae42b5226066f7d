"""What the leading rank tells the others: one line of JSON an order, over a socket. Only plain numbers and names.

    Load        the models, and this rank's place among those that share them; answered when it is read, and when
                they are loaded
    Serve       how large the caches are: layers are made, and answered for
    Measure     what its GPU has and what of it was taken since then; answered with the numbers
    Move        blocks of a model's cache move
    Prepare     who reads what in a step
    Forward     the rows of a step, whose numbers the leading rank sends
    Logits      after what was computed last, or after rows that the leading rank sends
    Replace     a parameter by another, which the leading rank sends whole

An order says what the leading rank does itself at that moment, so that what ranks compute together is in step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from ramify.device.reads import Reads
from ramify.engine.plan import BlockCopy, SharedPrefix, Work
from ramify.engine.sharing import Table
from ramify.errors import ProtocolError
from ramify.parallel.group import Backend

MOVES = ("swaps_out", "copies", "swaps_in", "late_copies")
COLUMNS = ("first_rows", "num_rows", "begins", "ends")


@dataclass(frozen=True, slots=True)
class Load:
    models: list[dict[str, Any]]  # options of EngineConfig.from_options
    rank: int
    size: int
    meeting_point: str
    backend: Backend
    uses_panels: bool


@dataclass(frozen=True, slots=True)
class Serve:
    num_blocks: int
    num_host_blocks: int
    max_rows: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Measure:
    pass


@dataclass(frozen=True, slots=True)
class Move:
    model: int
    moves: dict[str, list[list[int]]]

    @classmethod
    def of(cls, model: int, work: Work) -> Move | None:
        """None where nothing moves."""
        moves = {name: [list(copy) for copy in getattr(work, name)] for name in MOVES if getattr(work, name)}
        return cls(model, moves) if moves else None

    def work(self) -> Work:
        work = Work()
        for name, copies in self.moves.items():
            setattr(work, name, [BlockCopy(*copy) for copy in copies])
        return work


@dataclass(frozen=True, slots=True)
class Prepare:
    model: int
    columns: list[list[int]]
    tables: list[list[int] | None]  # None: the one that stood there in the step before
    shared: list[tuple[int, list[int]]]
    block_size: int
    size: int
    num_singles: int

    @classmethod
    def of(cls, model: int, reads: Reads, known: Sequence[Table] = ()) -> Prepare:
        """known: the tables of the step before. A table is a new one when it has changed, so most are still there."""
        places = zip_longest(reads.tables, known[: len(reads.tables)])
        return cls(
            model,
            [getattr(reads, name).tolist() for name in COLUMNS],
            [None if table is before else list(table) for table, before in places],
            [(prefix.num_blocks, list(prefix.sharers)) for prefix in reads.shared],
            reads.block_size,
            reads.size,
            reads.num_singles,
        )

    def reads(self, known: Sequence[Table] = ()) -> Reads:
        columns = {name: np.array(column, np.int64) for name, column in zip(COLUMNS, self.columns, strict=True)}
        return Reads(
            **columns,
            tables=[known[place] if table is None else tuple(table) for place, table in enumerate(self.tables)],
            shared=[SharedPrefix(num_blocks, tuple(sharers)) for num_blocks, sharers in self.shared],
            block_size=self.block_size,
            size=self.size,
            num_singles=self.num_singles,
            followed=None,  # ranks are told of beams once they are chosen
        )


@dataclass(frozen=True, slots=True)
class Forward:
    model: int
    num_rows: int
    num_wanted: int | None  # rows whose hidden states are asked for; None: all


@dataclass(frozen=True, slots=True)
class Logits:
    model: int
    num_rows: int
    are_last: bool  # the first rows of what was computed last, which every rank has


@dataclass(frozen=True, slots=True)
class Replace:
    model: int
    name: str
    shape: list[int]
    dtype: str  # as torch names it


Order = Load | Serve | Measure | Move | Prepare | Forward | Logits | Replace
_KINDS = {kind.__name__: kind for kind in (Load, Serve, Measure, Move, Prepare, Forward, Logits, Replace)}


def line_of(order: Order) -> bytes:
    return json.dumps([type(order).__name__, asdict(order)], separators=(",", ":")).encode() + b"\n"


def order_of(line: bytes) -> Order:
    try:
        name, values = json.loads(line)
        order: Order = _KINDS[name](**values)
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"an order cannot be read: {type(error).__name__}") from None
    return order
