"""Many clients at once, slow ones and ones that leave: nothing is mixed up and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from ramify import LLM, AsyncLLM, SamplingParams
from ramify.outputs import RequestOutput
from ramify.server.app import create_app
from ramify.server.completions import CompletionShape
from tests.conftest import CheckpointMaker
from tests.serving import ENGINE_PROCESS, core_of, serving

TOKENS = 8


@pytest.fixture(scope="module")
def folder(make_checkpoint: CheckpointMaker) -> str:
    return str(make_checkpoint("llama", num_hidden_layers=2))


@pytest.fixture
def llm(folder: str) -> Iterator[AsyncLLM]:
    made = AsyncLLM(folder, num_kv_blocks=2_048, block_size=4, engine_process=ENGINE_PROCESS)
    yield made
    made.engine.stop()


def prompt_of(nonce: int) -> list[int]:
    """A prompt that no other request has: its number, in digits of the tiny vocabulary."""
    return [5, nonce // 256, nonce % 256, 7]


class Client:
    """As little of HTTP as a thousand streams need: httpx would be most of the test's time."""

    def __init__(self, url: str) -> None:
        self._where = urlsplit(url)
        self._writer: asyncio.StreamWriter | None = None

    async def events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        reader, self._writer = await asyncio.open_connection(self._where.hostname, self._where.port)
        self._writer.write(request_bytes(body))
        status = await reader.readline()
        assert b" 200 " in status, await reader.read()
        async for line in reader:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
            if line.startswith(b"data: [DONE]"):
                break
        self.leave()

    def leave(self) -> None:
        if self._writer is not None:
            self._writer.close()


def request_bytes(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    return head.encode() + b"\r\n\r\n" + content


def streamed(nonce: int, **fields: Any) -> dict[str, Any]:
    return {
        "prompt": prompt_of(nonce),
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **fields,
    }


async def until_idle(llm: AsyncLLM) -> None:
    async with asyncio.timeout(60):
        while llm.engine.num_unfinished:
            await asyncio.sleep(0.01)
    stats = llm.stats()
    assert [stats["blocks_in_use"], stats["running"], stats["waiting"]] == [0, 0, 0]


def greedy(folder: str, nonces: list[int]) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    llm = LLM(folder, num_kv_blocks=2_048, block_size=4)
    outputs = llm.generate([prompt_of(nonce) for nonce in nonces], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


async def run_streams(url: str, nonces: list[int]) -> list[tuple[int, ...]]:
    async def one(nonce: int) -> tuple[int, ...]:
        tokens: list[int] = []
        names = set()
        async for event in Client(url).events(streamed(nonce)):
            names.add(event["id"])
            [choice] = event["choices"]
            tokens += choice["token_ids"]
            assert choice.get("prompt_token_ids", prompt_of(nonce)) == prompt_of(nonce)
        assert len(names) == 1, "one stream, one request"
        return tuple(tokens)

    return await asyncio.gather(*map(one, nonces))


def check_streams(llm: AsyncLLM, folder: str, count: int) -> None:
    nonces = list(range(count))

    async def body(url: str) -> list[tuple[int, ...]]:
        got = await run_streams(url, nonces)
        await until_idle(llm)
        return got

    with serving(create_app(llm)) as url:
        got = asyncio.run(body(url))
    wanted = greedy(folder, nonces)
    assert len(set(wanted)) > count // 2, "prompts that all go on alike would show nothing"
    assert got == wanted


def test_a_hundred_streams_at_once_are_not_mixed_up(llm: AsyncLLM, folder: str) -> None:
    check_streams(llm, folder, 100)


@pytest.mark.long
def test_a_thousand_streams_at_once_are_not_mixed_up(llm: AsyncLLM, folder: str) -> None:
    check_streams(llm, folder, 1_000)


def check_leavers(llm: AsyncLLM, count: int, seed: int) -> None:
    chance = random.Random(seed)

    async def leaver(url: str, nonce: int) -> None:
        client = Client(url)
        fields = {"max_tokens": 400, "n": 2, "temperature": 1.0}
        if chance.random() < 0.3:  # before anything came back, streamed or not
            _, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
            writer.write(request_bytes(streamed(nonce, stream=chance.random() < 0.5, **fields)))
            await asyncio.sleep(chance.random() / 5)
            writer.close()
            return
        events = client.events(streamed(nonce, **fields))
        for _ in range(chance.randrange(1, 30)):
            await anext(events)
        client.leave()

    async def body(url: str) -> list[tuple[int, ...]]:
        staying = asyncio.create_task(run_streams(url, [9_000, 9_001]))
        await asyncio.gather(*(leaver(url, nonce) for nonce in range(count)))
        await until_idle(llm)
        return await staying

    with serving(create_app(llm)) as url:
        stayed = asyncio.run(body(url))
    assert [len(tokens) for tokens in stayed] == [TOKENS] * 2
    assert llm.stats()["generated_tokens"] < count * 2 * 400 // 4, "nobody drew on for clients that were gone"


def test_clients_that_leave_take_everything_with_them(llm: AsyncLLM) -> None:
    check_leavers(llm, 40, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 3])
def test_two_hundred_clients_that_leave_take_everything_with_them(llm: AsyncLLM, seed: int) -> None:
    check_leavers(llm, 200, seed=seed)


def test_a_client_that_leaves_frees_its_blocks_within_one_step(llm: AsyncLLM) -> None:
    """Two requests run; one leaves. Once its abort was called for, at most the step under way still sees it."""
    core = core_of(llm)
    counted: list[int] = []
    abort = llm.engine.abort

    def abort_and_count(request_id: str) -> None:
        counted.append(llm.stats()["steps"])
        abort(request_id)

    llm.engine.abort = abort_and_count  # type: ignore[method-assign]
    left: list[int] = []
    core_abort = core.abort

    def freed(request_id: str) -> Any:
        output = core_abort(request_id)
        left.append(llm.stats()["steps"])
        return output

    core.abort = freed  # type: ignore[method-assign]

    async def body(url: str) -> None:
        staying, going = Client(url), Client(url)
        others = staying.events(streamed(1, max_tokens=400))
        mine = going.events(streamed(2, max_tokens=400))
        await anext(others)
        await anext(mine)
        going.leave()
        async with asyncio.timeout(30):
            while not left:
                await anext(others)
        staying.leave()
        await until_idle(llm)

    with serving(create_app(llm)) as url:
        asyncio.run(body(url))
    assert left[0] - counted[0] <= 1


def test_a_slow_reader_gets_several_tokens_in_one_event_and_loses_none(llm: AsyncLLM) -> None:
    """It reads nothing until its request has ended; what the sockets' buffers did not take arrives joined."""
    fields = {"max_tokens": 400, "n": 8, "temperature": 1.0, "seed": 3, "logprobs": 5}
    params = SamplingParams(max_tokens=400, n=8, seed=3, ignore_eos=True)

    async def wanted() -> list[tuple[int, ...]]:
        output = await llm.generate(prompt_of(1), params).final()
        return [completion.token_ids for completion in output.outputs]

    with serving(create_app(llm), send_buffer=4_096) as url, closing(socket.socket()) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.connect((urlsplit(url).hostname, urlsplit(url).port))
        connection.sendall(request_bytes(streamed(1, **fields)))
        tokens = asyncio.run(wanted())  # the same work beside it: when this is done, so is the other or nearly
        asyncio.run(until_idle(llm))
        received = b""
        while b"data: [DONE]" not in received:
            piece = connection.recv(1 << 16)
            assert piece, "the stream broke off"
            received += piece
    events = [json.loads(line[6:]) for line in received.splitlines() if line.startswith(b"data: {")]
    got: list[list[int]] = [[] for _ in range(8)]
    largest = 0
    for event in events:
        [choice] = event["choices"]
        got[choice["index"]] += choice["token_ids"]
        largest = max(largest, len(choice["token_ids"]))
        assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    assert [tuple(token_ids) for token_ids in got] == tokens
    assert largest > 20, "tokens were joined"


def test_reports_of_many_tokens_are_written_beside_the_loop(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a million logprobs kept every stream, and /health, waiting for two seconds."""
    writers: list[str] = []
    reply = CompletionShape.reply

    def noted(shape: CompletionShape, outputs: list[RequestOutput]) -> dict[str, Any]:
        writers.append(threading.current_thread().name)
        return reply(shape, outputs)

    monkeypatch.setattr(CompletionShape, "reply", noted)
    asked = {"logprobs": 20, "echo": True, "max_tokens": 1, "temperature": 0}
    with serving(create_app(llm)) as url:
        [short, long] = [
            httpx.post(f"{url}/v1/completions", json={**asked, "prompt": prompts}, timeout=60)
            for prompts in ([prompt_of(1)], [prompt_of(number) * 20 for number in range(4)])
        ]
    assert ["asyncio" in name for name in writers] == [False, True], "a thread of the loop's own"
    assert short.headers["content-type"] == long.headers["content-type"] == "application/json"
    assert [choice["index"] for choice in long.json()["choices"]] == [0, 1, 2, 3]
    assert {len(choice["logprobs"]["tokens"]) for choice in long.json()["choices"]} == {81}
    assert long.json()["usage"]["prompt_tokens"] == 4 * 80
    assert set(long.json()) == set(short.json()) == {"id", "object", "created", "model", "choices", "usage"}
