"""Thousands of clients on one server: nothing is mixed up, nothing is lost, and memory stays as it is.

    python bench/soak.py                             # all of it: some minutes on two cores
    python bench/soak.py --only streams --streams 2000 --http-workers 2
    python bench/soak.py --only memory --requests 20000 --save bench/results/cpu.jsonl

A tiny model with random weights, its engine in a process of its own unless --no-engine-process says otherwise.

streams   so many at once, each with a prompt of its own; every one must get the tokens that LLM.generate draws
leavers   clients that go away at a random moment, streamed or not; afterwards no block is held
memory    short requests, 64 at a time; resident memory of all processes of the server, ten times on the way
kill      the engine's process gets SIGKILL under load: every client is told within five seconds, and the server ends

Each part is a line of JSON, and the exit status is 1 if one of them failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.load_processes import take_all_files
from bench.load_server import ServeProcess
from bench.machine import commit, machine_name
from bench.serve_gpu import write_model

TOKENS = 8
VOCABULARY = 49_000
SECONDS_TO_TELL = 5.0  # after the engine's end


class RefusedError(AssertionError):
    """An answer that is no stream: what the server said instead, and its code for that."""

    def __init__(self, status: int, body: bytes | None) -> None:
        super().__init__(f"status {status}: {body!r}")
        self.code = "" if body is None else str(json.loads(body)["error"]["code"])


class Client:
    """As little of HTTP as thousands of streams need."""

    def __init__(self, url: str) -> None:
        self._where = urlsplit(url)
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader | None = None

    async def connect(self) -> None:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._where.hostname, self._where.port)

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes | None]:
        """The status, and the body unless it comes in pieces."""
        await self.connect()
        assert self._reader is not None
        assert self._writer is not None
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = next((line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:")), None)
        whole = None if length is None else await self._reader.readexactly(int(length.split(b":")[1]))
        return int(answer.split(b" ", 2)[1]), whole

    async def events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        status, whole = await self.ask("POST", "/v1/completions", body)
        if status != 200:
            raise RefusedError(status, whole)
        assert self._reader is not None
        async for line in self._reader:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
            elif line.startswith(b"data: [DONE]"):
                await self._reader.readuntil(b"0\r\n\r\n")
                return
        raise ConnectionError("the stream broke off")

    def leave(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def prompt_of(number: int) -> list[int]:
    """No other request has it."""
    return [5, 1 + number // 200, 1 + number % 200, 7]


def asked(number: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt_of(number), "seed": number, "temperature": 1.0, "max_tokens": TOKENS, "ignore_eos": True}
    return {**body, "stream": True, "return_token_ids": True, **fields}


async def metrics_of(url: str) -> dict[str, float]:
    client = Client(url)
    _, text = await client.ask("GET", "/metrics")
    client.leave()
    lines = [line.rsplit(" ", 1) for line in (text or b"").decode().splitlines() if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, value in lines if "_bucket" not in name}


async def until_idle(url: str) -> None:
    async with asyncio.timeout(120):
        while True:
            found = await metrics_of(url)
            if not found["ramify_requests_unfinished"]:
                break
            await asyncio.sleep(0.1)
    held = [found[f"ramify_{name}"] for name in ("cache_blocks_in_use", "sequences_running", "sequences_waiting")]
    assert held == [0, 0, 0], held


async def tokens_of(url: str, number: int) -> list[int]:
    tokens: list[int] = []
    client = Client(url)
    names = set()
    async for event in client.events(asked(number)):
        names.add(event["id"])
        tokens += event["choices"][0]["token_ids"]
    client.leave()
    assert len(names) == 1, "one stream, one request"
    return tokens


async def streams(server: ServeProcess, folder: Path, count: int) -> dict[str, Any]:
    began = time.monotonic()
    got = await asyncio.gather(*(tokens_of(server.url, number) for number in range(count)))
    seconds = time.monotonic() - began
    await until_idle(server.url)
    from ramify import LLM, SamplingParams

    llm = LLM(str(folder), load_format="dummy", max_model_len=512, num_kv_blocks=4_096)
    params = [SamplingParams(seed=number, max_tokens=TOKENS, ignore_eos=True) for number in range(count)]
    outputs = llm.generate([prompt_of(number) for number in range(count)], params, use_tqdm=False)
    wanted = [list(output.outputs[0].token_ids) for output in outputs]
    different = sum(one != other for one, other in zip(got, wanted, strict=True))
    kinds = len({tuple(tokens) for tokens in wanted})
    assert kinds > count // 2, f"only {kinds} different answers: prompts that go on alike would show nothing"
    assert not different, f"{different} of {count} streams did not get their own tokens"
    return {"streams": count, "lost": 0, "mixed_up": 0, "different_answers": kinds, "seconds": round(seconds, 1)}


async def leavers(server: ServeProcess, _folder: Path, count: int) -> dict[str, Any]:
    chance = random.Random(7)
    moments = {"before an answer": 0, "in the middle": 0}

    async def leave(number: int) -> None:
        client = Client(server.url)
        fields = {"max_tokens": 400, "n": 2}
        await asyncio.sleep(chance.random() * 2)
        if chance.random() < 0.3:
            moments["before an answer"] += 1
            asking = asyncio.ensure_future(
                client.ask("POST", "/v1/completions", asked(number, stream=chance.random() < 0.5, **fields))
            )
            await asyncio.sleep(chance.random() / 4)
            asking.cancel()
        else:
            moments["in the middle"] += 1
            events = client.events(asked(number, **fields))
            for _ in range(chance.randrange(1, 30)):
                await anext(events)
            await events.aclose()  # type: ignore[attr-defined]
        client.leave()

    async def stay() -> list[list[int]]:
        return [await tokens_of(server.url, 30_000 + number) for number in range(20)]

    staying = asyncio.ensure_future(stay())
    await asyncio.gather(*map(leave, range(count)))
    stayed = await staying
    await until_idle(server.url)
    assert [len(tokens) for tokens in stayed] == [TOKENS] * 20
    return {"leavers": count, **moments, "stayed_meanwhile": len(stayed), "blocks_in_use": 0}


async def memory(server: ServeProcess, _folder: Path, count: int) -> dict[str, Any]:
    """After a first tenth, in which caches fill, it may grow by a hundredth and no more."""
    numbers = iter(range(count))
    seen: list[dict[str, float]] = []

    async def work() -> None:
        client = Client(server.url)
        for number in numbers:
            if number % 2:
                async for _ in client.events(asked(number % 30_000, max_tokens=2)):
                    pass
            else:
                status, _ = await client.ask(
                    "POST", "/v1/completions", asked(number % 30_000, max_tokens=2, stream=False)
                )
                assert status == 200
            if number % (count // 10) == count // 10 - 1:
                seen.append(server.memory())
                print(f"{number + 1} requests: {seen[-1]} MiB", file=sys.stderr, flush=True)
        client.leave()

    began = time.monotonic()
    await asyncio.gather(*(work() for _ in range(64)))
    await until_idle(server.url)
    totals = [round(sum(each.values()), 1) for each in seen]
    growth = totals[-1] - totals[0]
    assert growth < 0.02 * totals[0], f"memory grew from {totals[0]} to {totals[-1]} MiB"
    seconds = round(time.monotonic() - began, 1)
    return {"requests": count, "mib": totals, "first": seen[0], "last": seen[-1], "seconds": seconds}


async def kill(server: ServeProcess, _folder: Path, count: int) -> dict[str, Any]:
    """The last of all: nothing is left of the server."""
    begun = 0
    ends: list[tuple[str, float]] = []

    async def wait(number: int) -> None:
        nonlocal begun
        client = Client(server.url)
        last = "cut off"
        try:
            async for event in client.events(asked(number, max_tokens=400)):
                if last == "cut off":
                    begun += 1
                last = event["error"]["code"] if "error" in event else "token"
        except RefusedError as refused:  # its turn had not come: it is told by a status, not by an event
            last = refused.code
        except (ConnectionError, asyncio.IncompleteReadError):
            last = "cut off"
        ends.append((last, time.monotonic()))
        client.leave()

    waiting = [asyncio.ensure_future(wait(number)) for number in range(count)]
    async with asyncio.timeout(120):
        while begun < min(count // 2, 200):  # of the 256 that run at a time; the others wait for their turn
            assert not any(each.done() for each in waiting), "nobody may end before the engine does"
            await asyncio.sleep(0.05)
    killed = time.monotonic()
    os.kill(server.engine, signal.SIGKILL)
    async with asyncio.timeout(60):
        await asyncio.gather(*waiting)
    slowest = max(at for _, at in ends) - killed
    kinds: dict[str, int] = {}
    for kind, _ in ends:
        kinds[kind] = kinds.get(kind, 0) + 1
    status = server.wait(60)
    assert slowest < SECONDS_TO_TELL, f"the last client waited {slowest:.1f} s"
    assert set(kinds) <= {"engine_fault", "cut off"}, kinds
    assert status == 1, f"exit status {status}"
    return {"clients": count, "told": kinds, "slowest_s": round(slowest, 2), "exit_status": status}


PARTS: dict[str, Callable[..., Any]] = {"streams": streams, "leavers": leavers, "memory": memory, "kill": kill}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*PARTS], nargs="+", default=[*PARTS])
    parser.add_argument("--streams", type=int, default=2_000)
    parser.add_argument("--leavers", type=int, default=500)
    parser.add_argument("--requests", type=int, default=20_000, help="of the part `memory`")
    parser.add_argument("--clients", type=int, default=200, help="of the part `kill`")
    parser.add_argument("--http-workers", type=int, default=1)
    parser.add_argument("--no-engine-process", action="store_true")
    parser.add_argument("--save", type=Path, help="append the lines to this file")
    given = parser.parse_args()
    take_all_files()
    counts = {"streams": given.streams, "leavers": given.leavers, "memory": given.requests, "kill": given.clients}
    parts = [part for part in PARTS if part in given.only and not (part == "kill" and given.no_engine_process)]
    flags = ["--load-format", "dummy", "--max-model-len", "512", "--num-kv-blocks", "4096", "--log-interval", "0"]
    flags += ["--max-queue", str(2 * given.streams), "--http-workers", str(given.http_workers)]
    flags += ["--no-engine-process" if given.no_engine_process else "--engine-process"]
    about = {
        "engine": "ramify serve",
        "machine": machine_name(),
        "commit": commit(),
        "http_workers": given.http_workers,
    }
    about["engine_process"] = not given.no_engine_process
    has_failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, tiny=True)
        with ServeProcess(str(folder), flags) as server:
            for part in parts:
                try:
                    line = {"workload": f"soak {part}", **asyncio.run(PARTS[part](server, folder, counts[part]))}
                except (AssertionError, TimeoutError) as error:
                    has_failed = True
                    line = {"workload": f"soak {part}", "failed": str(error) or type(error).__name__}
                text = json.dumps({**about, **line})
                print(text, flush=True)
                if given.save is not None and "failed" not in line:
                    with given.save.open("a", encoding="utf-8") as file:
                        file.write(text + "\n")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
