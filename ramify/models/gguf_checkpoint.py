"""A GGUF file as a checkpoint: tensors under their Hugging Face names, Llama's query and key rows in their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import torch

from ramify.models.gguf_architecture import architecture_of, shapes_of
from ramify.models.gguf_file import GGUFFile
from ramify.models.gguf_header import GGUFHeader
from ramify.models.stored import StoredTensor
from ramify.models.weights import PartOf, whole

WHOLE_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFCheckpoint:
    """The tensors of one file."""

    def __init__(self, header: GGUFHeader) -> None:
        self.file = GGUFFile(header)
        self.arch = architecture_of(header)
        shapes = shapes_of(header)
        self._names = {name: _canonical(name) for name in shapes}
        self._shapes = {self._names[name]: shape for name, shape in shapes.items()}

    @classmethod
    def open(cls, path: Path) -> Self:
        """Raises a ModelError that names the file if it cannot be used."""
        return cls(GGUFHeader.open(path))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def stored(self, part_of: PartOf = whole) -> Iterator[tuple[str, StoredTensor]]:
        for stored_name, name in self._names.items():
            tensor, part = self.file.stored(stored_name), part_of(name)
            if part is not None:
                tensor = tensor.cut(part)
            if self.arch.family == "llama" and (".q_proj." in name or ".k_proj." in name):
                tensor = _split_pairs(tensor, self.arch.head_dim)  # a part is of whole heads
            yield name, tensor
            self.file.release(stored_name)


def _canonical(name: str) -> str:
    """The Hugging Face name; an unknown name stays as it is, and `weights` refuses it."""
    stem, _, kind = name.rpartition(".")
    if stem in WHOLE_MODEL:
        return f"{WHOLE_MODEL[stem]}.{kind}"
    prefix, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if prefix == "blk" and layer.isdecimal() and part in PER_LAYER:
        return f"model.layers.{layer}.{PER_LAYER[part]}.{kind}"
    return name


def _split_pairs(tensor: StoredTensor, head_dim: int) -> StoredTensor:
    """GGUF stores Llama's rotary pairs side by side (0 1, 2 3, …); the decoder pairs (i, i + head_dim / 2)."""
    if len(tensor.shape) == 1:  # a bias: a block may hold weights of several pairs
        tensor = tensor.in_float32()
    rows = tensor.rows().numpy()  # whose copies stay on one thread: torch's threads would wait for more
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2)
    return replace(tensor, data=torch.from_numpy(np.ascontiguousarray(pairs)).view(-1))
