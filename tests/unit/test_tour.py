"""The tour goes through files that exist, and it and the README say how much that is to read."""

from __future__ import annotations

import importlib.util
from pathlib import Path

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
    engine = [path for path in count.stops() if "engine" in path.parts]
    assert len(engine) > 10
    assert [path.name for path in engine if "import torch" in path.read_text()] == []
