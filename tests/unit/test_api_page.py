"""docs/api.md is what docs/api.py makes of the sources now, and leaves out no public name."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import ramify

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("api", ROOT / "docs" / "api.py")
assert _spec is not None
assert _spec.loader is not None
api = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(api)


def test_every_public_name_stands_once() -> None:
    listed = Counter(name for names in api.CHAPTERS.values() for name in names)
    assert listed == Counter(name for name in ramify.__all__ if name != "__version__")


def test_the_page_is_fresh() -> None:
    """Stale? `python docs/api.py --write` writes it anew."""
    assert api.PAGE.read_text(encoding="utf-8") == api.page()


def test_a_signature_its_docstring_and_a_field_are_told() -> None:
    page = api.page()
    assert "#### `generate`" in page
    assert "Continues every prompt and returns the outputs in the prompts' order" in page
    assert "| `best_of` | `int \\| None` | `None` | continuations to draw, of which the n best return" in page
    assert "| `LENGTH` | `'length'` |  |" in page
    assert "\n\n\n" not in page
