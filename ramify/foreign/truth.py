"""Truth: an answer that may be read as a value or asked for by a call."""

from __future__ import annotations


class Truth(int):
    """True or False, for names that some callers know as a method and others as a value.

    A plain method would be true in every `if` that forgets to call it. This one answers `if output.finished` and
    `if output.finished()` alike; it compares, adds up, hashes and prints as the bool does. In JSON it is 1 or 0:
    write the call there, which is the bool itself.
    """

    def __new__(cls, value: object) -> Truth:
        return super().__new__(cls, bool(value))

    def __call__(self) -> bool:
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))
