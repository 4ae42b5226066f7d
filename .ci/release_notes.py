"""What CHANGELOG.md says of a version, as the notes of its release.

    python .ci/release_notes.py v0.1.0

The version must be the package's own, and its heading must have a date in place of "unreleased".
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"^## (?P<version>\S+) \((?P<when>[^)]+)\)\n", re.MULTILINE)


def notes(tag: str, changelog: str, version: str) -> str:
    wanted = tag.removeprefix("v")
    if wanted != version:
        sys.exit(f"the tag says {wanted}, and ramify/version.py {version}")
    headings = list(HEADING.finditer(changelog))
    for place, heading in enumerate(headings):
        if heading["version"] == wanted:
            if not re.fullmatch(r"\d{4}-\d\d-\d\d", heading["when"]):
                sys.exit(f"CHANGELOG.md has no date for {wanted}: ({heading['when']})")
            end = headings[place + 1].start() if place + 1 < len(headings) else len(changelog)
            return changelog[heading.end() : end].strip() + "\n"
    sys.exit(f"CHANGELOG.md says nothing of {wanted}")


if __name__ == "__main__":
    found = re.search(r'__version__ = "(.+)"', (ROOT / "ramify" / "version.py").read_text(encoding="utf-8"))
    print(notes(sys.argv[1], (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), found[1] if found else ""), end="")
