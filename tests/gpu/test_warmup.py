"""With warmup="full" no request captures a graph, whatever it asks for, and what is drawn is the same."""

from __future__ import annotations

from typing import Any

from tests.conftest import CheckpointMaker
from tests.gpu.engines import engine, step_of, tokens

ASKED: list[dict[str, Any]] = [
    {"seed": 1, "max_tokens": 12},
    {"n": 5, "seed": 2, "max_tokens": 12, "top_p": 0.8},
    {"n": 3, "seed": 3, "max_tokens": 12, "logprobs": 3, "repetition_penalty": 1.2},
    {"strategy": "beam_search", "beam_width": 4, "n": 2, "max_tokens": 12},
    {"seed": 4, "max_tokens": 12, "logit_bias": {5: 2.0}, "min_tokens": 4, "top_k": 9},
]


def test_nothing_is_captured_after_the_start(make_checkpoint: CheckpointMaker) -> None:
    folder = make_checkpoint("llama")
    warm, lazy = engine(folder, "bfloat16", warmup="full"), engine(folder, "bfloat16")
    captured = dict(step_of(warm).graphs.captured)
    assert captured
    assert not step_of(lazy).graphs.captured
    for params in ASKED:
        assert tokens(warm, **params) == tokens(lazy, **params)
    # 700 shared positions and several samples: prefixes are read together
    long = [[7 * index % 90 + 5 for index in range(400)]]
    assert tokens(warm, long, n=8, seed=1, max_tokens=12) == tokens(lazy, long, n=8, seed=1, max_tokens=12)
    assert step_of(warm).graphs.captured.keys() == captured.keys()
    assert len(step_of(lazy).graphs.captured) < len(captured)
