"""The journal of a run: `samples.jsonl`, with one sample per line, and `settings.json`, what they were made with.

All samples of a problem are written together and reach the disk before those of the next problem. So whatever ends a
run, power cuts and kill -9 included, only the last problem's lines can be incomplete. They are cut off when the journal
is opened again, and that problem is sampled again, with the same seed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ramify import disk
from ramify.distill.problems import Problem
from ramify.distill.recipe import Recipe
from ramify.errors import InvalidInputError, RamifyError

SAMPLES, SETTINGS = "samples.jsonl", "settings.json"


class Journal:
    """Open in one process at a time. `done` holds the line numbers of the problems that have all their samples."""

    def __init__(self, folder: Path, recipe: Recipe, problems: Sequence[Problem]) -> None:
        self.folder = folder
        self.path = folder / SAMPLES
        self._recipe = recipe
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise RamifyError(f"cannot write to {folder}: {disk.reason(error, folder)}") from None
        try:
            _lock(self._file, folder)
            self._settle_settings()
            self.done = self._recover({problem.line: problem.digest for problem in problems})
        except BaseException:
            self.close()
            raise

    def append(self, samples: Sequence[dict[str, Any]]) -> None:
        """Writes all samples of one problem: they are on the disk when this returns, or none of them is."""
        content = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples).encode()
        end = os.lseek(self._file, 0, os.SEEK_END)
        try:
            written = 0
            while written < len(content):
                written += os.write(self._file, content[written:])
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, end)
            why = disk.reason(error, self.folder, len(content))
            raise RamifyError(
                f"cannot write to {self.path}: {why}. What was there is safe: make room, then run the same command "
                f"again to go on"
            ) from None
        self.done.add(int(samples[0]["line"]))

    def samples(self) -> Iterator[dict[str, Any]]:
        """All samples so far, in the order in which they were written."""
        with self.path.open("rb") as file:
            for content in file:
                yield json.loads(content)

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle_settings(self) -> None:
        path = self.folder / SETTINGS
        wanted = self._recipe.as_dict()
        if not path.exists():
            if os.fstat(self._file).st_size:
                raise InvalidInputError(f"{self.path} was not written by this command: choose another folder")
            disk.write_whole(path, json.dumps(wanted, ensure_ascii=False, indent=1) + "\n")
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise InvalidInputError(f"{path} is damaged: choose another folder") from None
        differing = [name for name in wanted if not isinstance(found, dict) or found.get(name) != wanted[name]]
        if differing:
            name = differing[0]
            before = found.get(name) if isinstance(found, dict) else None
            raise InvalidInputError(
                f"{self.folder} holds samples made with other settings ({name} was {before!r}, now it is "
                f"{wanted[name]!r}): use the same ones to go on, or choose another folder"
            )

    def _recover(self, digests: dict[int, str]) -> set[int]:
        """Cuts off an incomplete problem at the end; returns the line numbers of the complete ones."""
        n = self._recipe.n
        done: set[int] = set()
        sound = start = 0  # where the last complete problem ends; where the present line starts
        num_read = 0  # how many samples of the problem `reading` have been read
        reading: int | None = None
        with self.path.open("rb") as file:
            for number, content in enumerate(file, start=1):
                end = start + len(content)
                sample = _sample(content)
                if sample is None:
                    if end != os.fstat(self._file).st_size:
                        raise InvalidInputError(f"{self.path} is damaged in line {number}: choose another folder")
                    break
                line, digest, index = sample
                if digests.get(line) != digest:
                    raise InvalidInputError(
                        f"{self.path} holds samples of line {line}, and that problem is not there any more: use the "
                        f"same problems to go on (more may follow after them), or choose another folder"
                    )
                if (num_read and reading != line) or index != num_read or line in done:
                    raise InvalidInputError(f"{self.path} is damaged in line {number}: choose another folder")
                reading, num_read = line, num_read + 1
                if num_read == n:
                    done.add(line)
                    num_read, sound = 0, end
                start = end
        os.ftruncate(self._file, sound)
        return done


def _sample(content: bytes) -> tuple[int, str, int] | None:
    """A journal line's (line, digest, sample); None if the line is incomplete or damaged."""
    if not content.endswith(b"\n"):
        return None
    try:
        entry = json.loads(content)
        return int(entry["line"]), str(entry["problem"]), int(entry["sample"])
    except (ValueError, KeyError, TypeError):
        return None


def _lock(file: int, folder: Path) -> None:
    """The kernel releases the lock when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # not on this system
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise InvalidInputError(f"another run is writing to {folder}: wait for it, or choose another folder") from None
