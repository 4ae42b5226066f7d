"""Pipe: a way for a stream's bytes straight into the client's connection, past the turns that ASGI takes for each.

A server of ours (`listening.py`) puts one into the scope of every request. Under other servers there is none, and
bytes go through ASGI's `send`.
"""

from __future__ import annotations

from typing import Protocol

from starlette.types import Scope

_PIPE = "ramify.pipe"


class Pipe(Protocol):
    """For the body of a response whose head has been sent; its end is sent as ASGI has it."""

    @property
    def is_full(self) -> bool:
        """Whether the client reads too slowly: much of what was written has not left this process."""
        ...

    def write(self, data: bytes) -> None:
        """Takes the bytes, of which there must be some, at once; to a client that is gone they are lost."""
        ...

    async def drained(self) -> None:
        """Waits until it is not full."""
        ...


def give_pipe(scope: Scope, pipe: Pipe) -> None:
    scope[_PIPE] = pipe


def pipe_of(scope: Scope) -> Pipe | None:
    pipe: Pipe | None = scope.get(_PIPE)
    return pipe
