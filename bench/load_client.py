"""The load itself: requests at a rate, or so many at a time, in one process."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import msgspec

from bench.load_answer import Answer, Record
from bench.load_connection import Client, Target
from bench.load_stub import Echo
from bench.load_work import Work, arrivals

PAUSE = 0.1  # seconds between a failure and the next request in its place


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one server, or the part of it that one of several processes makes."""

    target: Target
    work: Work
    concurrency: int | None = None  # requests at a time, of this part
    rate: float | None = None  # or arrivals a second, of the whole load
    requests: int | None = None  # of the whole load; None: until the seconds are over
    seconds: float | None = None  # after which no more are begun
    start_at: float = 0.0  # time.monotonic(): all parts begin together
    part: int = 0
    parts: int = 1
    timeout: float = 600.0  # seconds that one request may take
    keeps_pace: bool = False  # with a stub, see there


class Run:
    """One job in one process. `stop` begins no more requests and leaves those that run; `records` has the rest."""

    def __init__(self, job: Job) -> None:
        self.records: list[Record] = []
        self.unfinished = 0
        self._job = job
        self._client = Client(job.target)
        self._path = "/v1/chat/completions" if job.work.chat else "/v1/completions"
        self._tasks: set[asyncio.Task[Any]] = set()
        self._fault: BaseException | None = None
        self._stopped = False
        self._end = float("inf") if job.seconds is None else job.start_at + job.seconds

    async def run(self) -> None:
        job = self._job
        numbers: Iterator[int] = itertools.count(job.part, job.parts)
        if job.requests is not None:
            numbers = iter(range(job.part, job.requests, job.parts))
        pace: asyncio.BaseTransport | None = None
        if job.keeps_pace:
            pace, _ = await asyncio.get_running_loop().create_connection(Echo, job.target.host, job.target.port)
        try:
            if job.rate is not None:
                self._begin(self._arrive(job.rate, numbers))
            else:
                for _ in range(job.concurrency or 1):
                    self._begin(self._work_through(numbers))
            while self._tasks:
                await asyncio.wait(self._tasks)
            if self._fault is not None:
                raise self._fault
        finally:
            self._client.close()
            if pace is not None:
                pace.close()

    def stop(self) -> None:
        self._stopped = True
        for task in self._tasks:
            task.cancel()

    def _begin(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fault = task.exception()  # of the client itself: what it measured is worth nothing

    async def _work_through(self, numbers: Iterator[int]) -> None:
        await asyncio.sleep(max(0.0, self._job.start_at - time.monotonic()))
        for number in numbers:
            if self._stopped or time.monotonic() >= self._end:
                return
            record = await self._ask(number, None)
            if record.error is not None:  # a server that is gone would otherwise be asked as fast as it refuses
                await asyncio.sleep(PAUSE)

    async def _arrive(self, rate: float, numbers: Iterator[int]) -> None:
        """Requests begin when they are due, however many still run."""
        job = self._job
        mine = itertools.islice(arrivals(rate, job.work.seed), job.part, None, job.parts)
        for number, after in zip(numbers, mine, strict=False):
            due = job.start_at + after
            if due >= self._end:
                return
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self._begin(self._ask(number, due))

    async def _ask(self, number: int, due: float | None) -> Record:
        work = self._job.work
        content = self._job.target.request("POST", self._path, msgspec.json.encode(work.body_of(number)))
        now = time.monotonic()
        record = Record(number=number, began=now if due is None else due, late=0.0 if due is None else now - due)
        try:
            await self._client.ask(content, Answer(record, work.n), self._job.timeout)
        except asyncio.CancelledError:
            self.unfinished += 1
            raise
        self.records.append(record)
        return record
