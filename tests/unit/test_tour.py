"""The tour goes through files that exist, and the README says how much that is to read; in Chinese it says the same."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("count", ROOT / "docs" / "count.py")
assert _spec is not None
assert _spec.loader is not None
count = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(count)


def test_every_stop_is_a_file_and_stands_once() -> None:
    stops = count.stops()
    assert len(stops) > 20
    assert len(set(stops)) == len(stops)
    assert [str(path) for path in stops if not path.is_file()] == []


def test_tour_and_readme_say_what_was_counted() -> None:
    """Stale? `python docs/count.py --write` says it anew."""
    for page in count.PAGES:
        assert count.NUMBERS.findall(page.read_text()) == [count.tour()], page.name


def test_the_engine_imports_no_torch_as_the_tour_says() -> None:
    engine = [path for path in count.stops() if "engine" in path.relative_to(ROOT).parts]
    assert len(engine) > 10
    assert [path.name for path in engine if "import torch" in path.read_text()] == []


README, README_ZH = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def test_the_chinese_readme_has_the_same_code() -> None:
    """Comments too: a block is changed in README.md and then copied to README.zh.md."""
    assert CODE.findall(README_ZH) == CODE.findall(README)


def test_the_chinese_readme_has_the_same_parts() -> None:
    """Headings of the same levels in the same order, blocks of code between them, and a link to the other language."""

    def outline(text: str) -> list[str]:
        return [line.split(" ")[0] for line in CODE.sub("```", text).splitlines() if line.startswith(("#", "```"))]

    assert outline(README_ZH) == outline(README)
    assert "[中文](README.zh.md)" in README
    assert "[English](README.md)" in README_ZH


FACTS = {
    "measured numbers": re.compile(r"\d+\.[\d.]*\d"),
    "links": re.compile(r"\]\(((?!README)[^)]+)\)"),
    "names": re.compile(r"`([^`\n]+)`"),
}


@pytest.mark.parametrize("kind", FACTS)
def test_the_chinese_readme_tells_the_same_facts(kind: str) -> None:
    """As often, in whatever order: a figure that is new in one is missed in the other."""
    told, told_in_chinese = (sorted(FACTS[kind].findall(CODE.sub("", text))) for text in (README, README_ZH))
    assert told_in_chinese == told
