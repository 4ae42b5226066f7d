"""What a process that tokenizes does (`process/bounded_child.py` runs it): one tokenizer, texts in, ids out.

A request is a byte that says whether special tokens are added, and the text; the answer is the ids, 4 bytes each.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import tokenizers


def begin(description: bytes) -> Callable[[bytes], bytes]:
    backend = tokenizers.Tokenizer.from_str(description.decode("utf-8"))

    def answer(request: bytes) -> bytes:
        ids = backend.encode(request[1:].decode("utf-8"), add_special_tokens=request[0] == 1).ids
        return struct.pack(f"<{len(ids)}I", *ids)

    return answer
