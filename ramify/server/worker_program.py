"""The program of a worker: `worker_program.py FD`, where FD is a socket to the server that started it (`workers.py`).

Over that socket comes a frame with the server's module search path, and then what `worker_task.py` names.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys

LENGTH = struct.Struct("<I")  # as in `remote/frames.py`, which cannot be imported yet


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the server's to answer
    control = socket.socket(fileno=descriptor)
    head = control.recv(LENGTH.size, socket.MSG_WAITALL)
    path = control.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL) if len(head) == LENGTH.size else b""
    if not path:
        os._exit(1)  # the server is gone already
    sys.path[:] = json.loads(path)

    from ramify.server.worker import work

    work(control)


if __name__ == "__main__":
    main(int(sys.argv[1]))
