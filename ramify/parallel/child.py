"""The program of a rank's process: `child.py FD`, where FD is a socket to the process of the leading rank.

Over that socket come a line with the leading process's module search path, and then orders (orders.py). When the socket
ends, or that process is gone, so is this one, whatever it is doing. Ctrl-C and SIGTERM are for the leading process to
answer. Only the standard library is imported before the watch stands.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import sys
import threading
import time

SECONDS_BETWEEN_LOOKS = 1.0


def main(descriptor: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    leader = os.getppid()
    control = socket.socket(fileno=descriptor)
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    reader = control.makefile("rb")
    sys.path[:] = json.loads(reader.readline() or b"[]")

    def read() -> None:
        for line in reader:
            lines.put(line)
        os._exit(0)

    def watch() -> None:
        while os.getppid() == leader:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        os._exit(0)

    for task in (read, watch):
        threading.Thread(target=task, name=f"ramify-{task.__name__}", daemon=True).start()

    from ramify.parallel.follower import follow  # brings torch

    try:
        follow(lines.get, control.sendall)
    finally:
        os._exit(1)  # at once: nobody waits for a rank's threads


if __name__ == "__main__":
    main(int(sys.argv[1]))
