"""A real server for tests: uvicorn in a thread, on a port of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI


@contextmanager
def serving(app: FastAPI, *, max_header_bytes: int = 16 * 2**10) -> Iterator[str]:
    """The address of a server that runs as long as the block does."""
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host="127.0.0.1",
            port=0,
            http="h11",
            log_level="warning",
            h11_max_incomplete_event_size=max_header_bytes,
            timeout_graceful_shutdown=5,
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    [listener] = server.servers
    yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=30)
    assert not thread.is_alive(), "the server does not end"
