"""A hundred damaged quantised checkpoints, twenty of each method, the same ones every time: an error of ours each."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from ramify.config import ModelConfig
from ramify.errors import RamifyError
from ramify.models.loader import ModelLoader
from tests.conftest import CheckpointMaker
from tests.corruption import gguf_fields
from tests.quantised import write_model
from tests.quantised_folder import Scheme, write_quantised
from tests.unit.test_models_corrupted import packing_here

SHAPES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32, "vocab_size": 64}
SCHEMES = {
    "gptq4": Scheme("gptq", group_size=32, desc_act=True),
    "gptq8": Scheme("gptq", bits=8),
    "awq": Scheme("awq"),
    "fp8": Scheme("fp8", scale_dtype=torch.float32),
}
NUM_DAMAGES = 20


@dataclass
class Contents:
    """A checkpoint on its way to be damaged."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    draw: random.Random

    def some(self, *endings: str) -> str:
        return self.draw.choice(sorted(name for name in self.tensors if name.endswith(endings)))


PARTS = ("qweight", "qzeros", "scales", "weight_scale_inv")
SCALES = (".scales", "_scale_inv")


def lose_a_tensor(contents: Contents) -> None:
    del contents.tensors[contents.some(*PARTS)]


def lose_a_row(contents: Contents) -> None:
    name = contents.some(*PARTS)
    contents.tensors[name] = contents.tensors[name][:-1].clone()


def grow_a_column(contents: Contents) -> None:
    name = contents.some(*PARTS)
    contents.tensors[name] = torch.cat((contents.tensors[name], contents.tensors[name][:, :1]), dim=1)


def flatten_a_tensor(contents: Contents) -> None:
    name = contents.some(*PARTS)
    contents.tensors[name] = contents.tensors[name].flatten()


def change_a_dtype(contents: Contents) -> None:
    name = contents.some(*PARTS)
    contents.tensors[name] = contents.tensors[name].to(torch.int16)


def spoil_a_scale(contents: Contents) -> None:
    scales = contents.tensors[contents.some(*SCALES)].view(-1)
    scales[contents.draw.randrange(len(scales))] = contents.draw.choice([float("nan"), float("inf"), float("-inf")])


def spoil_a_number(contents: Contents) -> None:
    weights = contents.tensors[contents.some("down_proj.weight")].view(torch.uint8).view(-1)
    weights[contents.draw.randrange(len(weights))] = contents.draw.choice([0x7F, 0xFF])


def spoil_a_group(contents: Contents) -> None:
    groups = contents.tensors[contents.some("g_idx")]
    groups[contents.draw.randrange(len(groups))] = contents.draw.choice([-1, 4_000, -(2**31), 2**31 - 1])


def add_a_tensor(contents: Contents) -> None:
    contents.tensors[contents.some(*PARTS) + ".more"] = torch.zeros(3)


def store_a_weight_twice(contents: Contents) -> None:
    name = contents.some("qweight").removesuffix("qweight") + "weight"
    contents.tensors[name] = torch.zeros(128, 128)


def say_other_groups(contents: Contents) -> None:
    contents.config["quantization_config"]["group_size"] = contents.draw.choice([8, 48, 0, "128", 10**9])


def say_other_bits(contents: Contents) -> None:
    contents.config["quantization_config"]["bits"] = contents.draw.choice([0, 2, 3, 5, 16, None, "4"])


def say_other_blocks(contents: Contents) -> None:
    contents.config["quantization_config"]["weight_block_size"] = contents.draw.choice([None, [64, 64], [128], "128"])


def say_another_method(contents: Contents) -> None:
    contents.config["quantization_config"]["quant_method"] = contents.draw.choice(["bitsandbytes", "hqq", 7, None])


def say_nothing(contents: Contents) -> None:
    del contents.config["quantization_config"]


def say_another_size(contents: Contents) -> None:
    contents.config[contents.draw.choice(["hidden_size", "intermediate_size"])] = contents.draw.choice([64, 384, 2**20])


def quantise_nothing(contents: Contents) -> None:
    for name in [name for name in contents.tensors if "_proj." in name]:
        del contents.tensors[name]


Damage = Callable[[Contents], None]
EVERYWHERE: tuple[Damage, ...] = (
    lose_a_tensor,
    lose_a_row,
    grow_a_column,
    flatten_a_tensor,
    change_a_dtype,
    spoil_a_scale,
    add_a_tensor,
    say_another_method,
    say_nothing,
    say_another_size,
    quantise_nothing,
)
GROUPED: tuple[Damage, ...] = (*EVERYWHERE, store_a_weight_twice, say_other_groups, say_other_bits)
DAMAGES = {
    "gptq4": (*GROUPED, spoil_a_group),
    "gptq8": (*GROUPED, spoil_a_group),
    "awq": GROUPED,
    "fp8": (*EVERYWHERE, spoil_a_number, say_other_blocks),
}


def load(path: Path) -> None:
    ModelLoader(ModelConfig(model=str(path))).load_model("cpu", packing_here())


@pytest.mark.parametrize("method", SCHEMES)
def test_a_damaged_folder(method: str, make_checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    folder, _ = write_quantised(make_checkpoint("llama", **SHAPES), tmp_path, SCHEMES[method])
    weights, config = folder / "model.safetensors", folder / "config.json"
    load(folder)
    sound = weights.read_bytes(), config.read_text()
    draw = random.Random(7)
    for index in range(NUM_DAMAGES):
        weights.write_bytes(sound[0])
        contents = Contents(load_file(weights), json.loads(sound[1]), draw)
        if index % 5 == 4:  # cut anywhere
            what = "cut"
            whole = save(contents.tensors)
            weights.write_bytes(whole[: draw.randrange(len(whole))])
        else:
            damage = DAMAGES[method][(index * 4 // 5) % len(DAMAGES[method])]
            what = damage.__name__
            damage(contents)
            save_file(contents.tensors, weights)
        config.write_text(json.dumps(contents.config))
        with pytest.raises(RamifyError) as refused:
            load(folder)
        assert 10 < len(str(refused.value)) < 700, what


def test_a_damaged_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    write_model(path, ["Q4_K", "Q6_K", "Q8_0", "Q4_0"])
    load(path)
    sound, draw = path.read_bytes(), random.Random(3)
    _, fields = gguf_fields(sound)
    lengths = [field for field in fields if "dim" in field.what or "type of tensor" in field.what]
    assert lengths
    for index in range(NUM_DAMAGES):
        if index % 2:
            path.write_bytes(sound[: draw.randrange(len(sound) - 64)])
        else:
            path.write_bytes(draw.choice(lengths).write(sound, draw.choice([99, 2**31])))
        with pytest.raises(RamifyError):
            load(path)
