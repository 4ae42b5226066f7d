"""Where this process finds modules, as it is told to processes that are to find the same ones."""

from __future__ import annotations

import json
import sys


def told_search_path() -> bytes:
    """As JSON. What is no text there, as a Path that somebody appended, Python passes over too."""
    return json.dumps([entry for entry in sys.path if isinstance(entry, str)]).encode()
