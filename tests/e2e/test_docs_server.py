"""docs/server.md cannot rot: its Python runs against a server, its tables name what there is."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from ramify import AsyncLLM
from ramify.outputs import MixtureReport
from ramify.server.app import app_of, create_app
from ramify.server.config import ServerConfig
from ramify.server.metrics import ServerMetrics
from ramify.server.protocol import ChatCompletionRequest, CompletionRequest
from ramify.server.service import Service
from tests.serving import ENGINE_PROCESS, serving

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "server.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
# What OpenAI's own protocol has; everything else must be told as an extra.
OPENAI = {"model", "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "logit_bias"}
OPENAI |= {"stream", "stream_options", "user", "prompt", "max_tokens", "logprobs", "echo", "suffix", "messages"}
OPENAI |= {"max_completion_tokens", "top_logprobs", "response_format", "tools", "tool_choice", "parallel_tool_calls"}
OPENAI |= {"functions", "function_call", "modalities", "service_tier", "store", "metadata", "audio", "prediction"}
OPENAI |= {"reasoning_effort", "web_search_options"}


@pytest.mark.usefixtures("default_gguf")
def test_the_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    llm = AsyncLLM(num_kv_blocks=512, engine_process=ENGINE_PROCESS)
    client_blocks = [block for block in BLOCKS if "client" in block]
    assert len(client_blocks) == 2
    with serving(create_app(llm)) as url:
        names: dict[str, object] = {}
        for block in client_blocks:
            exec(block.replace("http://127.0.0.1:8000", url), names)
    llm.engine.stop()
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if re.match(r"\d ", line)] == ["0", "1", "2", "3"]
    assert re.search(r"^-\d\.\d{3} ", printed, flags=re.MULTILINE)


@pytest.mark.usefixtures("default_gguf")
def test_the_asynchronous_block_runs() -> None:
    [block] = [block for block in BLOCKS if "asyncio" in block]
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=120, check=False)
    assert [done.returncode, done.stderr] == [0, ""]
    assert len(done.stdout) > 40


def test_every_extra_field_is_told() -> None:
    taken = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
    missing = [name for name in sorted(taken - OPENAI) if f"`{name}`" not in TEXT]
    assert missing == []


def test_every_limit_is_told_with_its_default() -> None:
    for field in fields(ServerConfig):
        assert f"`--{field.name.replace('_', '-')}`" in TEXT, field.name


def test_every_route_is_told() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    for path in app_of(Service(ServerConfig())).openapi()["paths"]:
        assert path in pages, path
    for name in MixtureReport._fields:
        assert f"`{name}`" in TEXT


def test_every_metric_is_told() -> None:
    for metric in ServerMetrics(Service(ServerConfig())).registry.collect():
        assert metric.name.startswith("ramify_")
        name = metric.name.removeprefix("ramify_") + ("_total" if metric.type == "counter" else "")
        assert f"`{name}`" in TEXT, name
