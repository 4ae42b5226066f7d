"""The site without MkDocs: its navigation, what becomes of pages on their way, and the charts of the benchmarks."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = loaded("site_hooks")


def settings() -> dict[str, Any]:
    """mkdocs.yml; what it asks of Python by a tag is left out."""
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    read = yaml.safe_load(text)
    assert isinstance(read, dict)
    return read


def test_the_navigation_names_what_there_is() -> None:
    listed = list(hooks.named(settings()["nav"]))
    assert len(set(listed)) == len(listed)
    assert set(listed) <= {*hooks.pages(), *hooks.BORROWED}


def test_a_page_that_nobody_named_is_shown_too() -> None:
    class Config:
        nav = settings()["nav"]

    Config.nav = [entry for entry in Config.nav if "Recipes" not in entry]
    hooks.on_config(Config)
    assert set(hooks.pages()) <= set(hooks.named(Config.nav))
    assert "recipes/serving.md" in Config.nav[-1]["More"]


def test_nothing_is_fetched() -> None:
    """Neither fonts nor scripts of other hosts, by the settings or by the style sheet."""
    read = settings()
    assert read["theme"]["font"] is False
    assert "://" not in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for name in read["extra_css"]:
        assert "url(" not in (DOCS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("A list:\n- one\n- two", "A list:\n\n- one\n- two\n"),
        ("- one\n  goes on\n- two", "- one\n  goes on\n- two\n"),
        ("| `int \\| None` | a \\| b |", "| `int | None` | a \\| b |\n"),
        ("see [usage.md](usage.md#models)", "see [Usage](usage.md#models)\n"),
        ("see [the log](log.md)", "see [the log](log.md)\n"),
        ("in [tests](../tests/documents/README.md).", "in tests.\n"),
        ("at [home](https://example.org/a)", "at [home](https://example.org/a)\n"),
        ("```\nA list:\n- [x](../y)\n```", "```\nA list:\n- [x](../y)\n```\n"),
    ],
)
def test_a_page_of_docs_in_the_sites_dialect(written: str, shown: str) -> None:
    assert hooks.for_mkdocs(written, DOCS / "sampling.md") == shown


def test_links_of_other_folders() -> None:
    assert hooks.for_mkdocs("[trees](../trees.md)", DOCS / "recipes" / "grpo.md") == "[trees](../trees.md)\n"
    assert (
        hooks.for_mkdocs("[docs/trees.md](docs/trees.md)", ROOT / "CHANGELOG.md") == "[Trees of prefixes](trees.md)\n"
    )


charts = loaded("charts")


def test_the_pictures_are_drawn_from_the_results() -> None:
    """As they are now, or as they were before later rows came. `python docs/charts.py --write` draws them anew."""
    cpu, h200 = charts.read("cpu"), charts.read("h200")
    shown = {path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("pictures/bench_*.svg")}
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert {f"bench_{chart.name}.svg" for chart in charts.charts(cpu, h200)} == set(shown)
    assert set(re.findall(r"pictures/(bench_\w+\.svg)", page)) == set(shown)
    waiting = dict(shown)
    for left_out in range(len(cpu) + len(h200)):
        try:
            drawn = charts.charts(cpu[: max(len(cpu) - left_out, 0)], h200[: max(len(h200) - left_out, 0)])
        except (LookupError, StopIteration):
            break  # too few rows for all charts
        for chart in drawn:
            if waiting.get(f"bench_{chart.name}.svg") == charts.draw(chart):
                del waiting[f"bench_{chart.name}.svg"]
        if not waiting:
            return
    assert sorted(waiting) == []


def test_engines_are_compared_within_one_run() -> None:
    rows = [
        {"engine": "ramify", "workload": "one", "commit": "a", "command": "c"},
        {"engine": "vllm", "workload": "one", "commit": "a", "command": "c"},
        {"engine": "ramify", "workload": "one", "commit": "b", "command": "c"},
    ]
    assert charts._newest_run(rows, {("ramify", "one"), ("vllm", "one")}) == rows[:2]
    with pytest.raises(LookupError):
        charts._newest_run(rows, {("transformers", "one")})


def test_a_chart_keeps_strange_words_apart_from_its_own() -> None:
    bar = charts.Bar("<b>", 2.0, "2 & more")
    drawn = charts.draw(charts.Chart("x", "t", (charts.Group("g", "a", (bar,)),), "s"))
    assert "&lt;b&gt;" in drawn
    assert "2 &amp; more" in drawn
