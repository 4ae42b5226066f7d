"""RankGroup: what the ranks of a model compute together, by torch.distributed without its global state.

Ranks on CPUs talk by gloo over the loopback interface, ranks on GPUs by NCCL. They find each other through a file in a
folder of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Backend = Literal["gloo", "nccl"]
LOOPBACK = "127.0.0.1"
# A rank that is gone is noticed at once, by its closed connections or by its process; this is for one that is stuck.
TIMEOUT = timedelta(minutes=10)


def ranks_on(backend: Backend, meeting_point: Path, rank: int, size: int) -> RankGroup:
    return (NcclGroup if backend == "nccl" else RankGroup)(meeting_point, rank, size)


class RankGroup:
    """One rank of several, each in a process of its own; all of them call the same methods in the same order.

    By gloo; what is on a GPU goes through the host's memory, which no graph can capture.
    """

    def __init__(self, meeting_point: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = TIMEOUT
        self._store = dist.FileStore(str(meeting_point), size)  # type: ignore[attr-defined]
        self._group: Any = dist.ProcessGroupGloo(self._store, rank, size, options)

    def add_up(self, part: Tensor) -> Tensor:
        """Parts are added in the order of ranks, so an element's bits do not depend on where in the tensor it is."""
        own = part.cpu()
        parts = torch.empty(self.size, *part.shape, dtype=part.dtype)
        self._group.allgather([list(parts.unbind(0))], [own]).wait()
        torch.add(parts[0], parts[1], out=own)
        for other in parts[2:]:
            own += other
        return own if own is part else part.copy_(own)

    def share(self, values: Tensor) -> Tensor:
        """What rank 0 has, on every rank, in the same memory."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        sent = values.cpu()
        self._group.broadcast([sent], options).wait()
        return values if sent is values else values.copy_(sent)

    def gather(self, part: Tensor, width: int) -> Tensor:
        """(R, own columns) of every rank to (R, width) on rank 0; what others get means nothing.

        All ranks but the last have the same number of columns, and the last has no more.
        """
        rows, columns = part.shape[0], -(-width // self.size)
        padded = part
        if part.shape[1] < columns:
            padded = part.new_zeros(rows, columns)
            padded[:, : part.shape[1]] = part
        parts = self._gathered(padded.contiguous())
        if self.rank > 0:
            return part.new_zeros(rows, width)
        return torch.cat(list(parts), dim=1)[:, :width].contiguous()

    def _gathered(self, part: Tensor) -> Sequence[Tensor]:
        """Of every rank, on rank 0."""
        own = part.cpu()
        parts = [] if self.rank > 0 else [torch.empty_like(own) for _ in range(self.size)]
        _gather(self._group, parts, own)
        return [each.to(part.device) for each in parts]

    def abort(self) -> None:
        """Whoever waits for the others waits no longer."""


class NcclGroup(RankGroup):
    """Ranks on GPUs of one machine. What the host has, as weights that are replaced, still goes by gloo.

    Everything is launched on the current stream, so that a graph captures it with all else.
    """

    def __init__(self, meeting_point: Path, rank: int, size: int) -> None:
        super().__init__(meeting_point, rank, size)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        store = dist.PrefixStore("nccl", self._store)  # type: ignore[attr-defined]
        self._devices: Any = dist.ProcessGroupNCCL(store, rank, size, options)

    def add_up(self, part: Tensor) -> Tensor:
        options = dist.AllreduceOptions()  # which add, by themselves
        options.asyncOp = False
        _finish(self._devices.allreduce([part], options))
        return part

    def share(self, values: Tensor) -> Tensor:
        if values.device.type == "cpu":
            return super().share(values)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, False
        _finish(self._devices.broadcast([values], options))
        return values

    def _gathered(self, part: Tensor) -> Sequence[Tensor]:
        parts = [] if self.rank > 0 else [torch.empty_like(part) for _ in range(self.size)]
        _gather(self._devices, parts, part)
        return parts

    def abort(self) -> None:
        self._devices.abort()


def _gather(group: Any, parts: list[Tensor], part: Tensor) -> None:
    options = dist.GatherOptions()
    options.rootRank, options.asyncOp = 0, False
    _finish(group.gather([parts] if parts else [], [part], options))


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()
