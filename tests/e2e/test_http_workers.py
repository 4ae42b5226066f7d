"""`ramify serve --http-workers 2`: one port, one engine; keys, limits and metrics hold over both processes."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ramify.server.config import ServerConfig
from ramify.server.listening import address_of, listener_of
from ramify.server.service import limits_of
from ramify.server.worker_task import Task
from ramify.server.workers import Worker
from tests.conftest import CheckpointMaker
from tests.serve_process import Process, process

KEY = {"Authorization": "Bearer sesame"}
ASKED = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True, "seed": 3, "return_token_ids": True}
ENDLESS = {**ASKED, "max_tokens": 4_000, "stream": True}


def children(parent: int, program: str) -> list[int]:
    """The processes that another started to run a program."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and program in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return sorted(found)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing meanwhile, so that every new connection is another's."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def ask(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, headers=KEY, timeout=60)


class Stream:
    """A client that reads events until its stream ends, whatever ends it."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.events: list[dict[str, Any]] = []
        self.ended_at = 0.0
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(url, body), daemon=True)
        self._thread.start()
        assert self._begun.wait(60)

    def _read(self, url: str, body: dict[str, Any]) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=KEY, timeout=60) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        self.events.append(json.loads(line[6:]))
                        self._begun.set()
        except httpx.TransportError as error:
            self.events.append({"broken off": type(error).__name__})
        self.ended_at = time.monotonic()
        self._begun.set()

    def join(self) -> dict[str, Any]:
        self._thread.join(60)
        assert not self._thread.is_alive(), "nobody may wait for ever"
        return self.events[-1]


def metrics(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics", headers=KEY, timeout=60).text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def answers(found: dict[str, float], status: int) -> float:
    return found.get(f'ramify_http_requests_total{{method="POST",route="/v1/completions",status="{status}"}}', 0.0)


def until(true: Any) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def server(make_checkpoint: CheckpointMaker) -> Iterator[Process]:
    folder = make_checkpoint("llama", max_position_embeddings=4096)
    limits = ["--max-queue", "5", "--max-queue-per-client", "3", "--max-connections", "9", "--log-interval", "0"]
    model = ["--model", str(folder), "--num-kv-blocks", "600", "--api-key", "sesame"]
    with process(*model, *limits, "--http-workers", "2") as made:
        yield made


def test_limits_keys_and_metrics_are_those_of_one_server(server: Process) -> None:
    url = server.url()
    assert any("by 2 processes" in line for line in server.said)
    first, second = children(server.popen.pid, "worker_program.py")
    tokens = []
    for idle in (first, second):
        with stopped(idle):  # each has the key, the model and the engine
            assert httpx.get(f"{url}/health", timeout=60).json() == {"status": "ready"}
            assert httpx.get(f"{url}/v1/models", timeout=60).status_code == 401
            tokens.append(ask(url, ASKED).json()["choices"][0]["token_ids"])
            [card] = httpx.get(f"{url}/v1/models", headers=KEY, timeout=60).json()["data"]
            tokens.append(card)
    assert tokens[:2] == tokens[2:], "the same seed, the same tokens; the same card to the second"
    assert not any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in (first, second)), "they need no torch"
    with stopped(first):
        held = [Stream(url, ENDLESS), Stream(url, ENDLESS)]
    with stopped(second):
        held.append(Stream(url, ENDLESS))
        refused = ask(url, ASKED)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "client_queue_full")
        assert "this client has 3 prompts" in refused.json()["error"]["message"]
        found = metrics(url)
    assert answers(found, 200) == 5
    assert answers(found, 429) == 1
    assert found[f'ramify_requests_unfinished{{model="{_name(found)}"}}'] == 3

    # One process is killed: its clients are cut off, what they held is free, and another takes its place.
    os.kill(second, signal.SIGKILL)
    assert [set(stream.join()) for stream in held[:2]] == [{"broken off"}] * 2
    until(lambda: len(children(server.popen.pid, "worker_program.py")) == 2)
    [third] = [pid for pid in children(server.popen.pid, "worker_program.py") if pid != first]
    with stopped(third):
        until(lambda: ask(url, ASKED).status_code == 200)
        until(lambda: metrics(url)[f'ramify_requests_unfinished{{model="{_name(found)}"}}'] == 1)
    with stopped(first):
        until(lambda: _status(url) == 200)
        now = metrics(url)
    assert answers(now, 200) >= 6, "what the killed one had counted is counted still"
    assert answers(now, 429) >= 1

    # The engine's process is killed: every client is told, and the server ends with a status.
    [engine] = children(server.popen.pid, "child.py")
    waiting = [held[2], Stream(url, ENDLESS)]
    os.kill(engine, signal.SIGKILL)
    last = [stream.join() for stream in waiting]
    _, said = server.popen.communicate(timeout=60)
    assert [event["error"]["code"] for event in last] == ["engine_fault"] * 2
    assert server.popen.returncode == 1
    assert re.search(r"HTTP process \d ended by SIGKILL.*another takes its place", said)
    assert len(re.findall("the engine's process was ended by SIGKILL", said)) == 1
    assert "Traceback" not in said
    until(lambda: not _alive(third) and not _alive(first))


def _name(found: dict[str, float]) -> str:
    [name] = [name for name in found if name.startswith("ramify_requests_unfinished")]
    return name.split('"')[1]


def _status(url: str) -> int:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code
    except httpx.TransportError:
        return 0


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_sigterm_while_it_loads_ends_every_process(tmp_path: Path) -> None:
    """The checkpoint's configuration is a pipe that nobody writes to."""
    os.mkfifo(tmp_path / "config.json")
    with process("--model", str(tmp_path), "--http-workers", "2") as server:
        assert server.popen.stderr is not None
        url = server.popen.stderr.readline().split("Loading; ")[1].split()[0]
        until(lambda: _status(url) == 503)
        workers = children(server.popen.pid, "worker_program.py")
        status, said = server.end(signal.SIGTERM)
    assert (status, said, len(workers)) == (0, "", 2)
    until(lambda: not any(map(_alive, workers)))


def test_a_worker_ends_with_its_server_whatever_ended_that(tmp_path: Path) -> None:
    """Its socket to the server ends; here one that never told it what to serve."""
    config = ServerConfig(port=0, http_workers=2)
    limits = limits_of(config, 2)
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    with closing(listener_of(config)) as listener:
        task = Task.of(config, 0, listener=listener.fileno(), limits=limits.file)
        worker = Worker(task, str(tmp_path), ready=lambda _: None, ended=lambda _, status: ended.put(status))
        until(lambda: _status(address_of(listener)) == 503)
        worker.control.shutdown(socket.SHUT_RDWR)
        assert ended.get(timeout=60) == 1


def test_several_need_an_engine_of_its_own() -> None:
    with process("--http-workers", "2", "--no-engine-process") as server:
        _, said = server.popen.communicate(timeout=60)
    assert server.popen.returncode == 2
    assert "--http-workers must be 1 where the engine has no process of its own" in said
