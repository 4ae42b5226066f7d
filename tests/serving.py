"""A real server for tests: uvicorn in a thread, on a port of its own."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn
from fastapi import FastAPI

from ramify.async_llm import AsyncLLM
from ramify.config import DEFAULT_MODEL, MixtureConfig
from ramify.drive.async_engine import AsyncEngine
from ramify.engine.core import EngineCore
from ramify.server.app import app_of
from ramify.server.config import PairConfig, ServerConfig
from ramify.server.listening import Gate, protocol_behind
from ramify.server.load import load_models
from ramify.server.service import Service
from ramify.server.to_serve import pair_to_serve

# Every test that asks a server can be run with the engine in a process of its own, by this variable set to 1.
ENGINE_PROCESS = os.environ.get("RAMIFY_TEST_ENGINE_PROCESS") == "1"


@contextmanager
def serving(app: FastAPI, *, max_header_bytes: int = 16 * 2**10, send_buffer: int | None = None) -> Iterator[str]:
    """The address of a server that runs as long as the block does; `send_buffer` bounds what the system takes ahead."""
    listener = socket.socket()
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=protocol_behind(Gate(1_000_000)),  # as `serve` has it
            log_level="warning",
            h11_max_incomplete_event_size=max_header_bytes,
            timeout_graceful_shutdown=5,
        )
    )
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=30)
    assert not thread.is_alive(), "the server does not end"


def core_of(llm: AsyncLLM) -> EngineCore:
    """The core of an engine in this process."""
    if not isinstance(llm.engine, AsyncEngine):
        pytest.skip("looks into an engine that runs in another process")
    core = llm.engine._core
    assert isinstance(core, EngineCore)
    return core


def mixture_app() -> FastAPI:
    """The default model as teacher and as student, under the name `mixture`."""
    service = Service(ServerConfig())
    pair = PairConfig(teacher=DEFAULT_MODEL, theta=DEFAULT_MODEL)
    model = pair_to_serve(pair, MixtureConfig(), {"max_model_len": 1024}, "mixture")
    service.open(load_models([model], ENGINE_PROCESS, lambda _: None))
    return app_of(service)
