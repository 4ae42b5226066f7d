"""What an engine takes of a GPU stays inside gpu_memory_utilization, whatever it is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ramify import LLM, SamplingParams
from ramify.errors import InvalidInputError

# Wide enough that a step needs gigabytes: 8,192 rows of a vocabulary and an intermediate size that are large.
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 8960,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rope_theta": 10_000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def folder_of(path: Path, dtype: str = "bfloat16") -> str:
    (path / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": dtype}))
    return str(path)


def test_the_peak_stays_inside(tmp_path: Path) -> None:
    share = 0.12  # of 140 GB; what a step needs is a good part of it
    llm = LLM(folder_of(tmp_path), load_format="dummy", gpu_memory_utilization=share, max_num_seqs=512)
    long = [[(7 * index) % 1000 for index in range(30_000)], *([[row] * 200 for row in range(300)])]
    mixes = [
        SamplingParams(n=2, max_tokens=40, ignore_eos=True, detokenize=False, top_p=0.9, logprobs=5),
        SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False, repetition_penalty=1.2, logprobs=20),
        SamplingParams(max_tokens=20, detokenize=False, strategy="beam_search", beam_width=4),
    ]
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):  # the second time prompts hit the prefix cache: many chunks with long pasts
        outputs = llm.generate(long, [mixes[index % 3] for index in range(len(long))], use_tqdm=False)
        assert not any(output.error for output in outputs)
    outputs = llm.generate([[*long[0], row] for row in range(100)], mixes[0], use_tqdm=False)
    assert not any(output.error for output in outputs)
    free, total = torch.cuda.mem_get_info()
    beside = total - free - torch.cuda.memory_reserved()
    assert torch.cuda.max_memory_reserved() + beside <= share * total
    # And it is made use of: nine tenths of the share at least.
    assert torch.cuda.max_memory_reserved() + beside >= 0.9 * share * total


def test_no_room_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"no memory is left for the KV cache.*gpu_memory_utilization"):
        LLM(folder_of(tmp_path), load_format="dummy", gpu_memory_utilization=0.01)


def test_a_checkpoint_keeps_its_precision(tmp_path: Path) -> None:
    for name, dtype in (("float16", torch.float16), ("float32", torch.bfloat16)):
        llm = LLM(folder_of(tmp_path, name), load_format="dummy", num_kv_blocks=512, max_model_len=512)
        assert llm._decoder.dtype is dtype
        [output] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, detokenize=False), use_tqdm=False)
        assert not output.error
