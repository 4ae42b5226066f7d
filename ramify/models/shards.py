"""How ranks share a model: which part of each parameter one of them holds, and what they compute together.

    heads        queries by heads, keys and values by key-value heads, the output's columns by heads
    MLP          gate and up by rows, down's columns by the same
    vocabulary   rows of embedding and head

Output and down then give every rank a part of each sum, which are added up; every rank draws on the whole residual
stream. Where ranks outnumber key-value heads, a head is held by several of them. Norms are held by all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from ramify.errors import UnsupportedError
from ramify.models.families import Architecture
from ramify.models.stored import Part


class Ranks(Protocol):
    """The ranks that share a model, as one of them sees it. All of them call the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def add_up(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors, on every rank: in the same memory, bit for bit the same everywhere."""

    def gather(self, part: Tensor, width: int) -> Tensor:
        """(R, own columns) of every rank to (R, width) on rank 0; what others get means nothing."""


@dataclass(frozen=True, slots=True)
class Shard:
    """What rank `rank` of `size` holds of a model of this (whole) architecture."""

    arch: Architecture
    rank: int
    size: int

    def __post_init__(self) -> None:
        arch, size = self.arch, self.size
        counts = {"attention heads": arch.num_heads, "columns of the MLP": arch.intermediate_size}
        for what, count in counts.items():
            if count % size:
                raise UnsupportedError(f"tensor_parallel_size {size} does not divide the model's {count} {what}")
        kv_heads = arch.num_kv_heads
        if kv_heads % size and size % kv_heads:
            raise UnsupportedError(
                f"tensor_parallel_size {size} neither divides the model's {kv_heads} key-value heads nor is it a "
                "multiple of them"
            )
        if (size - 1) * self._vocabulary_step >= arch.vocab_size:
            raise UnsupportedError(f"tensor_parallel_size {size} is too much for {arch.vocab_size} tokens")

    @property
    def local(self) -> Architecture:
        """As one rank computes it: fewer heads and a narrower MLP. Hidden states and vocabulary are whole."""
        arch, size = self.arch, self.size
        return replace(
            arch,
            num_heads=arch.num_heads // size,
            num_kv_heads=max(1, arch.num_kv_heads // size),
            intermediate_size=arch.intermediate_size // size,
        )

    @property
    def vocabulary(self) -> range:
        """The tokens whose rows of embedding and head this rank holds; the last rank may have fewer."""
        start = self.rank * self._vocabulary_step
        return range(start, min(start + self._vocabulary_step, self.arch.vocab_size))

    def part(self, name: str) -> Part | None:
        """What this rank holds of a parameter, by its Hugging Face name; None: all of it."""
        module, _, kind = name.rpartition(".")
        owner = module.rpartition(".")[2]
        if owner in ("embed_tokens", "lm_head"):
            return Part(0, self.vocabulary.start, self.vocabulary.stop)
        local, width = self.local, self.arch.head_dim
        first_kv_head = self.rank * self.arch.num_kv_heads // self.size
        queries = (self.rank * local.num_heads * width, local.num_heads * width)
        keys = (first_kv_head * width, local.num_kv_heads * width)
        inner = (self.rank * local.intermediate_size, local.intermediate_size)
        rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "gate_proj": inner, "up_proj": inner}
        columns = {"o_proj": queries, "down_proj": inner} if kind == "weight" else {}
        if owner in rows:
            return Part(0, rows[owner][0], sum(rows[owner]))
        if owner in columns:
            return Part(1, columns[owner][0], sum(columns[owner]))
        return None

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a whole parameter, as a view."""
        part = self.part(name)
        return tensor if part is None else tensor.narrow(part.dimension, part.start, part.stop - part.start)

    @property
    def _vocabulary_step(self) -> int:
        return -(-self.arch.vocab_size // self.size)
