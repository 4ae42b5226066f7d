"""Two models in the GPU's step against the CPU path, on tiny float32 models: two lanes, one draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ramify import OptimalSampling
from ramify.device.step import DeviceStep
from ramify.drive.student_drafter import StudentDrafter
from ramify.engine.drafting.tempo import Tempo
from ramify.engine.drafting.together import Together
from ramify.gpu.gpu_step import gpu_step
from ramify.optimal import OptimalOutputs
from ramify.sampling.mixing import Mixer
from tests.conftest import CheckpointMaker
from tests.kernels.test_gpu_step import models_of

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "num_kv_blocks": 64, "max_num_seqs": 12}
TEACHER = [[5, 6, 7], list(range(10, 50)), [9]]
THETA = [list(range(10, 45)), [5, 6, 7], [9, 9]]
# The interpreter takes seconds a step: there two prompts, and tokens for a first step, one that is placed and one that
# just goes on.
SOME, MAX_TOKENS = (slice(None), 4) if torch.cuda.is_available() else (slice(None, None, 2), 3)


@pytest.fixture(scope="module")
def folders(make_checkpoint: CheckpointMaker) -> tuple[Path, Path]:
    """Different shapes of one vocabulary."""
    teacher = make_checkpoint("qwen3", hidden_size=128, num_hidden_layers=2)
    theta = make_checkpoint("qwen3", hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    return teacher, theta


def sampler(
    folders: tuple[Path, Path], device: torch.device, *, runs_ahead: bool = True, drafts: bool = False, **options: Any
) -> OptimalSampling:
    """An engine whose device step has the GPU's layers and sampler wherever it runs."""
    teacher, theta = map(str, folders)
    if device.type == "cpu":  # the CPU's kernels would pack the weights, which the GPU's could not read
        options["enforce_eager"] = True
    elif drafts:
        options["speculation"] = "student"
    made = OptimalSampling(teacher, theta, device=device.type, **OPTIONS, **options)
    if device.type == "cpu":
        mixer = Mixer(made.mixture_config)
        models = models_of(made.core.device)
        step = gpu_step(models, max_num_seqs=12, max_model_len=128, mixer=mixer, drafts=drafts)
        made.core.device = step
        if drafts:
            student = StudentDrafter(step, made.core.scheduler.managers[1], cost=0.3, role=1, max_model_len=128)
            made.core.scheduler.speculation = Together(student)
    assert isinstance(made.core.device, DeviceStep)
    made.core.device.runs_ahead = runs_ahead
    return made


def generate(made: OptimalSampling, **options: Any) -> OptimalOutputs:
    options = {"max_tokens": MAX_TOKENS, "seed": 3, **options}
    outputs = made.generate(TEACHER[SOME], THETA[SOME], use_tqdm=False, **options)
    assert not any(output.error for output in outputs.outputs)
    assert made.stats()["engine"]["blocks_in_use"] == 0
    return outputs


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"n": 3},
    "filtered": {"n": 2, "top_k": 30, "top_p": 0.9, "logprobs": 2},
    "controlled": {"repetition_penalty": 1.3, "logit_bias": {7: 2.0}},
}


# In the interpreter each takes its time: two of them always, the others with the long proofs.
CASES = [
    ("filtered", False),
    ("sampled", True),
    *(pytest.param(kind, False, marks=pytest.mark.long) for kind in ("greedy", "sampled", "controlled")),
]


@pytest.mark.parametrize(("kind", "one"), CASES)
def test_tokens_and_numbers_equal_the_cpu_path(
    folders: tuple[Path, Path], device: torch.device, kind: str, one: bool
) -> None:
    chosen = (folders[0], folders[0]) if one else folders
    made = generate(sampler(chosen, device), **KINDS[kind])
    on_cpu = OptimalSampling(*map(str, chosen), device="cpu", **OPTIONS)
    expected = generate(on_cpu, **KINDS[kind])
    assert made.generated_ids == expected.generated_ids
    for ours, theirs in zip(made.samples, expected.samples, strict=True):
        for report, other in zip(ours.mixture or (), theirs.mixture or (), strict=True):
            assert report == pytest.approx(other, abs=2e-4)
        assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)


def test_running_ahead_changes_nothing(folders: tuple[Path, Path], device: torch.device) -> None:
    # By entropies: no search for the weight, which takes the interpreter most of its time.
    ahead = generate(sampler(folders, device, alpha_method="entropy"), n=3)
    in_turn = generate(sampler(folders, device, alpha_method="entropy", runs_ahead=False), n=3)
    assert ahead.generated_ids == in_turn.generated_ids
    assert ahead.alpha_history == in_turn.alpha_history


def test_drafts_change_no_token(folders: tuple[Path, Path], device: torch.device) -> None:
    """The student's passes in its own blocks, and their logits in the mixture."""
    plain = generate(sampler(folders, device, alpha_method="entropy"), max_tokens=6, temperature=0.1)
    made = sampler(folders, device, alpha_method="entropy", drafts=True)
    with patch.object(Tempo, "length", return_value=2):
        drafted = generate(made, max_tokens=6, temperature=0.1)
    assert drafted.generated_ids == plain.generated_ids
    for ours, theirs in zip(drafted.alpha_history, plain.alpha_history, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    stats = made.stats()["engine"]
    assert 0 < stats["accepted_tokens"] <= stats["drafted_tokens"]
