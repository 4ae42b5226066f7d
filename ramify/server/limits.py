"""Limits: how many prompts and connections a server takes on at once, counted over all of its processes.

Counts lie in memory that the processes share, each in the column of the process that made it, so that what a process
held that has crashed can be taken back. A row is a thing that is counted: connections, prompts, and (where one client
may not have all) each client that has prompts running.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

_COUNT = 4  # bytes of a count
_NAME = 16  # bytes of a client's digest; none is all zeros
_MOST_CLIENTS = 2**14  # with prompts running at the same time; more are as if the queue were full
_CONNECTIONS, _PROMPTS, _FIRST_CLIENT = 0, 1, 2


class Limits:
    """Every process has one over the same file, and a column of its own in it; a lone process needs no file (-1).

        [names of the clients in rows 2, 3, ...] [row 0: connections, a count a process] [row 1: prompts] [row 2] ...

    A question and what follows from it happen under the file's lock, which the system takes back from a process that
    ends. Threads of one process are not kept apart: use it from one of them.
    """

    def __init__(self, file: int, *, by_client: bool, num_processes: int, column: int) -> None:
        self.file = file
        self._num_processes = num_processes
        self._column = column
        self._num_names = _MOST_CLIENTS if by_client else 0
        self._names_end = self._num_names * _NAME
        size = self._names_end + (_FIRST_CLIENT + self._num_names) * num_processes * _COUNT
        if file != -1:
            os.ftruncate(file, size)  # whoever comes first makes it, and all have the same size in mind
        self._memory = mmap.mmap(file, size)
        self._counts = memoryview(self._memory)[self._names_end :].cast("i")

    @classmethod
    def create(cls, *, by_client: bool, num_processes: int = 1, column: int = 0) -> Self:
        """In new memory, whose `file` may be handed to other processes; `by_client`: each may have its own limit."""
        if num_processes == 1:
            return cls(-1, by_client=by_client, num_processes=1, column=0)
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()), by_client=by_client, num_processes=num_processes, column=column)

    # -- connections ----------------------------------------------------------------------------------------------

    @property
    def num_connections(self) -> int:
        return self._sum(_CONNECTIONS)

    def connect(self, most: int) -> bool:
        """Whether there is room for one more connection, which is then counted."""
        with self._locked():
            if self._sum(_CONNECTIONS) >= most:
                return False
            self._add(_CONNECTIONS, 1)
            return True

    def disconnect(self) -> None:
        with self._locked():
            self._add(_CONNECTIONS, -1)

    # -- prompts --------------------------------------------------------------------------------------------------

    @property
    def num_prompts(self) -> int:
        return self._sum(_PROMPTS)

    def num_prompts_of(self, client: str) -> int:
        with self._locked():
            row = self._row_of(client)
            return 0 if row is None else self._sum(row)

    def take(self, count: int, client: str, most: int, most_of_one: int | None) -> str | None:
        """Counts so many prompts of a client, or says what they are too many for: "queue" or "client"."""
        with self._locked():
            if self._sum(_PROMPTS) + count > most:
                return "queue"
            if most_of_one is not None:
                row = self._row_of(client)
                if (0 if row is None else self._sum(row)) + count > most_of_one:
                    return "client"
                if row is None:
                    row = self._find(bytes(_NAME))
                    if row is None:
                        return "queue"
                    self._name(row, _digest(client))
                self._add(row, count)
            self._add(_PROMPTS, count)
            return None

    def give_back(self, count: int, client: str) -> None:
        with self._locked():
            self._add(_PROMPTS, -count)
            row = self._row_of(client)
            if row is not None:
                self._add(row, -count)
                self._forget_if_empty(row)

    def give_back_all(self, column: int) -> None:
        """Takes back whatever the process of that column held: it is gone."""
        with self._locked():
            for row in range(_FIRST_CLIENT + self._num_names):
                place = row * self._num_processes + column
                if self._counts[place]:
                    self._counts[place] = 0
                    if row >= _FIRST_CLIENT:
                        self._forget_if_empty(row)

    # -- rows -----------------------------------------------------------------------------------------------------

    def _sum(self, row: int) -> int:
        first = row * self._num_processes
        return sum(self._counts[first : first + self._num_processes])

    def _add(self, row: int, count: int) -> None:
        self._counts[row * self._num_processes + self._column] += count

    def _row_of(self, client: str) -> int | None:
        return self._find(_digest(client))

    def _find(self, name: bytes) -> int | None:
        place = self._memory.find(name, 0, self._names_end)
        while place % _NAME and place >= 0:  # it straddles two names
            place = self._memory.find(name, place + 1, self._names_end)
        return None if place < 0 else _FIRST_CLIENT + place // _NAME

    def _forget_if_empty(self, row: int) -> None:
        if not self._sum(row):
            self._name(row, bytes(_NAME))

    def _name(self, row: int, name: bytes) -> None:
        place = (row - _FIRST_CLIENT) * _NAME
        self._memory[place : place + _NAME] = name

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._num_processes == 1:
            yield
            return
        fcntl.lockf(self.file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.file, fcntl.LOCK_UN)


def _digest(client: str) -> bytes:
    return hashlib.blake2b(client.encode(), digest_size=_NAME).digest()
