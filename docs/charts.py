"""Draws the charts of docs/benchmarks.md from bench/results: SVG files, written by hand and so the same everywhere.

    python docs/charts.py            tells which charts there are, and of which rows they are made
    python docs/charts.py --write    writes docs/pictures/bench_*.svg

A chart shows the newest rows that belong together: engines are compared only within one run of one command.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu_workloads import WORKLOADS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PICTURES = ROOT / "docs" / "pictures"
COLOURS = {
    "Ramify": "#2f7d5b",
    "vLLM": "#d9642c",
    "transformers": "#8a8f98",
    "Ramify, int8": "#74b395",
    "llama.cpp": "#b8894d",
    "float32 weights": "#8a8f98",
    "both models": "#2f7d5b",
    "teacher alone": "#5b7fb8",
    "student alone": "#9bb2d6",
}
OTHER_COLOURS = ("#2f7d5b", "#5b7fb8", "#d9642c", "#b8894d", "#8a8f98", "#9bb2d6")

CPU_WORKLOADS = {
    "one": "one sequence: 64 tokens in, 128 out",
    "fan8@64": "8 samples of one prompt of 64 tokens",
    "fan64@1k": "64 samples of one prompt of 1,024 tokens",
    "mixed32": "32 prompts of 64 to 512 tokens",
}

WIDTH, LEFT, RIGHT = 760, 232, 128
BAR, GAP, MARGIN = 16, 3, 14

Row = dict[str, Any]


class Bar(NamedTuple):
    label: str
    value: float
    told: str


class Group(NamedTuple):
    """Bars that are compared: the longest is as long as the chart is wide."""

    title: str
    about: str
    bars: tuple[Bar, ...]


class Chart(NamedTuple):
    name: str
    title: str
    groups: tuple[Group, ...]
    source: str


def read(name: str) -> list[Row]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def charts(cpu: Sequence[Row], h200: Sequence[Row]) -> list[Chart]:
    on_cpu = [_engines(cpu), _beside_llama(cpu), _beams(cpu), _pair_on_cpu(cpu), _bits(cpu), _start(cpu)]
    return [*on_cpu, _gpu(h200), _pair_on_gpu(h200)]


def _newest_run(rows: Sequence[Row], wanted: set[tuple[str, str]]) -> list[Row]:
    """The rows of the last run (one command at one commit) in which all of these (engine, workload) were measured."""
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        runs.setdefault((row["commit"], str(row.get("command"))), []).append(row)
    for run in reversed(runs.values()):
        if wanted <= {(row["engine"], row["workload"]) for row in run}:
            return run
    raise LookupError(f"no run has all of {sorted(wanted)}")


def _newest(rows: Sequence[Row], workload: str, key: str) -> Row:
    return next(row for row in reversed(rows) if row["workload"] == workload and key in row)


def _engines(cpu: Sequence[Row]) -> Chart:
    run = _newest_run(cpu, {("ramify", "one"), ("vllm", "one"), ("transformers", "one")})
    groups = _by_engine(run, {"ramify": "Ramify", "vllm": "vLLM", "transformers": "transformers"})
    return Chart("cpu_engines", "Two cores of a CPU, 135M parameters in float32", groups, _source(run[0]))


def _beside_llama(cpu: Sequence[Row]) -> Chart:
    run = _newest_run(cpu, {("ramify", "fan64@1k"), ("llama.cpp", "fan64@1k")})
    groups = _by_engine(run, {"ramify": "Ramify", "ramify int8": "Ramify, int8", "llama.cpp": "llama.cpp"})
    return Chart("cpu_llama", "The same two cores and model, in a GGUF file of 4 bits (Q4_1)", groups, _source(run[0]))


def _by_engine(run: Sequence[Row], names: Mapping[str, str]) -> tuple[Group, ...]:
    groups = []
    for workload, about in CPU_WORKLOADS.items():
        measured = {row["engine"]: row["tok_s"] for row in run if row["workload"] == workload}
        bars = [Bar(names[each], measured[each], f"{measured[each]:,.0f} tok/s") for each in names if each in measured]
        groups.append(Group(workload, about, tuple(bars)))
    return tuple(groups)


def _beams(cpu: Sequence[Row]) -> Chart:
    run = _newest_run(cpu, {("ramify", "beam8"), ("transformers", "beam8")})
    steps = {row["engine"]: row["steps_s"] for row in run if row["workload"] == "beam8"}
    bars = tuple(
        Bar(name, steps[engine], f"{steps[engine]:.1f} steps/s")
        for engine, name in (("ramify", "Ramify"), ("transformers", "transformers"))
    )
    return Chart("cpu_beams", "Beam search on the same CPU", (Group("beam8", "8 beams", bars),), _source(run[0]))


def _pair_on_cpu(cpu: Sequence[Row]) -> Chart:
    names = {"student64": "student alone", "teacher64": "teacher alone", "optimal64": "both models"}
    run = _newest_run(cpu, {("ramify", each) for each in names})
    speed = {row["workload"]: row["tok_s"] for row in run}
    bars = tuple(Bar(name, speed[each], f"{speed[each]:,.0f} tok/s") for each, name in names.items())
    group = Group("64 samples", "every token drawn from both", bars)
    return Chart("cpu_pair", "Two models on a CPU", (group,), _source(run[0]))


def _bits(cpu: Sequence[Row]) -> Chart:
    rows = {row["workload"]: row for row in cpu if "packed_s" in row}  # the newest of each
    groups = tuple(
        Group(
            name.split(",")[0],
            name.partition(", ")[2],
            (
                Bar("Ramify", row["packed_s"], f"{row['packed_s']:.2f} s"),
                Bar("float32 weights", row["float32_s"], f"{row['float32_s']:.2f} s"),
            ),
        )
        for name, row in rows.items()
    )
    last = list(rows.values())[-1]
    return Chart("cpu_bits", "Weights of four bits beside the same as float32: processor time", groups, _source(last))


def _start(cpu: Sequence[Row]) -> Chart:
    row = _newest(cpu, "start", "stages")
    bars = tuple(Bar(name, seconds, f"{seconds:.2f} s") for name, seconds in row["stages"].items())
    group = Group("stages", f"{row['seconds']:.1f} s with the interpreter", bars)
    return Chart("cpu_start", "A new process to its first token on a CPU", (group,), _source(row))


def _gpu(h200: Sequence[Row]) -> Chart:
    groups = []
    newest = {row["workload"]: row for row in h200 if "tok_s" in row}
    for name, workload in WORKLOADS.items():
        if name not in newest or workload.vllm is None:
            continue
        speed = newest[name]["tok_s"]
        lengths = "–".join(f"{length:,}" for length in sorted(set(workload.lengths)))
        asked = f"{workload.num_prompts:,} prompt{'s' * (workload.num_prompts > 1)} of {lengths}"
        samples = f" × {workload.n}" if workload.n > 1 else ""
        bars = (
            Bar("Ramify", speed, f"{speed:,.0f} tok/s"),
            Bar("vLLM", workload.vllm, f"{workload.vllm:,.0f} tok/s"),
        )
        groups.append(Group(name, f"{workload.model.removeprefix('llama')}, {asked}{samples}", bars))
    commits = sorted({newest[group.title]["commit"] for group in groups})
    source = f"{newest['plain256']['machine']}; python bench/gpu.py; commits {', '.join(commits)}; vLLM 0.26"
    return Chart("h200_engines", "One H200, random weights of public shapes in bfloat16", tuple(groups), source)


def _pair_on_gpu(h200: Sequence[Row]) -> Chart:
    names = {"student32": "student alone", "teacher32": "teacher alone", "optimal32": "both models"}
    run = _newest_run(h200, {("ramify", each) for each in names})
    speed = {row["workload"]: row["tok_s"] for row in run}
    bars = tuple(Bar(name, speed[each], f"{speed[each]:,.0f} tok/s") for each, name in names.items())
    group = Group("32 requests", "3B and 1.5B, 512 tokens each", bars)
    return Chart("h200_pair", "Two models on an H200", (group,), _source(run[0]))


def _source(row: Row) -> str:
    command = f"; {row['command'].partition(' --')[0]}" if "command" in row else ""
    return f"{row['machine']}{command}; commit {row['commit']}"


def draw(chart: Chart) -> str:
    height = 60 + sum(max(len(group.bars), 2) * (BAR + GAP) + MARGIN for group in chart.groups) + 26
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
            ' font-family="system-ui, sans-serif" font-size="12" role="img">',
            f"<title>{escape(chart.title)}</title>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
            f'<text x="16" y="28" font-size="15" font-weight="600" fill="#1c2430">{escape(chart.title)}</text>',
            *_drawn_groups(chart.groups),
            f'<text x="16" y="{height - 12}" font-size="10.5" fill="#6b7280">{escape(chart.source)}</text>',
            "</svg>",
            "",
        ]
    )


def _drawn_groups(groups: Sequence[Group]) -> Iterator[str]:
    top = 52.0
    for group in groups:
        longest = max(bar.value for bar in group.bars)
        yield f'<text x="16" y="{top + 12:g}" font-weight="600" fill="#1c2430">{escape(group.title)}</text>'
        yield f'<text x="16" y="{top + 28:g}" font-size="10.5" fill="#6b7280">{escape(group.about)}</text>'
        for number, bar in enumerate(group.bars):
            y = top + number * (BAR + GAP)
            width = (WIDTH - LEFT - RIGHT - 92) * bar.value / longest
            colour = COLOURS.get(bar.label, OTHER_COLOURS[number % len(OTHER_COLOURS)])
            inner = LEFT + 108
            yield (
                f'<text x="{inner - 8}" y="{y + 12:g}" text-anchor="end" fill="#1c2430">{escape(bar.label)}</text>'
                f'<rect x="{inner}" y="{y:g}" width="{width:.1f}" height="{BAR}" rx="2" fill="{colour}"/>'
                f'<text x="{inner + width + 6:.1f}" y="{y + 12:g}" fill="#1c2430">{escape(bar.told)}</text>'
            )
        top += max(len(group.bars), 2) * (BAR + GAP) + MARGIN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true")
    wants_files = parser.parse_args().write
    for chart in charts(read("cpu"), read("h200")):
        if wants_files:
            (PICTURES / f"bench_{chart.name}.svg").write_text(draw(chart), encoding="utf-8")
        else:
            print(f"{chart.name:<14}{chart.title}\n{'':<14}{chart.source}")


if __name__ == "__main__":
    main()
