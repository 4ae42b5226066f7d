"""Beams that go on from others which only the device knows: what the host tells it of them, once a step."""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.device.pool import KVPool
from ramify.device.reads import Followed
from ramify.device.staging import Staging
from ramify.gpu.kernels.following import NUM_NUMBERS, follow


class Followers:
    """Of the rows of these tables (max_rows, max_blocks), in the blocks of this pool."""

    def __init__(self, tables: Tensor, pool: KVPool) -> None:
        self._tables, self._pool = tables, pool
        max_rows = tables.shape[0]
        self._scratch: Tensor | None = None  # as large as the tables, once there was a search
        self._numbers = torch.zeros(NUM_NUMBERS * max_rows, dtype=torch.int64, device=tables.device)
        self._staging = Staging(NUM_NUMBERS * max_rows, dtype=torch.int64, device=tables.device)

    def follow(self, followed: Followed) -> None:
        if self._scratch is None:
            self._scratch = torch.empty_like(self._tables)
        count = len(followed.rows)
        staged = self._staging.take()[: NUM_NUMBERS * count]
        columns = (followed.rows, followed.sources, followed.blocks, followed.indices, followed.is_inside)
        for own, column in zip(staged.numpy().reshape(NUM_NUMBERS, count), columns, strict=True):
            own[:] = column
        numbers = self._numbers[: NUM_NUMBERS * count]
        numbers.copy_(staged, non_blocking=True)
        self._staging.sent()
        follow(
            numbers.view(NUM_NUMBERS, count),
            followed.parents,
            self._tables,
            self._scratch,
            self._pool.kv,
            block_size=self._pool.block_size,
        )
