"""Weights replaced in place between calls, as a training loop does it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ramify import LLM, InvalidInputError, SamplingParams, WeightsError
from tests.conftest import CheckpointMaker

PROMPTS = [list(range(1, 40)), [7, 8, 9]]
PARAMS = SamplingParams(n=2, seed=1, max_tokens=6)


@pytest.fixture(scope="module")
def folder(make_checkpoint: CheckpointMaker) -> Path:
    return make_checkpoint("qwen2")


def other_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The same checkpoint after a step of training, as it were."""
    generator = torch.Generator().manual_seed(3)
    weights = load_file(folder / "model.safetensors")
    return {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in sorted(weights.items())
    }


def tokens(llm: LLM) -> list[list[tuple[int, ...]]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def test_an_engine_draws_from_its_new_weights_as_if_made_with_them(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    changed = other_weights(folder)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(str(folder))
    before = tokens(llm)
    llm.load_weights(changed.items())
    after = tokens(llm)
    assert after == tokens(LLM(str(tmp_path)))
    assert after != before
    llm.load_weights(load_file(folder / "model.safetensors").items())
    assert tokens(llm) == before


def test_what_the_old_weights_computed_is_not_found_again(folder: Path) -> None:
    llm = LLM(str(folder))
    tokens(llm)
    assert llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)[0].num_cached_tokens == 32
    llm.load_weights(other_weights(folder).items())
    assert llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)[0].num_cached_tokens == 0


def test_a_stream_that_does_not_fit_is_refused_and_nothing_is_drawn_from_a_mixture(folder: Path) -> None:
    llm = LLM(str(folder))
    before = tokens(llm)
    weights = load_file(folder / "model.safetensors")

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights.items())[:3]
        raise OSError("the trainer went away")

    with pytest.raises(OSError, match="went away"):
        llm.load_weights(broken())
    with pytest.raises(WeightsError, match="load them again"):
        tokens(llm)
    for wrong, message in (
        ({**weights, "model.extra.weight": torch.zeros(2)}, "is not known to the model"),
        ({name: tensor for name, tensor in weights.items() if "norm" not in name}, "lacks"),
        ({name: tensor[:1] for name, tensor in weights.items()}, "must have shape"),
    ):
        with pytest.raises(WeightsError, match=message):
            llm.load_weights(wrong.items())
    llm.load_weights(weights.items())
    assert tokens(llm) == before


def test_weights_are_not_replaced_under_running_requests(folder: Path) -> None:
    from ramify import Request

    llm = LLM(str(folder))
    llm.core.add_request(Request("r", None, [1, 2, 3], PARAMS))
    with pytest.raises(InvalidInputError, match="between calls only"):
        llm.load_weights([])
    llm.core.abort("r")
