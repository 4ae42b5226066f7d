"""The tree in docs/architecture.md is the tree on the disk, and a module imports only what stands above it there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENTRY = re.compile(r"^(?P<indent> *)(?P<name>[\w.]+/?)(?:\s{2,}(?P<what>\S.*))?$")


def _documented() -> dict[str, str | None]:
    page = (ROOT / "docs" / "architecture.md").read_text()
    block = page.split("## The tree")[1].split("```")[1]
    folders: list[str] = []
    entries: dict[str, str | None] = {}
    for line in block.strip("\n").splitlines():
        match = ENTRY.match(line)
        assert match, f"not an entry of the tree: {line!r}"
        folders = folders[: len(match["indent"]) // 2]
        if match["name"].endswith("/"):
            folders.append(match["name"])
        else:
            entries["".join(folders) + match["name"]] = match["what"]
    return entries


def test_the_documented_tree_is_the_real_one() -> None:
    sources = [path for kind in ("py", "cpp", "h") for path in (ROOT / "ramify").rglob(f"*.{kind}")]
    paths = [*sources, *(ROOT / "ramify" / "playground").iterdir()]
    real = {str(path.relative_to(ROOT)) for path in paths if path.is_file()}
    assert set(_documented()) == real


def test_every_file_says_what_it_is_for() -> None:
    silent = [name for name, what in _documented().items() if what is None and not name.endswith("/__init__.py")]
    assert silent == []


def _name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imports(path: Path, modules: dict[str, int]) -> Iterator[str]:
    """The modules of ours that a module loads, at its top or later; what only types need does not count."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in for_types:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else node.module for name in names)
        elif isinstance(node, ast.Import) and id(node) not in for_types:
            yield from (alias.name for alias in node.names)


def test_a_module_imports_only_what_stands_above_it() -> None:
    order = [path for path in _documented() if path.endswith(".py")]
    modules = {_name(path): place for place, path in enumerate(order)}
    wrong = [
        f"{_name(path)} imports {name}"
        for place, path in enumerate(order)
        for name in _imports(ROOT / path, modules)
        if modules.get(name, -1) >= place
    ]
    assert wrong == []


def test_the_order_would_notice_an_import_from_below() -> None:
    modules = {_name(path): place for place, path in enumerate(_documented())}
    found = set(_imports(ROOT / "ramify" / "llm.py", modules))
    assert {"ramify.drive.build", "ramify.config"} <= found
    assert modules["ramify.llm"] > modules["ramify.drive.build"] > modules["ramify.device.step"]


def test_the_top_holds_values_and_doors_alone() -> None:
    values = {
        "version",
        "errors",
        "validation",
        "device_names",
        "config",
        "structured_outputs",
        "sampling_params",
        "outputs",
    }
    doors = {"llm", "async_llm", "optimal", "__main__"}
    assert {path.stem for path in (ROOT / "ramify").glob("*.py")} == {"__init__", *values, *doors}


def test_the_documents_classes_stand_on_the_engine_and_nothing_stands_on_them() -> None:
    """Not even for types: an engine that knew them would have two ways to run a request's children."""
    others = [path for path in (ROOT / "ramify").rglob("*.py") if path.parent.name != "documents"]
    assert [path for path in others if "ramify.documents" in path.read_text()] == [ROOT / "ramify" / "__init__.py"]
