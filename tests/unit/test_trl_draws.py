"""Logprobs for trainers: those of what was really drawn, or none."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any, cast

import pytest

from ramify import LLM, EngineConfig, InvalidInputError, SamplingParams
from ramify.integrations.trl import RolloutWorker
from ramify.integrations.trl.draws import check_logprobs


class Configured:
    """An engine of which only the configuration is asked for."""

    def __init__(self, **options: Any) -> None:
        self.config = EngineConfig.from_options(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"typical_p": 0.9},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [3]},
        {"min_tokens": 2},
        {"bad_words": ["word"]},
        {"no_repeat_ngram_size": 2},
        {"structured_outputs": {"choice": ["a"]}},
        {"strategy": "diverse", "n": 2, "diversity_penalty": 1.0},
        {"logits_processors": [lambda _ids, logits: logits]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_changes_the_draw_needs_processed_logprobs(options: dict[str, Any]) -> None:
    """Of bad words and of siblings that push each other apart, trainers were told the model's own logprobs."""
    with pytest.raises(InvalidInputError, match='logprobs_mode="processed"'):
        check_logprobs(cast(LLM, Configured()), SamplingParams(**options))
    check_logprobs(cast(LLM, Configured(logprobs_mode="processed")), SamplingParams(**options))


def test_the_models_own_draws_need_nothing() -> None:
    check_logprobs(cast(LLM, Configured()), SamplingParams(n=4, seed=3, stop_token_ids=[5]))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> RolloutWorker:
    """TRL is asked for a class alone, and the engine for nothing as long as somebody pauses it."""
    module = ModuleType("async_rollout_worker")
    module.RolloutSample = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trl.experimental.async_grpo.async_rollout_worker", module)
    for name in ("trl", "trl.experimental", "trl.experimental.async_grpo"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))

    def tokenizer(_: str) -> dict[str, list[int]]:
        return {"input_ids": [1, 2]}

    return RolloutWorker(cast(LLM, Configured()), [{"prompt": "a"}], lambda **_: [], tokenizer)


def test_a_worker_is_stopped_while_its_weights_change(worker: RolloutWorker) -> None:
    """A trainer that failed, or was interrupted, while it sent weights waited for ever for the worker to end."""
    transfer = worker.weight_transfer
    transfer.pause()
    worker.start()
    stopping = threading.Thread(target=worker.stop, daemon=True)
    stopping.start()
    stopping.join(20)
    assert not stopping.is_alive()
    assert worker._error is None
    transfer.destroy()
    assert not transfer.drawing.locked()


def test_only_who_has_paused_resumes(worker: RolloutWorker) -> None:
    """The lock of a round was released in its middle."""
    transfer = worker.weight_transfer
    with transfer.drawing:
        transfer.resume()
        transfer.destroy()
        assert transfer.drawing.locked()
    transfer.pause()
    transfer.resume()
    assert not transfer.drawing.locked()
