"""What a process may take is the machine's memory, or less in a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from ramify.models import memory


@pytest.mark.parametrize(("limit", "used", "total", "free"), [(2**20, 2**19, 2**20, 2**19), (2**20, 2**21, 2**20, 0)])
def test_a_container_has_less(
    *, limit: int, used: int, total: int, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "limit").write_text(f"{limit}\n")
    (tmp_path / "used").write_text(f"{used}\n")
    monkeypatch.setattr(memory, "CONTROL_GROUPS", ((tmp_path / "limit", tmp_path / "used"),))
    assert memory.total_memory() == total
    assert memory.free_memory() == free


def test_no_limit_is_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "limit").write_text("max\n")
    monkeypatch.setattr(memory, "CONTROL_GROUPS", ((tmp_path / "limit", tmp_path / "used"),))
    assert 0 < memory.free_memory() <= memory.total_memory()
