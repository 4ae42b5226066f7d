"""A model that ranks share, as one model: what is asked of it, all ranks do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ramify.device.layers import Batch, Layers, Pool
from ramify.device.reads import Reads, SharingRule
from ramify.engine.plan import Work
from ramify.engine.sharing import Table
from ramify.errors import WeightsError
from ramify.models.decoder import Decoder, parameters
from ramify.models.shards import Shard
from ramify.models.weights import EMBEDDING, FLOATS, TIED_HEAD
from ramify.parallel.orders import Forward, Logits, Move, Prepare, Replace
from ramify.parallel.team import Team


class LeadingPool:
    """The cache of the model's keys and values, every rank's with its own heads."""

    def __init__(self, pool: Pool, team: Team, model: int) -> None:
        self._pool, self._team, self._model = pool, team, model

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    def move(self, work: Work) -> None:
        order = Move.of(self._model, work)
        if order is not None:
            self._team.together(order, lambda: self._pool.move(work))


class LeadingLayers:
    """`layers` compute the leading rank's own part."""

    def __init__(self, layers: Layers, team: Team, model: int) -> None:
        self._layers, self.team, self._model = layers, team, model
        self._pool = LeadingPool(layers.pool, team, model)
        self._last: Tensor | None = None  # what was computed last
        self._tables: Sequence[Table] = ()  # of the last step

    @property
    def pool(self) -> LeadingPool:
        return self._pool

    @property
    def device(self) -> torch.device:
        return self._layers.device

    @property
    def vocab_size(self) -> int:
        return self._layers.vocab_size

    @property
    def sharing(self) -> SharingRule:
        return self._layers.sharing

    def prepare(self, reads: Reads) -> None:
        order, self._tables = Prepare.of(self._model, reads, self._tables), reads.tables
        self.team.together(order, lambda: self._layers.prepare(reads))

    def forward(self, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """What is only on this rank's device, as tokens that the host has not seen, goes from device to device."""
        order = Forward(self._model, len(batch.token_ids), None if rows is None else len(rows))
        self._last = self.team.together(order, lambda: self._forward(batch, rows))
        return self._last

    def _forward(self, batch: Batch, rows: Tensor | None) -> Tensor:
        share = self.team.ranks.share
        own = Batch(*share(torch.stack(batch)))
        return self._layers.forward(own, None if rows is None else share(rows.contiguous()))

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Hidden states are the same on every rank, but which rows are asked for only this one knows."""
        last = self._last
        are_last = last is not None and hidden.data_ptr() == last.data_ptr() and len(hidden) <= len(last)
        order = Logits(self._model, len(hidden), are_last)

        def compute() -> Tensor:
            return self._layers.logits(hidden if are_last else self.team.ranks.share(hidden.contiguous()), out)

        return self.team.together(order, compute)


def replaced_everywhere(
    weights: Iterable[tuple[str, Tensor]], shard: Shard, team: Team, model: int
) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters to the other ranks, one at a time, and this rank's parts of them to whoever fills its own."""
    skeleton = Decoder(shard.arch, torch.float32, torch.device("meta"))
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters(skeleton)}
    for name, tensor in weights:
        if name in shapes and tuple(tensor.shape) != shapes[name]:
            raise WeightsError(f"{name} must have shape {shapes[name]}, got {tuple(tensor.shape)}")
        is_tied_head = name == TIED_HEAD and name not in shapes and tuple(tensor.shape) == shapes[EMBEDDING]
        if name not in shapes and not is_tied_head:
            yield name, tensor  # nothing that the model has: it is refused there
            continue
        if is_tied_head or tensor.dtype not in FLOATS:
            yield name, shard.cut(name, tensor)  # compared with the embedding, or refused
            continue
        whole = tensor.detach().cpu().contiguous()
        order = Replace(model, name, list(whole.shape), str(whole.dtype))
        team.together(order, lambda whole=whole: team.ranks.share(whole))  # type: ignore[misc]
        yield name, shard.cut(name, whole)
