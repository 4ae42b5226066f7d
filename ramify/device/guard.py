"""Which GPU is the current one while something is launched there: kernels, events and graphs go to the current one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on(device: torch.device) -> AbstractContextManager[object]:
    """A GPU that has a number is the current one meanwhile; any other device needs nothing."""
    if device.type != "cuda" or device.index is None:
        return nullcontext()
    return torch.cuda.device(device)
