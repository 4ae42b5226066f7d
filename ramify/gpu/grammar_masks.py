"""Masks of grammars on their way to the GPU: found by several threads in pinned memory, and sent on a stream of their
own, both while the device computes what is drawn from."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ramify.device.guard import through
from ramify.device.reads import Int64s
from ramify.device.rows import upload
from ramify.engine.plan import Asking
from ramify.structured.mask_threads import WORD
from ramify.structured.mask_workers import MaskWorkers, workers_of
from ramify.structured.matcher import Area, Asked, bits_of, num_words, write_masks


class GrammarMasks:
    def __init__(self, allowed: Tensor) -> None:
        """allowed (slots, words) int32, on the device: a bit for each token; zeros where no mask reaches."""
        self._allowed = allowed
        self._passages: list[_Passage] = []  # two, in turns; nobody has asked for any yet
        self._workers: MaskWorkers | None = None  # who write into them
        self._slots: Int64s = np.empty(0, np.int64)  # whose masks were sent last
        self._where: Tensor | None = None  # the same on the device

    def write(self, slots: Int64s, drawing: Sequence[Asking]) -> None:
        """What may follow each of these outputs, to its slot.

        A grammar that cannot be followed any further allows nothing, which ends its request with an error.
        """
        asked = [Asked(each.matcher, each.output) for each in drawing if each.matcher is not None]
        passage = self._passage(num_words(asked), workers_of(asked))
        masks = passage.take(len(asked)).numpy().view(np.uint32)
        write_masks(asked, masks, passage.area)
        for row, each in enumerate(drawing):
            if each.demands.params.allowed_token_ids and not asked[row].matcher.is_over:
                masks[row] &= bits_of(each.demands.params.allowed_token_ids, masks.shape[1] * WORD)
        where, table = self._on_device(slots), self._allowed[:, : masks.shape[1]]
        # There is a bit for the end of texts too, and so a word more in some vocabularies.
        table.index_copy_(0, where, passage.send(len(asked))[:, : table.shape[1]])
        passage.release()

    def _on_device(self, slots: Int64s) -> Tensor:
        """They are the same ones for as long as nobody comes or leaves."""
        if self._where is None or not np.array_equal(self._slots, slots):
            self._slots, self._where = slots, upload(slots, self._allowed.device)
        return self._where

    def _passage(self, width: int, workers: MaskWorkers | None) -> _Passage:
        if not self._passages or self._passages[0].width != width or self._workers is not workers:
            rows, device = self._allowed.shape[0], self._allowed.device
            areas = [None, None] if workers is None else [workers.area(turn, rows) for turn in range(2)]
            self._passages = [_Passage(rows, width, device, area) for area in areas]
            self._workers = workers
        self._passages.reverse()
        return self._passages[0]


class _Passage:
    """Pinned memory, and where it is copied to; on a CPU both are the same. The memory may be an area of workers."""

    def __init__(self, rows: int, width: int, device: torch.device, area: Area | None) -> None:
        self.width, self.area = width, area
        self._is_on_gpu = device.type == "cuda"
        if area is None:
            self._host = torch.zeros(rows, width, dtype=torch.int32, pin_memory=self._is_on_gpu)
        else:
            self._host = torch.from_numpy(area.masks.view(np.int32))
        self._device = self._host
        if self._is_on_gpu:
            self._device = torch.empty(rows, width, dtype=torch.int32, device=device)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._sent, self._read = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._read.record()  # of whoever had this memory before
            if area is not None and _pin(self._host):
                # Before the memory is given back: the driver would go on copying from where it was.
                weakref.finalize(self, _unpin, self._host.data_ptr(), self._sent).atexit = False

    def take(self, count: int) -> Tensor:
        """(count, width), to be written."""
        if self._is_on_gpu:
            self._sent.synchronize()  # two steps ago
        return self._host[:count]

    def send(self, count: int) -> Tensor:
        """What was written, for the stream that is the current one: it waits for the copy, which waits for nobody."""
        if self._is_on_gpu:
            self._stream.wait_event(self._read)
            with through(self._stream):
                self._device[:count].copy_(self._host[:count], non_blocking=True)
                self._sent.record()
            torch.cuda.current_stream().wait_event(self._sent)
        return self._device[:count]

    def release(self) -> None:
        """The current stream has read all that was sent."""
        if self._is_on_gpu:
            self._read.record()


def _pin(memory: Tensor) -> bool:
    """Lets copies from it go on while the host does other things. If the driver does not want to, they are slower."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel() * memory.element_size(), 0)) == 0


def _unpin(address: int, sent: torch.cuda.Event) -> None:
    sent.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
