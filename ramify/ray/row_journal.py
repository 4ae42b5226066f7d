"""RowJournal: what rows became, in a folder that all machines of a cluster see.

Every actor appends to a file of its own, a line for each row, and reads all files when it starts. So there is nothing
to lock; whatever ends an actor, or the whole job, costs the rows on their way and no others, and a torn line is passed
over. A row's name is made of everything that decides what it becomes, so other settings find nothing of these.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from ramify.errors import InvalidInputError, RamifyError
from ramify.files import disk

Entry = dict[str, Any]


class RowJournal:
    """Read once, when it is opened: later lines of other actors are not looked for."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._places: dict[str, tuple[Path, int]] = {}  # by the row's name: its file, and where the line begins
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(self._folder.glob("part-*.jsonl")):
                self._index(path)
            self._path = self._folder / f"part-{uuid.uuid4().hex}.jsonl"
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise RamifyError(f"the journal {folder} cannot be used: {disk.reason(error, self._folder)}") from None

    def find(self, name: str) -> list[Entry] | None:
        if name not in self._places:
            return None
        path, start = self._places[name]
        with path.open("rb") as file:
            file.seek(start)
            entries: list[Entry] = json.loads(file.readline())["entries"]
        return entries

    def append(self, name: str, entries: list[Entry]) -> None:
        """Returns when the row is on the disk."""
        content = json.dumps({"row": name, "entries": entries}, ensure_ascii=False).encode() + b"\n"
        with disk.writing(self._path, len(content)):
            disk.write_all(self._file, content)

    def _index(self, path: Path) -> None:
        start = 0
        with path.open("rb") as file:
            for content in file:
                with suppress(ValueError, KeyError, TypeError):  # torn: the row is made again
                    self._places[str(json.loads(content)["row"])] = path, start
                start += len(content)


def row_name(*parts: Any) -> str:
    """A digest of all that decides what a row becomes."""
    try:
        content = json.dumps(parts, sort_keys=True)
    except TypeError as error:
        raise InvalidInputError(
            f"a journal knows rows by what they are made of, and that cannot be written down here: {error}"
        ) from None
    return hashlib.sha256(content.encode()).hexdigest()[:32]
