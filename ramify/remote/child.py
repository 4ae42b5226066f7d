"""The program of the engine's process: `child.py FD`, where FD is a socket to the process that started it.

Over that socket come, in this order: a frame with the parent's module search path, a frame with the message `Build`,
and from then on single bytes, each with the socket of one more front process. When the socket ends, so does this
process, whatever it is doing: its parent is gone, or wants it gone. Should somebody else hold the parent's end open,
the parent's number tells. (The system's own signal at a parent's death follows the thread that started the child, not
the process, so it is of no use here.)

Ctrl-C and SIGTERM are the parent's to answer. Only the standard library is imported before the watch stands.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import socket
import struct
import sys
import threading

LENGTH = struct.Struct("<I")  # as in `remote.frames`
SECONDS_BETWEEN_LOOKS = 1.0


def main(descriptor: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # held back until now
    parent = os.getppid()
    control = socket.socket(fileno=descriptor)
    sys.path[:] = json.loads(_frame(control))
    builds: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    arrivals: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    threading.Thread(target=_hear, args=(control, parent, builds, arrivals), name="ramify-parent", daemon=True).start()

    from ramify.remote.engine_server import serve  # brings torch, while the parent finds out what to build

    serve(builds.get(), arrivals)


def _frame(control: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(_exactly(control, LENGTH.size))
    return _exactly(control, length)


def _exactly(control: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        piece = control.recv(count - len(content))
        if not piece:
            os._exit(0)  # the parent is gone before it said what it wanted
        content += piece
    return content


def _hear(
    control: socket.socket,
    parent: int,
    builds: queue.SimpleQueue[bytes],
    arrivals: queue.SimpleQueue[socket.socket],
) -> None:
    builds.put(_frame(control))
    while os.getppid() == parent:
        readable, _, _ = select.select([control], [], [], SECONDS_BETWEEN_LOOKS)
        if not readable:
            continue
        try:
            content, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        except OSError:
            break
        if not content:
            break
        for descriptor in descriptors:
            arrivals.put(socket.socket(fileno=descriptor))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
