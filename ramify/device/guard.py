"""Which GPU is the current one while something is launched there, and which stream: kernels and graphs go to these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def on(device: torch.device) -> AbstractContextManager[object]:
    """A GPU that has a number is the current one meanwhile; any other device needs nothing."""
    if device.type != "cuda" or device.index is None:
        return nullcontext()
    return torch.cuda.device(device)


@contextmanager
def through(stream: torch.cuda.Stream) -> Iterator[None]:
    """A stream of the current GPU is the current one meanwhile.

    As torch.cuda.stream, which asks the driver twice how many GPUs there are.
    """
    before = torch.cuda.current_stream(torch.cuda.current_device())
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(before)
