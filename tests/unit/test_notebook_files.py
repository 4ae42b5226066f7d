"""The notebooks as they are kept: whole, run, with their pictures, and free of what a machine leaves behind.

tests/extras runs them.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return found


def test_every_notebook_is_run_by_the_extras() -> None:
    names = {path.stem for path in NOTEBOOKS}
    assert names == {"many_samples", "two_models"}
    assert all(f'"{name}"' in (ROOT / "tests" / "extras" / "test_notebooks.py").read_text() for name in names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_as_it_ran(path: Path) -> None:
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        ast.parse("".join(cell["source"]))
    outputs = [output for cell in code for output in cell["outputs"]]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"image/png", "text/html"} <= kinds
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert {output["name"] for output in outputs if output["output_type"] == "stream"} <= {"stdout"}  # no warnings
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/home/|/tmp/|/root/", text)
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_links_to_exists(path: Path) -> None:
    words = "".join("".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)]+)\)", words)
    assert links
    assert [link for link in links if not (path.parent / link).exists()] == []
