"""As many threads as the container may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ramify.cpu import cores


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in place of the system's control group."""
    monkeypatch.setattr(cores, "CONTROL_GROUP", tmp_path / "cpu.max")
    monkeypatch.setattr(cores, "CONTROL_GROUPS_BEFORE", (tmp_path / "quota", tmp_path / "period"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    cores._quota.cache_clear()
    yield tmp_path
    cores._quota.cache_clear()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000", 8),
        ("400000 100000", 4),
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("1600000 100000", 8),
        ("", 8),
    ],
)
def test_a_quota_of_version_two(group: Path, text: str, expected: int) -> None:
    (group / "cpu.max").write_text(text + "\n")
    assert cores.usable_cores() == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("250000", 3), ("50000", 1)])
def test_a_quota_of_version_one(group: Path, quota: str, expected: int) -> None:
    (group / "quota").write_text(quota + "\n")
    (group / "period").write_text("100000\n")
    assert cores.usable_cores() == expected


@pytest.mark.usefixtures("group")
def test_no_control_group_is_no_quota() -> None:
    assert cores.usable_cores() == 8
