"""What HTTP costs: the same prompts through `ramify serve`, streamed to 32 clients at once, and through `LLM.generate`.

Regime: 32 rows of the default model, real text, one event per token and stream. The server is a process of its own, the
clients are this one, and both share the machine's cores with the model; `LLM.generate` runs while the server is idle.
They take turns, so that a machine that slows down slows both.

    python bench/serve.py [--repeats 3] [--quiet] [--save FILE]

Goal: at least 0.9 of `LLM.generate`'s tokens per second. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))

from engine_process import wait_until_quiet  # type: ignore[import-not-found]
from offline import processor_name  # type: ignore[import-not-found]

from ramify import LLM, SamplingParams

STREAMS, TOKENS = 32, 64
GOAL = 0.9
SUBJECTS = ("the sea", "a small village", "trees", "an old clock", "music", "the winter", "bread", "a long road")
PROMPTS = [
    f"Chapter {number}. This is a story about {SUBJECTS[number % 8]} and {SUBJECTS[(number * 3 + 1) % 8]}. It began"
    for number in range(STREAMS)
]


@contextmanager
def server() -> Iterator[str]:
    """`ramify serve` as a user starts it, and the address it prints."""
    command = [
        sys.executable,
        "-c",
        "from ramify.cli import main; main()",
        "serve",
        "--port",
        "0",
        "--generation-config",
        "none",
    ]
    process = subprocess.Popen(
        [*command, "--no-enable-prefix-caching"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            found = re.search(r"at (http://\S+)", line)
            if found:
                yield found[1]
                break
    finally:
        process.terminate()
        process.wait(30)


async def stream(url: str, number: int) -> tuple[int, int]:
    """One client; returns how many tokens and how many events it got."""
    where = urlsplit(url)
    body = {
        "prompt": PROMPTS[number],
        "max_tokens": TOKENS,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    writer.write(head.encode() + b"\r\n\r\n" + content)
    events = [line async for line in _lines(reader) if line.startswith(b"data: {")]
    writer.close()
    return json.loads(events[-1][6:])["usage"]["completion_tokens"], len(events) - 1


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    async for line in reader:
        if line.startswith(b"data: [DONE]"):
            return
        yield line


async def through_http(url: str) -> tuple[float, float]:
    """Tokens per second, and events per token."""
    start = time.perf_counter()
    got = await asyncio.gather(*(stream(url, number) for number in range(STREAMS)))
    seconds = time.perf_counter() - start
    tokens = sum(num_tokens for num_tokens, _ in got)
    assert tokens == STREAMS * TOKENS
    return tokens / seconds, sum(num_events for _, num_events in got) / tokens


def through_python(llm: LLM) -> float:
    params = [SamplingParams(max_tokens=TOKENS, seed=number, ignore_eos=True) for number in range(STREAMS)]
    start = time.perf_counter()
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quiet", action="store_true", help="begin turns only while nobody else computes here (Linux)")
    parser.add_argument("--save", type=Path, help="append one JSON object per result to this file")
    options = parser.parse_args()
    llm = LLM(enable_prefix_caching=False)
    best = {"LLM.generate": 0.0, "http": 0.0}
    with server() as url:
        for turn in range(options.repeats + 1):  # the first turn warms up
            if options.quiet:
                wait_until_quiet()
            python = through_python(llm)
            http, events = asyncio.run(through_http(url))
            print(f"LLM.generate {python:.1f} tok/s, http {http:.1f} tok/s, {events:.2f} events per token", flush=True)
            if turn > 0:
                best = {"LLM.generate": max(best["LLM.generate"], python), "http": max(best["http"], http)}
    ratio = best["http"] / best["LLM.generate"]
    print(f"serve32: http {best['http']:.1f} tok/s, LLM.generate {best['LLM.generate']:.1f}: {ratio:.2f} (goal {GOAL})")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    facts = {
        "machine": f"{processor_name()}, {os.cpu_count()} cores",
        "commit": commit.stdout.strip(),
        "command": f"python bench/serve.py --repeats {options.repeats}" + " --quiet" * options.quiet,
    }
    names = {"LLM.generate": "ramify", "http": "ramify serve"}
    lines = [
        {"engine": names[name], "workload": "serve32", "tok_s": round(speed, 1), **facts}
        for name, speed in best.items()
    ]
    if options.save:
        with options.save.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    print(json.dumps({"results": best, "ratio": round(ratio, 3), **facts}))


if __name__ == "__main__":
    main()
