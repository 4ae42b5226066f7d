"""The chart of a load test is one well-formed page, whatever its results hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import load_chart
from bench.load_chart import page, powers, read_results, ticks


def result(engine: str, speeds: list[float | None], latency: float = 10.0, **more: Any) -> dict[str, Any]:
    points = []
    for at, speed in enumerate(speeds):
        values = {"p50": latency * (at + 1), "p90": latency * 2 * (at + 1), "p99": latency * 3 * (at + 1), "mean": 1.0}
        points.append(
            {"concurrency": 4**at, "tok_s": speed, "req_s": 2.0, "failed": 0, "ttft_ms": values, "token_ms": None}
            | {"e2e_ms": values}
        )
    return {"engine": engine, "workload": "load", "commit": "abc", "points": points, **more}


def drawn(text: str) -> ElementTree.Element:
    """As XML: what a browser would forgive shows here."""
    return ElementTree.fromstring(re.sub(r"<meta [^>]*>|<!doctype html>", "", text))


def test_a_line_for_each_run_and_a_point_for_each_load() -> None:
    settings = {"prompt": [24, 24], "output": [50, 64], "n": 4, "stream": True, "shared": 0.0}
    tree = drawn(
        page([result("ours", [100.0, 300.0, 700.0], settings=settings), result("theirs", [80.0, 200.0], 2_000.0)])
    )
    plots = tree.findall(".//svg")
    assert len(plots) == 2, "nothing was measured per token"
    for plot in plots:
        assert len(plot.findall("polyline")) == 4
        assert len(plot.findall("circle")) == 5
        numbers = [float(x) for line in plot.findall("polyline") for x in re.split("[ ,]", line.attrib["points"])]
        assert 0 < min(numbers) <= max(numbers) < load_chart.WIDTH
    assert [item.findtext("span", "") + (item[0].tail or "") for item in tree.findall(".//li")] == ["ours", "theirs"]
    assert [item.findtext("small") for item in tree.findall(".//li")] == ["prompts of 24, outputs of 50–64, n = 4", ""]
    assert len(tree.findall(".//tr")) == 6


def test_whatever_a_server_is_called_is_text() -> None:
    name = "</title><script>alert('&')</script>\"x"
    text = page([result(name, [1.0]), result(name, [2.0], commit=name)])
    assert "<script" not in text
    assert name in "".join(drawn(text).itertext())
    assert not re.search(r"https?://|@import|url\(", text), "the page loads nothing"


def test_runs_without_numbers_do_not_break_it() -> None:
    tree = drawn(page([result("ours", [None, None])]))  # tokens were not told: requests a second are drawn
    assert len(tree.findall(".//circle")) == 4
    assert drawn(page([{"engine": "none", "points": []}])).findall(".//svg") == []


@pytest.mark.parametrize("top", [0.003, 0.9, 1.0, 7.3, 99.0, 1_234.5, 8e6])
def test_ticks_are_few_and_round(top: float) -> None:
    found = ticks(top)
    assert 3 <= len(found) <= 11
    assert found[-1] <= top
    assert powers(top / 50, top) == sorted(powers(top / 50, top))
    assert len(powers(top / 50, top)) >= 4
    assert len(powers(top / 1e5, top)) >= 5


def test_files_are_read_and_what_is_wrong_with_one_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, other, broken = tmp_path / "good.jsonl", tmp_path / "other.jsonl", tmp_path / "broken.jsonl"
    offline = json.dumps({"engine": "ramify", "workload": "one", "tok_s": 4.0})
    good.write_text(offline + "\n\n" + json.dumps(result("ours", [1.0])) + "\n")
    other.write_text(offline + "\n")
    broken.write_text("{")
    assert [found["engine"] for found in read_results([good])] == ["ours"]
    load_chart.main([str(good), "--out", str(tmp_path / "chart.html")])
    assert "chart.html is the chart" in capsys.readouterr().out
    for path, why in ((other, "holds no results"), (broken, "line 1, is no JSON"), (tmp_path / "no", "No such file")):
        with pytest.raises(SystemExit, match=why):
            load_chart.main([str(good), str(path), "--out", str(tmp_path / "x.html")])
