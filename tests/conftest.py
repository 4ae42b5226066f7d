"""What several tests need: the default model's file, and tiny random checkpoints of every family."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ramify.models import embedded

# Before torch is there: tests compute little at a time, and threads that wait for each other on a busy machine cost
# more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# Triton decides when it is first imported whether kernels are compiled or interpreted, and some packages import it on
# their way. Without a GPU the kernels' tests (tests/kernels) run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shared machine may be slow at any moment: no example fails for its time. The same examples run every time, so that a
# change is judged by what it changes; `--hypothesis-profile search`, as in `make test-search`, looks for new ones.
settings.register_profile("ramify", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("search", settings.get_profile("ramify"), derandomize=False, print_blob=True)
settings.load_profile("ramify")


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The embedded default model, fetched on first use as a user's would be."""
    return embedded.fetch()


TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,  # wide enough that greedy outputs differ from prompt to prompt
}

CheckpointMaker = Callable[..., Path]


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointMaker:
    """make_checkpoint(family, shard="20MB"?, **config changes) -> folder saved by transformers, random weights."""

    def make(family: str, *, max_shard_size: str = "1GB", **changes: Any) -> Path:
        import torch
        import transformers

        name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
        facts = {**TINY, **({"head_dim": 32} if family == "qwen3" else {}), **changes}
        config = getattr(transformers, f"{name}Config")(**facts)
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.dim() == 1:  # norms are ones and biases zeros at birth: make them matter
                    parameter.add_(torch.randn_like(parameter) * (0.2 if "norm" in parameter_name else 0.5))
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return folder

    return make


def rewrite_config(folder: Path, **changes: Any) -> None:
    """Changes fields of a checkpoint's config.json; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
