"""A teacher and a student, each on a device of its own, draw what they draw on one: tiny checkpoints on the CPU.

Both devices are the CPU here, and yet each model has its own lane and pool, and logits cross from one to the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ramify import OptimalSampling
from ramify.device.crossing import CrossedLayers
from ramify.device.step import DeviceStep
from ramify.errors import UnsupportedError
from ramify.optimal import OptimalOutputs
from ramify.parallel.leading import LeadingLayers
from tests.conftest import CheckpointMaker
from tests.equivalence.test_speculation import cheap
from tests.ranks import RankThread, rank_threads  # noqa: F401 - a fixture

OPTIONS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 96, "block_size": 4, "seed": 5, "max_num_seqs": 8}
TEACHER = [[(7 * place + 3 * number) % 300 for place in range(5 + 9 * number)] for number in range(3)]
THETA = [[9, 8, 7], TEACHER[1], [(5 * place) % 300 for place in range(40)]]


@pytest.fixture(scope="module")
def folders(make_checkpoint: CheckpointMaker) -> tuple[Path, Path]:
    return make_checkpoint("qwen3", num_hidden_layers=2), make_checkpoint("llama")


def sampler(folders: tuple[Path, Path], **options: Any) -> OptimalSampling:
    return OptimalSampling(*map(str, folders), **{**OPTIONS, "max_num_batched_tokens": 16, **options})


def outputs_of(made: OptimalSampling) -> list[OptimalOutputs]:
    """Prompts in chunks, siblings, and the same again from the prefix cache; filters, controls, reports and beams."""
    asked: list[dict[str, Any]] = [
        {"n": 3, "temperature": 0.9, "top_p": 0.95, "logprobs": 2},
        {"n": 2, "repetition_penalty": 1.2},
        {"temperature": 1.0, "strategy": "beam_search", "beam_width": 3, "n": 2, "seed": None},
    ]
    return [
        made.generate(TEACHER, THETA, use_tqdm=False, **{"max_tokens": 5, "seed": 4, **options}) for options in asked
    ]


def check_equal(found: list[OptimalOutputs], expected: list[OptimalOutputs], *, within: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.generated_ids == other.generated_ids
        for own, truth in zip(one.samples, other.samples, strict=True):
            assert own.cumulative_logprob == pytest.approx(truth.cumulative_logprob, abs=within)
            for report, theirs in zip(own.mixture or (), truth.mixture or (), strict=True):
                assert report == pytest.approx(theirs, abs=5 * within)


def layers_of(made: OptimalSampling) -> list[object]:
    assert isinstance(made.core.device, DeviceStep)
    return [lane.layers for lane in made.core.device.lanes]


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["kernels", "operators"])
def test_two_devices_draw_what_one_draws(folders: tuple[Path, Path], enforce_eager: bool) -> None:
    """Bit for bit: what crosses is copied."""
    apart = sampler(folders, devices=(("cpu",), ("cpu",)), enforce_eager=enforce_eager)
    crossed = layers_of(apart)[1]
    assert isinstance(crossed, CrossedLayers)
    found = outputs_of(apart)
    assert 0 < crossed.num_crossings <= apart.stats()["engine"]["steps"]
    check_equal(found, outputs_of(sampler(folders, device="cpu", enforce_eager=enforce_eager)), within=0.0)


def test_preempted_and_swapped_blocks_move_in_each_pool(folders: tuple[Path, Path]) -> None:
    small = {"num_kv_blocks": 16, "preemption_mode": "swap", "swap_space": 0.01, "max_model_len": 56}
    made = [sampler(folders, **place, **small) for place in ({"devices": ("cpu", "cpu")}, {"device": "cpu"})]
    found = [each.generate(TEACHER[:2], n=3, max_tokens=12, seed=2, use_tqdm=False) for each in made]
    check_equal(found[:1], found[1:], within=0.0)
    assert made[0].stats()["engine"]["preemptions"] > 0


@pytest.mark.parametrize("devices", [(("cpu", "cpu"), ("cpu",)), ("cpu", "cpu,cpu"), ("cpu,cpu", "cpu,cpu")], ids=str)
def test_either_may_be_shared_by_several(
    folders: tuple[Path, Path],
    devices: Any,
    rank_threads: list[RankThread],  # noqa: F811
) -> None:
    """By gloo: two ranks of a model are a team of their own."""
    expected = outputs_of(sampler(folders, device="cpu"))
    made = sampler(folders, devices=devices)
    assert len(rank_threads) == str(devices).count("cpu") - 2
    check_equal(outputs_of(made), expected, within=2e-5)
    teacher, theta = layers_of(made)
    assert isinstance(teacher, LeadingLayers) is ("cpu" in devices[0][1:])
    assert isinstance(theta, CrossedLayers)


def test_given_tokens_are_told_of_alike(folders: tuple[Path, Path]) -> None:
    asked = (TEACHER[0], [[4, 5, 6], [7, 8]], THETA[0])
    places: list[dict[str, Any]] = [{"devices": ("cpu", "cpu")}, {"device": "cpu"}]
    one, other = (sampler(folders, **place).logprobs(*asked, top_k=2) for place in places)
    assert one == other


def test_one_checkpoint_is_held_once_where_it_is_in_one_place(folders: tuple[Path, Path]) -> None:
    """Elsewhere it is held twice."""
    same = (folders[0], folders[0])
    once, twice = sampler(same, devices=("cpu", "cpu")), sampler(same, devices=("cpu", "auto"))
    assert once.loads_one_checkpoint
    assert not twice.loads_one_checkpoint
    expected = outputs_of(sampler(same, device="cpu"))
    check_equal(outputs_of(once), expected, within=0.0)
    check_equal(outputs_of(twice), expected, within=2e-5)


@pytest.mark.parametrize("devices", [("cpu", "cpu"), ("cpu,cpu", "cpu")])
def test_a_student_drafts_on_its_own_device(
    folders: tuple[Path, Path],
    devices: Any,
    rank_threads: list[RankThread],  # noqa: F811
) -> None:
    mixed: dict[str, Any] = {"alpha_method": "fixed", "alpha": 0.1, "max_num_batched_tokens": 256}
    drafted = sampler(folders, devices=devices, speculation="student", **mixed)
    cheap(drafted.core)
    found, expected = (
        [made.generate(TEACHER[:2], THETA[:2], max_tokens=20, seed=3, use_tqdm=False)]
        for made in (drafted, sampler(folders, device="cpu", **mixed))
    )
    check_equal(found, expected, within=1e-4)
    assert drafted.stats()["engine"]["drafted_tokens"] > 0
    assert len(rank_threads) == len(devices[0]) // 4


def test_what_cannot_be_divided_is_refused(folders: tuple[Path, Path]) -> None:
    with pytest.raises(UnsupportedError, match=r"tensor_parallel_size 3 does not divide the model's 4 attention heads"):
        sampler(folders, devices=("cpu,cpu,cpu", "cpu"))
