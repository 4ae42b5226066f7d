"""What `make docs` does to the pages on their way to the site (mkdocs.yml names this file).

The pages are written for GitHub's Markdown and stay as they are. MkDocs reads another dialect, so a few of their lines
are rewritten here, page by page, in memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
# Shown by the site and kept elsewhere: their names there, and their files.
BORROWED = {"CHANGELOG.md": ROOT / "CHANGELOG.md", "pictures/icon.svg": ROOT / "ramify" / "playground" / "icon.svg"}

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")
LIST_ITEM = re.compile(r"(?:[-*]|\d+\.) ")


def on_config(config: Any) -> Any:
    """Pages that the navigation does not name come last, under a heading of their own."""
    listed = set(named(config.nav))
    rest = [page for page in pages() if page not in listed]
    if rest:
        config.nav.append({"More": rest})
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, path in BORROWED.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    name = page.file.src_uri
    return for_mkdocs(markdown, BORROWED[name] if name in BORROWED else DOCS / name)


def pages() -> list[str]:
    """Every page of docs/, by its path there."""
    return sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def named(nav: Any) -> Iterator[str]:
    """The pages that a navigation names, at any depth."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for inner in nav.values():
            yield from named(inner)
    else:
        for inner in nav or ():
            yield from named(inner)


def for_mkdocs(text: str, path: Path) -> str:
    """A page, which lies at that path, in MkDocs' dialect.

    - A list may follow a paragraph without a blank line on GitHub, and must not here.
    - A pipe inside code in a table is escaped there, and must not be here.
    - Links lead to pages from where the page is shown, and say a page's title where they said its file. What they
      lead to outside of docs/ (sources, tests) is not of the site: such a link becomes its text.
    """
    lines: list[str] = []
    is_code = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            is_code = not is_code
        if is_code:
            lines.append(line)
            continue
        if LIST_ITEM.match(line) and lines and lines[-1].strip() and not _in_list(lines):
            lines.append("")
        lines.append(LINK.sub(lambda link: _link(link, path), _unescaped(line)))
    return "\n".join(lines) + "\n"


def _unescaped(line: str) -> str:
    if not line.startswith("|"):
        return line
    return re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), line)


def _link(link: re.Match[str], path: Path) -> str:
    told, file, anchor = link[1], link[2], link[3] or ""
    if "://" in file:
        return link[0]
    target = (path.parent / file).resolve()
    if not target.is_relative_to(DOCS):
        return told
    if told.removeprefix("docs/") == target.name and target.suffix == ".md":
        told = title(target)
    shown_in = path.parent if path.is_relative_to(DOCS) else DOCS
    return f"[{told}]({Path(os.path.relpath(target, shown_in)).as_posix()}{anchor})"


def title(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _in_list(lines: list[str]) -> bool:
    """Whether the last line belongs to a list: an item, or an indented line under one."""
    for line in reversed(lines):
        if LIST_ITEM.match(line):
            return True
        if not line.startswith(" "):
            return False
    return False
