"""A load client in several processes: one event loop is soon busier with events than a fast server.

Each process gets jobs on its standard input and answers on its standard output, in frames of msgpack. A frame that
comes while a job runs, or the end of the input, stops the job; so nothing is left behind by a parent that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec

from bench.load_answer import Record
from bench.load_client import Job, Run
from bench.load_connection import Target
from bench.load_work import Work

LENGTH = 8  # bytes before each frame
HEAD_START = 0.1  # seconds in which all processes get their job before it starts


class Part(msgspec.Struct):
    """What one process has to tell of a job."""

    records: list[Record]
    unfinished: int = 0
    busy_seconds: float = 0.0  # of its processor


class Loaded(msgspec.Struct):
    """What all of them have."""

    records: list[Record]
    unfinished: int
    busy: float  # share of a core that the busiest process took
    stopped: bool  # by Ctrl-C: what there is until then


class ClientError(Exception):
    """A process of the client has ended."""


class Clients:
    """Processes that make one load together."""

    def __init__(self, processes: int) -> None:
        # A session of their own: Ctrl-C is the parent's to handle, and what they have is not lost.
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            for _ in range(processes)
        ]

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):
                _pipe(process.stdin).close()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _pipe(process.stdout).close()

    def run(self, job: Job, targets: list[Target] | None = None) -> Loaded:
        """Splits a job over the processes; with `targets`, each process has a server of its own."""
        asked = self._processes
        if job.concurrency is not None:
            asked = asked[: job.concurrency]
        shares = [None] * len(asked) if job.concurrency is None else _split(job.concurrency, len(asked))
        start = time.monotonic() + HEAD_START
        for part, (process, share) in enumerate(zip(asked, shares, strict=True)):
            own = msgspec.structs.replace(
                job,
                concurrency=share,
                part=part,
                parts=len(asked),
                start_at=start,
                target=job.target if targets is None else targets[part],
            )
            self._send(process, msgspec.msgpack.encode(own))
        with self._stopping(asked) as stopped:
            parts = [self._receive(process) for process in asked]
        seconds = time.monotonic() - start
        return Loaded(
            records=sorted((record for part in parts for record in part.records), key=lambda record: record.number),
            unfinished=sum(part.unfinished for part in parts),
            busy=max(part.busy_seconds for part in parts) / seconds,
            stopped=bool(stopped),
        )

    @contextmanager
    def _stopping(self, asked: list[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
        """Ctrl-C or SIGTERM stops the processes, which tell what they have; a second one is an interrupt as ever."""
        signals: list[int] = []

        def stop(number: int, _: object) -> None:
            signals.append(number)
            if len(signals) > 1:
                raise KeyboardInterrupt
            for process in asked:
                self._send(process, b"")

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield signals
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _send(self, process: subprocess.Popen[bytes], content: bytes) -> None:
        try:
            pipe = _pipe(process.stdin)
            pipe.write(len(content).to_bytes(LENGTH, "little") + content)
            pipe.flush()
        except BrokenPipeError:
            raise ClientError(f"a client process ended with status {process.wait()}") from None

    def _receive(self, process: subprocess.Popen[bytes]) -> Part:
        pipe = _pipe(process.stdout)
        head = pipe.read(LENGTH)
        if len(head) < LENGTH:
            raise ClientError(f"a client process ended with status {process.wait()}")
        return msgspec.msgpack.decode(pipe.read(int.from_bytes(head, "little")), type=Part)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _split(count: int, parts: int) -> list[int]:
    return [count // parts + (part < count % parts) for part in range(parts)]


async def _take_jobs() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    following: asyncio.Task[bytes | None] = loop.create_task(_frame(reader))
    while (frame := await following) is not None:
        following = loop.create_task(_frame(reader))
        if not frame:
            continue  # to stop what has just ended by itself
        run = Run(msgspec.msgpack.decode(frame, type=Job))
        busy = time.process_time()
        running = loop.create_task(run.run())
        await asyncio.wait({running, following}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            run.stop()
        await running
        part = Part(run.records, run.unfinished, time.process_time() - busy)
        content = msgspec.msgpack.encode(part)
        sys.stdout.buffer.write(len(content).to_bytes(LENGTH, "little") + content)
        sys.stdout.buffer.flush()


async def _frame(reader: asyncio.StreamReader) -> bytes | None:
    try:
        return await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH), "little"))
    except asyncio.IncompleteReadError:
        return None


def take_all_files() -> None:
    """As many connections as the system allows at all."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def probe(target: Target, work: Work, timeout: float) -> Record:
    """One request as all will be, so that what is wrong with all of them is said once."""
    run = Run(Job(target=target, work=work, concurrency=1, requests=1, timeout=timeout))
    asyncio.run(run.run())
    return run.records[0]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    take_all_files()
    with contextlib.suppress(BrokenPipeError):
        asyncio.run(_take_jobs())
    os._exit(0)  # nothing is left to flush, and a reader that is gone needs no traceback


if __name__ == "__main__":
    main()
