"""Where requests are prepared (rendered, tokenized, parsed) and long replies written: beside the event loop.

What happens in the event loop holds up every stream, so only work that is known to be short runs there.
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


async def prepared(make: Callable[[], T], num_bytes: int, *, may_take_long: bool = False) -> T:
    """Work that grows with a body, the request's or the reply's, of `num_bytes`: in the loop only if that is short.

    `may_take_long`, whatever it is given: it runs a chat template, which is a program, or builds a grammar.
    """
    return await beside_the_loop(make) if may_take_long or num_bytes >= _SHORT_BYTES else make()
