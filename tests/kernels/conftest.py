"""Where kernels run: compiled on a GPU, or in Triton's interpreter (tests/conftest.py chooses before Triton loads)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import triton

from tests.kernels.interpreter import WRITTEN_FOR, quick_interpreter

# Triton's interpreter computes bfloat16 wrongly and says nothing: it is proven on a GPU alone, and float16, which goes
# the same ways, in the interpreter. Each precision is one more compilation of everything.
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]


@pytest.fixture(autouse=True, scope="module")
def kernels_are_interpreted_quickly() -> Iterator[None]:
    is_interpreted = not torch.cuda.is_available() and triton.__version__.startswith(WRITTEN_FOR)
    with quick_interpreter() if is_interpreted else nullcontext():
        yield


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen
