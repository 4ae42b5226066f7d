"""Proofs that need a GPU; elsewhere each is skipped, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for test in items:
        if HERE in test.path.parents:
            test.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; torch sees none here"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")
