"""The workloads on which engines are compared, by name. Random token ids, fixed output lengths, no EOS."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """num_prompts prompts with lengths in the range `lengths`, n samples each, `output` tokens per sample."""

    name: str
    num_prompts: int
    lengths: tuple[int, int]
    n: int
    output: int
    temperature: float = 1.0

    @property
    def num_tokens(self) -> int:
        return self.num_prompts * self.n * self.output

    def prompts(self) -> list[list[int]]:
        numbers = random.Random(0)
        lengths = [numbers.randint(*self.lengths) for _ in range(self.num_prompts)]
        return [[numbers.randrange(100, 49_000) for _ in range(length)] for length in lengths]


# On a CPU, with the shape of the default model in float32.
CPU_WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("one", 1, (64, 64), 1, 128),
        Workload("fan8@64", 1, (64, 64), 8, 64),
        Workload("fan64@1k", 1, (1024, 1024), 64, 48),
        Workload("mixed32", 32, (64, 512), 1, 64),
    )
}

# The default model's shape: benchmarks make random weights from it, the same for every engine.
MODEL_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
