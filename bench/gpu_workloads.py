"""The workloads for one GPU, by name, and the public shapes whose random weights they run on."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from ramify import SamplingParams

COMMON: dict[str, Any] = {
    "vocab_size": 151_936,
    "rope_theta": 1_000_000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 40_960,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "rope_theta": 500_000,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": False,
    },
    "1.5B": {
        **QWEN2,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "3B": {
        **QWEN2,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
    "7B": {
        **QWEN2,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
}
SHAPES["llama1B"] = {
    **LLAMA,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
SHAPES["text1B"] = SHAPES["llama1B"]  # with a tokenizer: grammars are of text
SHAPES["llama8B"] = {
    **LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
# Put into any of these shapes, it makes a model that runs anywhere in no time: to see that a benchmark works.
REHEARSAL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2_048,
    "eos_token_id": 511,
    "bos_token_id": 510,
    "torch_dtype": "float32",
}


@dataclass(frozen=True, slots=True)
class GpuWorkload:
    """num_prompts prompts and outputs with lengths in these ranges, n samples each; tokens/s of vLLM, floor and goal.

    If the model is a pair, both models see the same prompts, and vLLM has nothing to compare with. None: not known.
    """

    name: str
    model: str
    num_prompts: int
    lengths: tuple[int, int]
    n: int
    outputs: tuple[int, int]
    params: dict[str, Any]
    vllm: float | None
    floor: float | None
    goal: float | None
    largest_id: int = 150_000
    twin: str | None = None  # the same without the control, in the same run, and the share of its speed that is wanted
    share: float = 0.9

    def requests(self) -> tuple[list[list[int]], list[SamplingParams]]:
        numbers = random.Random(0)
        prompts, params = [], []
        for index in range(self.num_prompts):
            length = numbers.randint(*self.lengths)
            prompts.append([numbers.randint(100, self.largest_id) for _ in range(length)])
            seeded = {**self.params, "seed": index} if self.params.get("seed") is not None else self.params
            params.append(
                SamplingParams(
                    n=self.n,
                    max_tokens=numbers.randint(*self.outputs),
                    ignore_eos="structured_outputs" not in seeded,  # its outputs are long enough by themselves
                    detokenize=False,
                    **seeded,
                )
            )
        return prompts, params

    def rehearsed(self) -> GpuWorkload:
        """The same in miniature: so many prompts and samples, lengths a sixteenth, at most eight samples a prompt."""
        lengths, outputs = ((low // 16, high // 16) for low, high in (self.lengths, self.outputs))
        return replace(
            self,
            lengths=lengths,
            outputs=outputs,
            n=min(self.n, 8),
            largest_id=REHEARSAL["vocab_size"] - 1,
            vllm=None,
            floor=None,
            goal=None,
        )


def _llama(
    name: str,
    model: str,
    asked: tuple[int, tuple[int, int], int, tuple[int, int]],
    params: dict[str, Any],
    *,
    vllm: float | None = None,
    floor: float | None = None,
    goal: float | None = None,
    twin: str | None = None,
    share: float = 0.9,
) -> GpuWorkload:
    """asked: prompts, their lengths, samples of each, lengths of outputs."""
    return GpuWorkload(name, model, *asked, params, vllm, floor, goal, largest_id=128_000, twin=twin, share=share)


_CHATS = (256, (100, 200), 1, (128, 128))
_PENALTIES = {"temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.2}
_BIAS = {"temperature": 0.8, "min_p": 0.05, "logit_bias": dict.fromkeys(range(200, 2200, 100), 2.0)}
_BEAMS = {"strategy": "beam_search", "beam_width": 8}
# More people than any output has room for.
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "known": {"type": "boolean"},
    },
    "required": ["name", "age", "known"],
    "additionalProperties": False,
}
_GRAMMAR = {"temperature": 0.8, "structured_outputs": {"json": {"type": "array", "items": _PERSON, "minItems": 500}}}
# Short strings end soon; nested objects, enumerations and numbers with bounds.
_ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999_999},
        "state": {"enum": ["open", "paid", "sent", "returned"]},
        "buyer": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "city": {"type": ["string", "null"], "maxLength": 12},
            },
            "required": ["name", "city"],
            "additionalProperties": False,
        },
        "lines": {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "item": {"type": "string", "maxLength": 16},
                    "price": {"type": "number", "maximum": 100},
                },
                "required": ["item", "price"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["id", "state", "buyer", "lines"],
    "additionalProperties": False,
}
_ORDERS = {"temperature": 0.8, "structured_outputs": {"json": {"type": "array", "items": _ORDER, "minItems": 500}}}
_RULES = {"temperature": 0.8, "top_n_sigma": 2.0, "epsilon_cutoff": 3e-4, "xtc_probability": 0.5}
_TYPICAL = {"temperature": 0.8, "typical_p": 0.95}
_DIVERSE = {"strategy": "diverse", "diversity_penalty": 0.5}
_FILTERS = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
_PLAIN = (256, (128, 128), 1, (256, 256))
_W = GpuWorkload
PAIR = "3B+1.5B"
WORKLOADS = {
    workload.name: workload
    for workload in (
        _W("mixed256", "0.6B", 256, (100, 1024), 1, (100, 1024), {"temperature": 0.6}, 24_800, 31_800, 26_500),
        _W("plain256", "0.6B", *_PLAIN, {"temperature": 0.8}, 47_400, 84_000, 68_000),
        _W("filters256", "0.6B", *_PLAIN, _FILTERS, 38_400, 84_000, 67_000),
        _W("seeded256", "0.6B", *_PLAIN, {**_FILTERS, "seed": 0}, 39_600, 84_000, 67_000),
        _W("logprobs256", "0.6B", *_PLAIN, {"temperature": 0.8, "logprobs": 5}, 21_100, 84_000, 66_000),
        _W("fan1x256@8k", "1.5B", 1, (8192, 8192), 256, (256, 256), {}, 16_100, 83_000, 64_000),
        _W("fan8x32@2k", "1.5B", 8, (2048, 2048), 32, (256, 256), {}, 29_900, 100_000, 78_000),
        _W("fan64x8@512", "1.5B", 64, (512, 512), 8, (256, 256), {}, 38_700, 120_000, 95_000),
        _W("student32", "1.5B", 32, (128, 128), 1, (512, 512), {"temperature": 0.8}, 12_900, 22_400, 19_500),
        _W("teacher32", "3B", 32, (128, 128), 1, (512, 512), {}, 9_560, 13_700, 12_000),
        _W("teacher1", "3B", 1, (128, 128), 1, (512, 512), {}, 336, 680, 540),
        _W("optimal32", PAIR, 32, (128, 128), 1, (512, 512), {"temperature": 0.8}, None, 8_500, 7_000),
        _W("optimal16x512", PAIR, 16, (128, 128), 1, (512, 512), {"temperature": 0.8}, None, None, None),
        _W("optimal16x1024", PAIR, 16, (128, 128), 1, (1024, 1024), {"temperature": 0.8}, None, None, None),
        _W("fan1x256@16k7b", "7B", 1, (16_384, 16_384), 256, (128, 128), {}, 4_580, 16_900, 14_000),
        _llama("chats256", "llama1B", _CHATS, {"temperature": 0.8}),
        _llama("penalties256", "llama1B", _CHATS, _PENALTIES, vllm=27_600, twin="chats256"),
        _llama("bias256", "llama1B", _CHATS, _BIAS, vllm=29_000, twin="chats256"),
        _llama("text256", "text1B", _CHATS, {"temperature": 0.8}),
        _llama("grammar256", "text1B", _CHATS, _GRAMMAR, twin="text256", share=0.85),
        _llama("orders256", "text1B", _CHATS, _ORDERS, twin="text256", share=0.85),
        _llama("rules256", "llama1B", _CHATS, _RULES, twin="chats256"),
        _llama("typical256", "llama1B", _CHATS, _TYPICAL, twin="chats256", share=0.8),
        _llama("plain512", "llama1B", (512, (128, 128), 1, (128, 128)), {}),
        _llama("topp512", "llama1B", (512, (128, 128), 1, (128, 128)), {"top_p": 0.95}, twin="plain512"),
        _llama(
            "burst1000",
            "llama1B",
            (1000, (50, 1500), 1, (32, 400)),
            {"top_p": 0.95},
            vllm=23_200,
            floor=43_000,
            goal=32_500,
        ),
        _llama("roll32x16", "llama1B", (32, (200, 300), 16, (512, 512)), {"logprobs": 1}, vllm=23_500, goal=100_000),
        _llama("fan8x8@512", "llama1B", (8, (512, 512), 8, (64, 64)), {}),
        _llama("beam64", "llama1B", (8, (512, 512), 8, (64, 64)), _BEAMS, goal=25_000, twin="fan8x8@512", share=0.5),
        _llama("beamlogprobs64", "llama1B", (8, (512, 512), 8, (64, 64)), {**_BEAMS, "logprobs": 5}, twin="beam64"),
        _llama("diverse8x8@512", "llama1B", (8, (512, 512), 8, (64, 64)), _DIVERSE, twin="fan8x8@512", share=0.5),
        _llama(
            "chat64",
            "llama8B",
            (64, (400, 600), 1, (256, 256)),
            {"temperature": 0.7, "top_p": 0.9},
            vllm=6_550,
            goal=7_600,
        ),
        _llama("one8b", "llama8B", (1, (500, 500), 1, (256, 256)), {}, vllm=202, goal=245),
        _llama("votes4x64", "llama8B", (4, (1500, 2500), 64, (256, 256)), {"top_p": 0.95}, vllm=11_600, goal=21_000),
    )
}
