"""Whether a wheel runs where its name says: what its libraries ask of a system, told by auditwheel.

python .ci/check_wheel.py dist/ramify_llm-…-manylinux_2_28_x86_64.whl
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

PLATFORM = re.compile(r"manylinux_(\d+)_(\d+)_(\w+)")


def glibc(tag: str) -> tuple[str, int, int]:
    """The machine, and the oldest glibc."""
    found = PLATFORM.search(tag)
    if found is None:
        sys.exit(f"{tag} names no glibc: its libraries need something that other systems lack")
    return found[3].removesuffix(".whl"), int(found[1]), int(found[2])


def main(path: Path) -> None:
    libraries = [name for name in ZipFile(path).namelist() if name.endswith(".so")]
    if not libraries:
        sys.exit(f"{path.name} carries no library")
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", "--json", str(path)], capture_output=True, text=True, check=False
    )
    if shown.returncode != 0:
        sys.exit(f"auditwheel refuses {path.name}: {shown.stderr.strip() or shown.stdout.strip()}")
    needed = json.loads(shown.stdout)
    told, found = glibc(path.name), glibc(needed["overall_tag"])
    if told[0] != found[0] or told < found:
        sys.exit(f"{path.name} says {told}, and its libraries need {found}: {needed['versioned_symbols']}")
    print(f"{path}: {len(libraries)} libraries, glibc {found[1]}.{found[2]} or newer, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
