"""`report.html`: acceptance, advice, lengths, α, examples. One file: no script, nothing fetched, all text escaped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ramify.distill.recipe import Recipe
from ramify.distill.tally import BINS, EXAMPLES, Tally, percent
from ramify.drive.alpha_view import LEGEND, STYLE, weight

WIDTH, HEIGHT, MARGIN = 860, 170, 34
FOLDED_TOKENS, FOLDED_CHARACTERS = 80, 400  # what is longer is folded behind its beginning
_FLAG = re.compile(r"(?<!\w)--[a-z-]+")
ADDED_STYLE = """
:root { --yes: rgb(34,139,94); --no: rgb(190,84,46); --note: #fef3c7; }
@media (prefers-color-scheme: dark) { :root { --yes: rgb(74,190,134); --no: rgb(240,140,100); --note: #3b2f12; } }
h1 { overflow-wrap: anywhere; margin-bottom: .2rem; } .lead { margin: 0 0 1rem; color: var(--soft); }
table { border-collapse: collapse; } td, th { padding: .15rem 1.2rem .15rem 0; text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; white-space: pre-wrap; }
.advice code { font: inherit; white-space: nowrap; }
.advice { background: var(--note); border-radius: 8px; padding: .6rem 1rem .6rem 2rem; }
.example { margin: 1.4rem 0; } .example .text { font-size: .92rem; line-height: 1.6; }
.question { color: var(--soft); white-space: pre-wrap; overflow-wrap: anywhere; }
.verdict { font-size: .85rem; } .yes { color: var(--yes); } .no { color: var(--no); }
svg .yes { fill: var(--yes); } svg .no { fill: var(--no); }
details, summary { display: inline; } summary { list-style: none; cursor: pointer; }
summary::-webkit-details-marker { display: none; }
.more { color: var(--soft); text-decoration: underline; background: none; } details[open] .more { display: none; }
details.settings, details.settings summary { display: block; }
"""


def page(
    tally: Tally, recipe: Recipe, num_problems: int, *, preset: str | None = None, advised: Sequence[str] = ()
) -> str:
    headline = f"{preset or 'own settings'}: {models(recipe)}"
    lengths = tally.lengths[True] + tally.lengths[False]
    bin_width = max(1, -(-max(lengths, default=1) // BINS))
    by_length = {
        "accepted": (_binned(tally.lengths[True], bin_width), 'class="yes"'),
        "rejected": (_binned(tally.lengths[False], bin_width), 'class="no"'),
    }
    by_alpha = {
        "tokens": ([tally.alphas[index] for index in range(BINS)], [weight((i + 0.5) / BINS) for i in range(BINS)])
    }
    per_problem = Counter(tally.accepted_of_problem.values())
    colors = ['class="no"'] + ['class="yes"'] * recipe.n
    by_problem = {"problems": ([per_problem[count] for count in range(recipe.n + 1)], colors)}
    reasons = {reason: f"{count:,} ({percent(count, tally.samples)})" for reason, count in tally.reasons.most_common()}
    default = Recipe().as_dict()
    settings = {name: str(value) for name, value in recipe.as_dict().items() if value != default[name]}
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Distillation data, {escape(headline)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}{ADDED_STYLE}</style></head><body>
<h1>{escape(headline)}</h1>
<p class="lead">Distillation data: {tally.accepted:,} of {tally.samples:,} samples accepted</p>
{_advice(advised)}{_table(_facts(tally, recipe, num_problems))}
<h2>what became of the samples</h2>
{_table(reasons)}
<h2>accepted samples of each problem</h2>
{bars(by_problem, ["0", str(recipe.n)])}
<h2>lengths, in tokens</h2>
{bars(by_length, ["0", str(bin_width * BINS)])}
<h2>α, the teacher's weight, over all tokens</h2>
{bars(by_alpha, ["0", "1"])}
<h2>examples</h2>
{LEGEND}
{"".join(_example(sample) for sample in _chosen(tally))}
<details class="settings"><summary><h2>settings that are not the defaults ({len(settings)})</h2></summary>
{_table(settings)}</details>
</body></html>
"""


def models(recipe: Recipe) -> str:
    if recipe.model_teacher == recipe.model_theta:
        return f"{recipe.model_teacher} as teacher and student"
    return f"{recipe.model_teacher} as teacher, {recipe.model_theta} as student"


def _facts(tally: Tally, recipe: Recipe, num_problems: int) -> dict[str, str]:
    low, high = tally.interval()
    facts = {
        "problems": f"{len(tally.of_problem):,} of {num_problems:,}",
        "with an accepted sample": f"{sum(1 for count in tally.accepted_of_problem.values() if count):,}",
        "samples": f"{tally.samples:,}",
        "accepted": f"{tally.accepted:,} ({percent(tally.accepted, tally.samples)}; 95 % confidence: "
        f"{percent(low)} to {percent(high)})",
        "tokens": f"{tally.tokens:,}",
        "mean α": f"{tally.alpha_sum / tally.tokens:.3f}" if tally.tokens else "none",
        "mean log π_t − log π_θ": f"{tally.gain_sum / tally.gains:+.3f} nats a token" if tally.gains else "none",
    }
    if tally.from_oracle:
        facts["answers by the oracle"] = f"{len(tally.from_oracle):,} ({recipe.oracle})"
    return facts


def _advice(advised: Sequence[str]) -> str:
    if not advised:
        return ""
    unbroken = (_FLAG.sub(r"<code>\g<0></code>", escape(line)) for line in advised)
    lines = "".join(f"<li>{line}</li>" for line in unbroken)
    return f'<h2>what to change</h2>\n<ul class="advice">{lines}</ul>\n'


def _chosen(tally: Tally) -> list[dict[str, Any]]:
    """Half accepted and half rejected samples, accepted first; if one kind is rare, more of the other."""
    accepted, rejected = tally.examples[True], tally.examples[False]
    half = EXAMPLES // 2
    num_accepted = max(min(len(accepted), half), min(len(accepted), EXAMPLES - len(rejected)))
    return accepted[:num_accepted] + rejected[: EXAMPLES - num_accepted]


def _example(sample: dict[str, Any]) -> str:
    verdict = "accepted" if sample["accepted"] else f"rejected: {sample['rejected_because']}"
    answers = f"answer {sample['sample_answer']!r}, reference {sample['answer']!r}"
    spans = [
        f'<span {weight(alpha)} title="α {alpha:.3f}">{escape(piece)}</span>'
        for piece, alpha in zip(sample["tokens"], sample["alpha"], strict=True)
    ]
    text = "".join(spans)
    if len(spans) > FOLDED_TOKENS:
        rest = len(spans) - FOLDED_TOKENS
        text = _folded("".join(spans[:FOLDED_TOKENS]), "".join(spans[FOLDED_TOKENS:]), f"{rest} more tokens")
    return (
        f'<div class="example"><div class="question">{_question(sample["question"])}</div>'
        f'<div class="text">{text}</div>'
        f'<p class="verdict {"yes" if sample["accepted"] else "no"}">problem {sample["line"]}, sample '
        f"{sample['sample']}: {escape(verdict)}; {escape(answers)}</p></div>\n"
    )


def _question(question: str) -> str:
    if len(question) <= FOLDED_CHARACTERS:
        return escape(question)
    start, rest = question[:FOLDED_CHARACTERS], question[FOLDED_CHARACTERS:]
    return _folded(escape(start), escape(rest), f"{len(rest):,} more characters")


def _folded(start: str, rest: str, more: str) -> str:
    return f'<details><summary>{start}<span class="more"> … {more}</span></summary>{rest}</details>'


def bars(series: Mapping[str, tuple[Sequence[int], str | Sequence[str]]], ends: Sequence[str]) -> str:
    """Stacked bars as SVG, with `ends` written under the first and the last; a series has attributes, or each bar."""
    counts = [values for values, _ in series.values()]
    num_bars = max(len(values) for values in counts)
    highest = max([sum(column) for column in zip(*counts, strict=True)] + [1])
    width, height = (WIDTH - MARGIN) / num_bars, HEIGHT - 40
    drawn = []
    tops = [0.0] * num_bars
    for number, (name, (values, attributes)) in enumerate(series.items()):
        for column, value in enumerate(values):
            tall = value / highest * (height - 6)
            own = attributes if isinstance(attributes, str) else attributes[column]
            if value:
                drawn.append(
                    f'<rect x="{MARGIN + column * width + 1:.1f}" y="{height - tops[column] - tall:.1f}" '
                    f'width="{max(width - 2, 1):.1f}" height="{tall:.1f}" {own}><title>{value:,}</title></rect>'
                )
            tops[column] += tall
        if isinstance(attributes, str):
            drawn.append(f'<text x="{MARGIN + 60 + 150 * number}" y="{HEIGHT - 4}" {attributes}>{escape(name)}</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(", ".join(series))}">'
        f'<path d="M{MARGIN} 6V{height}H{WIDTH}" class="axis"/>'
        f'<text x="0" y="14">{highest:,}</text><text x="{MARGIN}" y="{HEIGHT - 4}">{escape(ends[0])}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 4}" text-anchor="end">{escape(ends[1])}</text>{"".join(drawn)}</svg>'
    )


def _binned(lengths: Sequence[int], bin_width: int) -> list[int]:
    counts = Counter(min(length // bin_width, BINS - 1) for length in lengths)
    return [counts[index] for index in range(BINS)]


def _table(rows: Mapping[str, str]) -> str:
    made = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items())
    return f"<table>{made}</table>"
