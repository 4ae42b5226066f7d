"""The contents of GPTQ, AWQ and FP8 matrices: read, checked, and laid out in blocks along the rows of the weight.

What a file may say wrongly (groups that are not there, scales that are no numbers) is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ramify.errors import WeightsError
from ramify.models.packed_quants import Groups, dequantized_fp8, fp8_blocks, group_blocks, halves_of
from ramify.models.quantised_headers import QuantisedMatrices
from ramify.models.stored import StoredTensor

Read = Callable[[str], Tensor]
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where a word holds its first, second, ... output
# Matrices that multiply the same input as one: their columns must be in one order.
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def read_matrix(matrices: QuantisedMatrices, name: str, read: Read) -> StoredTensor:
    """The weight of this name, in blocks where they hold it exactly, else as float32."""
    stem = name.removesuffix(".weight")
    match matrices.quantization.method:
        case "fp8":
            return _read_fp8(read(name), read(f"{name}_scale_inv"), name)
        case "awq":
            return _read_awq(matrices, stem, read)
        case "gptq":
            return _GptqReader(matrices, read).matrix(stem)


class _GptqReader:
    def __init__(self, matrices: QuantisedMatrices, read: Read) -> None:
        self._matrices = matrices
        self._quantization = matrices.quantization
        self._read = read

    def matrix(self, stem: str) -> StoredTensor:
        bits, depth = self._quantization.bits, self._matrices.by_name[f"{stem}.weight"].shape[1]
        # A word holds its weights one after the other along the depth, the lowest bits first.
        numbers = _unpacked(self._read(f"{stem}.qweight").t(), bits)
        stored_zeros = _unpacked(self._read(f"{stem}.qzeros"), bits)  # (groups, outputs)
        zeros = stored_zeros + 1 if self._adds_one(stored_zeros) else stored_zeros
        zeros = zeros.bitwise_and_(2**bits - 1).t()
        size = self._matrices.group_size(depth)
        groups = Groups(numbers, _scales(self._read, f"{stem}.scales"), zeros, size, bits)
        places = self._places(stem)
        if places is None:
            return _stored(groups)
        if places.is_even and self._shares_places(stem, places):
            order = torch.argsort(places.group_of, stable=True)
            stored = group_blocks(groups._replace(numbers=numbers[:, order]), order.to(torch.int32))
            if stored is not None:
                return stored
        return StoredTensor.of(groups.dequantized(places.group_of))

    def _adds_one(self, stored: Tensor) -> bool:
        """Whether zero points are stored less one. A symmetric checkpoint of the second version has the middle itself,
        whatever its label says."""
        middle = 2 ** (self._quantization.bits - 1)
        is_second = self._quantization.symmetric and bool((stored == middle).all())
        return self._quantization.zeros_are_one_less and not is_second

    def _places(self, stem: str) -> _Places | None:
        """None: columns are in the order of their groups."""
        name = f"{stem}.g_idx"
        if not self._matrices.has(name):
            return None
        group_of = self._read(name).long()
        groups, size = self._matrices.num_groups(len(group_of)), self._matrices.group_size(len(group_of))
        return _checked_places(group_of, name, groups, size)

    def _shares_places(self, stem: str, places: _Places) -> bool:
        """Whether all matrices that multiply the same input have their columns in the same groups, and in blocks."""
        parent, _, own = stem.rpartition(".")
        siblings = next((names for names in JOINED if own in names), ())
        others = [f"{parent}.{name}" for name in siblings if name != own]
        return all(self._is_alike(other, places) for other in others)

    def _is_alike(self, stem: str, places: _Places) -> bool:
        own = self._places(stem)
        if own is None or not torch.equal(own.group_of, places.group_of):
            return False
        return halves_of(self._read(f"{stem}.scales")) is not None


def _read_awq(matrices: QuantisedMatrices, stem: str, read: Read) -> StoredTensor:
    depth = matrices.by_name[f"{stem}.weight"].shape[1]
    numbers = _in_awq_order(_unpacked(read(f"{stem}.qweight"), 4)).t().contiguous()
    zeros = _in_awq_order(_unpacked(read(f"{stem}.qzeros"), 4)).t()
    return _stored(Groups(numbers, _scales(read, f"{stem}.scales"), zeros, matrices.group_size(depth), 4))


class _Places(NamedTuple):
    group_of: Tensor  # int64 (depth,): the group of each column
    is_even: bool  # whether all groups but the last have as many columns as they should


def _checked_places(group_of: Tensor, name: str, groups: int, group_size: int) -> _Places | None:
    low, high = int(group_of.min()), int(group_of.max())
    if low < 0 or high >= groups:
        raise WeightsError(f"{name} must hold groups in 0..{groups - 1}, got {low}..{high}")
    if torch.equal(group_of, torch.arange(len(group_of)) // group_size):
        return None
    counts = torch.bincount(group_of, minlength=groups)
    return _Places(group_of, is_even=bool((counts[:-1] == group_size).all()))


def _stored(groups: Groups) -> StoredTensor:
    stored = group_blocks(groups)
    return StoredTensor.of(groups.dequantized()) if stored is None else stored


def _read_fp8(weight: Tensor, scales: Tensor, name: str) -> StoredTensor:
    if bool(((weight.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise WeightsError(f"{name} holds what is not a number")
    _check_finite(scales, f"{name}_scale_inv")
    stored = fp8_blocks(weight, scales)
    return StoredTensor.of(dequantized_fp8(weight, scales)) if stored is None else stored


def _scales(read: Read, name: str) -> Tensor:
    """(outputs, groups)"""
    scales = read(name)
    _check_finite(scales, name)
    return scales.t()


def _check_finite(scales: Tensor, name: str) -> None:
    if not bool(torch.isfinite(scales).all()):
        raise WeightsError(f"{name} must hold finite numbers, and some are not")


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 (rows, columns) -> uint8 (rows, columns * 32 / bits), the lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets.clone()  # not the file's own pages
    return torch.stack((octets & 0x0F, octets >> 4), dim=-1).view(len(words), -1)


def _in_awq_order(numbers: Tensor) -> Tensor:
    return numbers.view(len(numbers), -1, 8)[:, :, AWQ_PLACES].reshape(len(numbers), -1)
