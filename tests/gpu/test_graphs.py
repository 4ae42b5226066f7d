"""Same seed, same tokens in bfloat16: with graphs and without, a step ahead and not, and after other weights came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ramify.device.pool import KVPool
from ramify.engine.plan import BlockCopy
from tests.conftest import CheckpointMaker
from tests.gpu.engines import engine, step_of, tokens

KINDS: dict[str, dict[str, Any]] = {
    "one row": {"seed": 3, "max_tokens": 40, "prompts": [[5, 6, 7]]},
    "plain": {"n": 5, "seed": 3, "max_tokens": 40},
    "filtered": {"n": 3, "seed": 4, "temperature": 0.7, "top_k": 30, "top_p": 0.9, "max_tokens": 40},
    "penalised": {"n": 2, "seed": 5, "repetition_penalty": 1.3, "max_tokens": 24},
    "reported": {"n": 2, "seed": 6, "logprobs": 4, "max_tokens": 24},
    "shaped": {"n": 7, "seed": 7, "typical_p": 0.9, "max_tokens": 16},
    "beams": {"strategy": "beam_search", "beam_width": 7, "n": 2, "max_tokens": 16},
}


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, make_checkpoint: CheckpointMaker) -> Path:
    return make_checkpoint(request.param)


@pytest.mark.parametrize("kind", list(KINDS))
def test_graphs_change_no_token(folder: Path, kind: str) -> None:
    with_graphs = engine(folder, "bfloat16")
    drawn = tokens(with_graphs, **KINDS[kind])
    assert step_of(with_graphs).graphs.captured, "steps were captured"
    without = engine(folder, "bfloat16", enforce_eager=True)
    assert tokens(without, **KINDS[kind]) == drawn
    assert not step_of(without).graphs.captured


@pytest.mark.parametrize("kind", list(KINDS))
def test_running_ahead_changes_no_token(folder: Path, kind: str) -> None:
    ahead, behind = engine(folder, "bfloat16"), engine(folder, "bfloat16")
    step_of(behind).runs_ahead = False
    assert tokens(ahead, **KINDS[kind]) == tokens(behind, **KINDS[kind])


@torch.inference_mode()
def test_the_host_goes_on_while_blocks_are_copied(folder: Path) -> None:
    """As siblings do once they fork inside a block: the step before may still run, and others are a step ahead."""
    pool = step_of(engine(folder, "bfloat16")).lanes[0].layers.pool
    assert isinstance(pool, KVPool)
    pool.blocks[:, 1] = 3.0
    torch.cuda.set_sync_debug_mode("error")
    try:
        pool.copy_blocks([BlockCopy(1, 2), BlockCopy(1, 3)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool((pool.blocks[:, 2:4] == 3.0).all())


@pytest.mark.parametrize("kind", ["one row", "plain"])
def test_graphs_draw_from_new_weights(folder: Path, tmp_path: Path, kind: str) -> None:
    """The same graphs, not captured again, as an engine draws that was made with these weights."""
    generator = torch.Generator().manual_seed(3)
    weights = load_file(folder / "model.safetensors")
    changed = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in sorted(weights.items())
    }
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    llm = engine(folder, "bfloat16")
    before = tokens(llm, **KINDS[kind])
    llm.reset_prefix_cache()
    assert tokens(llm, **KINDS[kind]) == before  # steps with prompts are captured when they come again
    graphs = dict(step_of(llm).graphs.captured)
    llm.load_weights(changed.items())
    after = tokens(llm, **KINDS[kind])
    assert all(step_of(llm).graphs.captured[key] is graph for key, graph in graphs.items())
    assert step_of(llm).graphs.captured.keys() == graphs.keys()
    assert after == tokens(engine(tmp_path, "bfloat16"), **KINDS[kind])
    assert after != before
