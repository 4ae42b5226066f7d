"""The recipe of docs/recipes/grpo.md, copied from its page and run, with small sizes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed: make test-extras")

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "grpo.md"


@pytest.mark.usefixtures("default_gguf")
def test_the_recipe_for_grpo_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PAGE.name == "grpo.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    saves, trains = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    sizes = "steps, generations, prompts, max_tokens = "
    trains, count = re.subn(rf"^{sizes}.*$", f"{sizes}1, 2, 1, 4", trains, flags=re.MULTILINE)
    assert count == 1
    names: dict[str, Any] = {}
    exec(compile(saves, str(PAGE), "exec"), names)
    exec(compile(trains, str(PAGE), "exec"), names)
    assert re.search(r"^\[\d\.\d+\]$", capsys.readouterr().out, re.MULTILINE)
