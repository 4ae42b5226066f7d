"""The server under load: somebody's by its address, or `ramify serve` started here and compared with `LLM.generate`."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

from bench.load_answer import said
from bench.load_connection import Target, fetch, why
from bench.load_http import WireError
from bench.load_work import Work

ONLY_HTTP = {"return_token_ids", "user", "metadata"}  # fields that ask for nothing of the engine


class UnmeasurableError(Exception):
    """Why a server cannot be measured, in words for whoever started the test."""


def target_of(url: str, api_key: str | None) -> Target:
    """An address as people write it: with or without http://, with or without /v1."""
    where = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = where.port
    except ValueError:
        raise UnmeasurableError(f"{url} is no address: its port must be a number below 65536") from None
    if where.scheme not in {"http", "https"} or not where.hostname:
        raise UnmeasurableError(f"{url} is no address: http://HOST:PORT is one")
    return Target(
        host=where.hostname,
        port=port or (443 if where.scheme == "https" else 80),
        tls=where.scheme == "https",
        prefix=where.path.rstrip("/").removesuffix("/v1"),
        api_key=api_key,
    )


def served_models(target: Target, url: str, wait: float) -> list[str]:
    """The models that a server names, as soon as it serves; none where it has no such route."""
    end = time.monotonic() + wait
    while True:
        try:
            status, body = asyncio.run(fetch(target, "GET", "/v1/models"))
            trouble = None if status != 503 else f"{url} is not ready: {said(body)}"
        except TimeoutError:
            trouble = f"{url} does not answer"
        except (OSError, WireError) as error:
            reason = why(error) if isinstance(error, OSError) else str(error)
            trouble = f"{url} cannot be reached: {reason}. Is a server running there?"
        if trouble is None:
            break
        if time.monotonic() >= end:
            raise UnmeasurableError(trouble + (f" (after {wait:g} s)" if wait else " (--wait SECONDS waits for it)"))
        time.sleep(0.2)
    if status in {401, 403}:
        raise UnmeasurableError(f"{url} wants another API key: --api-key KEY, or $OPENAI_API_KEY ({said(body)})")
    if status != 200:
        return []
    try:
        return [model["id"] for model in msgspec.json.decode(body)["data"]]
    except (msgspec.DecodeError, KeyError, TypeError):
        return []


class ServeProcess:
    """`ramify serve` as a user starts it, the address that it prints, and the processes that it consists of."""

    def __init__(self, model: str | None, flags: list[str]) -> None:
        command = [sys.executable, "-c", "from ramify.cli import main; main()", "serve", "--port", "0"]
        command += ["--generation-config", "none", *([] if model is None else ["--model", model]), *flags]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "200"},
            start_new_session=True,  # Ctrl-C ends the load first, and then the server
        )
        self._lines: deque[str] = deque(maxlen=20)
        self._served = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        self._served.wait()
        if not self.url:
            self.close()
            raise UnmeasurableError("ramify serve did not start:\n" + "\n".join(self._lines))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def wait(self, seconds: float) -> int:
        """Its exit status."""
        return self._process.wait(seconds)

    @property
    def engine(self) -> int:
        """The number of the engine's process."""
        [number] = [pid for pid, (_, command) in self._processes().items() if "child.py" in command]
        return number

    def memory(self) -> dict[str, float]:
        """Resident MiB of each of its processes, those that speak HTTP together."""
        found: dict[str, float] = {}
        for pid, (kilobytes, command) in self._processes().items():
            kind = "engine" if "child.py" in command else "workers" if "worker_program.py" in command else "server"
            found[kind] = round(found.get(kind, 0.0) + kilobytes / 1024, 1) if pid else 0.0
        return found

    def _processes(self) -> dict[int, tuple[int, str]]:
        """Kilobytes and command of this process and those that it started."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if self._process.pid not in (int(folder.name), parent):
                    continue
                status = (folder / "status").read_text()
                [kilobytes] = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
                found[int(folder.name)] = int(kilobytes), (folder / "cmdline").read_text()
            except (OSError, ValueError):  # it has ended meanwhile
                continue
        return found

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:  # until its end: a server whose log nobody reads would stand still
            self._lines.append(line.rstrip())
            found = re.search(r"Serving .* at (http://\S+)", line)
            if found and not self.url:
                self.url = found[1]
                self._served.set()
        self._served.set()


@contextmanager
def ramify_serve(model: str | None, flags: list[str]) -> Iterator[str]:
    """The address of a server that runs as long as the block does."""
    with ServeProcess(model, flags) as server:
        yield server.url


class Python:
    """`LLM.generate` on the same work, with as many sequences at a time as the server is asked for."""

    def __init__(self, model: str | None, concurrency: int, n: int, **options: Any) -> None:
        from ramify import LLM

        if model is not None:
            options["model"] = model
        self._llm = LLM(**options, max_num_seqs=concurrency * n, generation_config="none")

    def tokens_per_second(self, work: Work, requests: int) -> float:
        from ramify import SamplingParams
        from ramify.errors import RamifyError

        fields = {name: value for name, value in work.fields.items() if name not in ONLY_HTTP}
        prompts: list[Any] = [work.prompt_of(number) for number in range(requests)]
        lengths = map(work.max_tokens_of, range(requests))
        try:
            params = [SamplingParams(max_tokens=length, n=work.n, **fields) for length in lengths]
        except RamifyError as error:
            raise UnmeasurableError(f"LLM.generate cannot do the same: {error}. --no-compare leaves it out") from None
        start = time.perf_counter()
        if work.chat:
            chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = self._llm.chat(chats, params, use_tqdm=False)
        else:
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return sum(len(sample.token_ids) for output in outputs for sample in output.outputs) / seconds
