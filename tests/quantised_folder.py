"""Tiny GPTQ, AWQ and FP8 checkpoints, written by the formulas that were published with them, one number at a time.

Each comes as two folders: the quantised one, and the same weights as float32. Numbers, scales and zero points are
random; no weight is quantised for it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Numbers = npt.NDArray[np.int64]
# The outputs that stand in a word of AWQ's, lowest bits first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint is quantised; options: beside those that follow from the rest."""

    method: str
    bits: int = 4
    group_size: int = 128
    sym: bool = False
    desc_act: bool = False
    is_v2: bool = False  # GPTQ's second version: zero points as they are
    scale_dtype: torch.dtype = torch.float16
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        if self.method == "fp8":
            said: dict[str, Any] = {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        elif self.method == "awq":
            said = {"bits": self.bits, "group_size": self.group_size, "zero_point": True, "version": "gemm"}
        else:
            said = {
                "bits": self.bits,
                "group_size": self.group_size,
                "sym": self.sym,
                "desc_act": self.desc_act,
                "checkpoint_format": "gptq_v2" if self.is_v2 else "gptq",
                "damp_percent": 0.01,
                "true_sequential": True,
            }
        return {"quant_method": self.method, **said, **self.options}


def write_quantised(sound: Path, target: Path, scheme: Scheme, *, seed: int = 0) -> tuple[Path, Path]:
    """Two folders in target, quantised and not: a float32 checkpoint, the matrices of its layers replaced."""
    generator = np.random.default_rng(seed)
    quantised, dequantised = dict[str, Tensor](), dict[str, Tensor]()
    orders: dict[tuple[str, int], Numbers] = {}
    for name, tensor in load_file(sound / "model.safetensors").items():
        if not (".layers." in name and name.endswith("_proj.weight")):
            quantised[name] = dequantised[name] = tensor
            continue
        stem, (outputs, depth) = name.removesuffix(".weight"), tensor.shape
        if scheme.method == "fp8":
            tensors, weight = _fp8(generator, outputs, depth, scheme.scale_dtype)
        else:
            # Matrices with the same input are quantised in the same order.
            key = (name.rpartition(".self_attn." if "self_attn" in name else ".mlp.")[0], depth)
            size = depth if scheme.group_size == -1 else scheme.group_size
            groups = np.arange(depth) // size
            if scheme.desc_act:
                groups = orders.setdefault(key, generator.permutation(groups))
            tensors, weight = _grouped(generator, scheme, outputs, groups)
        quantised |= {f"{stem}.{kind}": each for kind, each in tensors.items()}
        dequantised[name] = weight
    folders = target / "quantised", target / "dequantised"
    for folder, tensors in zip(folders, (quantised, dequantised), strict=True):
        folder.mkdir(parents=True)
        for path in sound.glob("*.json"):
            shutil.copy(path, folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((sound / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps(config | {"quantization_config": scheme.config}))
    return folders


def _grouped(generator: Any, scheme: Scheme, outputs: int, groups: Numbers) -> tuple[dict[str, Tensor], Tensor]:
    depth, count, most = len(groups), int(groups.max()) + 1, 2**scheme.bits - 1
    numbers = generator.integers(0, most + 1, (depth, outputs))
    zeros = np.full((count, outputs), 2 ** (scheme.bits - 1))
    if not scheme.sym:
        zeros = generator.integers(0, most + 1, (count, outputs))
    scales = torch.from_numpy(generator.uniform(0.5, 1.5, (count, outputs)) * 0.2 / most).to(scheme.scale_dtype)
    # weight[output, k] = scale of its group * (number - zero point of its group)
    weight = scales.double().numpy()[groups] * (numbers - zeros[groups])
    if scheme.method == "awq":
        tensors = {"qweight": _awq_words(numbers), "qzeros": _awq_words(zeros), "scales": scales}
    else:
        stored = zeros if scheme.is_v2 else (zeros - 1) % (most + 1)
        tensors = {
            "qweight": _words(numbers.T, scheme.bits).t().contiguous(),
            "qzeros": _words(stored, scheme.bits),
            "scales": scales,
            "g_idx": torch.from_numpy(groups).to(torch.int32),
        }
    return tensors, torch.from_numpy(weight.T.astype(np.float32)).contiguous()


def _words(numbers: Numbers, bits: int) -> Tensor:
    """(rows, columns) -> int32 (rows, columns * bits / 32): number i of a word is shifted by i * bits."""
    in_word = 32 // bits
    words = np.zeros((numbers.shape[0], numbers.shape[1] // in_word), dtype=np.uint32)
    for place in range(in_word):
        words |= (numbers[:, place::in_word] << (bits * place)).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32))


def _awq_words(numbers: Numbers) -> Tensor:
    words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), dtype=np.uint32)
    for place, output in enumerate(AWQ_ORDER):
        words |= (numbers[:, output::8] << (4 * place)).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32))


def _fp8(generator: Any, outputs: int, depth: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    octets = generator.integers(0, 256, (outputs, depth)).astype(np.uint8)
    octets[(octets & 0x7F) == 0x7F] = 0  # what is not a number
    weight = torch.from_numpy(octets).view(torch.float8_e4m3fn)
    shape = (-(-outputs // 128), -(-depth // 128))
    scales = torch.from_numpy(generator.uniform(0.5, 1.5, shape) * 1e-3).to(dtype)
    dequantised = torch.empty(outputs, depth)
    for row in range(shape[0]):
        for column in range(shape[1]):
            block = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
            dequantised[block] = weight[block].float() * scales[row, column].float()
    return {"weight": weight, "weight_scale_inv": scales}, dequantised
