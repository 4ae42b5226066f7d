"""The load client against servers that behave well, slowly, badly or not at all; no model is involved."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench import serve
from bench.load_answer import Answer, Record
from bench.load_client import Job, Run
from bench.load_connection import Target
from bench.load_processes import Clients, Loaded
from bench.load_report import Point, point_of, remarks, table_head, table_row
from bench.load_server import Python, UnmeasurableError
from bench.load_stub import stubs
from bench.load_work import Work

WORK = Work(model="m", prompt=(4, 8), output=(3, 3))
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
Handler = Callable[[asyncio.StreamWriter, dict[str, Any]], Awaitable[None]]


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(index: int = 0, text: str = "a") -> bytes:
    return event(choices=[{"index": index, "text": text, "finish_reason": None}])


def loaded_from(handler: Handler, **options: Any) -> Loaded:
    """What a load on a server with this handler of requests comes to, all in one event loop."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await handler(writer, json.loads(await reader.readexactly(length)))
        writer.close()

    async def run() -> Loaded:
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        target = Target(host="127.0.0.1", port=server.sockets[0].getsockname()[1])
        made = Run(Job(**{"target": target, "work": WORK, "concurrency": 2, "requests": 4, **options}))
        await made.run()
        server.close()
        return Loaded(made.records, made.unfinished, 0.1, stopped=False)

    return asyncio.run(run())


def point(handler: Handler, **options: Any) -> Point:
    return point_of({"concurrency": 2}, loaded_from(handler, **options))


def whole(content: bytes, status: str = "200 OK", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{more}Content-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def test_tokens_are_those_of_usage_where_the_server_tells_them() -> None:
    async def handler(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        assert body["stream_options"] == {"include_usage": True}
        usage = {"prompt_tokens": 5, "completion_tokens": 3}
        events = text() + text() + event(choices=[], usage=usage) + b"data: [DONE]\n\n"
        writer.write(STREAM + events)
        writer.close()

    found = point(handler)
    assert (found["requests"], found["failed"], found["output_tokens"], found["prompt_tokens"]) == (4, 0, 12, 20)
    assert (found["counted_by"], found["events_per_token"]) == ("usage", 0.667)


def test_events_are_counted_where_it_does_not_and_that_is_said() -> None:
    async def handler(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
        writer.write(STREAM + text() + text() + text() + b"data: [DONE]\n\n")
        writer.close()

    found = point(handler)
    assert (found["output_tokens"], found["counted_by"]) == (12, "events")
    assert "the server told no usage: events were counted as tokens" in remarks(found)


def test_times_are_taken_from_events_of_each_choice() -> None:
    record = Record(number=0, began=10.0)
    answer = Answer(record, n=2)
    answer.begin(200, "text/event-stream; charset=utf-8")
    answer.feed(event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}]), 10.5)
    for now, index in ((11.0, 0), (11.2, 1), (11.5, 0), (12.2, 1), (12.0, 0)):
        answer.feed(event(choices=[{"index": index, "delta": {"content": "x"}}]), now)
    answer.feed(event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}]), 12.5)
    answer.feed(event(choices=[], usage={"prompt_tokens": 1, "completion_tokens": 6}) + b"data: [DONE]\n\n", 12.5)
    answer.finish(13.0)
    assert (record.error, record.first, record.ended, record.events) == (None, 11.0, 13.0, 5)
    assert array("f", record.gaps).tolist() == pytest.approx([0.5, 1.0, 0.5])
    assert record.seconds_per_token == pytest.approx((1.0 + 1.0) / 2 / 2)  # three tokens a choice, two after the first


def test_a_stream_in_one_event_tells_no_time_between_tokens() -> None:
    async def handler(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
        writer.write(STREAM + text() + event(choices=[], usage={"completion_tokens": 8}) + b"data: [DONE]\n\n")
        writer.close()

    found = point(handler)
    assert (found["token_ms"], found["event_ms"], found["events_per_token"]) == (None, None, 0.125)
    assert "per event, ms: p50 -, p90 -, p99 -; 0.125 events a token" in remarks(found)
    assert "-" in table_row(found)


def test_answers_that_are_not_streamed_have_no_first_token() -> None:
    async def handler(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        assert "stream" not in body
        assert [message["role"] for message in body["messages"]] == ["user"]
        choices = [{"index": index, "message": {"content": "a b"}} for index in range(2)]
        writer.write(whole(json.dumps({"choices": choices, "usage": {"completion_tokens": 6}}).encode()))

    work = Work(model="m", prompt=(4, 4), output=(3, 3), stream=False, chat=True, n=2)
    found = point(handler, work=work)
    assert (found["requests"], found["output_tokens"], found["ttft_ms"], found["event_ms"]) == (4, 24, None, None)
    assert found["e2e_ms"]["p50"] > 0
    assert max(map(len, (*table_head(found).splitlines(), table_row(found)))) <= 80


FAILURES: dict[str, tuple[bytes, str]] = {
    "HTTP 429": (whole(b'{"error": {"message": "the queue is full"}}', "429 Too Many Requests"), "the queue is full"),
    "HTTP 502": (whole(b"<html>bad gateway</html>", "502 Bad Gateway"), "<html>bad gateway</html>"),
    "disconnected": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "closed the connection"),
    "cut off": (STREAM + text(), "without [DONE]"),
    "empty answer": (STREAM + b"data: [DONE]\n\n", "no tokens"),
    "error in the answer": (STREAM + text() + event(error={"message": "a fault"}) + b"data: [DONE]\n\n", "a fault"),
    "malformed answer": (STREAM + b"data: {]\n\n", "malformed"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_failures_are_told_by_kind_with_what_was_said(kind: str) -> None:
    answer, said = FAILURES[kind]

    async def handler(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
        writer.write(answer)
        writer.close()

    found = point(handler, requests=2)
    assert found["errors"] == {kind: 2}
    assert said in found["said"][kind]
    assert (found["requests"], found["req_s"], found["ttft_ms"], found["tok_s"]) == (0, 0, None, None)
    assert any(kind in note for note in remarks(found))


def test_one_failure_among_others_is_in_no_latency() -> None:
    asked = []

    async def handler(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        asked.append(body)
        good = STREAM + text() + text() + b"data: [DONE]\n\n"
        writer.write(b"what?\r\n\r\n" if len(asked) == 2 else good)
        writer.close()

    found = point(handler, concurrency=1)
    assert (found["requests"], found["failed"], found["errors"]) == (3, 1, {"malformed answer": 1})


def test_a_slow_server_meets_the_timeout_and_a_gone_one_is_named() -> None:
    async def handler(_: asyncio.StreamWriter, __: dict[str, Any]) -> None:
        await asyncio.sleep(30)

    assert point(handler, requests=2, timeout=0.05)["errors"] == {"timeout": 2}
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gone = Target(host="127.0.0.1", port=unused.getsockname()[1])
        found = point(handler, target=gone, requests=2)
    assert found["errors"] == {"cannot connect": 2}
    assert found["said"] == {"cannot connect": "Connection refused"}


def test_a_connection_given_up_between_two_requests_is_no_failure() -> None:
    connections = set()

    async def handler(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
        if writer in connections:  # kept alive, and then closed instead of an answer
            writer.close()
            return
        connections.add(writer)
        writer.write(whole(b'{"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}'))

    found = point(handler, concurrency=1, work=Work(model=None, prompt=(2, 2), output=(1, 1), stream=False))
    assert (found["requests"], found["failed"]) == (4, 0)
    assert len(connections) == 4


def test_a_rate_does_not_wait_for_answers() -> None:
    """All requests are under way before the first answer comes, which a number of clients at a time could not do."""
    waiting: list[asyncio.StreamWriter] = []

    async def handler(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
        waiting.append(writer)
        if len(waiting) == 6:
            for each in waiting:
                each.write(STREAM + text() + b"data: [DONE]\n\n")
                each.close()

    loaded = loaded_from(handler, rate=500.0, concurrency=None, requests=6, start_at=time.monotonic())
    found = point_of({"rate": 500.0}, loaded)
    assert (found["requests"], found["failed"]) == (6, 0)
    assert found["late_ms"]["p99"] >= 0


def test_parts_make_one_load_together() -> None:
    """Two processes, each with a stub of its own: every number once, and the client's own figure."""
    work = Work(model=None, prompt=(4, 4), output=(5, 5), n=2)
    with Clients(2) as clients, stubs(2) as targets:
        paced = Job(target=targets[0], work=work, concurrency=3, requests=9, keeps_pace=True)
        loaded = clients.run(paced, targets)
        one = clients.run(Job(target=targets[0], work=work, concurrency=1, requests=2))
        chat = Work(model=None, prompt=(4, 4), output=(5, 5), stream=False, chat=True)
        plain = clients.run(Job(target=targets[0], work=chat, rate=200.0, requests=5))
    assert [record.number for record in loaded.records] == list(range(9))
    assert [record.number for record in one.records] == [0, 1]
    assert [record.number for record in plain.records] == list(range(5))
    found = point_of({"concurrency": 3}, loaded)
    assert (found["errors"], found["output_tokens"], found["events_per_token"]) == ({}, 90, 1.0)


@contextmanager
def answering(get: tuple[int, Any], post: tuple[int, Any], asked: threading.Semaphore | None = None) -> Iterator[str]:
    """A server with one answer to every GET and one to every POST; `asked` counts these."""

    class Fixed(BaseHTTPRequestHandler):
        def answer(self, status: int, value: Any) -> None:
            content = json.dumps(value).encode()
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self.answer(*get)

        def do_POST(self) -> None:
            self.answer(*post)
            if asked is not None:
                asked.release()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Fixed)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


MODELS = {"data": [{"id": "small"}, {"id": "large"}]}
DONE = {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}


@pytest.mark.parametrize(
    ("get", "post", "told"),
    [
        ((401, {"error": {"message": "no key"}}), (200, DONE), ["--api-key KEY", "$OPENAI_API_KEY", "no key"]),
        ((503, {"error": {"message": "loading"}}), (200, DONE), ["not ready: loading", "--wait SECONDS"]),
        (
            (200, MODELS),
            (404, {"error": {"message": "no such model"}}),
            ["small, large", "no such model", "--model NAME"],
        ),
        ((200, MODELS), (400, {"error": {"message": "ignore_eos is unknown"}}), ["--no-ignore-eos"]),
        ((404, {}), (401, {"detail": "who are you?"}), ["HTTP 401: who are you?", "--api-key KEY"]),
    ],
)
def test_a_server_that_cannot_be_measured_is_told_kindly(
    get: tuple[int, Any], post: tuple[int, Any], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(get, post) as url:
        assert serve.main(["--url", url, "--model", "x", "--no-stream"]) == 2
    captured = capsys.readouterr()
    assert [part for part in told if part not in captured.err] == []
    assert captured.out == ""


def test_work_that_python_cannot_do_is_told_kindly() -> None:
    python = object.__new__(Python)  # without its engine, which is not reached
    work = Work(model=None, prompt=(2, 2), output=(1, 1), fields={"echo": True, "return_token_ids": True})
    with pytest.raises(UnmeasurableError, match=r"'echo' is not a field .* --no-compare leaves it out"):
        python.tokens_per_second(work, 1)


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert serve.main(["--url", f"127.0.0.1:{unused.getsockname()[1]}"]) == 2
    assert "cannot be reached: Connection refused. Is a server running there?" in capsys.readouterr().err
    for url in ("ftp://x", "http://h:99999", "http://"):
        assert serve.main(["--url", url]) == 2
        assert f"{url} is no address" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--concurrency 0", "0 is no whole number from 1 up"),
        ("--rate 0", "0 is no number above 0"),
        ("--rate nan", "nan is no number above 0"),
        ("--rate 1 --concurrency 1", "not allowed with"),
        ("--prompt 9:3", "9:3 is no length"),
        ("--shared 1.5", "1.5 is no share"),
        ("--field top_k", "top_k is no field"),
        ("--field user=me", "text needs quotes"),
        ("--field n=3", "the load test's own"),
        ("--chat --token-ids 5", "messages are text"),
        ("--url x -- --port 3", "flags after --"),
        ("--rate 3 --compare", "knows no arrivals"),
        ("--seconds 3 --compare", "needs --requests"),
        ("--url x --compare", "--url names another"),
        ("--beside x", "--beside needs --chart"),
        ("--save /no/such/folder/x", "there is no folder /no/such/folder"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(arguments.split())
    assert why in capsys.readouterr().err


def test_the_best_whole_run_counts_beside_the_best_of_python() -> None:
    points: list[Point] = []
    for speed, python, more in ((10.0, 9.0, {}), (12.0, 8.0, {}), (11.0, 20.0, {}), (99.0, None, {"stopped": True})):
        serve.Turns._keep(points, 0, {"tok_s": speed, **more}, python)
    assert points == [{"tok_s": 12.0, "python_tok_s": 20.0, "of_python": 0.6}]


def test_results_keep_the_command_without_key_and_files() -> None:
    given = "--api-key k --rate 1 2 --save a --beside b c --n 3 --chart=d --api-key=k --shared 1 -- --port 8"
    assert serve.shown(given.split()) == "python bench/serve.py --rate 1 2 --n 3 --shared 1 -- --port 8"


def test_the_page_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(serve.__file__).parents[1] / "docs" / "load_test.md").read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        serve.main(["--help"])
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help", "--max-num-seqs", "--no-quiet"}
    told = set(re.findall(r"--[a-z][a-z-]+", page))
    assert known - told == set()
    others = {"--http-workers", "--only", "--rehearse"}  # of bench/soak.py and bench/serve_gpu.py
    assert told - known == {"--max-num-seqs", "--out"} | others


def test_a_sweep_is_saved_and_drawn_without_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save, chart = tmp_path / "results.jsonl", tmp_path / "chart.html"
    arguments = "--concurrency 1 2 --requests 3 --no-stream --ceiling-seconds 0.1 --api-key secret-key --processes 1"
    with answering((200, MODELS), (200, DONE)) as url:
        command = ["--url", url, *arguments.split(), "--save", str(save), "--chart", str(chart)]
        assert serve.main(command) == 0
        assert serve.main([*command, "--label", "a rival <b>", "--beside", str(save)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    first, second = map(json.loads, save.read_text().splitlines())
    assert json.loads(last) == second
    assert (first["model"], second["engine"]) == ("small", "a rival <b>")
    assert [point["concurrency"] for point in first["points"]] == [1, 2]
    assert [point["requests"] for point in first["points"]] == [3, 3]
    assert first["ceiling"]["req_s"] > 0
    assert "secret-key" not in save.read_text() + chart.read_text()
    assert "a rival &lt;b&gt;" in chart.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_what_there_is(number: signal.Signals, tmp_path: Path) -> None:
    save, asked = tmp_path / "results.jsonl", threading.Semaphore(0)
    arguments = ["--rate", "100", "--requests", "100000", "--no-stream", "--ceiling-seconds", "0", "--save", str(save)]
    with answering((200, MODELS), (200, DONE), asked) as url:
        process = subprocess.Popen(
            [sys.executable, serve.__file__, "--url", url, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,  # noqa: PLW1509
        )
        for _ in range(30):
            asked.acquire()
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "stopped: what was measured until now" in err
    assert "Traceback" not in err
    [point] = json.loads(out.splitlines()[-1])["points"]
    assert point["stopped"]
    assert 20 < point["requests"] < 100_000
    assert point["failed"] == 0
    assert json.loads(save.read_text())["points"] == [point]
