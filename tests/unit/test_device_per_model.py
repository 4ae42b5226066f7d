"""Each of two models on its own device: whatever the schedule, what one device draws; logits cross once a step."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramify import LLM, InvalidInputError, OptimalSampling, SamplingParams
from ramify.config import CacheConfig, MixtureConfig, ModelConfig, configs_of_pair
from ramify.device.pool import KVPool, bytes_per_block
from ramify.device.sizing import GpuMemory, num_blocks
from ramify.device.step import Capture
from ramify.errors import ModelError
from ramify.models import loader
from ramify.models.decoder import Decoder
from ramify.remote.messages import Build, TwoModels, encode
from ramify.sampling.mixing import Mixer
from ramify.server.config import PairConfig
from ramify.server.to_serve import pair_to_serve
from tests.architectures import SMALL
from tests.fake import FakeDevice, fake_engine
from tests.unit.test_two_models import Asked, World, run_both, worlds


@given(worlds(), st.sampled_from([{0: "nobody"}, {1: "nobody"}, {0: "layers", 1: "layers"}]))
@settings(max_examples=12, deadline=None)
def test_every_schedule_gives_what_one_device_gives(world: World, elsewhere: dict[int, Any]) -> None:
    """Tokens, logprobs and all that is told of a token, bit for bit; with prompts in pieces, siblings, preemption."""
    asked, _, options = world
    outputs = []
    for places in ({}, elsewhere):
        engine = fake_engine(num_models=2, mixer=Mixer(MixtureConfig()), elsewhere=places, **options)
        for number, each in enumerate(asked):
            engine.add_request(each.request(str(number)))
        outputs.append({name: output.outputs for name, output in run_both(engine).items()})
        steps, device = engine.stats()["steps"], engine.device
        assert isinstance(device, FakeDevice)
        assert device.crossed.keys() == places.keys()
        assert all(0 < layers.num_crossings <= steps for layers in device.crossed.values())
    assert outputs[0] == outputs[1]


def test_beams_best_of_and_reports_cross_too() -> None:
    params = [
        SamplingParams(strategy="beam_search", beam_width=3, n=2, max_tokens=5),
        SamplingParams(n=2, best_of=4, max_tokens=5, seed=3, logprobs=2, top_p=0.9),
        SamplingParams(n=3, strategy="diverse", diversity_penalty=2.0, max_tokens=4, seed=1),
    ]
    found = []
    elsewhere: list[dict[int, Capture]] = [{}, {1: "nobody"}]
    for places in elsewhere:
        engine = fake_engine(num_models=2, mixer=Mixer(MixtureConfig()), elsewhere=places)
        for number, each in enumerate(params):
            engine.add_request(Asked([1, 2, 3, 4, 5], [9, 2], each).request(str(number)))
        found.append({name: output.outputs for name, output in run_both(engine).items()})
    assert found[0] == found[1]


# -- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("cpu", "the teacher's devices and the student's"),
        (("cpu",), "the teacher's devices and the student's"),
        (("cpu", "cpu", "cpu"), "the teacher's devices and the student's"),
        ((("cpu",), ()), "the teacher's devices and the student's"),
        ((("cpu",), 3), "the teacher's devices and the student's"),
        ((("cpu",), (None,)), "the teacher's devices and the student's"),
        ((("gpu",), ("cpu",)), r"'cuda:N', or several that share a model.* got 'gpu'"),
        ((("cuda:0", "cuda:0"), ("cpu",)), r"different GPUs.* got 'cuda:0,cuda:0'"),
        ((("cuda:0", "cpu"), ("cpu",)), r"either GPUs or CPUs.* got 'cuda:0,cpu'"),
        ((("cuda", "cuda:1"), ("cpu",)), r"'cuda:N' or 'cpu' for each"),
        ((("cpu",) * 65, ("cpu",)), r"at most 64 devices, got 65"),
    ],
)
def test_what_names_no_devices_is_refused(devices: object, said: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^devices must .*{said}"):
        configs_of_pair("a", "b", devices, {})


@pytest.mark.parametrize("option", [{"device": "cpu"}, {"tensor_parallel_size": 2}, {"data_parallel_size": 2}])
def test_devices_are_said_once(option: dict[str, Any]) -> None:
    [name] = option
    with pytest.raises(InvalidInputError, match=f"^{name} must .* beside devices"):
        configs_of_pair("a", "b", ("cpu", "cpu"), option)


def test_each_model_has_what_is_named_for_it() -> None:
    teacher, theta = configs_of_pair("a", "b", (["cuda:1", "cuda:0"], "cpu"), {"block_size": 8})
    assert (teacher.model_config.model, teacher.model_config.device, teacher.model_config.num_ranks) == (
        "a",
        "cuda:1,cuda:0",
        2,
    )
    assert (theta.model_config.model, theta.model_config.device, theta.model_config.num_ranks) == ("b", "cpu", 1)
    assert theta.cache_config.block_size == 8
    assert configs_of_pair("a", "b", None, {})[1].model_config.device == "auto"


def test_one_model_on_several_devices() -> None:
    assert ModelConfig(device="cpu,cpu,cpu").num_ranks == 3
    assert ModelConfig(device="cuda:0,cuda:1", tensor_parallel_size=2).num_ranks == 2
    with pytest.raises(InvalidInputError, match=r"^tensor_parallel_size must be the number of devices \(2 in "):
        ModelConfig(device="cuda:0,cuda:1", tensor_parallel_size=3)
    with pytest.raises(InvalidInputError, match=r"^device must be .*different GPUs"):
        ModelConfig(device="cuda:1,cuda:1")
    with pytest.raises(InvalidInputError, match=r"^device must be .*either GPUs or CPUs"):
        ModelConfig(device="cpu,cuda:1")


def test_a_machine_has_the_devices_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def names(**options: Any) -> list[str]:
        return [str(device) for device in loader.rank_devices(ModelConfig(**options))]

    assert names(device="cuda:1") == ["cuda:1"]
    assert names(device="cuda:1,cuda:0") == ["cuda:1", "cuda:0"]
    assert names(device="cuda", tensor_parallel_size=2) == ["cuda:0", "cuda:1"]
    assert names(device="cpu", tensor_parallel_size=2) == names(device="cpu,cpu") == ["cpu", "cpu"]
    with pytest.raises(InvalidInputError, match=r"'cuda:2': there are 2 GPUs"):
        names(device="cuda:0,cuda:2")
    with pytest.raises(InvalidInputError, match=r"at most the number of GPUs \(2\), got 4"):
        names(tensor_parallel_size=4)
    with pytest.raises(InvalidInputError, match=r"name all 2 GPUs that share the model, got 'cuda:0'"):
        names(device="cuda:0", tensor_parallel_size=2)


@pytest.mark.parametrize("devices", [("cuda:7", "cpu"), ("cpu", ("cuda:6", "cuda:7"))])
def test_a_device_that_does_not_exist_is_refused(devices: Any) -> None:
    """Before anything is looked for."""
    if torch.cuda.device_count() > 7:
        pytest.skip("this machine has them")
    with pytest.raises(InvalidInputError, match=r"device 'cuda:[67]'"):
        OptimalSampling("no/such-teacher", "no/such-student", devices=devices)
    with pytest.raises(InvalidInputError, match=r"device 'cuda:7'"):
        LLM("no/such-model", device="cuda:7")


def test_a_server_is_told_of_devices_as_of_all_else() -> None:
    """Plain data, which its engine's process reads as it was written."""
    pair = PairConfig(teacher="a", theta="b", devices=["cuda:0,cuda:1", "cpu"])
    build = pair_to_serve(pair, MixtureConfig(), {"block_size": 8}, None).build
    [read] = msgspec.msgpack.decode(encode(Build([build])), type=Build).models
    assert isinstance(read, TwoModels)
    assert read.are_apart
    assert [options["device"] for options in (read.teacher, read.theta)] == ["cuda:0,cuda:1", "cpu"]
    together = pair_to_serve(PairConfig(teacher="a", theta="b"), MixtureConfig(), {}, None).build
    assert isinstance(together, TwoModels)
    assert not together.are_apart
    with pytest.raises(InvalidInputError, match="devices are for two models"):
        PairConfig(devices=["cpu", "cpu"])


# -- memory ---------------------------------------------------------------------------------------------------------


def model_on(device: str) -> Decoder:
    """Of no weights."""
    decoder = Decoder(SMALL, torch.float32, torch.device("meta"))
    decoder.device = torch.device(device)
    return decoder


def test_the_device_with_the_least_room_decides_and_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramify.device.sizing.free_memory", lambda: 10**12)
    block = bytes_per_block(SMALL, 16, torch.float32)
    devices = torch.device("cuda", 0), torch.device("cuda", 1)
    first, second = GpuMemory(1000 * block, 300 * block, 0), GpuMemory(1000 * block, 500 * block, 0)

    def count(names: tuple[str, str], share: float = 1.0) -> int:
        return num_blocks(
            CacheConfig(gpu_memory_utilization=share),
            [model_on(name) for name in names],
            num_tracks=2,
            max_num_seqs=256,
            max_model_len=1600,
            measure_gpus=lambda: dict(zip(devices, (first, second), strict=True)),
        )

    assert count(("cuda:0", "cuda:0")) == 350  # both caches in one memory
    assert count(("cuda:0", "cuda:1")) == 500
    assert count(("cuda:1", "cpu")) == 500
    with pytest.raises(InvalidInputError, match=r"KV cache on cuda:1: gpu_memory_utilization 0.4 .*a device each"):
        count(("cuda:0", "cuda:1"), 0.4)


def test_errors_of_memory_say_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only fewer blocks."""
    monkeypatch.setattr("ramify.device.sizing.free_memory", lambda: 0)
    with pytest.raises(InvalidInputError, match=r"quantised model.*num_kv_blocks.*devices"):
        num_blocks(CacheConfig(), [model_on("cpu")], num_tracks=1, max_num_seqs=1, max_model_len=16)
    with pytest.raises(ModelError, match=r"num_kv_blocks asks for less, quantised weights leave more room.*devices"):
        KVPool(SMALL, 10**15, 16, torch.float32, torch.device("cpu"))

    def full(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    said = r"cuda:1 has no .* GiB for the KV cache: .*gpu_memory_utilization.*quantised.*tensor_parallel_size.*devices"
    with pytest.raises(ModelError, match=said):
        KVPool(SMALL, 4, 16, torch.float32, torch.device("cuda", 1))
