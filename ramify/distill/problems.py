"""Reading problems from a JSONL file: one object with `question` and `answer` per line.

Where an oracle is to write the missing answers, a problem may come without one. The file itself is only read.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramify.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Problem:
    line: int  # in its file, from 1
    question: str
    answer: str | None  # None: the file has none
    oracle_answer: str | None = None  # what the oracle wrote instead

    @property
    def solution(self) -> str:
        """The answer, whoever gave it."""
        return self.oracle_answer or "" if self.answer is None else self.answer

    @property
    def digest(self) -> str:
        """By which a later run sees whether the line still holds the same problem."""
        return hashlib.sha256(json.dumps([self.question, self.answer]).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Malformed:
    line: int
    what: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.what}"


def read_problems(
    path: Path, limit: int | None = None, *, answers_may_lack: bool = False
) -> tuple[list[Problem], list[Malformed]]:
    """The problems in a file (or in its first `limit` lines), and what is wrong with its malformed lines.

    With `answers_may_lack`, a problem whose answer is missing, null or blank is sound, and its answer None.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise InvalidInputError(f"the problems cannot be read: {path}: {error.strerror}") from None
    problems: list[Problem] = []
    malformed: list[Malformed] = []
    with file:
        for line, whole in enumerate(file, start=1):
            content = whole.removeprefix(codecs.BOM_UTF8) if line == 1 else whole  # as some editors begin a file
            if limit is not None and line > limit:
                break
            if not content.strip():
                continue
            parsed = _parse(line, content, answers_may_lack=answers_may_lack)
            if isinstance(parsed, Problem):
                problems.append(parsed)
            else:
                malformed.append(parsed)
    return problems, malformed


def _parse(line: int, content: bytes, *, answers_may_lack: bool) -> Problem | Malformed:
    try:
        entry: Any = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError:
        return Malformed(line, "not UTF-8")
    except (ValueError, RecursionError) as error:
        return Malformed(line, f"not JSON: {error}")
    if not isinstance(entry, dict):
        return Malformed(line, f"not an object but {_kind(entry)}")
    answer = entry.get("answer")
    lacks_answer = answers_may_lack and (answer is None or (isinstance(answer, str) and not answer.strip()))
    for name in ("question",) if lacks_answer else ("question", "answer"):
        if name not in entry:
            hint = " (--oracle MODEL writes answers where there are none)" if name == "answer" else ""
            return Malformed(line, f"no {name!r}{hint}")
        if not isinstance(entry[name], str):
            return Malformed(line, f"{name!r} is not text but {_kind(entry[name])}")
        try:
            entry[name].encode("utf-8")
        except UnicodeEncodeError:
            return Malformed(line, f"{name!r} holds half a surrogate pair")
    if not entry["question"].strip():
        return Malformed(line, "the question is empty")
    return Problem(line, entry["question"], None if lacks_answer else answer)


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
