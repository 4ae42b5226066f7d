"""`report.html`: acceptance, lengths, α, examples. It is one file: no script, nothing fetched, all text escaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from ramify.disk import write_whole
from ramify.distill.journal import Journal
from ramify.distill.recipe import Recipe
from ramify.drive.alpha_view import STYLE, color

BINS = 20
EXAMPLES = 12
WIDTH, HEIGHT, MARGIN = 860, 170, 34
ACCEPTED_COLOR, REJECTED_COLOR = "rgb(34,139,94)", "rgb(214,120,88)"
ADDED_STYLE = """
table { border-collapse: collapse; } td, th { padding: .15rem 1.2rem .15rem 0; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.example { margin: 1.4rem 0; } .example .text { font-size: .92rem; line-height: 1.6; }
.question { color: #57534e; white-space: pre-wrap; overflow-wrap: anywhere; }
.verdict { font-size: .85rem; } .yes { color: rgb(21,101,66); } .no { color: rgb(160,70,40); }
"""


@dataclass
class Tally:
    """What the report says about all samples, gathered in one pass."""

    reasons: Counter[str] = field(default_factory=Counter)
    lengths: dict[bool, list[int]] = field(default_factory=lambda: {True: [], False: []})
    alphas: Counter[int] = field(default_factory=Counter)
    accepted_by_problem: Counter[int] = field(default_factory=Counter)
    tokens: int = 0
    alpha_sum: float = 0.0
    gain_sum: float = 0.0
    gains: int = 0
    examples: dict[bool, list[dict[str, Any]]] = field(default_factory=lambda: {True: [], False: []})

    def add(self, sample: dict[str, Any]) -> None:
        accepted = bool(sample["accepted"])
        self.reasons["accepted" if accepted else sample["rejected_because"]] += 1
        self.lengths[accepted].append(len(sample["token_ids"]))
        self.accepted_by_problem[sample["line"]] += int(accepted)
        self.tokens += len(sample["token_ids"])
        for alpha in sample["alpha"]:
            self.alphas[min(int(alpha * BINS), BINS - 1)] += 1
            self.alpha_sum += alpha
        for teacher, theta in zip(sample["logprobs_teacher"], sample["logprobs_theta"], strict=True):
            if teacher is not None and theta is not None:
                self.gain_sum += teacher - theta
                self.gains += 1
        # By number and line, so that the same samples are shown however often the run was interrupted.
        chosen = self.examples[accepted]
        chosen.append(sample)
        chosen.sort(key=lambda example: (example["sample"], example["line"]))
        del chosen[EXAMPLES:]


def write_report(path: Path, journal: Journal, recipe: Recipe, num_problems: int) -> None:
    tally = Tally()
    for sample in journal.samples():
        tally.add(sample)
    write_whole(path, _page(tally, recipe, num_problems))


def _page(tally: Tally, recipe: Recipe, num_problems: int) -> str:
    samples = sum(tally.reasons.values())
    accepted = tally.reasons["accepted"]
    solved = sum(1 for count in tally.accepted_by_problem.values() if count)
    facts = {
        "problems": f"{len(tally.accepted_by_problem):,} of {num_problems:,}",
        "with an accepted sample": f"{solved:,}",
        "samples": f"{samples:,}",
        "accepted": f"{accepted:,} ({_share(accepted, samples)})",
        "tokens": f"{tally.tokens:,}",
        "mean α": f"{tally.alpha_sum / tally.tokens:.3f}" if tally.tokens else "none",
        "mean log π_t − log π_θ": f"{tally.gain_sum / tally.gains:+.3f} nats a token" if tally.gains else "none",
    }
    reasons = {reason: f"{count:,} ({_share(count, samples)})" for reason, count in tally.reasons.most_common()}
    lengths = tally.lengths[True] + tally.lengths[False]
    longest = max(lengths, default=1)
    bin_width = max(1, -(-longest // BINS))
    ends = f"{color(0)}, {color(0.5)}, {color(1)}"
    settings = {name: str(value) for name, value in recipe.as_dict().items() if value != getattr(Recipe(), name, None)}
    by_length = {
        "accepted": (_binned(tally.lengths[True], bin_width), ACCEPTED_COLOR),
        "rejected": (_binned(tally.lengths[False], bin_width), REJECTED_COLOR),
    }
    by_alpha = {
        "tokens": ([tally.alphas[index] for index in range(BINS)], [color((i + 0.5) / BINS) for i in range(BINS)])
    }
    per_problem = Counter(tally.accepted_by_problem.values())
    by_problem = {"problems": ([per_problem[count] for count in range(recipe.n + 1)], ACCEPTED_COLOR)}
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Distillation data</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}{ADDED_STYLE}</style></head><body>
<h1>Distillation data: {accepted:,} of {samples:,} samples accepted</h1>
{_table(facts)}
<h2>what became of the samples</h2>
{_table(reasons)}
<h2>accepted samples of each problem</h2>
{bars(by_problem, ["0", str(recipe.n)])}
<h2>lengths, in tokens</h2>
{bars(by_length, ["0", str(bin_width * BINS)])}
<h2>α, the teacher's weight, over all tokens</h2>
{bars(by_alpha, ["0", "1"])}
<h2>examples</h2>
<p class="legend">student <span class="scale" style="background:linear-gradient(90deg, {ends})"></span> teacher</p>
{"".join(_example(sample) for sample in _chosen(tally))}
<h2>settings that are not the defaults</h2>
{_table(settings) if settings else "<p>none</p>"}
</body></html>
"""


def _chosen(tally: Tally) -> list[dict[str, Any]]:
    """Half accepted and half rejected samples, accepted first; if one kind is rare, more of the other."""
    accepted, rejected = tally.examples[True], tally.examples[False]
    half = EXAMPLES // 2
    num_accepted = max(min(len(accepted), half), min(len(accepted), EXAMPLES - len(rejected)))
    return accepted[:num_accepted] + rejected[: EXAMPLES - num_accepted]


def _example(sample: dict[str, Any]) -> str:
    verdict = "accepted" if sample["accepted"] else f"rejected: {sample['rejected_because']}"
    answers = f"answer {sample['sample_answer']!r}, reference {sample['answer']!r}"
    spans = "".join(
        f'<span style="background:{color(alpha)}" title="α {alpha:.3f}">{escape(piece)}</span>'
        for piece, alpha in zip(sample["tokens"], sample["alpha"], strict=True)
    )
    return (
        f'<div class="example"><p class="question">{escape(sample["question"])}</p><div class="text">{spans}</div>'
        f'<p class="verdict {"yes" if sample["accepted"] else "no"}">problem {sample["line"]}, sample '
        f"{sample['sample']}: {escape(verdict)}; {escape(answers)}</p></div>\n"
    )


def bars(series: Mapping[str, tuple[Sequence[int], str | Sequence[str]]], ends: Sequence[str]) -> str:
    """Stacked bars as SVG, with `ends` written under the first and the last."""
    counts = [values for values, _ in series.values()]
    num_bars = max(len(values) for values in counts)
    highest = max([sum(column) for column in zip(*counts, strict=True)] + [1])
    width, height = (WIDTH - MARGIN) / num_bars, HEIGHT - 40
    drawn = []
    tops = [0.0] * num_bars
    for number, (name, (values, fill)) in enumerate(series.items()):
        for column, value in enumerate(values):
            tall = value / highest * (height - 6)
            fills = fill if isinstance(fill, str) else fill[column]
            if value:
                drawn.append(
                    f'<rect x="{MARGIN + column * width + 1:.1f}" y="{height - tops[column] - tall:.1f}" '
                    f'width="{max(width - 2, 1):.1f}" height="{tall:.1f}" fill="{fills}">'
                    f"<title>{value:,}</title></rect>"
                )
            tops[column] += tall
        if isinstance(fill, str):
            drawn.append(
                f'<text x="{MARGIN + 8 + 110 * number}" y="{HEIGHT - 4}" style="fill:{fill}">{escape(name)}</text>'
            )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(", ".join(series))}">'
        f'<path d="M{MARGIN} 6V{height}H{WIDTH}" fill="none" stroke="rgb(214,211,209)"/>'
        f'<text x="0" y="14">{highest:,}</text><text x="{MARGIN}" y="{height + 14}">{escape(ends[0])}</text>'
        f'<text x="{WIDTH}" y="{height + 14}" text-anchor="end">{escape(ends[1])}</text>{"".join(drawn)}</svg>'
    )


def _binned(lengths: Sequence[int], bin_width: int) -> list[int]:
    counts = Counter(min(length // bin_width, BINS - 1) for length in lengths)
    return [counts[index] for index in range(BINS)]


def _table(rows: Mapping[str, str]) -> str:
    made = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items())
    return f"<table>{made}</table>"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"
