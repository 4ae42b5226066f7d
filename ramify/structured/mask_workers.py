"""MaskWorkers: processes that find the masks of a step, each those of its own outputs.

llguidance's threads gain nothing where masks are quick: they wait for each other's locks, and waking them takes as long
as the masks do. Processes share nothing but the memory where masks are written. From there they may go to a GPU as they
are.

    host       a frame to each worker: of every output its number, its last token, its row
    workers    take the tokens, and write the masks into the rows
    host       reads a frame of each: what is wrong, if anything is

An answer says no more than that the masks are there. If a call is broken off while some are on their way (Ctrl-C), they
would answer what is asked next, before its masks are there: these workers are then asked nothing more.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ramify.process.bounded_child import LENGTH, read_frame
from ramify.structured.mask_frames import FAULT, NO_WAY, NOTHING, REQUEST, STEP, Setup, num_bytes, shared
from ramify.structured.mask_threads import WORD, Mask
from ramify.structured.matcher import Area, Asked, Ends, GrammarFaultError, Matcher
from ramify.structured.string_limits import StringLimits

MOST_ROWS = 2_048
STEPS, ASIDE = 2, 2  # areas for steps, in turns, and the one of all else
POLL_SECONDS = 0.002
LOST = "a process that finds masks of structured_outputs has ended"
FOLDER = Path(__file__).parents[2]

_Process = subprocess.Popen[bytes]


class MaskWorkers:
    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int], count: int) -> None:
        """Starts them, and waits until they are ready. The last token is the end of a text."""
        self.num_tokens = len(tokens) - 1
        shape = (STEPS + 1, MOST_ROWS, -(-len(tokens) // WORD))
        file = os.memfd_create("masks")
        os.ftruncate(file, num_bytes(shape))  # pages are there once they are written
        self._progress, self.areas = shared(file, shape)
        setup = Setup(list(tokens), list(special_token_ids), file, shape, 0)
        self._workers = [_Worker(file, setup._replace(place=place).spelled()) for place in range(count)]
        os.close(file)
        self._numbers = itertools.count()
        self._num_known = 0
        self._last_area = 0
        self._early: _Early | None = None  # what is being found, and nobody has asked for yet
        self._lock = threading.Lock()
        self.is_lost = self._is_torn = False
        self._wait(1)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    @property
    def is_torn(self) -> bool:
        """Whether something that they were asked was broken off: others must take their place."""
        return self._is_torn or any(worker.is_torn for worker in self._workers)

    def know(self, lark: str, limits: StringLimits | None) -> int:
        """A grammar, which is known to be sound: its key, once all have built it."""
        with self._lock:
            self._num_known += 1
            key = self._num_known
            try:
                for worker in self._workers:
                    worker.request("know", key, lark, None if limits is None else limits.spelled(), at_once=True)
            except BaseException:  # who was not told would never be so far as the others
                self._is_torn = True
                raise
        self._wait(1 + key)
        return key

    def _wait(self, progress: int) -> None:
        """Until all workers are so far, or one of them will never be."""
        while (self._progress[: len(self._workers)] < progress).any():
            if not all(worker.is_alive for worker in self._workers):
                self.is_lost = True
                return
            time.sleep(POLL_SECONDS)

    def forget(self, key: int) -> None:
        for worker in self._workers:
            worker.request("forget", key)

    def begin(self, key: int, ends: Ends) -> RemoteMatcher:
        number = next(self._numbers)
        worker = self._workers[number % len(self._workers)]
        worker.request("begin", number, key, sorted(ends.token_ids))
        return RemoteMatcher(self, worker, number, key, ends)

    def area(self, number: int, rows: int) -> Area | None:
        """For a step of so many rows; None if they are too many."""
        return Area(number, self.areas[number, :rows]) if rows <= MOST_ROWS else None

    def next_number(self) -> int:
        return next(self._numbers)

    def ask_early(self, matchers: Sequence[RemoteMatcher]) -> None:
        """The next step will ask about these first, in this order."""
        if self.is_torn:
            return
        try:
            self._finish_early()
            rows, area = list(range(len(matchers))), 1 - self._last_area
            if any(matcher.is_over for matcher in matchers):
                rows = [row for row in rows if not matchers[row].is_over]
                matchers = [matchers[row] for row in rows]
            self._early = _Early(matchers, rows, area, self._send(matchers, rows, area))
        except BaseException:
            self._is_torn = True
            raise

    def find(self, matchers: Sequence[RemoteMatcher], rows: Sequence[int], area: int) -> dict[int, str]:
        """Into these rows of the area. Returns what is wrong with which."""
        if self.is_torn:
            self.areas[area, list(rows)] = 0
            return dict.fromkeys(rows, LOST)
        try:
            self._last_area = area if area < STEPS else self._last_area
            early, faults = self._early, self._finish_early()
            count = 0 if early is None else len(early.rows)
            if early is not None and (early.area, early.matchers, early.rows) != (area, matchers[:count], rows[:count]):
                count, faults = 0, {}  # something else came between
            return faults | self._collect(self._send(matchers[count:], rows[count:], area), area)
        except BaseException:
            self._is_torn = True
            raise

    def presume(self, matcher: RemoteMatcher, token_ids: Sequence[int]) -> bytes | None:
        """What its worker says of these tokens; None if there is nobody to say it."""
        if self.is_torn:
            return None
        try:
            self._finish_early()
            matcher.tell()
            return matcher.worker.ask("presume", matcher.number, list(token_ids))
        except BaseException:
            self._is_torn = True
            raise

    def _finish_early(self) -> dict[int, str]:
        early, self._early = self._early, None
        return {} if early is None else self._collect(early.asked, early.area)

    def _send(self, matchers: Sequence[RemoteMatcher], rows: Sequence[int], area: int) -> dict[_Worker, list[int]]:
        """Returns who was asked for what: an output's number, its last token, its row, and so on."""
        asked: dict[_Worker, list[int]] = {}
        for matcher, row in zip(matchers, rows, strict=True):
            untold = matcher.untold
            if len(untold) > 1:
                matcher.tell(keeping_last=True)
            entries = asked.get(matcher.worker)
            if entries is None:
                entries = asked[matcher.worker] = []
            entries += (matcher.number, untold.pop() if untold else NOTHING, row)
        for worker, entries in asked.items():
            worker.send(struct.pack(f"4B{len(entries)}i", STEP, area, 0, 0, *entries))
        return asked

    def _collect(self, asked: dict[_Worker, list[int]], area: int) -> dict[int, str]:
        faults: dict[int, str] = {}
        for worker, entries in asked.items():
            said = worker.answer()
            if said is None:
                self.is_lost = True
                found = dict.fromkeys(entries[2::3], LOST)
                self.areas[area, list(found)] = 0
                faults |= found
            elif said:
                faults |= dict(json.loads(said))
        return faults


class _Early(NamedTuple):
    matchers: Sequence[RemoteMatcher]
    rows: Sequence[int]
    area: int
    asked: dict[_Worker, list[int]]


class _Worker:
    """One process. Several threads may send; one reads."""

    def __init__(self, file: int, first: bytes) -> None:
        path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process: _Process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ramify.structured.mask_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(file,),
            env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        self._lock = threading.Lock()
        self.is_torn = False
        self.freed: list[int] = []  # outputs that nobody follows any more
        weakref.finalize(self, _end, self._process)
        self.send(first)

    def close(self) -> None:
        _end(self._process)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def request(self, name: str, *arguments: Any, at_once: bool = False) -> None:
        """It may wait for the next step."""
        self.send(bytes([REQUEST]) + json.dumps([name, *arguments]).encode(), at_once=at_once)

    def send(self, frame: bytes, *, at_once: bool = True) -> None:
        freed, self.freed = self.freed, []
        if freed:
            self.request("free", freed)
        stream = self._process.stdin
        assert stream is not None
        try:
            with self._lock, suppress(BrokenPipeError, ValueError):  # it has ended, which reading will tell
                stream.write(LENGTH.pack(len(frame)) + frame)
                if at_once:
                    stream.flush()
        except BaseException:  # it may have got a part of the frame
            self.is_torn = True
            raise

    def answer(self) -> bytes | None:
        """None if it has ended."""
        assert self._process.stdout is not None
        return read_frame(self._process.stdout)

    def ask(self, name: str, *arguments: Any) -> bytes | None:
        self.request(name, *arguments, at_once=True)
        return self.answer()


class RemoteMatcher(Matcher):
    """One whose state a worker has."""

    __slots__ = ("_key", "number", "worker", "workers")

    def __init__(self, workers: MaskWorkers, worker: _Worker, number: int, key: int, ends: Ends) -> None:
        super().__init__(ends)
        self.workers, self.worker, self.number = workers, worker, number
        self._key = key

    def __del__(self) -> None:
        self.worker.freed.append(self.number)

    def fork(self) -> RemoteMatcher:
        """Before the first token it begins by itself, where the next worker can follow it."""
        if not self.num_taken:
            return self.workers.begin(self._key, self.ends)
        self.tell()
        number = self.workers.next_number()
        self.worker.request("fork", self.number, number)
        copy = RemoteMatcher(self.workers, self.worker, number, self._key, self.ends)
        copy.num_taken, copy.is_over = self.num_taken, self.is_over
        return copy

    def presume(self, token_ids: Sequence[int]) -> Mask | None:
        if self.is_over:
            return self.ends.mask
        said = self.workers.presume(self, token_ids)
        if said is None or said[:1] == FAULT:
            raise GrammarFaultError(LOST if said is None else said[1:].decode())
        return None if said == NO_WAY else np.frombuffer(said[1:], np.uint32)

    def tell(self, *, keeping_last: bool = False) -> None:
        told = len(self.untold) - keeping_last
        if told > 0:
            self.worker.request("take", self.number, self.untold[:told])
            del self.untold[:told]

    @classmethod
    def ask_all(cls, matchers: Sequence[RemoteMatcher]) -> bool:
        matchers[0].workers.ask_early(matchers)
        return True

    @classmethod
    def find_all(
        cls, matchers: Sequence[RemoteMatcher], rows: Sequence[int], into: Mask, area: Area | None = None
    ) -> dict[int, str]:
        workers = matchers[0].workers
        if area is not None:
            return workers.find(matchers, rows, area.number)
        faults: dict[int, str] = {}
        for start in range(0, len(rows), MOST_ROWS):
            some, places = rows[start : start + MOST_ROWS], range(len(rows[start : start + MOST_ROWS]))
            found = workers.find(matchers[start : start + MOST_ROWS], places, ASIDE)
            into[list(some)] = workers.areas[ASIDE, : len(some)]
            faults |= {some[place]: fault for place, fault in found.items()}
        return faults


def workers_of(asked: Iterable[Asked]) -> MaskWorkers | None:
    """Who find most of these masks."""
    return next((each.matcher.workers for each in asked if isinstance(each.matcher, RemoteMatcher)), None)


def _end(process: _Process) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(BrokenPipeError, ValueError):
                stream.close()
