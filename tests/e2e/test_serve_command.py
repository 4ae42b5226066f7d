"""`ramify serve` as a process: start, health, signals, exit status, mistakes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import CheckpointMaker
from tests.serve_process import Process, process

LONG = {"prompt": [5, 6, 7], "max_tokens": 500, "ignore_eos": True, "stream": True, "return_token_ids": True}


BEAMS = {"strategy": "beam_search", "beam_width": 2, "seed": None}


@pytest.fixture(scope="module")
def folder(make_checkpoint: CheckpointMaker) -> Path:
    return make_checkpoint("llama", max_position_embeddings=4096)


def model(folder: Path, *more: str) -> list[str]:
    return ["--model", str(folder), "--num-kv-blocks", "600", *more]


def test_sigterm_ends_an_idle_server_with_status_0(folder: Path) -> None:
    with process(*model(folder)) as server:
        url = server.url()
        assert url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{url}/health").json() == {"status": "ready"}
        [card] = httpx.get(f"{url}/v1/models").json()["data"]
        assert card["id"] == folder.name, "clients learn a name, not a path"
        # A string of escaped quotes without an end: 300 KB of it stopped the server, and SIGTERM was not heard.
        evil = b"[]" * 65 + b'"' + b'\\"' * 150_000
        reply = httpx.post(f"{url}/v1/completions", content=evil, headers={"content-type": "application/json"})
        assert reply.json()["error"]["code"] == "invalid_json"
        status, said = server.end(signal.SIGTERM)
    assert [status, said] == [0, ""]


def test_the_models_recommendation_is_told_and_used(folder: Path, tmp_path: Path) -> None:
    recommending = tmp_path / "recommending"
    shutil.copytree(folder, recommending)
    (recommending / "generation_config.json").write_text('{"temperature": 0.4, "top_k": 5}')
    asked = {"prompt": [5, 6, 7], "max_tokens": 12, "seed": 3, "return_token_ids": True}
    with process(*model(recommending)) as server:
        url = server.url()
        assert "Defaults of requests: temperature 0.4, top_k 5 (from generation_config.json)" in "".join(server.said)
        [card] = httpx.get(f"{url}/v1/models").json()["data"]
        assert card["default_sampling_params"] == {
            "temperature": 0.4,
            "top_p": 1.0,
            "top_k": 5,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "source": "generation_config.json",
        }
        silent, said, other, beams = (
            httpx.post(f"{url}/v1/completions", json={**asked, **more}).json()["choices"][0]["token_ids"]
            for more in ({}, {"temperature": 0.4, "top_k": 5}, {"temperature": 1, "top_k": -1}, BEAMS)
        )
        assert silent == said != other
        assert len(beams) == 12, "a beam search takes no temperature, and nobody sent one"


def test_ctrl_c_does_so_too_and_the_key_may_come_from_the_environment(folder: Path) -> None:
    with process(*model(folder, "--served-model-name", "tiny"), RAMIFY_API_KEY="sesame") as server:
        url = server.url()
        assert httpx.get(f"{url}/v1/models").status_code == 401
        reply = httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer sesame"})
        assert reply.json()["data"][0]["id"] == "tiny"
        status, said = server.end(signal.SIGINT)
    assert [status, said] == [0, ""]


def read_events(url: str, body: dict[str, Any], into: list[dict[str, Any]], begun: threading.Event) -> None:
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: "):
                into.append({"done": True} if line == "data: [DONE]" else json.loads(line[6:]))
                begun.set()


def interrupted(url: str, server: Process, body: dict[str, Any], *signals: int) -> tuple[int, list[dict[str, Any]]]:
    """Streams, sends signals in the middle, returns the exit status and the events."""
    events: list[dict[str, Any]] = []
    begun = threading.Event()
    reader = threading.Thread(target=read_events, args=(url, body, events, begun))
    reader.start()
    assert begun.wait(60)
    status, _ = server.end(*signals)
    reader.join(60)
    return status, events


def test_sigterm_in_the_middle_lets_a_request_end_within_the_grace_time(folder: Path) -> None:
    with process(*model(folder, "--grace-period", "50")) as server:
        status, events = interrupted(server.url(), server, LONG, signal.SIGTERM)
    tokens = [token for event in events for choice in event.get("choices", ()) for token in choice["token_ids"]]
    assert status == 0
    assert events[-1] == {"done": True}
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert len(tokens) == 500


@pytest.mark.parametrize(
    ("grace", "signals"), [("0", [signal.SIGTERM]), ("50", [signal.SIGTERM, signal.SIGINT])], ids=["no grace", "twice"]
)
def test_after_the_grace_time_a_request_ends_with_an_error(folder: Path, grace: str, signals: list[int]) -> None:
    with process(*model(folder, "--grace-period", grace)) as server:
        status, events = interrupted(server.url(), server, {**LONG, "max_tokens": 4_000}, *signals)
    assert status == 0
    assert events[-1] == {"done": True}
    assert events[-2]["error"]["code"] == "aborted"
    assert "shutting down" in events[-2]["error"]["message"]


def test_it_says_what_it_does_and_logs_requests_without_their_text(folder: Path) -> None:
    with process(*model(folder, "--log-requests", "--log-interval", "0.05"), RAMIFY_API_KEY="sesame") as server:
        url, key = server.url(), {"Authorization": "Bearer sesame"}
        asked = {"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True}
        reply = httpx.post(f"{url}/v1/completions", json=asked, headers=key, timeout=60).json()
        streamed = httpx.post(f"{url}/v1/completions", json={**asked, "stream": True}, headers=key, timeout=60)
        assert streamed.status_code == 200
        httpx.post(f"{url}/v1/completions", json={"prompt": [5], "surprise": "a secret"}, headers=key)
        httpx.get(f"{url}/v1/models/secret", headers={"Authorization": "Bearer secret"})
        status, said = server.end(signal.SIGTERM)
    loading = [line.split(" ", 2)[2] for line in server.said]
    assert status == 0
    assert loading[0].startswith("Loading; http://127.0.0.1:")
    assert loading[1] == f"{folder}: reading weights\n"
    assert re.fullmatch(r".*: read in [0-9.]+ s \([0-9]+ MiB of float32 on cpu\)\n", loading[2])
    assert loading[3].startswith("KV cache: 600 blocks of 16 tokens (")
    lines = [line.split(" ", 2)[2] for line in said.splitlines()]
    counts = "prompt_tokens=3 output_tokens=300"
    patterns = [
        rf"POST /v1/completions 200 [0-9.]+ s id={reply['id']} {counts}",
        rf"POST /v1/completions 200 [0-9.]+ s id=cmpl-[0-9a-f]+ {counts}",
        r"POST /v1/completions 400 [0-9.]+ s error=unknown_field",
        r"GET unknown 401 [0-9.]+ s error=invalid_api_key",
    ]
    requests = [line for line in lines if line.startswith(("POST", "GET"))]
    assert [bool(re.fullmatch(*pair)) for pair in zip(patterns, requests, strict=True)] == [True] * 4
    assert any(re.match(r".*: 1 running, 0 waiting; [0-9.]+ tokens/s drawn", line) for line in lines)
    assert "secret" not in said


def test_health_is_503_until_the_model_is_there(tmp_path: Path) -> None:
    """The checkpoint's configuration is a pipe that nobody writes to: loading waits, and the server answers."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    slow = tmp_path / "slow"
    slow.mkdir()
    os.mkfifo(slow / "config.json")
    with process("--model", str(slow), "--port", str(port), "--api-key", "sesame") as server:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                reply = httpx.get(f"{url}/health")
                break
            except httpx.ConnectError:
                time.sleep(0.05)
        assert reply.status_code == 503
        assert reply.json() == {"status": "not ready", "reason": "loading"}
        waiting = httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer sesame"})
        assert waiting.status_code == 503
        assert waiting.json()["error"]["code"] == "not_ready"
        assert int(waiting.headers["retry-after"]) >= 1
        status, said = server.end(signal.SIGTERM)
    assert status == 0, "it ends although a thread still waits for the model"
    assert [f"{url} answers 503" in line for line in said.splitlines()] == [True]


def test_mistakes_are_one_line_and_status_2(folder: Path) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, said in (
            (model(folder, "--port", port), "cannot listen at 127.0.0.1 port"),
            (["--model", "/no/such/folder"], "/no/such/folder"),
            (model(folder, "--max-samples", "0"), "--max-samples must be"),
            (model(folder, "--api-key", ""), "--api-key must be"),
            (model(folder, "--block-size", "0"), "--block-size must be"),
        ):
            with process(*arguments) as server:
                output, errors = server.popen.communicate(timeout=60)
            assert server.popen.returncode == 2, errors
            *before, mistake = errors.strip().splitlines()
            assert said in mistake
            assert before == [] or ["Loading;" in line for line in before] == [True], errors
            assert output == ""
