"""Links of the README and of the pages lead to files and headings that exist; so do paths between backticks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "README.zh.md", "CHANGELOG.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *ROOT.glob("examples/**/*.md"),
]
NAMED_ELSEWHERE = {"docs/distillation.md"}  # a page of one of the source documents


def text_of(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> Iterator[str]:
    """What each heading of a page is called in a link, by GitHub's rules."""
    for heading in re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = text_of(page)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    for path in re.findall(r"`((?:ramify|docs|tests|bench|examples|configs)/[\w./-]*)`", text):
        assert path in NAMED_ELSEWHERE or (ROOT / path).exists(), path


def test_the_readme_links_every_page() -> None:
    linked = set(re.findall(r"\]\(docs/(\w+\.md)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {page.name for page in ROOT.glob("docs/*.md")} == linked


def test_the_recipes_are_listed() -> None:
    folder = ROOT / "docs" / "recipes"
    linked = set(re.findall(r"\]\((\w+\.md)\)", (folder / "index.md").read_text(encoding="utf-8")))
    assert {page.name for page in folder.glob("*.md")} - {"index.md"} == linked


PART = re.compile(r"`([A-Z]\w+)\.(\w+)(?:\([^`]*\))?`")
SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "ramify").rglob("*.py")))


TELL_OF_OTHERS = {"log.md", "documents.md"}  # of what was, and of what the source documents say


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in TELL_OF_OTHERS], ids=lambda page: page.name
)
def test_parts_of_our_classes_are_there(page: Path) -> None:
    """The architecture named a method that had been gone for long."""
    gone = [
        f"{name}.{part}"
        for name, part in PART.findall(text_of(page))
        if f"class {name}" in SOURCES and not re.search(rf"\bdef {part}\b|\b{part}\b *[:=]", SOURCES)
    ]
    assert gone == []
