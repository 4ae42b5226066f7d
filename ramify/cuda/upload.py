"""Numbers from the host to the device, without waiting for what the device is doing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: NDArray[Any] | Sequence[int], device: torch.device, dtype: type[np.generic] = np.int64) -> Tensor:
    """Through pinned memory: a plain copy would wait until all that was launched before has run."""
    array = values if isinstance(values, np.ndarray) else np.asarray(values, dtype=dtype)
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
