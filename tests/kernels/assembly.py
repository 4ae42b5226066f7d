"""What the functions of packed kernels do that are written in assembly: with threads and bits, as the instructions do.

Everything else, what is loaded from where, multiplied with what and written to where, is the kernels' own source
(gluon.py). Nearly every tensor there has one element a thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.kernels.gluon import BY_FIRST, Pointer

Words = tuple[Tensor, ...]  # int32 (threads,) each


def instructions() -> dict[str, Callable[..., Any]]:
    """By the names that kernels have for them."""
    return {
        "load_words": lambda pointer, inside, where: _words(pointer, 4, inside if where else None),
        "load_pair": lambda pointer, inside, where: _words(pointer, 2, inside if where else None),
        "load_inputs": lambda pointer: _words(pointer, 4),
        "load_input_pair": lambda pointer: _words(pointer, 2),
        "from_lane": lambda word, lane: word.view(-1, 32).gather(1, lane.view(-1, 32)).view(-1),
        "as_float": lambda word: word.view(torch.float32),
        "decode_scale": _decode_scale,
        "unpack_nibbles": _unpack_nibbles,
        "unpack_octets": _unpack_octets,
        "normed": _normed,
        "scaled": _scaled,
        "store_words": _store_words,
        "multiply": _multiply,
        "_by_parts": lambda _rank: BY_FIRST,
    }


def _words(pointer: Pointer, count: int, inside: Tensor | None = None) -> Words:
    """As many 32 bits in a row, however the tensor is typed; zeros where `inside` is."""
    width = 4 // pointer.tensor.itemsize
    places = torch.as_tensor(pointer.places)
    if inside is not None:
        places = torch.where(inside.bool(), places, 0)
    assert not bool((places % (count * width)).any()), "aligned"
    assert int(places.min()) >= 0, "before the first number"
    assert int(places.max()) + count * width <= len(pointer.tensor), "past the last number"
    words, first = pointer.tensor.view(torch.int32), places // width
    found = (words[first + each] for each in range(count))
    return tuple(each if inside is None else torch.where(inside.bool(), each, 0) for each in found)


def _store_words(pointer: Pointer, *words: Tensor) -> None:
    inside, places = words[-1].bool(), torch.as_tensor(pointer.places)
    assert not bool((places[inside] % 8).any()), "aligned"
    whole = torch.stack(words[:-1], 1)[inside].view(pointer.tensor.dtype)
    pointer.tensor.view(-1, 8)[places[inside] // 8] = whole


def _type_in(text: str) -> torch.dtype:
    return torch.bfloat16 if "bf16" in text else torch.float16


def _halves(word: Tensor, dtype: torch.dtype) -> Tensor:
    """(threads,) -> (threads, 2) float32: the two numbers of a word, low half first."""
    return word.view(torch.int16).view(-1, 2).view(dtype).float()


def _word(halves: Tensor, dtype: torch.dtype) -> Tensor:
    """(threads, 2) -> (threads,): exact, or rounded once."""
    return halves.to(dtype).contiguous().view(torch.int32)[:, 0]


def _bits(halves: Tensor) -> Tensor:
    return halves.to(torch.int16).contiguous().view(torch.int32)[:, 0]


def _constant(text: str, name: str) -> Tensor:
    bits = int(text.split(f"mov.b32 {name}, 0x")[1][:4], 16)
    return torch.tensor([bits], dtype=torch.int32).to(torch.int16).view(_type_in(text)).float()


def _decode_scale(word: Tensor, text: str) -> tuple[Tensor, Tensor]:
    dtype, halves = _type_in(text), word.view(torch.int16).view(-1, 2)
    zero = _halves(_bits(halves[:, 1:].expand(-1, 2)), dtype) * _constant(text, "m")
    return halves[:, 0].contiguous().view(torch.float16).float(), _word(zero, dtype)


def _unpack_nibbles(word: Tensor, zero: Tensor, other_zero: Tensor, text: str) -> Words:
    dtype, low, high, found = _type_in(text), _constant(text, "l"), _constant(text, "h"), []
    for moved in (word, word >> 8):
        found.append(_word(_halves(moved & 0x000F000F, dtype) * low + _halves(zero, dtype), dtype))
        found.append(_word(_halves(moved & 0x00F000F0, dtype) * high + _halves(other_zero, dtype), dtype))
    return tuple(found)


def _unpack_octets(word: Tensor, zero: Tensor, other_zero: Tensor, text: str) -> Words:
    dtype = _type_in(text)
    if "or.b32" not in text:
        scale = _constant(text, "l")
        first = _halves(word & 0x00FF00FF, dtype) * scale + _halves(zero, dtype)
        other = _halves(word >> 8 & 0x00FF00FF, dtype) * scale + _halves(other_zero, dtype)
        return _word(first, dtype), _word(other, dtype)
    octets = word.view(torch.uint8).view(-1, 2, 2).view(torch.float8_e4m3fn).float()
    return _word(octets[:, :, 0], dtype), _word(octets[:, :, 1], dtype)


def _normed(word: Tensor, weight: Tensor, scale: Tensor, text: str) -> Tensor:
    dtype = _type_in(text)
    rounded = (_halves(word, dtype) * scale[:, None]).to(dtype).float()
    return _word(rounded * _halves(weight, dtype), dtype)


def _scaled(word: Tensor, scale: Tensor, text: str) -> Tensor:
    dtype = _type_in(text)
    return _word(_halves(word, dtype) * scale[:, None], dtype)


def _multiply(left: Words, inputs: Tensor, other_inputs: Tensor, sums: Words, text: str) -> Words:
    """By the picture of mma.m16n8k16 in the PTX manual: thread 4 g + q."""
    warps, dtype = len(inputs) // 32, _type_in(text)
    # (warps, g, q, half)
    a = [_halves(each, dtype).view(warps, 8, 4, 2) for each in left]
    b = [_halves(each, dtype).view(warps, 8, 4, 2) for each in (inputs, other_inputs)]
    matrix = torch.cat((torch.cat((a[0], a[2]), 2), torch.cat((a[1], a[3]), 2)), 1).reshape(warps, 16, 16)
    columns = torch.cat(b, 2).reshape(warps, 8, 16)
    product = matrix @ columns.transpose(1, 2)  # (warps, 16, 8)
    halves = product.view(warps, 2, 8, 4, 2)
    return tuple(
        sums[2 * half + column] + halves[:, half, :, :, column].reshape(-1)
        for half, column in itertools.product(range(2), range(2))
    )
