"""Strict loading: every parameter is filled exactly once, no tensor is left over, shapes are checked first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from ramify.errors import WeightsError
from ramify.models.decoder import Decoder, Parameter, parameters, places
from ramify.models.families import Architecture
from ramify.models.linear import Packing
from ramify.models.packed_quants import random_blocks
from ramify.models.shards import Ranks
from ramify.models.stored import Part, StoredTensor

# Which part of a parameter is wanted; None: all of it.
PartOf = Callable[[str], Part | None]
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TIED_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


class Checkpoint(Protocol):
    """A source of tensors under their Hugging Face names."""

    arch: Architecture

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every tensor; no tensor is read for it."""

    def stored(self, part_of: PartOf) -> Iterable[tuple[str, Tensor | StoredTensor]]:
        """All tensors, read one at a time, and of each only the part that is wanted.

        What was yielded is to be used before the next is asked for.
        """


def load(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    packing: Packing | None = None,
    ranks: Ranks | None = None,
) -> Decoder:
    """A decoder with the checkpoint's weights, or this rank's; nothing is allocated unless all names and shapes fit."""
    check_shapes(checkpoint.arch, checkpoint.shapes)
    decoder = Decoder(checkpoint.arch, dtype, device, packing, ranks)
    fill(decoder, checkpoint.stored(decoder.shard.part))
    return decoder


def whole(_: str) -> Part | None:
    """All of every parameter."""
    return None


def check_shapes(arch: Architecture, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises WeightsError unless the names and shapes are exactly those of the architecture's parameters."""
    if arch.num_layers > len(shapes):  # checked before looping over layers, which a damaged file may claim to have
        raise WeightsError(f"{arch.num_layers} layers cannot be filled from {len(shapes)} tensors")
    skeleton = Decoder(arch, torch.float32, torch.device("meta"))
    left_over = dict(shapes)
    if arch.tie_embeddings and left_over.get(TIED_HEAD) == left_over.get(EMBEDDING):
        left_over.pop(TIED_HEAD, None)  # some checkpoints store the tied embedding twice; `fill` compares the two
    for name, target in parameters(skeleton):
        shape = left_over.pop(name, None)
        if shape is None:
            raise WeightsError(f"the checkpoint lacks {name}")
        if shape != tuple(target.shape):
            raise WeightsError(f"{name} must have shape {tuple(target.shape)}, got {shape}")
    if left_over:
        raise WeightsError(f"the checkpoint has tensors the model does not know: {_some(left_over)}")


@torch.inference_mode()
def fill(decoder: Decoder, stream: Iterable[tuple[str, Tensor | StoredTensor]]) -> None:
    """Copies a stream of (name, tensor) into a decoder; WeightsError unless it fills each parameter exactly once.

    Of a model that ranks share, tensors are this rank's parts.
    """
    missing = dict(places(decoder))
    known = frozenset(missing)
    for name, tensor in stream:
        if name == TIED_HEAD and decoder.arch.tie_embeddings:
            _check_tied(decoder, _numbers(tensor), embedding_filled=EMBEDDING not in missing)
            continue
        target = missing.pop(name, None)
        if target is None:
            reason = "was given twice" if name in known else "is not known to the model"
            raise WeightsError(f"{name} {reason}")
        if tuple(tensor.shape) != tuple(target.tensor.shape):
            raise WeightsError(f"{name} must have shape {tuple(target.tensor.shape)}, got {tuple(tensor.shape)}")
        if isinstance(tensor, Tensor) and tensor.dtype not in FLOATS:
            raise WeightsError(f"{name} must hold floating-point numbers, got {tensor.dtype}")
        _put(decoder, target, tensor)
    if missing:
        raise WeightsError(f"the checkpoint lacks {_some(missing)}")
    _add_biases_once(decoder)


@torch.inference_mode()
def replace_one(decoder: Decoder, name: str, tensor: Tensor) -> None:
    """Fills one parameter, or this rank's part of it; whoever leads has checked that it fits."""
    _put(decoder, dict(places(decoder))[name], tensor)
    _add_biases_once(decoder)


def _put(decoder: Decoder, target: Parameter, tensor: Tensor | StoredTensor) -> None:
    if target.matrix is not None and decoder.packing is not None and target.tensor.is_meta:
        stored = StoredTensor.of(tensor.to(decoder.device)) if isinstance(tensor, Tensor) else tensor
        target.matrix.put(target.first_row, stored, decoder.packing)
    else:
        target.tensor.copy_(_numbers(tensor))


def fill_randomly(decoder: Decoder, seed: int, dtype: torch.dtype) -> None:
    """Random weights of a usual magnitude, the same for the same seed: for benchmarks, where texts do not matter.

    Weights that are packed are of this dtype before. Ranks have the parts of one model: each draws every whole tensor,
    one at a time.
    """
    generator = torch.Generator(device=decoder.device).manual_seed(seed)
    shapes = [tensor.shape for _, tensor in parameters(Decoder(decoder.shard.arch, dtype, torch.device("meta")))]
    for shape, (name, (tensor, matrix, first_row)) in zip(shapes, places(decoder), strict=True):
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif name.endswith(".bias"):
            tensor.zero_()
        elif decoder.packing is not None and decoder.arch.quantization is not None and ".layers." in name:
            assert matrix is not None, "norms and biases are not quantised"
            blocks = random_blocks(decoder.arch.quantization, (shape[0], shape[1]), generator)
            part = decoder.shard.part(name)
            matrix.put(first_row, blocks if part is None else blocks.cut(part), decoder.packing)
        elif matrix is None or decoder.packing is None:
            drawn = tensor if decoder.ranks is None else torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            drawn.normal_(0.0, 0.02, generator=generator)
            if decoder.ranks is not None:
                tensor.copy_(decoder.shard.cut(name, drawn))
        else:
            drawn = torch.empty(shape, device=decoder.device).normal_(0.0, 0.02, generator=generator)
            numbers = decoder.shard.cut(name, drawn)
            matrix.put(first_row, StoredTensor.of(numbers.to(dtype)), decoder.packing)


def _add_biases_once(decoder: Decoder) -> None:
    """Where ranks' parts are added up, the first one's has the bias."""
    if decoder.shard.rank > 0:
        for layer in decoder.layers:
            for linear in (layer.output, layer.down):
                if linear.bias is not None:
                    linear.bias.zero_()


def _check_tied(decoder: Decoder, head: Tensor, *, embedding_filled: bool) -> None:
    if not embedding_filled:
        raise WeightsError(f"{TIED_HEAD} came before {EMBEDDING}, to which it is tied")
    if head.shape != decoder.embedding.shape or not _is_embedding(decoder, head):
        raise WeightsError(f"{TIED_HEAD} differs from {EMBEDDING}, but the config says they are tied")


def _is_embedding(decoder: Decoder, head: Tensor) -> bool:
    if not decoder.table.parts:
        return _are_equal(head, decoder.embedding)
    held = decoder.table.parts[0]
    ids = torch.split(torch.arange(len(head)), 4096)  # some at a time: as numbers, all would take much more memory
    return all(_are_equal(head[some], held.rows(some).to(decoder.dtype)) for some in ids)


def _are_equal(numbers: Tensor, held: Tensor) -> bool:
    """Once they are where these are held, and in their precision."""
    return torch.equal(numbers.to(held.device, held.dtype), held)


def _numbers(tensor: Tensor | StoredTensor) -> Tensor:
    return tensor.numbers() if isinstance(tensor, StoredTensor) else tensor


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
