"""Standard input, output and error, whatever the shell made of them."""

from __future__ import annotations

import codecs
import io
import os
import sys
from pathlib import Path
from typing import TextIO


def prepare_streams() -> None:
    """A closed stream becomes an empty one, and bytes that are no text are errors instead of strange characters."""
    nowhere = Path(os.devnull)
    sys.stdin = sys.stdin or nowhere.open(encoding="utf-8")
    sys.stdout = sys.stdout or nowhere.open("w", encoding="utf-8")
    sys.stderr = sys.stderr or nowhere.open("w", encoding="utf-8")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")
    if isinstance(sys.stdout, io.TextIOWrapper) and not takes_all_characters():
        sys.stdout.reconfigure(errors="replace")  # one that it lacks is a question mark, and the rest is not lost


def takes_all_characters() -> bool:
    """Whether standard output is Unicode; in other encodings models write what they have no character for."""
    try:
        return codecs.lookup(sys.stdout.encoding or "utf-8").name.startswith("utf-")
    except LookupError:
        return False


def discard_output() -> None:
    """Forgets what could not be written; Python would try once more as it ends, and complain."""
    _discard(sys.stdout)


def discard_messages() -> None:
    """The same for standard error."""
    _discard(sys.stderr)


def flush_messages() -> None:
    """Messages that cannot be written do not change how a command ends."""
    try:
        sys.stderr.flush()
    except OSError:
        discard_messages()


def _discard(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
