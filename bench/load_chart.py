"""Latency over throughput, in one HTML file that needs nothing else: a line for each run, a point for each load.

    python bench/load_chart.py ours.jsonl theirs.jsonl --out chart.html

Result files are those that `bench/serve.py --save` writes; lines of other benchmarks in them are passed over.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 560, 330
LEFT, RIGHT, TOP, BOTTOM = 62, 22, 20, 46
PANELS = (
    ("ttft_ms", "Time to the first token"),
    ("token_ms", "Time per token, after the first"),
    ("event_ms", "Time between events of a stream"),
    ("e2e_ms", "Time of a whole answer"),
)
COLOURS = ("#24704f", "#4a6fd0", "#b0562a", "#8a4ea8", "#8b7a1d", "#1f8791", "#b8406a", "#5f6b3b")
DARK_COLOURS = ("#6cc39c", "#8fabf5", "#e39a6c", "#c79be0", "#d2c05c", "#6cc6cf", "#ee8fb0", "#b0bd86")
STYLE = """
:root { color-scheme: light dark; --paper: #faf8f4; --card: #fff; --ink: #22211d; --soft: #635f55; --line: #e2ddd1; %s }
@media (prefers-color-scheme: dark) {
  :root { --paper: #171714; --card: #201f1c; --ink: #ece8df; --soft: #b3ad9f; --line: #34322c; %s }
}
body { margin: 0 auto; max-width: 1220px; padding: 28px 24px 48px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Liberation Sans", Arial, sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 15px; margin: 0 0 6px; }
p { margin: 0 0 14px; color: var(--soft); max-width: 76ch; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%%, 460px), 1fr)); gap: 18px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px; overflow-x: auto; }
svg { display: block; width: 100%%; height: auto; } svg text { fill: var(--soft); font-size: 12px; }
svg text.load { fill: var(--ink); font-size: 11px; paint-order: stroke; stroke: var(--card); stroke-width: 3px; }
.grid { stroke: var(--line); } .line { fill: none; stroke-width: 2; } .p99 { stroke-dasharray: 5 4; stroke-width: 1.5; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 22px; margin: 0 0 18px; padding: 0; list-style: none; }
.swatch { display: inline-block; width: 22px; height: 3px; vertical-align: middle; margin-right: 7px; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: 4px 10px; text-align: right; border-top: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; border-top: 0; } th:first-child, td:first-child { text-align: left; }
caption { text-align: left; color: var(--soft); padding-bottom: 6px; }
td:first-child { white-space: normal; min-width: 16ch; } small { color: var(--soft); margin-left: 8px; }
.wide { margin-top: 18px; }
"""


def page(results: Sequence[dict[str, Any]]) -> str:
    """The whole document. Whatever the results hold is text in it, never markup."""
    colours = [" ".join(f"--c{at}: {colour};" for at, colour in enumerate(set_)) for set_ in (COLOURS, DARK_COLOURS)]
    legend = "".join(
        f'<li><span class="swatch" style="background: var(--c{at % len(COLOURS)})"></span>{escape(name)}'
        f"<small>{escape(_asked(result))}</small></li>"
        for at, (name, result) in enumerate(zip(_names(results), results, strict=True))
    )
    panels = "".join(
        f'<section class="card"><h2>{title}</h2>{_plot(results, name, title)}</section>'
        for name, title in PANELS
        if any(point.get(name) for result in results for point in result["points"])
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Latency over throughput</title><style>{STYLE % tuple(colours)}</style></head>
<body><h1>Latency over throughput</h1>
<p>Right is more tokens a second, down is sooner. A point is one load, with its number of requests at a time, or of
arrivals a second (/s). Solid lines are medians, dashed ones 99th percentiles.</p>
<ul class="legend">{legend}</ul><div class="panels">{panels}</div>
<div class="card wide">{_table(results)}</div></body></html>
"""


def _names(results: Sequence[dict[str, Any]]) -> list[str]:
    names = []
    for result in results:
        name = str(result.get("engine", "?"))
        same = sum(str(other.get("engine", "?")) == name for other in results)
        names.append(f"{name} ({result.get('commit') or 'no commit'})" if same > 1 else name)
    return names


def _asked(result: dict[str, Any]) -> str:
    """What was asked of a server, since only the same work can be compared."""
    settings = result.get("settings") or {}
    spans = {name: settings[name] for name in ("prompt", "output") if name in settings}
    parts = [f"{name}s of {'–'.join(map(str, dict.fromkeys(span)))}" for name, span in spans.items()]
    if settings.get("n", 1) != 1:
        parts.append(f"n = {settings['n']}")
    if settings.get("shared"):
        parts.append(f"{settings['shared']:.0%} of a prompt shared")
    if settings.get("stream") is False:
        parts.append("not streamed")
    return ", ".join(parts)


def _plot(results: Sequence[dict[str, Any]], name: str, title: str) -> str:
    shown = [[point for point in result["points"] if point.get(name) and _speed(point)] for result in results]
    speeds = [_speed(point) for points in shown for point in points]
    latencies = [point[name][share] for points in shown for point in points for share in ("p50", "p99")]
    if not speeds:
        return ""
    right = max(speeds) * 1.08
    low, high = min(latencies), max(latencies)
    logarithmic = high > 20 * max(low, 1e-3)
    bottom, top = (max(low, 1e-3) / 1.3, high * 1.3) if logarithmic else (0.0, high * 1.1 or 1.0)

    def x(speed: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * speed / right

    def y(latency: float) -> float:
        share = (latency - bottom) / (top - bottom)
        if logarithmic:
            share = math.log(max(latency, bottom) / bottom) / math.log(top / bottom)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    parts = []
    for tick in powers(bottom, top) if logarithmic else ticks(top):
        at = y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{_duration(tick)}</text>')
    for tick in ticks(right):
        parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:,g}</text>')
    axis = "tokens a second" if all(point.get("tok_s") for points in shown for point in points) else "a second"
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{axis}</text>')
    for at, (points, engine) in enumerate(zip(shown, _names(results), strict=True)):
        colour = f"var(--c{at % len(COLOURS)})"
        for share in ("p99", "p50"):
            way = " ".join(f"{x(_speed(point)):.1f},{y(point[name][share]):.1f}" for point in points)
            parts.append(f'<polyline class="line {share}" style="stroke: {colour}" points="{way}"/>')
        labelled = -math.inf
        for point in points:
            values = point[name]
            tip = escape(
                f"{engine}, {_load(point)}: {_speed(point):,.1f} a second, p50 {_duration(values['p50'])}, "
                f"p90 {_duration(values['p90'])}, p99 {_duration(values['p99'])}"
            )
            place = f'cx="{x(_speed(point)):.1f}" cy="{y(values["p50"]):.1f}"'
            parts.append(f'<circle {place} r="4" style="fill: {colour}"><title>{tip}</title></circle>')
            if abs(x(_speed(point)) - labelled) < 14:
                continue  # two labels in one place can be read by nobody; the tip has it
            labelled = x(_speed(point))
            where = f'x="{x(_speed(point)):.1f}" y="{y(values["p50"]) - 9:.1f}"'
            parts.append(f'<text class="load" {where} text-anchor="middle">{escape(_load(point))}</text>')
    kind = ", on a logarithmic scale" if logarithmic else ""
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}{kind}">{"".join(parts)}</svg>'


def ticks(top: float) -> list[float]:
    """Round numbers from 0 to `top`, some four to eight of them."""
    step = 10 ** math.floor(math.log10(top))
    step = next(step * part for part in (0.1, 0.2, 0.25, 0.5, 1) if top / (step * part) <= 8 or part == 1)
    return [step * count for count in range(int(top / step) + 1)]


def powers(bottom: float, top: float) -> list[float]:
    """1, 2 and 5 times powers of ten between the two; only the powers where there would be many."""
    exponents = range(math.floor(math.log10(bottom)), math.ceil(math.log10(top)) + 1)
    leads = (1, 2, 5) if top / bottom < 1e3 else (1,)
    return [lead * 10.0**exponent for exponent in exponents for lead in leads if bottom <= lead * 10.0**exponent <= top]


def _table(results: Sequence[dict[str, Any]]) -> str:
    heads = ["", "load", "tok/s", "req/s", "failed"]
    heads += [f"{title}, ms" for title in ("first token", "per token", "per event", "whole answer")]
    rows = []
    for engine, result in zip(_names(results), results, strict=True):
        for point in result["points"]:
            cells = [engine, _load(point), "-" if point.get("tok_s") is None else f"{point['tok_s']:,.1f}"]
            cells += [f"{point.get('req_s', 0):,.2f}", str(point.get("failed", 0))]
            for name, _ in PANELS:
                values = point.get(name)
                shares = () if values is None else (values["p50"], values["p90"], values["p99"])
                cells.append(" / ".join(f"{value:,.{0 if value >= 100 else 1}f}" for value in shares) or "-")
            rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{head}</th>" for head in heads)
    return f"<table><caption>Latencies are p50 / p90 / p99</caption><tr>{head}</tr>{''.join(rows)}</table>"


def _speed(point: dict[str, Any]) -> float:
    return float(point.get("tok_s") or point.get("req_s") or 0)


def _load(point: dict[str, Any]) -> str:
    return f"{point['concurrency']}" if "concurrency" in point else f"{point.get('rate', 0):g}/s"


def _duration(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.3g} s" if milliseconds >= 1000 else f"{milliseconds:.3g} ms"


def read_results(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The runs of these files; raises OSError, or ValueError where a file holds none."""
    results: list[dict[str, Any]] = []
    for path in paths:
        found = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                value = json.loads(line) if line.strip() else None
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}, is no JSON: {error}") from None
            if isinstance(value, dict) and value.get("workload") == "load" and value.get("points"):
                found.append(value)
        if not found:
            raise ValueError(f"{path} holds no results of bench/serve.py")
        results += found
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, help="files that bench/serve.py --save wrote")
    parser.add_argument("--out", type=Path, default=Path("chart.html"), help="default: chart.html")
    options = parser.parse_args(arguments)
    try:
        options.out.write_text(page(read_results(options.results)), encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.exit(f"no chart: {error}")
    print(f"{options.out} is the chart")


if __name__ == "__main__":
    main()
