"""batch_invariant in bfloat16, on widths of real models: requests alone and in three busy schedules, bit for bit.

Tiny models split nothing: these have the widths, heads and vocabularies of 0.6B, 1.5B and 1B models, with three layers:
how sums are split follows from a layer's shape, so more of them would only take longer. Most of the time goes into
compiling, and into the 500 requests one at a time.
"""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify import LLM, SamplingParams
from tests import bits

COUNT = 500
COMMON = {
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
    "rope_theta": 500_000,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": False,
    },
    "1.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "llama1B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "all at once": {"num_kv_blocks": 20_000, "max_num_seqs": 512},
    "prompts in pieces, without graphs": {
        "num_kv_blocks": 20_000,
        "max_num_seqs": 48,
        "max_num_batched_tokens": 384,
        "enforce_eager": True,
    },
    "a cache that runs out": {"num_kv_blocks": 1_200, "max_num_seqs": 256, "max_num_batched_tokens": 2_048},
}


@pytest.fixture(scope="module", params=list(SHAPES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("shape")
    (made / "config.json").write_text(json.dumps({**COMMON, **SHAPES[request.param]}))
    return made


def engine(folder: Path, **options: Any) -> LLM:
    gc.collect()
    torch.cuda.empty_cache()
    return LLM(str(folder), load_format="dummy", device="cuda", max_model_len=1_536, batch_invariant=True, **options)


def test_requests_alone_and_in_busy_schedules(folder: Path) -> None:
    numbers = random.Random(0)
    asked = bits.random_requests(COUNT, numbers, vocab_size=100_000, longest_prompt=900, most_tokens=48)
    alone = bits.told_alone(engine(folder, num_kv_blocks=4_000), asked)
    for name, options in SCHEDULES.items():
        llm = engine(folder, **options)
        bits.check(alone, bits.told_together(llm, asked, numbers, waves=3), asked)
        if name == "a cache that runs out":
            assert llm.stats()["preemptions"] > 0
        del llm


def test_many_samples_of_a_long_prompt_have_the_bits_of_one(folder: Path) -> None:
    """Child i of n = 64 over a shared prefix, and child i of n = 1 + i alone with nothing to share."""
    prompt = [random.Random(1).randrange(100_000) for _ in range(1_300)]
    llm = engine(folder, num_kv_blocks=8_000)

    def sampled(n: int) -> list[Any]:
        params = SamplingParams(n=n, seed=5, max_tokens=40, ignore_eos=True, logprobs=1, detokenize=False)
        [output] = llm.generate([prompt], params, use_tqdm=False)
        return bits.told(output)[1]  # type: ignore[no-any-return]

    many = sampled(64)
    for n in (1, 2, 9):
        llm.reset_prefix_cache()
        assert sampled(n) == many[:n]
