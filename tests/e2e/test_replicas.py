"""Replicas in processes of their own: the tokens of one engine, also after one of them was killed half-way."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ramify import LLM, OptimalSampling, RequestOutput, SamplingParams
from ramify.errors import InvalidInputError, UnsupportedError, WeightsError
from ramify.models.decoder import Decoder, parameters
from ramify.models.weights import fill_randomly
from tests.conftest import TINY
from tests.serve_process import process

PARAMS = [
    SamplingParams(n=6, max_tokens=24, seed=3),
    SamplingParams(max_tokens=30),
    SamplingParams(n=2, best_of=5, max_tokens=16, logprobs=1),
    SamplingParams(strategy="beam_search", beam_width=3, n=2, max_tokens=10),
]
PROMPTS = [[number + 1, 5, 6, 7] * 5 for number in range(12)]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Random weights, the same in every process."""
    folder = tmp_path_factory.mktemp("model")
    facts = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-6, **TINY}
    (folder / "config.json").write_text(json.dumps(facts))
    return {"model": str(folder), "load_format": "dummy", "num_kv_blocks": 600, "max_num_seqs": 16}


@pytest.fixture(scope="module")
def replicas(options: dict[str, Any]) -> Iterator[LLM]:
    llm = LLM(**options, data_parallel_size=2)
    yield llm
    llm._core.stop()  # type: ignore[union-attr]


def finished(llm: LLM) -> list[RequestOutput]:
    outputs = llm.generate(PROMPTS, [PARAMS[number % 4] for number in range(len(PROMPTS))], use_tqdm=False)
    return [replace(output, metrics=None, num_cached_tokens=0, request_id="") for output in outputs]


def test_refusals_name_what_cannot_cross_and_what_there_is_not(replicas: LLM, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"LLM.tree needs the engine in this process.*data_parallel_size 2"):
        replicas.tree()
    with pytest.raises(UnsupportedError, match="logits_processors cannot be used with data_parallel_size"):
        replicas.generate([[5]], SamplingParams(logits_processors=[lambda _tokens, logits: logits]))
    with pytest.raises(InvalidInputError, match=r"data_parallel_size must be .* got 0"):
        LLM(**options, data_parallel_size=0)
    with pytest.raises(InvalidInputError, match="must fit max_model_len"):
        replicas.generate([[5] * 600])


def assert_weights_reach_all(replicas: LLM, one: LLM) -> None:
    """Other weights in every replica, then the first ones again; what one engine refuses, they do."""
    generator = torch.Generator().manual_seed(3)
    before = {name: tensor.clone() for name, tensor in fresh_weights(one)}
    changed = [
        (name, tensor + 0.05 * torch.randn(tensor.shape, generator=generator)) for name, tensor in before.items()
    ]
    params = SamplingParams(n=4, seed=1, max_tokens=6)

    def tokens(llm: LLM) -> list[tuple[int, ...]]:
        [output] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        return [sample.token_ids for sample in output.outputs]

    first = tokens(one)
    for weights in (changed, list(before.items())):
        one.load_weights(weights)
        replicas.load_weights(iter(weights))
        assert tokens(replicas) == tokens(one)
    assert tokens(one) == first
    with pytest.raises(WeightsError, match="lacks"):
        replicas.load_weights(changed[:-1])
    with pytest.raises(WeightsError, match="incomplete"):
        tokens(replicas)
    with pytest.raises(WeightsError, match="given twice"):
        replicas.load_weights([changed[0], changed[0]])
    replicas.load_weights(before.items())
    assert tokens(replicas) == first


def fresh_weights(llm: LLM) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that random filling gives such a model."""
    arch = llm.architecture
    decoder = Decoder(arch, torch.float32, torch.device("cpu"))
    fill_randomly(decoder, 0, torch.float32)
    return parameters(decoder)


def test_replicas_draw_what_one_engine_draws_also_when_one_is_killed(replicas: LLM, options: dict[str, Any]) -> None:
    one = LLM(**options)
    wanted = finished(one)
    assert finished(replicas) == wanted
    given: Any = ([5, 6, 7], [[8, 9, 10], [11]])
    assert replicas.logprobs(*given, top_k=1) == one.logprobs(*given, top_k=1)
    assert len(replicas.replica_stats()) == 2
    assert all(each["generated_tokens"] for each in replicas.replica_stats())
    assert_weights_reach_all(replicas, one)
    # Requests without a seed draw it by their place in the queue, which has moved on: this run names theirs.
    replicas._core.pool._num_arrived = 0  # type: ignore[union-attr]
    replicas.reset_prefix_cache()
    process = replicas._core.pool.links[1].process  # type: ignore[union-attr]
    assert process is not None
    threading.Timer(0.1, os.kill, [process.pid, signal.SIGKILL]).start()
    assert finished(replicas) == wanted
    [streamed] = replicas.stream_generate([5, 6, 7], SamplingParams(max_tokens=4, seed=1))
    assert len(streamed.outputs[0].token_ids) == 4


@pytest.mark.long
def test_two_models_in_replicas_draw_what_they_draw_in_one_engine(options: dict[str, Any]) -> None:
    folder = options["model"]
    drawn = []
    for count in (1, 2):
        sampler = OptimalSampling(folder, folder, load_format="dummy", num_kv_blocks=600, data_parallel_size=count)
        outputs = sampler.generate(PROMPTS[:4], n=3, max_tokens=8, seed=4, use_tqdm=False)
        drawn.append((outputs.generated_ids, outputs.alpha_history, sampler.stats()["teacher"]["positions_computed"]))
    assert drawn[0][:2] == drawn[1][:2]
    assert drawn[1][2] >= drawn[0][2] > 0, "a prompt that is divided is computed once more"


@pytest.mark.long
def test_a_server_goes_on_with_the_replicas_that_are_left(options: dict[str, Any]) -> None:
    flags = [
        "--model",
        options["model"],
        "--load-format",
        "dummy",
        "--num-kv-blocks",
        "600",
        "--data-parallel-size",
        "2",
    ]
    with process(*flags) as server:
        url = server.url()
        while httpx.get(f"{url}/health").status_code == 503:
            time.sleep(0.1)
        body = {"prompt": [5, 6, 7], "n": 4, "max_tokens": 5, "seed": 1, "logprobs": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]
        children = Path(f"/proc/{server.popen.pid}/task/{server.popen.pid}/children").read_text().split()
        for number, child in enumerate(children):
            assert number < 2 or "child.py" not in Path(f"/proc/{child}/cmdline").read_text()
        os.kill(int(children[0]), signal.SIGKILL)
        again = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]
        assert [choice["logprobs"] for choice in again] == [choice["logprobs"] for choice in answer]
        told = httpx.get(f"{url}/metrics").text
        assert 'ramify_replica_generated_tokens_total{model="' in told
        assert httpx.get(f"{url}/health").json() == {"status": "ready"}
