"""docs/documents.md names what exists, and leaves out nothing that the documents define."""

from __future__ import annotations

import dataclasses
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.document_blocks import FOLDER, FOUNDATIONS, OPTIMAL_SAMPLING, PARALLEL_SAMPLING, TOKEN_SAMPLER, python_blocks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "documents.md").read_text(encoding="utf-8")
NEED_TRITON = ("ramify.gpu.",)  # importable where Triton is; their files are looked for instead


def rows() -> list[list[str]]:
    """The cells of every row of the tables with a column `here`."""
    found, is_open = [], False
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if "here" in cells:
            is_open = True
        elif not cells:
            is_open = False
        elif is_open and not line.startswith("|---"):
            assert len(cells) in {2, 3}, line
            found.append(cells)
    return found


def named() -> list[str]:
    return sorted({name for cells in rows() for name in re.findall(r"`([^`]+)`", cells[1])})


def resolve(name: str) -> Any:
    """A dotted path: the longest part that is a module, then attributes; fields without a default count."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if not ".".join(parts[:length]).startswith(error.name or "."):
                raise  # it is there, and something it needs is not
            continue
        for part in parts[length:]:
            fields = {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
            found = part if part in fields and not hasattr(found, part) else getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("name", named())
def test_every_name_in_the_column_exists(name: str) -> None:
    if "/" in name:
        assert (ROOT / name).is_file()
    elif name.startswith(NEED_TRITON):
        assert (ROOT / f"{name.replace('.', '/')}.py").is_file()
    elif name.endswith(")"):
        owner, parameter = name.rstrip(")").split("(")
        assert parameter in inspect.signature(resolve(owner)).parameters
    else:
        assert name.startswith("ramify.")
        assert resolve(name) is not None


def test_the_tables_were_read() -> None:
    assert len(rows()) > 80
    assert len(named()) > 100
    for cells in rows():
        assert "`" in cells[1] or (cells[1] == "—" and cells[2]), f"nothing stands for {cells[0]}"


def test_a_name_that_is_gone_would_be_noticed() -> None:
    for gone in ("ramify.config.ModelConfig.colour", "ramify.nothing", "ramify.sampling_params.SamplingParams.depth"):
        with pytest.raises((AttributeError, ModuleNotFoundError)):
            resolve(gone)
    assert resolve("ramify.outputs.CompletionOutput.text") is not None, "a field without a default"


@pytest.mark.parametrize("document", [PARALLEL_SAMPLING, TOKEN_SAMPLER, FOUNDATIONS, OPTIMAL_SAMPLING])
def test_every_class_and_function_that_a_document_defines_is_on_the_page(document: str) -> None:
    code = "\n".join(block.code for block in python_blocks(document))
    defined = set(re.findall(r"^\s*(?:class|def) (\w+)", code, re.MULTILINE))
    assert {name for name in defined if not re.search(rf"\b{name}\b", PAGE)} == set()


def test_every_class_and_method_of_document_4_is_on_the_page() -> None:
    text = (FOLDER / "4-parallel-sampling-module.md").read_text(encoding="utf-8")
    chapter = PAGE.partition("## 4.")[2].partition("## 5.")[0]
    listed = set(re.findall(r"^### `(\w+)`", text, re.MULTILINE)) | set(re.findall(r"^- `(\w+)\(", text, re.MULTILINE))
    assert len(listed) > 40
    assert {name for name in listed if not re.search(rf"\b{name}\b", chapter)} == set()


def test_options_milestones_and_figures_are_on_the_page() -> None:
    foundations = (FOLDER / FOUNDATIONS).read_text(encoding="utf-8")
    options = re.findall(r"[├└]── (\w+): ", foundations)
    assert len(options) == 10
    optimal = "\n".join(block.code for block in python_blocks(OPTIMAL_SAMPLING))
    options += re.findall(r"^    (\w+)=", optimal, re.MULTILINE)
    milestones = set(re.findall(r"\bM\d\b", foundations))
    figures = re.findall(r"[\d.]+(?= tok/s)", (FOLDER / OPTIMAL_SAMPLING).read_text(encoding="utf-8"))
    assert len(figures) == 3
    missing = {name for name in (*options, *milestones, *figures) if not re.search(rf"\b{re.escape(name)}\b", PAGE)}
    assert missing == set()
