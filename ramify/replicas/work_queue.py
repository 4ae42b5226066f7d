"""WorkQueue: requests that wait for one of several engines, and who gets which of them. Knows no process and no thread.

    add(work) --> queue: (priority, arrival) --> hand_out() --> pieces, each for one engine
    ended(piece), lost(engine) <-- what became of them

An engine draws from the queue whenever it holds less than it can run at a time and a few more, so that a slow one takes
less. Costs are counted in tokens: of a prompt those that an engine has not seen yet, of a child as many as it may draw,
or as others lately did. Work goes where it would be done first: an engine that knows a prompt's beginning is preferred
by exactly what that saves. Children that go their own ways are divided where that evens out the engines; near the end,
when it is known that nothing will follow, the largest goes first, and no engine is given what another could run sooner.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from ramify.replicas.prefixes import Prefixes


@dataclass(eq=False, slots=True)
class Work:
    """A request that waits, or what is left of it: children `first` to `first + left - 1`."""

    name: str
    priority: int = 0
    prompt: int = 1  # tokens, of all its models
    chain: tuple[int, ...] = ()  # its leading blocks
    block_size: int = 16
    left: int = 1
    longest: int = 1  # tokens that a child may draw
    may_split: bool = False
    first: int = 0
    number: int = -1  # its place in the order of arrivals; kept by work that is given back
    each: int = 0  # tokens expected of a child

    @property
    def cost(self) -> int:
        return self.prompt + self.left * self.each


@dataclass(eq=False, frozen=True, slots=True)
class Piece:
    """What one engine was given of a request."""

    work: Work
    engine: int
    first: int
    count: int
    cost: int


@dataclass(eq=False, slots=True)
class Engine:
    """What is known here of one engine."""

    at_once: int  # children that it runs at a time
    most: int  # that it is given at a time: a few wait there
    prefixes: Prefixes
    load: int = 0
    children: int = 0
    pieces: dict[Piece, None] = field(default_factory=dict)
    priorities: Counter[int] = field(default_factory=Counter)
    is_there: bool = True

    def has_room(self, priority: int, *, nothing_follows: bool) -> bool:
        """More urgent work than what it has need not wait here: the engine lets it go first. Where nothing follows,
        whoever is free first should find something, so nobody is given what he cannot run yet."""
        if not self.is_there:
            return False
        most = self.at_once if nothing_follows else self.most
        return self.children < most or any(priority < other for other in self.priorities)


class WorkQueue:
    def __init__(self, max_num_seqs: int, num_engines: int, *, most_blocks: int = 65_536) -> None:
        # A quarter more than can run, so that an engine need not wait for the answer to "what next?".
        most = max_num_seqs + max(2, max_num_seqs // 4)
        self.engines = [Engine(max_num_seqs, most, Prefixes(most_blocks)) for _ in range(num_engines)]
        self._heap: list[tuple[int, int, int, int, Work]] = []
        self._serials = count()  # so that works themselves need not be compared
        self._arrivals = count()
        self._waiting: dict[Work, None] = {}
        self._cost = 0  # of all that waits
        self._children = 0
        self._is_complete = False
        self._largest_first = False
        self._num_drawn = self._num_ended = 0  # tokens of children that have ended

    # -- what waits ----------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Children."""
        return self._children

    @property
    def num_there(self) -> int:
        """Engines that have not been lost."""
        return sum(engine.is_there for engine in self.engines)

    def add(self, work: Work) -> None:
        if work.number < 0:
            work.number = next(self._arrivals)
        work.each = self._expected(work.longest)
        self._waiting[work] = None
        self._cost += work.cost
        self._children += work.left
        if self._is_complete:
            self.expect_more()
        heapq.heappush(self._heap, self._entry(work))

    def remove(self, work: Work) -> int:
        """Takes out what is left of a request; returns how many children that was."""
        if work not in self._waiting:
            return 0
        left = work.left
        self._leave(work, left)
        return left

    def expect_no_more(self) -> None:
        """Nothing will be added: what waits may be ordered so that all engines end together."""
        self._is_complete = True

    def expect_more(self) -> None:
        self._is_complete = False
        if self._largest_first:
            self._largest_first = False
            self._order()

    def all_waiting(self) -> list[Work]:
        return list(self._waiting)

    # -- handing out ---------------------------------------------------------------------------------------------------

    def hand_out(self) -> list[Piece]:
        """What goes to which engine now, in order; each counts as that engine's until it has ended."""
        pieces = []
        while self._waiting:
            if self._is_complete and not self._largest_first and self._children <= self._most_at_once:
                self._largest_first = True
                self._order()
            work = self._heap[0][-1]
            if work not in self._waiting:
                heapq.heappop(self._heap)
                continue
            chosen = self._chosen(work)
            if chosen is None:
                break
            pieces.append(self._give(work, chosen))
        return pieces

    @property
    def _most_at_once(self) -> int:
        return sum(engine.most for engine in self.engines if engine.is_there)

    def _chosen(self, work: Work) -> int | None:
        """Who would have done it first, of those who have room."""
        best, least = None, 0
        for index, engine in enumerate(self.engines):
            if engine.has_room(work.priority, nothing_follows=self._largest_first):
                level = engine.load + self._unknown(work, engine)
                if best is None or level < least:
                    best, least = index, level
        return best

    def _unknown(self, work: Work, engine: Engine) -> int:
        """Tokens of its prompt that an engine would compute."""
        if not work.chain:
            return work.prompt
        return work.prompt - min(work.prompt - 1, engine.prefixes.num_known(work.chain) * work.block_size)

    def _give(self, work: Work, index: int) -> Piece:
        engine = self.engines[index]
        unknown = self._unknown(work, engine)
        taken = self._share(work, index) if work.may_split and work.left > 1 else work.left
        piece = Piece(work, index, work.first, taken, unknown + taken * work.each)
        self._leave(work, taken)
        engine.load += piece.cost
        engine.children += taken
        engine.pieces[piece] = None
        engine.priorities[work.priority] += 1
        if work.chain:
            engine.prefixes.note(work.chain)
        return piece

    def _share(self, work: Work, index: int) -> int:
        """How many of its children an engine gets: all, unless others would be idle meanwhile.

        All that waits is poured over the engines as they are filled now; what of this request stands above the level
        that is reached goes to others, if it is worth their computing the prompt once more.
        """
        beside = self._cost - work.cost
        total = work.left * work.each
        if beside >= total * len(self.engines):
            return work.left
        there = [engine for engine in self.engines if engine.is_there]
        levels = [engine.load + self._unknown(work, engine) for engine in there]
        own = self.engines[index].load + self._unknown(work, self.engines[index])
        room = _level(levels, beside + total) - own
        taken = min(work.left, max(1, -(-room // work.each)))
        others = [self._unknown(work, engine) for engine in there if engine is not self.engines[index]]
        worth = (work.left - taken) * work.each >= min(others, default=0)
        return taken if worth else work.left

    def _leave(self, work: Work, taken: int) -> None:
        """So many of its children wait no longer."""
        self._cost -= taken * work.each
        self._children -= taken
        work.first += taken
        work.left -= taken
        if not work.left:
            del self._waiting[work]
            self._cost -= work.prompt

    # -- what became of it ---------------------------------------------------------------------------------------------

    def ended(self, piece: Piece, num_drawn: int = 0) -> None:
        """Whatever its end was; `num_drawn` tokens by all its children."""
        engine = self.engines[piece.engine]
        if piece not in engine.pieces:
            return
        del engine.pieces[piece]
        engine.load -= piece.cost
        engine.children -= piece.count
        engine.priorities[piece.work.priority] -= 1
        if not engine.priorities[piece.work.priority]:
            del engine.priorities[piece.work.priority]
        self._num_drawn += num_drawn
        self._num_ended += piece.count

    def lost(self, index: int) -> list[Piece]:
        """An engine is gone: nothing more is given to it. Returns what it had."""
        engine = self.engines[index]
        engine.is_there = False
        pieces = list(engine.pieces)
        engine.pieces, engine.load, engine.children = {}, 0, 0
        engine.priorities.clear()
        return pieces

    def forget_prefixes(self) -> None:
        for engine in self.engines:
            engine.prefixes.clear()

    # -- order and size ------------------------------------------------------------------------------------------------

    def _entry(self, work: Work) -> tuple[int, int, int, int, Work]:
        size = -work.cost if self._largest_first else 0
        return (work.priority, size, work.number, next(self._serials), work)

    def _order(self) -> None:
        self._heap = [self._entry(work) for work in self._waiting]
        heapq.heapify(self._heap)

    def _expected(self, longest: int) -> int:
        """Tokens of a child: as many as it may draw, but not far beyond what others did."""
        if not self._num_ended or not self._num_drawn:
            return max(1, longest)
        return max(1, min(longest, 2 * self._num_drawn // self._num_ended + 1))


def _level(levels: Iterable[int], amount: int) -> int:
    """How high it stands everywhere when so much is poured over vessels that are filled to these levels."""
    ordered: Sequence[int] = sorted(levels)
    total = amount
    for number, level in enumerate(ordered, start=1):
        total += level
        if number == len(ordered) or total <= number * ordered[number]:
            return -(-total // number)
    return amount
