"""Counts what is to be read: the files of the tour, and the lines of every room.

    python docs/count.py            prints both
    python docs/count.py --write    and writes the tour's numbers where the tour and the README say them

Lines are lines, with comments and blanks.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "docs" / "tour.md", ROOT / "README.md", ROOT / "README.zh.md")
STOP = re.compile(r"^### \d+\. `([\w/.]+)`$", re.MULTILINE)
NUMBERS = re.compile(r"\*\*[\d,]+ files and [\d,]+ lines\*\*")


def stops() -> list[Path]:
    """The files that the tour goes through, in its order."""
    return [ROOT / "ramify" / name for name in STOP.findall(PAGES[0].read_text())]


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def tour() -> str:
    files = stops()
    return f"**{len(files)} files and {sum(map(lines_of, files)):,} lines**"


def rooms() -> Counter[str]:
    """Lines by folder; kernels, in Triton and C++, are a room of their own."""
    counted: Counter[str] = Counter()
    for path in (path for kind in ("py", "cpp", "h") for path in (ROOT / "ramify").rglob(f"*.{kind}")):
        parts = path.relative_to(ROOT / "ramify").parts
        is_kernel = path.suffix != ".py" or parts[:2] == ("gpu", "kernels")
        counted["kernels" if is_kernel else parts[0] if len(parts) > 1 else "values and doors"] += lines_of(path)
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        for page in PAGES:
            page.write_text(NUMBERS.sub(tour(), page.read_text()))
    counted = rooms()
    for room, lines in counted.most_common():
        print(f"{room:<20}{lines:8,}")
    print(f"{'without kernels':<20}{counted.total() - counted['kernels']:8,}")
    print(f"the tour: {tour().strip('*')}")


if __name__ == "__main__":
    main()
