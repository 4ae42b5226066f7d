"""Ranks as threads of this process instead of processes: the same orders, the same collectives, no time to start."""

from __future__ import annotations

import json
import queue
import threading
from typing import Any

import pytest

from ramify.parallel import team
from ramify.parallel.follower import follow
from ramify.parallel.orders import Order, line_of


class RankThread:
    """What a RankProcess is, for whoever leads."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self._size = rank, size
        self.orders: list[str] = []
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._said: str | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        def next_line() -> bytes:
            line = self._lines.get()
            if line is None:
                raise SystemExit
            return line

        try:
            follow(next_line, self._answers.put)
        except SystemExit:
            return
        except Exception as error:  # as a process that ends
            self._said = f"{type(error).__name__}: {error}"

    def tell(self, order: Order) -> None:
        self.send(line_of(order))

    def send(self, line: bytes) -> None:
        self.orders.append(json.loads(line)[0])
        self._lines.put(line)

    def answer(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self._answers.get(timeout=60))
        return told

    def reason(self) -> str | None:
        return None if self._said is None else f"rank {self.rank} of {self._size}: {self._said}"

    def stop(self) -> None:
        self._lines.put(None)


@pytest.fixture
def rank_threads(monkeypatch: pytest.MonkeyPatch) -> list[RankThread]:
    """All that are started in a test."""
    started: list[RankThread] = []

    def start(rank: int, size: int) -> RankThread:
        started.append(RankThread(rank, size))
        return started[-1]

    monkeypatch.setattr(team, "RankProcess", start)
    return started
