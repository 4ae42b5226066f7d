"""Searches and diverse sets whose steps are launched before the host knows the last one: as when it waits for each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ramify import LLM, SamplingParams
from ramify.device.lane import Moving
from ramify.engine.plan import Plan
from tests.conftest import CheckpointMaker
from tests.gpu.engines import PROMPTS, engine, step_of

SEARCHES: dict[str, dict[str, Any]] = {
    "eight beams": {"beam_width": 8, "n": 8, "max_tokens": 40},
    "two beams": {"beam_width": 2, "n": 2, "max_tokens": 24},
    "many beams": {"beam_width": 17, "n": 3, "max_tokens": 20},
    "early": {"beam_width": 4, "n": 4, "max_tokens": 40, "early_stopping": True, "stop_token_ids": [7, 8, 9]},
    "never": {"beam_width": 4, "n": 4, "max_tokens": 40, "early_stopping": "never", "length_penalty": 0.4},
    "reported": {"beam_width": 5, "n": 5, "max_tokens": 24, "logprobs": 3},
    "filtered": {"beam_width": 4, "n": 4, "max_tokens": 24, "top_k": 3},
}


@pytest.fixture(scope="module")
def folder(make_checkpoint: CheckpointMaker) -> Path:
    return make_checkpoint("qwen3")


@pytest.fixture(scope="module")
def waiting(folder: Path) -> LLM:
    llm = engine(folder, "float32")
    step_of(llm).runs_ahead = False
    return llm


@pytest.fixture(scope="module")
def ahead(folder: Path) -> LLM:
    return engine(folder, "float32")


def found(llm: LLM, params: list[SamplingParams]) -> list[Any]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert not any(output.error for output in outputs)
    assert llm.stats()["blocks_in_use"] == 0
    return [[(each.token_ids, each.finish_reason) for each in output.outputs] for output in outputs]


@pytest.mark.parametrize("kind", list(SEARCHES))
def test_searches_find_the_same(waiting: LLM, ahead: LLM, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[Moving] = []
    original = step_of(ahead)._moving

    def counted(plan: Plan) -> Moving | None:
        moving = original(plan)
        moves.extend([] if moving is None else [moving])
        return moving

    monkeypatch.setattr(step_of(ahead), "_moving", counted)
    params = [SamplingParams(strategy="beam_search", **SEARCHES[kind])] * len(PROMPTS)
    assert found(ahead, params) == found(waiting, params)
    assert len(moves) > 8


def test_searches_beside_others_find_the_same(waiting: LLM, ahead: LLM) -> None:
    """Others come and go: rows move, and steps hold prompts and plain draws too."""
    beams = SamplingParams(strategy="beam_search", beam_width=6, n=6, max_tokens=33)
    params = [
        SamplingParams(n=9, seed=3, max_tokens=7),
        beams,
        SamplingParams(seed=4, max_tokens=50, top_p=0.9),
        beams,
        SamplingParams(strategy="beam_search", beam_width=3, max_tokens=9, repetition_penalty=1.2),
    ]
    assert found(ahead, params) == found(waiting, params)


@pytest.mark.parametrize("strategy", ["diverse", "without_replacement"])
def test_searches_beside_sets_find_the_same(waiting: LLM, ahead: LLM, strategy: Any) -> None:
    """Sets are drawn in waves, which must not choose for a search more than once."""
    beams = SamplingParams(strategy="beam_search", beam_width=6, n=6, max_tokens=33)
    penalty: dict[str, Any] = {"diversity_penalty": 2.0} if strategy == "diverse" else {}
    others = [SamplingParams(strategy=strategy, n=4, seed=number, max_tokens=40, **penalty) for number in range(3)]
    params = [beams, *others, replace(beams, beam_width=3, n=3)]
    both = found(ahead, params)
    assert both == found(waiting, params)
    ahead.reset_prefix_cache()
    alone = found(ahead, [beams] * len(PROMPTS))
    assert both[0] == alone[0]


@pytest.mark.parametrize("options", [{}, {"allowed_token_ids": [5, 6, 7, 8, 9, 10, 11], "stop_token_ids": [7, 8]}])
def test_diverse_sets_draw_the_same(waiting: LLM, ahead: LLM, options: dict[str, Any]) -> None:
    """Also where siblings end, whom the others look at no more."""
    params = [
        SamplingParams(strategy="diverse", n=6, diversity_penalty=5.0, seed=number, max_tokens=20, **options)
        for number, _ in enumerate(PROMPTS)
    ]
    assert found(ahead, params) == found(waiting, params)
