"""Where a request is prepared: rendered, tokenized, parsed. What may take long runs beside the event loop.

What happens in the event loop holds up every stream, so a route says which of two kinds its work is:

    await beside_the_loop(make)               a template, which is a program; anything that has no bound
    await prepared(make, num_bytes)           work that grows with the body: in the loop only if the body is short

Threads help only if the work lets go of the interpreter's lock, or is made of short steps: the tokenizer and the
template do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_SHORT_BYTES = 2**14  # tokenizing this much takes a few milliseconds


async def beside_the_loop(make: Callable[[], T]) -> T:
    return await asyncio.to_thread(make)


async def prepared(make: Callable[[], T], num_bytes: int) -> T:
    """`num_bytes`: how long the request's body is, which bounds everything in it."""
    return make() if num_bytes < _SHORT_BYTES else await beside_the_loop(make)
