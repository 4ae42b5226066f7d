"""A file of JSON lines that survives whatever ends the process: n lines for each problem, appended together.

All lines of a problem reach the disk before those of the next one. So only the last problem's lines can be incomplete
(power cuts and kill -9 included). They are cut off when the file is opened again, and that problem is done again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ramify.errors import InvalidInputError, RamifyError
from ramify.files import disk


class ProblemLines:
    """`done` holds the line numbers of the problems that have all their n lines here."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: set[int] = set()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise RamifyError(f"cannot write to {path.parent}: {disk.reason(error, path.parent)}") from None

    def recover(self, digests: Mapping[int, str], n: int) -> None:
        """Cuts off an incomplete problem at the end and learns which ones are done; `digests` by line number."""
        self.done = set()
        sound = start = 0  # where the last complete problem ends; where the present line starts
        num_read = 0  # how many lines of the problem `reading` have been read
        reading: int | None = None
        size = os.fstat(self.file).st_size
        with self.path.open("rb") as file:
            for number, content in enumerate(file, start=1):
                end = start + len(content)
                entry = _entry(content)
                if entry is None:
                    if end != size:
                        raise self._damaged(number)
                    break
                line, digest, index = entry
                if digests.get(line) != digest:
                    raise InvalidInputError(
                        f"{self.path} holds samples of line {line}, and that problem is not there any more: use the "
                        f"same problems to go on (more may follow after them), or choose another folder"
                    )
                if (num_read and reading != line) or index != num_read or line in self.done:
                    raise self._damaged(number)
                reading, num_read = line, num_read + 1
                if num_read == n:
                    self.done.add(line)
                    num_read, sound = 0, end
                start = end
        os.ftruncate(self.file, sound)

    def append(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Writes all lines of one problem: they are on the disk when this returns, or none of them is."""
        content = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode()
        end = os.lseek(self.file, 0, os.SEEK_END)
        try:
            disk.write_all(self.file, content)
        except OSError as error:
            os.ftruncate(self.file, end)
            why = disk.reason(error, self.path.parent, len(content))
            raise RamifyError(
                f"cannot write to {self.path}: {why}. What was there is safe: make room, then run the same command "
                f"again to go on"
            ) from None
        self.done.add(int(entries[0]["line"]))

    def entries(self) -> Iterator[dict[str, Any]]:
        """All of them so far, in the order in which they were written."""
        with self.path.open("rb") as file:
            for content in file:
                yield json.loads(content)

    def close(self) -> None:
        os.close(self.file)

    def _damaged(self, number: int) -> InvalidInputError:
        return InvalidInputError(f"{self.path} is damaged in line {number}: choose another folder")


def _entry(content: bytes) -> tuple[int, str, int] | None:
    """A line's (line, problem, sample); None if it is incomplete or damaged."""
    if not content.endswith(b"\n"):
        return None
    try:
        entry = json.loads(content)
        return int(entry["line"]), str(entry["problem"]), int(entry["sample"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
