"""What /metrics tells after a known amount of work."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from ramify import AsyncLLM
from ramify.server.app import app_of, create_app
from ramify.server.config import ServerConfig
from ramify.server.service import Service
from tests.conftest import CheckpointMaker
from tests.serving import ENGINE_PROCESS, serving


@pytest.fixture
def folder(make_checkpoint: CheckpointMaker) -> Path:
    return make_checkpoint("llama")


def test_methods_that_nobody_knows_are_counted_as_one() -> None:
    """Any word is a method to the HTTP parser; each was a counter of its own, kept for ever, whoever sent it."""
    with serving(app_of(Service(ServerConfig(api_key="key")))) as url:
        for number in range(20):
            assert httpx.request(f"WORD{number}", f"{url}/health").status_code == 405
            assert httpx.request(f"WORD{number}", f"{url}/v1/models").status_code == 401
        told = httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer key"}).text
    counted = {line for line in told.splitlines() if line.startswith("ramify_http_requests_total")}
    assert counted == {
        'ramify_http_requests_total{method="unknown",route="/health",status="405"} 20.0',
        'ramify_http_requests_total{method="unknown",route="unknown",status="401"} 20.0',
    }


def test_metrics_count_what_happened(folder: Path) -> None:
    llm = AsyncLLM(str(folder), num_kv_blocks=600, engine_process=ENGINE_PROCESS)
    with serving(create_app(llm)) as url:
        body = {"prompt": [[5, 6, 7] * 20, [5, 6, 7] * 20], "max_tokens": 4, "n": 2, "ignore_eos": True}
        for _ in range(2):
            assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        httpx.post(f"{url}/v1/completions", json={"prompt": [5], "n": 0})
        lines = httpx.get(f"{url}/metrics").text.splitlines()
    llm.engine.stop()
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
    assert all(name.startswith("ramify_") for name in values)
    label = f'{{model="{folder.name}"}}'
    assert values[f"ramify_generated_tokens_total{label}"] == 2 * 2 * 2 * 4
    assert (
        values[f"ramify_prompt_tokens_computed_total{label}"] + values[f"ramify_prompt_tokens_cached_total{label}"]
        == 4 * 60
    )
    assert values[f"ramify_prompt_tokens_cached_total{label}"] > 0
    for name in ("time_to_first_token", "queue_time", "e2e_request_latency"):
        assert values[f"ramify_{name}_seconds_count{label}"] == 4
    assert values[f"ramify_inter_token_latency_seconds_count{label}"] == 8 * 3
    assert values[f"ramify_request_prompt_tokens_sum{label}"] == 4 * 60
    for name in (
        "sequences_running",
        "sequences_waiting",
        "requests_unfinished",
        "cache_blocks_in_use",
        "preemptions_total",
    ):
        assert values[f"ramify_{name}{label}"] == 0
    assert values[f"ramify_cache_blocks{label}"] == 600
    assert values[f'ramify_requests_total{{finish_reason="length",model="{folder.name}"}}'] == 4
    route = 'method="POST",route="/v1/completions"'
    assert values[f'ramify_http_requests_total{{{route},status="200"}}'] == 2
    assert values[f'ramify_http_requests_total{{{route},status="400"}}'] == 1
