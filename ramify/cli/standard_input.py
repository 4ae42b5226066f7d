"""Standard input as text: what a command reads there, and what it says of bytes that are none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ramify.errors import InvalidInputError


@contextmanager
def text_alone() -> Iterator[None]:
    """Around whatever reads standard input."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"standard input is no text in {error.encoding}: {error.reason}") from None


def read_all() -> str:
    """Everything but the newline that ends the last line."""
    with text_alone():
        return sys.stdin.read().removesuffix("\n")
