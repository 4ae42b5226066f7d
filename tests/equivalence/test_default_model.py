"""The embedded default model against transformers' own reading of the same file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ramify import LLM, SamplingParams
from ramify.models.decoder import parameters
from ramify.models.loader import ModelLoader
from tests.equal import check_greedy

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "import torch\n\nclass Attention(torch.nn.Module):\n    def __init__(self",
    "SELECT name, COUNT(*) FROM users WHERE",
    "请写一个关于未来的故事开头",
    "写一个Python函数计算斐波那契数列",
    "2050年，人类终于实现了",
    "日本の首都は",
    "Привет, как",
    "مرحبا",
    "🎉🎂 Happy birthday",
    "👩‍👩‍👧‍👦 The family 🏡",
    "3.14159265358979",
    "Q: What is 17 * 23?\nA:",
    "<html>\n<body>\n\t<h1>",
    "   leading spaces and   runs\t\tof tabs\r\n",
    '{"name": "Ada", "born": 1815, "known_for": [',
    "E = mc² and ∑ᵢ xᵢ ≥",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "To be, or not to be, that is the question:\n",
    "x",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "Zürich, naïve café, façade:",
]


@pytest.fixture(scope="module")
def llm(default_gguf: Path) -> LLM:
    return LLM(str(default_gguf))


@pytest.fixture(scope="module")
def reference(default_gguf: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        default_gguf.parent, gguf_file=default_gguf.name, dtype=torch.float32
    ).eval()


def test_weights_are_those_transformers_reads(default_gguf: Path, reference: Any) -> None:
    from ramify import ModelConfig

    decoder = ModelLoader(ModelConfig(model=str(default_gguf))).load_model("cpu")
    expected = reference.state_dict()
    for name, tensor in parameters(decoder):
        assert torch.equal(tensor, expected[name]), name


def test_greedy_outputs_equal_transformers_on_varied_prompts(
    llm: LLM, reference: Any, record_property: Callable[[str, object], None]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    report = check_greedy(
        reference,
        [output.prompt_token_ids for output in outputs],
        [output.outputs[0].token_ids for output in outputs],
    )
    record_property("near_ties", report.near_ties)
    assert report.followed >= len(PROMPTS) - 2
    assert all(len(output.outputs[0].token_ids) == 64 for output in outputs)


def test_a_prompt_gives_the_same_tokens_alone_and_among_others(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=11, n=2, max_tokens=12)
    together = llm.generate(PROMPTS[:6], params, use_tqdm=False)
    alone = llm.generate(PROMPTS[3], params, use_tqdm=False)[0]
    assert [completion.token_ids for completion in alone.outputs] == [
        completion.token_ids for completion in together[3].outputs
    ]


def test_quantised_weights_give_what_dequantised_ones_give(llm: LLM, default_gguf: Path) -> None:
    """Greedy tokens, and their logprobs to 1e-4: weights in 4 and 8 bits against the same weights as float32."""
    dequantized = LLM(str(default_gguf), dequantize=True)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
    for one, other in zip(
        llm.generate(PROMPTS[:20], params, use_tqdm=False),
        dequantized.generate(PROMPTS[:20], params, use_tqdm=False),
        strict=True,
    ):
        mine, theirs = one.outputs[0], other.outputs[0]
        assert mine.token_ids == theirs.token_ids
        for row, its_row in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
            for token in row.keys() & its_row.keys():
                assert row[token].logprob == pytest.approx(its_row[token].logprob, abs=1e-4)
