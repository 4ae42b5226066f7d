"""Pinned memory from which numbers are copied to the device while the host goes on."""

from __future__ import annotations

import torch
from torch import Tensor

OF_PASSES = 12  # buffers of what every pass is sent: more than are launched before anybody waits for them


class Staging:
    """Buffers in turns: the copy of the step before may not have been made yet when the next is written.

    Steps that draw nothing, as those of a long prompt, give nobody a reason to wait for them, and passes that draft
    tokens are launched all at once: the host may be further ahead than one. So whoever takes a buffer waits until its
    last copy has been made, which mostly is long ago.
    """

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device, turns: int = 2) -> None:
        on_gpu = device.type == "cuda"
        self._buffers = [torch.zeros(*shape, dtype=dtype, pin_memory=on_gpu) for _ in range(turns)]
        self._sent: list[torch.cuda.Event] = []
        if on_gpu:
            self._sent = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._turn = 0

    def take(self) -> Tensor:
        """The next buffer, to be written."""
        self._turn = (self._turn + 1) % len(self._buffers)
        if self._sent:
            self._sent[self._turn].synchronize()
        return self._buffers[self._turn]

    def sent(self) -> None:
        """The copy from what was taken is on its way."""
        if self._sent:
            self._sent[self._turn].record()
