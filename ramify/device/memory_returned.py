"""Memory given back while an engine sleeps, and taken again: what tensors hold goes to the host, or is forgotten.

Only storages are emptied: tensors and views of them stay, and are as before when their memory is there again.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable

import torch
from torch import Tensor


class PutAway:
    """The storages behind some tensors, emptied; with `keep`, what they hold waits in host memory."""

    def __init__(self, tensors: Iterable[Tensor], *, keep: bool) -> None:
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._emptied: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        for storage in storages.values():
            self._emptied.append((storage, storage.nbytes(), _on_the_host(storage) if keep else None))
            storage.resize_(0)
        self.num_bytes = sum(size for _, size, _ in self._emptied)

    def bring_back(self) -> None:
        """Takes the memory again; without `keep` it holds anything."""
        for storage, size, kept in self._emptied:
            storage.resize_(size)
            if kept is not None:
                _bytes_of(storage).copy_(kept)
        self._emptied = []


def _on_the_host(storage: torch.UntypedStorage) -> Tensor:
    content = _bytes_of(storage)
    kept = torch.empty(len(content), dtype=torch.uint8, pin_memory=content.is_cuda)
    return kept.copy_(content)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def forget_pages(tensor: Tensor) -> None:
    """Gives the pages of a CPU's tensor back to the system, which maps zeros there when they are next used.

    Where the system has no such call, they stay.
    """
    if not sys.platform.startswith("linux"):
        return
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0:
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        advise(first, length, mmap.MADV_DONTNEED)
