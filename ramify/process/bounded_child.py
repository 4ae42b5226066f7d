"""The program that `bounded` starts: frames in, frames out, within limits on memory and on time for each.

It imports nothing of Ramify. Its first argument is the file of a worker: a module with `begin(first frame)`, which
returns the function that answers every frame after it. Frames are a length and bytes, from standard input and to
standard output; an answer begins with 0, or with 1 and a message if it failed.
"""

from __future__ import annotations

import resource
import runpy
import signal
import struct
import sys
from typing import IO

LENGTH = struct.Struct("<Q")
START_SECONDS = 10  # for imports and the first frame


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame's bytes; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    content = stream.read(length)
    return content if len(content) == length else None


def main(worker: str, memory_bytes: int, seconds: int, bytes_per_second: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    # At its end the signal ends the process, whatever that is doing.
    signal.setitimer(signal.ITIMER_PROF, START_SECONDS)
    begin = runpy.run_path(worker)["begin"]
    first = read_frame(source)
    if first is None:
        return
    answer = begin(first)
    while (request := read_frame(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds + len(request) / bytes_per_second)
        try:
            reply = b"\0" + answer(request)
        except BaseException as error:  # a panic of a library in Rust is no Exception
            reply = b"\1" + str(error)[:200].encode(errors="replace")
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(LENGTH.pack(len(reply)) + reply)
        sink.flush()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
