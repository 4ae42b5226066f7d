"""The queue of several engines: every child is handed out once, in order, to whoever would have it done first."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ramify.replicas.prefixes import MOST_BLOCKS, Prefixes, chain_of
from ramify.replicas.work_queue import Piece, Work, WorkQueue

MOST = 10  # what an engine of 8 sequences is given at a time


def queue(num_engines: int = 2, max_num_seqs: int = 8) -> WorkQueue:
    return WorkQueue(max_num_seqs, num_engines)


def filled(queue: WorkQueue, *works: Work) -> list[Piece]:
    for work in works:
        queue.add(work)
    return queue.hand_out()


def given_out(pieces: list[Piece]) -> list[tuple[int, str, int, int]]:
    return [(piece.engine, piece.work.name, piece.first, piece.count) for piece in pieces]


ACTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(0, 2),  # priority
            st.integers(1, 40),  # children
            st.integers(1, 60),  # longest output
            st.integers(1, 70),  # prompt
            st.booleans(),  # may be divided
        ),
        st.tuples(st.just("end"), st.integers(0, 1000), st.integers(0, 200)),
        st.tuples(st.just("lose"), st.integers(0, 3)),
        st.tuples(st.just("remove"), st.integers(0, 1000)),
        st.tuples(st.just("complete")),
    ),
    max_size=40,
)


class Watched:
    """A queue that checks itself at every act, and counts what became of every child."""

    def __init__(self, num_engines: int) -> None:
        self.queue = queue(num_engines)
        self.works: list[Work] = []
        self.wanted: Counter[tuple[str, int]] = Counter()
        self.ended: Counter[tuple[str, int]] = Counter()
        self.running: list[Piece] = []

    def hand_out(self) -> None:
        before = [engine.children for engine in self.queue.engines]
        urgent = [min(engine.priorities, default=9) for engine in self.queue.engines]
        pieces = self.queue.hand_out()
        priorities = [piece.work.priority for piece in pieces]
        assert priorities == sorted(priorities), "the most urgent first"
        for piece in pieces:
            engine = self.queue.engines[piece.engine]
            assert engine.is_there
            assert piece.count >= 1
            assert before[piece.engine] < MOST or piece.work.priority < max(urgent[piece.engine], *engine.priorities)
            before[piece.engine] += piece.count
        self.running += pieces
        for engine in self.queue.engines:
            assert engine.children == sum(piece.count for piece in engine.pieces)
            assert engine.load == sum(piece.cost for piece in engine.pieces)
        if self.queue.num_there and self.queue.num_waiting:
            assert all(engine.children >= MOST for engine in self.queue.engines if engine.is_there), "nobody is idle"

    def act(self, kind: str, *said: Any) -> None:
        if kind == "add":
            priority, children, longest, prompt, may_split = said
            name = f"work-{len(self.works)}"
            chain = chain_of([prompt % 3] * prompt, 16)
            work = Work(name, priority, prompt, chain, left=children, longest=longest, may_split=may_split)
            self.works.append(work)
            self.wanted.update((name, child) for child in range(children))
            self.queue.add(work)
        elif kind == "end" and self.running:
            self._end(self.running[said[0] % len(self.running)], said[1])
        elif kind == "lose" and said[0] < len(self.queue.engines) and self.queue.num_there > 1:
            for piece in self.queue.lost(said[0]):
                self.running.remove(piece)
                again = piece.work
                self.queue.add(
                    Work(
                        again.name,
                        again.priority,
                        again.prompt,
                        first=piece.first,
                        left=piece.count,
                        number=again.number,
                    )
                )
        elif kind == "remove" and self.works:
            work = self.works[said[0] % len(self.works)]
            first = work.first
            left = self.queue.remove(work)
            for child in range(first, first + left):
                del self.wanted[work.name, child]
        elif kind == "complete":
            self.queue.expect_no_more()
        self.hand_out()

    def _end(self, piece: Piece, num_drawn: int) -> None:
        self.running.remove(piece)
        self.queue.ended(piece, num_drawn)
        self.ended.update((piece.work.name, child) for child in range(piece.first, piece.first + piece.count))

    def finish(self) -> None:
        while self.running:
            self._end(self.running[0], 5)
            self.hand_out()


@given(num_engines=st.integers(1, 4), acts=ACTS)
def test_every_child_is_drawn_once_whatever_happens(num_engines: int, acts: list[tuple[Any, ...]]) -> None:
    watched = Watched(num_engines)
    for act in acts:
        watched.act(*act)
    watched.finish()
    assert watched.ended == watched.wanted
    assert (watched.queue.num_waiting, watched.queue._cost) == (0, 0)
    assert all(engine.load == engine.children == 0 for engine in watched.queue.engines)


def test_one_prompt_with_many_children_is_divided_evenly() -> None:
    asked = Work("one", prompt=20, left=1024, longest=100, may_split=True)
    pieces = filled(queue(8, 256), asked)
    assert given_out(pieces) == [(engine, "one", engine * 128, 128) for engine in range(8)]


def test_two_children_go_to_two_idle_engines_but_not_for_the_price_of_a_long_prompt() -> None:
    short = Work("short", prompt=16, left=2, longest=64, may_split=True)
    assert given_out(filled(queue(), short)) == [(0, "short", 0, 1), (1, "short", 1, 1)]
    long = Work("long", prompt=8000, left=2, longest=64, may_split=True)
    assert given_out(filled(queue(), long)) == [(0, "long", 0, 2)]


def test_what_must_stay_whole_does() -> None:
    assert given_out(filled(queue(), Work("beams", left=4, longest=64))) == [(0, "beams", 0, 4)]


def test_many_requests_are_not_divided() -> None:
    works = [Work(f"{number}", prompt=10, left=4, longest=20, may_split=True) for number in range(16)]
    pieces = filled(queue(4), *works)
    assert all(piece.count == 4 for piece in pieces)
    assert Counter(piece.engine for piece in pieces) == {0: 3, 1: 3, 2: 3, 3: 3}, "ten children each, and a few"


def test_a_known_beginning_draws_requests_until_that_costs_more_than_it_saves() -> None:
    asked = [Work(f"{number}", prompt=101, chain=chain_of([7] * 101, 16), longest=10) for number in range(12)]
    other = Work("other", prompt=101, longest=10)
    engines = [piece.engine for piece in filled(queue(2, 32), asked[0], other, *asked[1:])]
    assert engines[:2] == [0, 1], "both have as much to do"
    assert engines[2:9] == [0] * 7, "96 tokens are saved: worth the wait behind six more"
    assert 1 in engines[9:], "then the other engine computes the beginning once"


def test_different_beginnings_go_to_different_engines() -> None:
    works = [
        Work(f"{kind}-{number}", prompt=101, chain=chain_of([kind] * 101, 16), longest=10)
        for number in range(4)
        for kind in (1, 2)
    ]
    pieces = filled(queue(2, 32), *works)
    assert {(piece.engine, piece.work.name[0]) for piece in pieces} == {(0, "1"), (1, "2")}


def test_an_engine_that_is_full_is_given_nothing_but_what_is_more_urgent() -> None:
    waiting = queue(1)
    assert len(filled(waiting, *(Work(f"{number}", priority=1) for number in range(20)))) == MOST
    assert filled(waiting, Work("later", priority=2)) == []
    assert given_out(filled(waiting, Work("now", priority=0))) == [(0, "now", 0, 1)]


def test_near_the_end_the_longest_go_first() -> None:
    lengths = [5, 50, 500, 10, 400]
    works = [Work(f"{length}", longest=length) for length in lengths]
    in_order = queue(1)
    assert [piece.work.name for piece in filled(in_order, *works)] == ["5", "50", "500", "10", "400"]
    ending = queue(1)
    for length in lengths:
        ending.add(Work(f"{length}", longest=length))
    ending.expect_no_more()
    assert [piece.work.name for piece in ending.hand_out()] == ["500", "400", "50", "10", "5"]
    far = queue(1)
    for number in range(30):
        far.add(Work(f"{number}", longest=number + 1))
    far.expect_no_more()
    pieces = far.hand_out()
    assert [piece.work.name for piece in pieces] == [f"{number}" for number in range(10)], "the end is not near"


def test_requests_that_are_alike_are_divided_evenly_at_the_end() -> None:
    """Whichever of two engines is done first by a moment takes no more of what is left than it can run."""
    queue = WorkQueue(64, 2)
    for number in range(256):
        queue.add(Work(str(number), prompt=16, longest=64))
    queue.expect_no_more()
    given = queue.hand_out()
    for engine in (0, 1):
        for piece in [each for each in given if each.engine == engine][:64]:
            queue.ended(piece, 64)
        given += queue.hand_out()
    assert Counter(piece.engine for piece in given) == {0: 128, 1: 128}


def test_what_is_asked_for_counts_no_more_than_what_others_drew() -> None:
    learned = queue()
    [piece] = filled(learned, Work("first", longest=1000))
    learned.ended(piece, num_drawn=20)
    late = Work("second", longest=1000)
    learned.add(late)
    assert late.each == 41


def test_beginnings_are_forgotten_from_their_ends_the_oldest_first() -> None:
    known = Prefixes(most=4)
    one, two = chain_of([1] * 49, 16), chain_of([2] * 49, 16)
    assert len(one) == 3
    known.note(one)
    known.note(two)
    assert (known.num_known(one), known.num_known(two)) == (1, 3)
    assert known.num_known(chain_of([2] * 33, 16)) == 2
    assert chain_of([1] * 16, 16) == (), "the last token is always computed"
    assert len(chain_of([1] * 10_000, 4)) == MOST_BLOCKS
    known.clear()
    assert known.num_known(two) == 0
