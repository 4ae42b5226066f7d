"""What surrounds the routes: signals, connections, the log, lines on throughput, other origins."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn

from ramify.errors import InvalidInputError
from ramify.server.app import app_of
from ramify.server.config import ServerConfig
from ramify.server.listening import Gate, listener_of, protocol_behind, room_for_connections
from ramify.server.records import Record
from ramify.server.service import Service
from ramify.server.signals import SignalWatch
from ramify.server.throughput import Throughput
from ramify.server.to_serve import ModelToServe
from tests.serving import serving


@contextmanager
def script(code: str) -> Iterator[subprocess.Popen[str]]:
    """A process of its own, which never outlives the test's patience."""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        patience = threading.Timer(60, process.kill)
        patience.start()
        try:
            yield process
        finally:
            patience.cancel()
            process.kill()


# -- signals --------------------------------------------------------------------------------------------------

BUSY = """
from ramify.server.signals import SignalWatch
with SignalWatch([({first}, lambda: print("first", flush=True)), ({second}, lambda: print("second", flush=True))]):
    print("ready", flush=True)
    while True:  # never a turn for anybody's event loop
        pass
"""


@pytest.mark.parametrize(
    ("seconds", "num_signals", "printed", "said"),
    [
        ((0.1, 600), 1, "first\n", "did not end in time"),
        ((600, 0.1), 2, "first\nsecond\n", "did not end in time"),
        ((600, 600), 3, "first\nsecond\n", "ended at once"),
    ],
    ids=["in its time", "in the second's", "at once"],
)
def test_signals_end_a_process_whose_main_thread_never_rests(
    seconds: tuple[float, float], num_signals: int, printed: str, said: str
) -> None:
    with script(BUSY.format(first=seconds[0], second=seconds[1])) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        heard = ""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM)[:num_signals]:
            process.send_signal(number)
            if heard != printed:
                heard += process.stdout.readline()
        output, errors = process.communicate(timeout=60)
    assert [heard + output, process.returncode] == [printed, 1]
    assert said in errors


def test_the_watch_leaves_signals_as_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with SignalWatch([]):
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


# -- connections ----------------------------------------------------------------------------------------------

FILES = 128
SERVE = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))
from ramify.server.config import ServerConfig
from ramify.server.front import run_front
from ramify.server.listening import listener_of
from ramify.server.service import Service
config = ServerConfig(port=0, log_interval=0)
run_front(Service(config), lambda _: [], listener_of(config))
"""


ASKED = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def asked(connection: socket.socket) -> bytes:
    connection.sendall(ASKED.replace(b"x\r\n", b"x\r\nConnection: close\r\n"))
    return b"".join(iter(lambda: connection.recv(1_000), b""))


def test_connections_beyond_the_limit_of_files_are_refused_and_told_of_once() -> None:
    """Without a cap, each attempt left thousands of tracebacks in the log, and nobody was served any more."""
    with script(SERVE) as process:
        assert process.stderr is not None
        address = process.stderr.readline().split("http://127.0.0.1:")[1].split()[0]
        assert "Serving" in process.stderr.readline()
        connections: list[socket.socket] = []
        for _ in range(3 * FILES):
            connections.append(socket.create_connection(("127.0.0.1", int(address)), timeout=30))
        assert asked(connections[0]).startswith(b"HTTP/1.1 503 "), "it has no model"
        late = socket.create_connection(("127.0.0.1", int(address)), timeout=30)
        connections.append(late)
        try:
            answer = asked(late)
        except ConnectionError:
            answer = b""  # so many wait to be refused that it was dropped
        assert b"too_many_connections" in answer or answer == b""
        for connection in connections:
            connection.close()
        warnings = [process.stderr.readline(), process.stderr.readline()]
        with closing(socket.create_connection(("127.0.0.1", int(address)), timeout=30)) as again:
            assert b"not ready" in asked(again)
        process.terminate()
        _, rest = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "and no more are taken" in warnings[0]
    assert "are taken again" in warnings[1]
    assert rest == "", "no traceback, no second line"


def test_nobody_sends_headers_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a few hundred silent connections would keep everybody out."""
    monkeypatch.setattr("ramify.server.listening._HEADER_SECONDS", 0.1)

    async def connect() -> list[bytes]:
        gate = Gate(10)
        config = uvicorn.Config(app_of(Service(ServerConfig())), http=protocol_behind(gate), lifespan="off")
        server = uvicorn.Server(config)
        listener = listener_of(ServerConfig(port=0))
        serving = asyncio.create_task(server._serve(sockets=[listener]))
        read = []
        for whole, part in ((b"", b""), (b"", b"GET /health HTTP/1.1\r\nHost:"), (ASKED, b"GET")):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(whole)
            answer = await reader.readuntil(b"}") if whole else b""
            writer.write(part)
            read.append(answer + await asyncio.wait_for(reader.read(), 30))
            writer.close()
        assert gate.num_open == 0
        server.should_exit = True
        await serving
        return read

    silent, slow, then_slow = asyncio.run(connect())
    assert [silent, slow] == [b"", b""]
    assert then_slow.count(b"HTTP/1.1 503") == 1, "what was asked is answered, and then it is closed"


@pytest.fixture(scope="module")
def without_models() -> Iterator[str]:
    """The address of a server that has nothing to serve."""
    with serving(app_of(Service(ServerConfig()))) as url:
        yield url


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("pieces", "status", "code"),
    [
        ([b"\x16\x03\x01 hello\r\n\r\n"], 400, "invalid_http"),
        ([b"GET /health HTTP/1.1\r\n\r\n"], 400, "invalid_http"),
        ([HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello"], 400, "invalid_http"),
        ([HEAD + b"Content-Length: -1\r\n\r\n"], 400, "invalid_http"),
        ([HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n"], 400, "invalid_http"),
        ([ASKED[:-2] + b"X: " + b"x" * 16_384 + b"\r\n\r\n"], 431, "headers_too_large"),
        ([b"GET /?" + b"x" * 16_384 + ASKED[11:]], 431, "headers_too_large"),
        ([ASKED[:-2] + b"X: " + b"x" * 20_000, b"x" * 20_000], 431, "headers_too_large"),
        ([ASKED[:-2] + b"X: y\r\n" * 3_000 + b"\r\n"], 431, "headers_too_large"),
    ],
)
def test_what_is_no_http_or_too_long_is_refused_in_the_shape_of_all_errors(
    without_models: str, pieces: list[bytes], status: int, code: str
) -> None:
    """It was plain text, and headers had no limit at all where they came in one piece."""
    head, body = sent(without_models, pieces)
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert "application/json" in head
    assert json.loads(body)["error"]["code"] == code


def test_headers_just_within_their_limit_are_read(without_models: str) -> None:
    head, _ = sent(without_models, [ASKED[:-2] + b"Connection: close\r\nX: " + b"x" * 16_200 + b"\r\n\r\n"])
    assert head.startswith("HTTP/1.1 503 "), "it has no model"


def test_nonsense_after_an_answer_ends_the_connection_and_leaves_no_traceback(
    without_models: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A second answer to one request cannot be sent; that it was tried was a traceback in the log each time."""
    no_chunk = b"POST /nope HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", b"ZZ\r\n"
    head, body = sent(without_models, list(no_chunk))
    assert head.startswith("HTTP/1.1 404 ")
    assert json.loads(body)["error"]["code"] == "unknown_url"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def sent(url: str, pieces: list[bytes]) -> tuple[str, str]:
    """Head and body of what comes back until the connection is closed; further pieces go once there is an answer."""
    address = urlsplit(url)
    with closing(socket.create_connection((address.hostname, address.port), timeout=30)) as connection:
        connection.sendall(pieces[0])
        answer = connection.recv(65_536) if len(pieces) > 1 else b""
        for piece in pieces[1:]:
            with suppress(ConnectionError):
                connection.sendall(piece)
        with suppress(ConnectionError):
            while piece := connection.recv(65_536):
                answer += piece
    head, _, body = answer.decode().partition("\r\n\r\n")
    return head, body


FEW = """
from ramify.server.config import ServerConfig
from ramify.server.front import run_front
from ramify.server.listening import listener_of
from ramify.server.service import Service
config = ServerConfig(port=0, log_interval=0, request_timeout=1, max_connections=1)
run_front(Service(config), lambda _: [], listener_of(config))
"""


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system cannot tell who reads nothing")
def test_who_reads_nothing_keeps_no_place_for_ever() -> None:
    """An answer that nobody reads is never over: clients without a key could take every connection and keep it."""
    with script(FEW) as process:
        assert process.stderr is not None
        address = "127.0.0.1", int(process.stderr.readline().split("http://127.0.0.1:")[1].split()[0])
        assert "Serving" in process.stderr.readline()
        with closing(socket.socket()) as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
            holder.connect(address)
            holder.settimeout(0.5)
            with suppress(TimeoutError):
                for _ in range(200):  # more answers than all buffers on the way hold
                    holder.sendall(ASKED.replace(b"/health", b"/") * 200)
            answers = []
            for _ in range(100):
                with closing(socket.create_connection(address, timeout=30)) as other:
                    answers.append(asked(other))
                if b"not ready" in answers[-1]:
                    break
                time.sleep(0.2)
    assert b"too_many_connections" in answers[0]
    assert b"not ready" in answers[-1]


def test_a_gate_counts_and_tells_once(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(10)
    assert [gate.enter() for _ in range(15)] == [True] * 10 + [False] * 5
    gate.leave()
    assert [gate.enter(), gate.enter()] == [True, False]
    for _ in range(10):
        gate.leave()
    assert [record.getMessage() for record in caplog.records] == [
        "10 connections are open, and no more are taken (--max-connections)",
        "connections are taken again; 5 were refused",
        "10 connections are open, and no more are taken (--max-connections)",
        "connections are taken again; 1 were refused",
    ]


def test_files_that_run_out_all_the_same_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(10)
    for _ in range(100):
        gate.heard(None, {"message": "socket.accept() out of system resource", "exception": OSError(24, "files")})  # type: ignore[arg-type]
    assert len(caplog.records) == 1


def test_room_is_left_for_the_process_itself() -> None:
    assert room_for_connections(ServerConfig(), 1_024) == 896
    assert room_for_connections(ServerConfig(), 64) == 32
    assert room_for_connections(ServerConfig(max_connections=5), 64) == 5
    with pytest.raises(InvalidInputError, match=r"max_connections must be at most 32, got 33.*ulimit -n"):
        room_for_connections(ServerConfig(max_connections=33), 64)


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("no.such.host.invalid", "there is no such address"),
        ("192.0.2.1", "does not have that address"),
        ("a" * 300, "no such"),
    ],
)
def test_an_address_that_is_not_here(host: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        listener_of(ServerConfig(host=host, port=0))


# -- the log --------------------------------------------------------------------------------------------------


def test_a_line_tells_counts_and_names_of_ours() -> None:
    record = Record("cmpl-1", 12, 64)
    assert record.line("POST", "/v1/completions", 200, 1.2345) == (
        "POST /v1/completions 200 1.234 s id=cmpl-1 prompt_tokens=12 output_tokens=64"
    )
    assert Record(error="client_gone").line("GET", "/", None, 0) == "GET / unanswered 0.000 s error=client_gone"


def test_throughput_is_told_only_if_there_is_any() -> None:
    throughput = Throughput()
    idle = dict.fromkeys(("steps", "generated_tokens", "prompt_tokens_computed", "running", "waiting"), 0)
    idle |= {"blocks_in_use": 0, "blocks_total": 200}
    assert throughput.line(idle, 10) is None
    busy = {**idle, "steps": 5, "generated_tokens": 50, "prompt_tokens_computed": 20, "running": 3, "blocks_in_use": 50}
    assert throughput.line(busy, 10) == ("3 running, 0 waiting; 5.0 tokens/s drawn, 2.0 tokens/s of prompts; cache 25%")
    assert throughput.line(busy, 10) is None


# -- not ready yet --------------------------------------------------------------------------------------------


def test_health_tells_how_far_loading_is_and_nothing_of_the_machine(caplog: pytest.LogCaptureFixture) -> None:
    service = Service(ServerConfig(api_key="sesame"))

    async def health() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app_of(service)), base_url="http://x") as client:
            answer = await client.get("/health")
            return answer.status_code, answer.json()

    assert asyncio.run(health()) == (503, {"status": "not ready", "reason": "loading"})
    with caplog.at_level("INFO"):
        service.say("Captured 12 of 40 sizes of CUDA graphs")
        service.say("Compiling /home/somebody/kernels.cpp")
    reason = "loading: captured 12 of 40 sizes of CUDA graphs"
    assert asyncio.run(health()) == (503, {"status": "not ready", "reason": reason})
    assert [record.getMessage() for record in caplog.records if record.name == "ramify.server.service"] == [
        "Captured 12 of 40 sizes of CUDA graphs",
        "Compiling /home/somebody/kernels.cpp",
    ]
    service.is_draining = True
    assert asyncio.run(health()) == (503, {"status": "not ready", "reason": "shutting down"})


@pytest.mark.parametrize(("flags", "wanted"), [([], "full"), (["--warmup", "lazy"], "lazy")])
def test_a_server_is_warm_before_it_is_ready_unless_told_otherwise(
    flags: list[str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from ramify.cli.commands import app

    asked: dict[str, Any] = {}

    def serve(_config: ServerConfig, models: Callable[[], list[ModelToServe]]) -> None:
        asked.update(models()[0].build.options)  # type: ignore[union-attr]

    monkeypatch.setattr("ramify.server.run.serve", serve)
    result = CliRunner().invoke(app, ["serve", *flags])
    assert result.exit_code == 0, result.output
    assert asked["warmup"] == wanted


# -- other origins --------------------------------------------------------------------------------------------


def client_of(config: ServerConfig) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app_of(Service(config))), base_url="http://x")


PAGE = {"Origin": "https://page.example"}
PREFLIGHT = {
    **PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


async def headers_of(config: ServerConfig, page: str) -> dict[str, Any]:
    async with client_of(config) as client:
        origin = {"Origin": page}
        before = await client.options("/v1/chat/completions", headers={**PREFLIGHT, **origin})
        refused = await client.post("/v1/chat/completions", headers=origin, json={"messages": []})
        return {
            "preflight": before.status_code,
            "preflight allows": before.headers.get("access-control-allow-origin"),
            "allowed headers": before.headers.get("access-control-allow-headers"),
            "status": refused.status_code,
            "allows": refused.headers.get("access-control-allow-origin"),
        }


@pytest.mark.parametrize("api_key", [None, "sesame"])
@pytest.mark.parametrize(
    ("origins", "page", "allowed"),
    [
        (None, "https://page.example", None),
        (["https://page.example"], "https://page.example", "https://page.example"),
        (["https://page.example"], "https://page.example.evil", None),
        (["https://page.example"], "http://page.example", None),
        (["*"], "https://page.example", "*"),
    ],
)
def test_pages_of_other_origins_are_let_in_by_name(
    api_key: str | None, origins: list[str] | None, page: str, allowed: str | None
) -> None:
    got = asyncio.run(headers_of(ServerConfig(api_key=api_key, allowed_origins=origins), page))
    assert [got["preflight allows"], got["allows"]] == [allowed, allowed]
    assert got["status"] == (503 if api_key is None else 401), "the request itself still needs the key"
    if allowed is not None:
        assert got["preflight"] == 200, "a browser asks first, and without the key"
        assert "x-stainless-lang" in got["allowed headers"]


@pytest.mark.parametrize("origin", ["", "page.example", "https://page.example/", "https://a b", 5])
def test_an_origin_is_what_browsers_send(origin: Any) -> None:
    with pytest.raises(InvalidInputError, match="allowed_origins"):
        ServerConfig(allowed_origins=[origin])
