"""An engine behind a connection gives what it gives in the same process, to the letter and the last bit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ramify import AsyncEngine, Request, RequestOutput, SamplingParams
from ramify.config import MixtureConfig
from ramify.engine.core import EngineCore
from ramify.remote.remote_engine import RemoteEngine
from ramify.sampling.mixing import Mixer
from tests.fake import fake_engine, letters
from tests.remote import remote

CODEC = letters()


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(body(), 60))


def core(**options: Any) -> EngineCore:
    made = fake_engine(**options)
    made.make_text, made.decode, made.encode_words = CODEC.make_stream, CODEC.decode_token, CODEC.encode_words
    return made


def requests(params: SamplingParams, *, num_models: int = 1) -> list[Request]:
    others = [(1, [9, 8, 7])] if num_models == 2 else []
    return [Request("asked", None, [5, 6, 7, 8, 9], params, other_prompts=others)]


async def outputs(engine: AsyncEngine | RemoteEngine, asked: list[Request]) -> list[RequestOutput]:
    streams = [engine.submit(request) for request in asked]
    return [await stream.final() for stream in streams]


def both(params: SamplingParams, *, num_models: int = 1, **options: Any) -> tuple[Any, Any]:
    """What a request gives in the same process and behind a connection."""
    if num_models == 2:
        options |= {"num_models": 2, "mixer": Mixer(MixtureConfig(), frozenset())}

    async def here() -> list[RequestOutput]:
        engine = AsyncEngine(core(**options))
        try:
            return await outputs(engine, requests(params, num_models=num_models))
        finally:
            await engine.shutdown()

    async def there() -> list[RequestOutput]:
        with remote(core(**options), CODEC) as engine:
            return await outputs(engine, requests(params, num_models=num_models))

    return run(here), run(there)


def even(output: Any) -> float:
    """A caller's own score: it reads the text."""
    return float(output.text.count("a")) - len(output.text) / 7


PARAMS: dict[str, dict[str, Any]] = {
    "one": {},
    "greedy": {"temperature": 0},
    "samples": {"n": 5, "logprobs": 3},
    "samples with controls": {"n": 2, "top_k": 40, "top_p": 0.9, "frequency_penalty": 0.5, "logit_bias": {7: 3.5}},
    "stop strings": {"n": 4, "stop": ["ab", "cc"]},
    "stop strings that stay": {"n": 4, "stop": ["ab", "cc"], "include_stop_str_in_output": True, "min_tokens": 3},
    "stop ids": {"n": 3, "stop_token_ids": list(range(40, 90)), "include_stop_str_in_output": True},
    "no text": {"detokenize": False, "logprobs": 0},
    "best of": {"best_of": 4, "n": 2, "logprobs": 1},
    "best by the mean": {"best_of": 4, "score": "mean_logprob"},
    "best by a function": {"best_of": 4, "n": 2, "score": even, "stop": ["cab"]},
    "best by a function that fails": {"best_of": 3, "score": lambda _: 1 / 0},
    "beams": {"strategy": "beam_search", "beam_width": 4, "n": 3, "logprobs": 2},
    "groups of beams": {
        "strategy": "beam_search", "beam_width": 4, "num_beam_groups": 2, "diversity_penalty": 1.0, "n": 4,
    },
    "diverse": {"strategy": "diverse", "n": 3, "diversity_penalty": 2.0},
    "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 2},
    "prompt alone": {"prompt_logprobs": 2, "max_tokens": 0},
    "a child by itself": {"child": 5},
}  # fmt: skip


def kinds_of(name: str) -> list[str]:
    """The kinds of outputs that these parameters can be asked for."""
    kinds = []
    for kind in ("final_only", "delta", "cumulative", "growth"):
        try:
            SamplingParams(**{"max_tokens": 12, "seed": 7, **PARAMS[name], "output_kind": kind, **beams(name)})
            kinds.append(kind)
        except ValueError:
            pass
    return kinds


def beams(name: str) -> dict[str, Any]:
    return {"seed": None} if "beam" in name else {}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in PARAMS for kind in kinds_of(name)], ids=str)
def test_outputs_are_those_of_the_same_process(name: str, kind: str) -> None:
    params = SamplingParams(**{"max_tokens": 12, "seed": 7, **PARAMS[name], "output_kind": kind, **beams(name)})
    here, there = both(params)
    assert there == here


@pytest.mark.parametrize("kind", ["final_only", "delta", "growth"])
def test_two_models_are_mixed_as_in_the_same_process(kind: str) -> None:
    here, there = both(SamplingParams(max_tokens=10, n=2, seed=3, logprobs=1, output_kind=kind), num_models=2)
    assert there == here
    assert len(there[0].outputs[0].mixture) == len(there[0].outputs[0].token_ids) > 1
