"""RankGroup: what the ranks of a model compute together, by torch.distributed without its global state.

Ranks on CPUs talk by gloo over the loopback interface; they find each other through a file in a folder of their own.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LOOPBACK = "127.0.0.1"
# A rank that is gone is noticed at once, by its closed connections; this is for one that is stuck.
TIMEOUT = timedelta(minutes=10)


class RankGroup:
    """One rank of several, each in a process of its own; all of them call the same methods in the same order."""

    def __init__(self, meeting_point: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = TIMEOUT
        store = dist.FileStore(str(meeting_point), size)  # type: ignore[attr-defined]
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)

    def add_up(self, part: Tensor) -> Tensor:
        """Parts are added in the order of ranks, so an element's bits do not depend on where in the tensor it is."""
        parts = torch.empty(self.size, *part.shape, dtype=part.dtype)
        self._group.allgather([list(parts.unbind(0))], [part]).wait()
        torch.add(parts[0], parts[1], out=part)
        for other in parts[2:]:
            part += other
        return part

    def share(self, values: Tensor) -> Tensor:
        """What rank 0 has, on every rank, in the same memory."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([values], options).wait()
        return values

    def gather(self, part: Tensor, width: int) -> Tensor:
        """(R, own columns) of every rank to (R, width) on rank 0; what others get means nothing.

        All ranks but the last have the same number of columns, and the last has no more.
        """
        rows, columns = part.shape[0], -(-width // self.size)
        padded = part
        if part.shape[1] < columns:
            padded = part.new_zeros(rows, columns)
            padded[:, : part.shape[1]] = part
        options = dist.GatherOptions()
        options.rootRank = 0
        if self.rank > 0:
            self._group.gather([], [padded.contiguous()], options).wait()
            return part.new_zeros(rows, width)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._group.gather([parts], [padded.contiguous()], options).wait()
        return torch.cat(parts, dim=1)[:, :width].contiguous()
