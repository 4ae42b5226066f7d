"""Which part of a model a rank holds: all of it once, read as parts, and what cannot be shared is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.config import EngineConfig
from ramify.errors import InvalidInputError, ProtocolError, UnsupportedError
from ramify.models.decoder import Decoder, parameters
from ramify.models.gguf_checkpoint import GGUFCheckpoint
from ramify.models.shards import Shard
from ramify.models.stored import Part
from ramify.parallel.orders import Logits, line_of, order_of
from tests.architectures import SMALL

WIDE = replace(SMALL, num_heads=8, num_kv_heads=2, qkv_bias=True, output_bias=True, mlp_bias=True)


class OneOf:
    """A rank that computes nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def gather(self, part: torch.Tensor, width: int) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_parts_have_the_shapes_of_the_ranks_own_parameters(size: int) -> None:
    whole = Decoder(WIDE, torch.float32, torch.device("meta"))
    for rank in range(size):
        own = Decoder(WIDE, torch.float32, torch.device("meta"), ranks=OneOf(rank, size))
        for (name, tensor), (_, all_of_it) in zip(parameters(own), parameters(whole), strict=True):
            assert own.shard.cut(name, all_of_it).shape == tensor.shape, name


@pytest.mark.parametrize("size", [2, 4])
def test_every_part_of_every_matrix_is_held_by_one_rank(size: int) -> None:
    """Key-value heads by several, where ranks outnumber them: those whose queries read them."""
    whole = Decoder(WIDE, torch.float32, torch.device("meta"))
    for name, tensor in parameters(whole):
        parts = [part for rank in range(size) if (part := Shard(WIDE, rank, size).part(name)) is not None]
        if not parts:
            assert "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))
            continue
        every = [index for part in parts for index in range(part.start, part.stop)]
        assert sorted(set(every)) == list(range(tensor.shape[parts[0].dimension]))
        copies = size // 2 if "k_proj" in name or "v_proj" in name else 1
        assert len(every) == copies * len(set(every))
    keys = [Shard(WIDE, rank, 4).part("model.layers.0.self_attn.k_proj.weight") for rank in range(4)]
    assert keys == [(0, 0, 16), (0, 0, 16), (0, 16, 32), (0, 16, 32)]


def test_a_vocabulary_that_does_not_divide_leaves_the_last_rank_fewer_tokens() -> None:
    odd = replace(SMALL, vocab_size=101)
    assert [len(Shard(odd, rank, 4).vocabulary) for rank in range(4)] == [26, 26, 26, 23]


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, r"tensor_parallel_size 3 does not divide the model's 4 attention heads"),
        ({"intermediate_size": 113}, 2, r"tensor_parallel_size 2 does not divide the model's 113 columns of the MLP"),
        (
            {"num_heads": 12, "num_kv_heads": 4, "intermediate_size": 96},
            6,
            r"tensor_parallel_size 6 neither divides the model's 4 key-value heads nor is it a multiple of them",
        ),
        ({"vocab_size": 3}, 4, r"tensor_parallel_size 4 is too much for 3 tokens"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_numbers(changes: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Shard(replace(SMALL, **changes), 0, size)


def test_parts_of_a_gguf_file_are_those_of_its_tensors(default_gguf: Path) -> None:
    """Quantised rows and columns, and Llama's rotary pairs: each read alone as in the whole."""
    checkpoint = GGUFCheckpoint.open(default_gguf)
    shard = Shard(checkpoint.arch, 1, 3)
    both = zip(checkpoint.stored(), checkpoint.stored(shard.part), strict=True)
    for (name, whole), (_, part) in islice(both, 1, 12):
        assert torch.equal(shard.cut(name, whole.numbers()), part.numbers()), name
        assert part.quant_format == whole.quant_format


def test_columns_that_cut_through_blocks_become_numbers(default_gguf: Path) -> None:
    stored = dict(islice(GGUFCheckpoint.open(default_gguf).stored(), 1, 12))
    down = stored["model.layers.0.mlp.down_proj.weight"]
    assert down.is_quantised
    part = down.cut(Part(1, 5, 105))
    assert not part.is_quantised
    assert torch.equal(part.numbers(), down.numbers()[:, 5:105])


def test_orders_are_lines_and_nothing_else_is_one() -> None:
    assert order_of(line_of(Logits(1, 7, are_last=True))) == Logits(1, 7, are_last=True)
    for line in (b"", b"[]", b'["Logits", {}]', b'["system", {"x": 1}]', b"not json", b"[[], {}]"):
        with pytest.raises(ProtocolError):
            order_of(line)


@pytest.mark.parametrize("size", [0, 65, True, "2", 1.5])
def test_the_number_of_ranks_is_a_small_integer(size: object) -> None:
    with pytest.raises(InvalidInputError, match="tensor_parallel_size"):
        EngineConfig.from_options(tensor_parallel_size=size)
