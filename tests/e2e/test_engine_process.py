"""The engine in a process of its own: the same outputs and errors, and an end with whoever it belongs to."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from ramify import AsyncLLM, EngineLostError, RequestOutput, SamplingParams, WeightsError
from ramify.remote.remote_engine import RemoteEngine
from tests.conftest import CheckpointMaker
from tests.serve_process import process

SECONDS = 60  # more than anything here takes: a test that waits in vain fails


@pytest.fixture(scope="module")
def options(make_checkpoint: CheckpointMaker, default_gguf: Path) -> dict[str, Any]:
    """A tiny model that speaks the default model's tokens."""
    folder = make_checkpoint("llama", hidden_size=32, vocab_size=49_152, max_position_embeddings=4096)
    return {"model": str(folder), "tokenizer": str(default_gguf), "num_kv_blocks": 600}


@pytest.fixture(scope="module")
def remote(options: dict[str, Any]) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(**options, engine_process=True)
    yield llm
    llm.engine.stop()


ASKED: list[dict[str, Any]] = [
    {"n": 3, "logprobs": 2, "output_kind": "delta"},
    {"best_of": 4, "n": 2},
    {"best_of": 4, "score": lambda output: output.text.count("e")},
    {"strategy": "beam_search", "beam_width": 3, "n": 2, "seed": None},
    {"n": 4, "stop": ["a", "er"], "output_kind": "cumulative"},
    {"n": 2, "output_kind": "growth", "logprobs": 3, "stop": ["on"]},
    {"prompt_logprobs": 1, "bad_words": ["the"], "repetition_penalty": 1.2, "logit_bias": {500: 4.0}},
]


async def outputs(llm: AsyncLLM) -> list[RequestOutput]:
    """One after the other, so that each finds the cache as the one before it left it."""
    params = [SamplingParams(**{"max_tokens": 12, "seed": 5, **asked}) for asked in ASKED]
    prompts: list[Any] = ["Once upon a time", [{"role": "user", "content": "Why?"}]]
    return [
        await (llm.chat(prompt, each) if isinstance(prompt, list) else llm.generate(prompt, each)).final()
        for prompt in prompts
        for each in params
        if isinstance(prompt, str) or each.prompt_logprobs is None
    ]


def test_outputs_are_those_of_the_same_process(remote: AsyncLLM, options: dict[str, Any]) -> None:
    here = AsyncLLM(**options)
    wanted, got = asyncio.run(outputs(here)), asyncio.run(outputs(remote))
    here.engine.stop()
    for one, other in zip(wanted, got, strict=True):
        assert other.outputs == one.outputs
        assert other.growth == one.growth
        assert other.prompt_logprobs == one.prompt_logprobs
        assert other.num_cached_tokens == one.num_cached_tokens
        assert (other.prompt, other.prompt_token_ids, other.error) == (one.prompt, one.prompt_token_ids, one.error)
    assert any(output.outputs[0].text for output in got)
    assert remote.stats() == here.stats()
    assert remote.max_model_len == here.max_model_len
    assert remote.architecture == here.architecture
    assert remote.generation_defaults == here.generation_defaults


def test_what_loading_raises_is_raised_here(options: dict[str, Any], tmp_path: Path) -> None:
    """Only the engine's process reads weights; this folder has none that fit."""
    folder = Path(options["model"])
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    raised = []
    for engine_process in (False, True):
        with pytest.raises(WeightsError) as error:
            AsyncLLM(**{**options, "model": str(tmp_path)}, engine_process=engine_process)
        raised.append(str(error.value))
    assert raised[0] == raised[1]


def gone(pid: int) -> bool:
    """Whether a process has ended, also if nobody has asked for its status yet."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + SECONDS
    while not gone(pid):
        assert time.monotonic() < end, "it outlives those it belongs to"
        time.sleep(0.02)


PARENT = """
import sys, time
from ramify.remote.engine_process import EngineProcess
from ramify.remote.messages import OneModel
engine = EngineProcess()
engine.build([OneModel({"model": sys.argv[1]})])
print(engine.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks processes up in /proc")
def test_it_ends_with_its_parent_whatever_ends_that(options: dict[str, Any]) -> None:
    """Also while it is loading, and also by a signal that nobody can answer."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, options["model"]], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, signal.SIGTERM)  # not its to answer
    os.kill(child, signal.SIGINT)
    time.sleep(0.2)
    assert not gone(child)
    parent.kill()
    parent.communicate(timeout=SECONDS)
    wait_until_gone(child)


STREAM = {"prompt": [5, 6, 7], "max_tokens": 3_000, "ignore_eos": True, "stream": True}


def children_of(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def wait_until_it_has(url: str, count: int) -> None:
    """Until the server's engine has so many sequences: who asks for a whole reply hears nothing before its end."""
    deadline, has = time.monotonic() + SECONDS, 0.0
    while has < count:
        assert time.monotonic() < deadline, f"only {has} of {count} have arrived"
        lines = httpx.get(f"{url}/metrics", timeout=SECONDS).text.splitlines()
        has = sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith(("ramify_sequences_running", "ramify_sequences_waiting"))
        )


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks processes up in /proc")
def test_a_server_whose_engine_is_killed_tells_every_client_and_ends(options: dict[str, Any]) -> None:
    """Ten clients are in the middle of their streams, and one waits for a whole reply."""
    model = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with process(*model, "--engine-process") as server:
        url = server.url()
        begun, ends, health = threading.Barrier(12, timeout=SECONDS), [], []

        def read(streamed: bool) -> None:
            body = {**STREAM, "stream": streamed}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=SECONDS) as reply:
                lines = reply.iter_lines()
                if streamed:
                    next(lines)
                    begun.wait()
                ends.append([line for line in lines if "error" in line])

        def ask() -> None:
            begun.wait()
            with suppress(httpx.HTTPError):  # it may have ended already
                while (reply := httpx.get(f"{url}/health", timeout=SECONDS)).status_code == 200:
                    time.sleep(0.01)
                health.append(reply.json())

        threads = [threading.Thread(target=read, args=(True,)) for _ in range(10)]
        threads += [threading.Thread(target=read, args=(False,)), threading.Thread(target=ask)]
        for thread in threads:
            thread.start()
        begun.wait()
        wait_until_it_has(url, 11)
        [engine] = children_of(server.popen.pid)
        os.kill(engine, signal.SIGKILL)
        killed = time.monotonic()
        for thread in threads:
            thread.join(SECONDS)
        assert not any(thread.is_alive() for thread in threads)
        status, said = server.end()
        assert time.monotonic() - killed < SECONDS
    why = "the engine's process was ended by SIGKILL"
    assert [why in line for lines in ends for line in lines] == [True] * 11
    assert all(answer == {"status": "not ready", "reason": why} for answer in health)
    assert status == 1
    assert "Traceback" not in said
    assert [line for line in said.splitlines() if why in line] == [f"error: {why}"], "told once"
    assert gone(engine)


def test_readers_of_a_killed_engine_do_not_wait(remote: AsyncLLM, options: dict[str, Any]) -> None:
    """The last test: it takes the engine of the others with it."""

    async def body() -> None:
        long = SamplingParams(max_tokens=3_000, ignore_eos=True, output_kind="delta")
        streams = [remote.generate([5, 6, place], long) for place in range(5)]
        await anext(streams[0])
        engine = remote.engine
        assert isinstance(engine, RemoteEngine)
        assert engine._link.process is not None
        os.kill(engine._link.process.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineLostError, match="SIGKILL"):
                await asyncio.wait_for(stream.final(), SECONDS)
        assert not engine.is_sound
        assert engine.num_unfinished == 0
        assert remote.stats()["blocks_total"] == options["num_kv_blocks"]
        with pytest.raises(EngineLostError):
            remote.generate([5], long)
        await remote.shutdown()

    asyncio.run(body())
