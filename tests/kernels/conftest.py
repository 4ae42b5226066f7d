"""Kernels run on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

# Before triton is imported: it decides then.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
