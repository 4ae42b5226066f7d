"""The program that `encoding_process` starts: one tokenizer, texts in, ids out, each within a limit on time.

It imports nothing of Ramify, reads frames (length, bytes) from its standard input until that ends, and answers each on
its standard output with a frame that begins with 0 and holds the ids, or begins with 1 and holds a message.
"""

from __future__ import annotations

import resource
import signal
import struct
import sys
from typing import IO

import tokenizers

LENGTH = struct.Struct("<Q")


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame's bytes; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    content = stream.read(length)
    return content if len(content) == length else None


def answer(backend: tokenizers.Tokenizer, request: bytes) -> bytes:
    try:
        ids = backend.encode(request[1:].decode("utf-8"), add_special_tokens=request[0] == 1).ids
        return b"\0" + struct.pack(f"<{len(ids)}I", *ids)
    except BaseException as error:  # a panic of the backend is no Exception
        return b"\1" + str(error)[:200].encode()


def main(memory_bytes: int, seconds: int, bytes_per_second: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    signal.setitimer(signal.ITIMER_PROF, seconds)  # at its end the signal ends the process, whatever that is doing
    description = read_frame(source)
    if description is None:
        return
    backend = tokenizers.Tokenizer.from_str(description.decode("utf-8"))
    while (request := read_frame(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds + len(request) / bytes_per_second)
        reply = answer(backend, request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(LENGTH.pack(len(reply)) + reply)
        sink.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
