"""Two models served as one: what OptimalSampling draws, with the teacher's weight at every token."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ramify import OptimalSampling
from ramify.config import MixtureConfig
from ramify.outputs import MixtureReport
from ramify.server.app import app_of
from ramify.server.config import PairConfig, ServerConfig
from ramify.server.load import load_models
from ramify.server.service import Service
from ramify.server.to_serve import model_to_serve, pair_to_serve
from tests.serve_process import process
from tests.serving import ENGINE_PROCESS, serving

SECRET = "The answer is forty-two."
QUESTION = "What is six times seven?"
OPTIONS: dict[str, Any] = {"num_kv_blocks": 512}


@pytest.fixture(scope="module")
def pair(default_gguf: Path) -> OptimalSampling:
    name = str(default_gguf)
    return OptimalSampling(name, name, teacher_system_prompt=SECRET, alpha_min=0.1, **OPTIONS)


@pytest.fixture(scope="module")
def client(default_gguf: Path) -> Iterator[httpx.Client]:
    name = str(default_gguf)
    service = Service(ServerConfig())
    mixed = PairConfig(teacher=name, theta=name, teacher_system_prompt=SECRET)
    wanted = [
        model_to_serve(name, OPTIONS, "plain"),
        pair_to_serve(mixed, MixtureConfig(alpha_min=0.1), OPTIONS, "mixed"),
    ]
    models = load_models(wanted, ENGINE_PROCESS, print)
    service.open(models)
    with serving(app_of(service)) as url, httpx.Client(base_url=url, timeout=120) as made:
        yield made
    for model in models:
        model.engine.stop()


def completion(client: httpx.Client, **fields: Any) -> Any:
    body = {
        "model": "mixed",
        "prompt": QUESTION,
        "max_tokens": 8,
        "temperature": 0.8,
        "seed": 5,
        "ignore_eos": True,
        **fields,
    }
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_both_models_are_offered(client: httpx.Client) -> None:
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["plain", "mixed"]


def test_a_completion_is_what_optimal_sampling_draws(client: httpx.Client, pair: OptimalSampling) -> None:
    wanted = pair.generate(QUESTION, n=2, max_tokens=8, seed=5, ignore_eos=True, use_tqdm=False)
    choices = completion(client, n=2, return_token_ids=True)["choices"]
    assert [choice["text"] for choice in choices] == wanted.generated_texts
    assert [choice["token_ids"] for choice in choices] == wanted.generated_ids
    for place, choice in enumerate(choices):
        assert set(choice["mixture"]) == set(MixtureReport._fields)
        assert choice["mixture"]["alpha"] == pytest.approx(wanted.alpha_history[place], abs=1e-3)
        assert choice["mixture"]["kl_theta"] == pytest.approx(wanted.diagnostics["kl_theta"][place], abs=1e-3)
    assert len({round(alpha, 3) for choice in choices for alpha in choice["mixture"]["alpha"]}) > 3


def test_the_teachers_own_prompt_is_never_told(client: httpx.Client) -> None:
    told = completion(client, echo=True, return_token_ids=True)
    assert told["choices"][0]["text"].startswith(QUESTION)
    assert SECRET not in json.dumps(told)
    assert "prompt_token_ids" not in told["choices"][0]


def test_streamed_weights_stand_beside_their_tokens(client: httpx.Client) -> None:
    [plain] = completion(client, return_token_ids=True)["choices"]
    body = {
        "model": "mixed",
        "prompt": QUESTION,
        "max_tokens": 8,
        "temperature": 0.8,
        "seed": 5,
        "ignore_eos": True,
        "stream": True,
    }
    tokens: list[int] = []
    alphas: list[float] = []
    with client.stream("POST", "/v1/completions", json={**body, "return_token_ids": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                assert len(choice["token_ids"]) == len(choice["mixture"]["alpha"])
                tokens += choice["token_ids"]
                alphas += choice["mixture"]["alpha"]
    assert tokens == plain["token_ids"]
    assert alphas == pytest.approx(plain["mixture"]["alpha"], abs=1e-3)


def test_the_student_may_have_a_prompt_of_its_own(client: httpx.Client, pair: OptimalSampling) -> None:
    wanted = pair.generate(
        [QUESTION, "One"], ["Six times seven is", "Two"], max_tokens=6, seed=5, ignore_eos=True, use_tqdm=False
    )
    got = completion(client, prompt=[QUESTION, "One"], theta_prompt=["Six times seven is", "Two"], max_tokens=6)
    assert [choice["text"] for choice in got["choices"]] == wanted.generated_texts


def test_chats_are_mixed_too(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": "mixed", "messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    told = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    other = [{"role": "user", "content": "Say something about the sea."}]
    apart = client.post("/v1/chat/completions", json={**body, "theta_messages": other}).json()["choices"][0]
    assert len(told["mixture"]["alpha"]) == len(apart["mixture"]["alpha"]) == 6
    assert told["mixture"]["kl_theta"] != apart["mixture"]["kl_theta"]


@pytest.mark.parametrize(
    ("route", "fields", "named"),
    [
        ("completions", {"model": "plain", "prompt": "x", "theta_prompt": "y"}, "theta_prompt has no meaning"),
        ("completions", {"model": "mixed", "prompt": ["x", "y"], "theta_prompt": "y"}, "one entry for each prompt"),
        ("completions", {"model": "mixed", "prompt": "x", "prompt_logprobs": 1}, "prompt_logprobs"),
        ("completions", {"model": "mixed", "prompt": [5], "theta_prompt": "y"}, "token ids"),
        ("chat/completions", {"model": "plain", "messages": [], "theta_messages": []}, "theta_messages has no meaning"),
    ],
)
def test_what_has_no_meaning_is_refused(client: httpx.Client, route: str, fields: dict[str, Any], named: str) -> None:
    reply = client.post(f"/v1/{route}", json=fields)
    assert reply.status_code == 400
    assert named in reply.json()["error"]["message"]


def test_the_command_line_serves_a_mixture(default_gguf: Path) -> None:
    name = str(default_gguf)
    flags = ["--teacher", name, "--theta", name, "--alpha-method", "fixed", "--alpha", "0.25", "--num-kv-blocks", "64"]
    with process(*flags, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1")) as server:
        url = server.url()
        [card] = httpx.get(f"{url}/v1/models").json()["data"]
        assert card["id"] == f"{default_gguf.name}+{default_gguf.name}"
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": "One", "max_tokens": 3}, timeout=60)
        assert reply.json()["choices"][0]["mixture"]["alpha"] == pytest.approx([0.25] * 3)
        assert server.end(signal.SIGTERM) == (0, "")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--teacher", "x"], "must be given together"),
        (["--alpha-min", "0.5"], "need --teacher and --theta"),
        (["--teacher-system-prompt", "x"], "go with teacher and theta"),
    ],
)
def test_flags_that_lack_the_others_are_one_line(flags: list[str], said: str) -> None:
    with process(*flags) as server:
        _, errors = server.popen.communicate(timeout=60)
    assert server.popen.returncode == 2
    assert said in errors
    assert len(errors.strip().splitlines()) == 1
