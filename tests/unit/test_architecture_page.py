"""The tree in docs/architecture.md is the tree on the disk."""

from __future__ import annotations

import re
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
