"""schemathesis asks what the OpenAPI document allows, and what it does not: no 500, and replies as documented."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import response_schema_conformance

from ramify import AsyncLLM
from ramify.server.app import create_app
from ramify.server.config import ServerConfig
from tests.conftest import CheckpointMaker
from tests.serving import ENGINE_PROCESS, serving


@pytest.fixture(scope="module")
def llm(make_checkpoint: CheckpointMaker, default_gguf: Path) -> Iterator[AsyncLLM]:
    """A tiny model that speaks: the default model's tokenizer, a short context, so that every request is quick."""
    folder = make_checkpoint("llama", num_hidden_layers=1, hidden_size=32, vocab_size=49_152)
    made = AsyncLLM(
        str(folder),
        tokenizer=str(default_gguf),
        max_model_len=96,
        num_kv_blocks=2_048,
        block_size=4,
        engine_process=ENGINE_PROCESS,
    )
    yield made
    made.engine.stop()


@pytest.fixture(scope="module")
def schema(llm: AsyncLLM) -> Iterator[Any]:
    with serving(create_app(llm, ServerConfig(request_timeout=20))) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


def operations(schema: Any, method: str) -> list[Any]:
    return [operation for result in schema.get_all_operations() if (operation := result.ok()).method.upper() == method]


def ask_at_random(operation: Any, mode: GenerationMode, examples: int) -> None:
    @settings(
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        derandomize=True,
        database=None,
    )
    @given(case=operation.as_strategy(generation_mode=mode), name_a_model=st.integers(0, 9).map(lambda draw: draw == 0))
    def ask(case: Any, name_a_model: bool) -> None:
        if isinstance(case.body, dict) and not name_a_model:
            case.body.pop("model", None)  # a random name is a 404, and nothing else would be looked at
        reply = case.call()
        assert reply.status_code < 500, reply.text
        if reply.status_code >= 400:
            assert set(reply.json()) == {"error"}, "every refusal has OpenAI's shape"
        if reply.headers["content-type"][0].startswith("application/json"):
            case.validate_response(reply, checks=[response_schema_conformance])

    ask()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
def test_no_body_is_answered_with_a_500(schema: Any, mode: GenerationMode) -> None:
    asked = operations(schema, "POST")
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"} <= {
        operation.path for operation in asked
    }
    for operation in asked:
        ask_at_random(operation, mode, examples=30)


def test_no_question_is_answered_with_a_500(schema: Any) -> None:
    asked = operations(schema, "GET")
    assert {"/v1/models", "/v1/models/{name}", "/health", "/metrics"} <= {operation.path for operation in asked}
    for operation in asked:
        ask_at_random(operation, GenerationMode.POSITIVE, examples=5)


def test_nothing_runs_on(llm: AsyncLLM) -> None:
    assert llm.engine.num_unfinished == 0
    assert llm.stats()["blocks_in_use"] == 0
    assert llm.engine.is_sound
    assert llm.stats()["generated_tokens"] > 0, "some of it was really served"
