"""The notebooks, run from top to bottom as Jupyter runs them, with the default model on a CPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 600  # for one cell, on a machine that does much else
PICTURES = {"many_samples": 1, "two_models": 2}  # drawn by matplotlib
SHOWN = {"many_samples": 3, "two_models": 1}  # outputs that show themselves

pytestmark = pytest.mark.usefixtures("default_gguf")


def run(path: Path) -> list[Any]:
    """What its cells put out, in their order; a cell that raises fails the test."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: make test-extras")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(path, as_version=4)
    where = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    client = nbclient.NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(path.parent)}})
    client.execute(env={**os.environ, "PYTHONPATH": where, "CUDA_VISIBLE_DEVICES": ""})
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


@pytest.mark.skipif(sys.platform != "linux", reason="as the other tests of whole programs")
@pytest.mark.parametrize("name", list(PICTURES))
def test_a_notebook_runs_from_top_to_bottom(name: str) -> None:
    outputs = run(ROOT / "notebooks" / f"{name}.ipynb")
    kinds = [kind for output in outputs for kind in output.get("data", {})]
    assert kinds.count("image/png") == PICTURES[name]
    assert kinds.count("text/html") == SHOWN[name]
    assert not [output for output in outputs if output["output_type"] == "error"]
