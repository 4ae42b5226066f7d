"""The journal of a run: `samples.jsonl`, with one sample per line, and `settings.json`, what they were made with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ramify.distill.files import ANSWERS, SAMPLES, SETTINGS
from ramify.distill.problem_lines import ProblemLines
from ramify.distill.problems import Problem
from ramify.distill.recipe import Recipe
from ramify.errors import InvalidInputError
from ramify.files.disk import write_whole


class Journal:
    """Open in one process at a time. `done` holds the line numbers of the problems that have all their samples."""

    def __init__(self, folder: Path, recipe: Recipe, problems: Sequence[Problem]) -> None:
        self.folder = folder
        self.path = folder / SAMPLES
        self._recipe = recipe
        self._lines = ProblemLines(self.path)
        try:
            _lock(self._lines.file, folder)
            self._settle_settings()
            self._lines.recover({problem.line: problem.digest for problem in problems}, recipe.n)
        except BaseException:
            self.close()
            raise

    @property
    def done(self) -> set[int]:
        return self._lines.done

    def append(self, samples: Sequence[dict[str, Any]]) -> None:
        """Writes all samples of one problem: they are on the disk when this returns, or none of them is."""
        self._lines.append(samples)

    def samples(self) -> Iterator[dict[str, Any]]:
        """All samples so far, in the order in which they were written."""
        return self._lines.entries()

    def close(self) -> None:
        self._lines.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle_settings(self) -> None:
        path = self.folder / SETTINGS
        wanted = self._recipe.as_dict()
        content = json.dumps(wanted, ensure_ascii=False, indent=1) + "\n"
        has_samples = os.fstat(self._lines.file).st_size > 0
        if not path.exists():
            if has_samples:
                raise InvalidInputError(f"{self.path} was not written by this command: choose another folder")
            write_whole(path, content)
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise InvalidInputError(f"{path} is damaged: choose another folder")
        answers = self.folder / ANSWERS
        if not has_samples and not (answers.exists() and answers.stat().st_size):
            write_whole(path, content)  # nothing was made with what it says: its run ended before, by a mistake in it
            return
        unknown = sorted(found.keys() - wanted.keys())
        if unknown:
            raise InvalidInputError(
                f"{self.folder} holds samples made by another version of Ramify, with a setting that this one does not "
                f"have ({unknown[0]}): go on with that version, or choose another folder"
            )
        before = Recipe().as_dict() | found  # a setting that is newer than the folder was at its default
        without_oracle = wanted["oracle"] is before["oracle"] is None
        for name, value in wanted.items():
            if without_oracle and name.startswith("oracle_"):
                continue  # there was nobody to tell
            if before[name] != value:
                raise InvalidInputError(
                    f"{self.folder} holds samples made with other settings ({name} was {before[name]!r}, now it is "
                    f"{value!r}): use the same ones to go on, or choose another folder"
                )


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
