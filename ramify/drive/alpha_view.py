"""Pictures of a mixture: a sample's text coloured by alpha, and curves of alpha and both divergences.

A page is one file: no script, nothing fetched, all text escaped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from ramify.errors import InvalidInputError
from ramify.files import disk
from ramify.outputs import MixtureReport, RequestOutput, finite

PICTURES = (".png", ".svg", ".pdf")
WIDTH, HEIGHT, MARGIN = 860, 130, 34
SMALL_WIDTH, SMALL_HEIGHT = 300, 44

# Colours are variables, so that a page follows the reader's theme. A token's weight is a share of the student's or of
# the teacher's colour over a neutral one, which stands for alpha = 1/2.
STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1c1917; --soft: #57534e; --faint: #78716c; --line: #e7e5e4;
  --student: rgb(96,165,250); --neutral: #f5f5f4; --teacher: rgb(251,146,60);
  --student-line: rgb(37,99,235); --teacher-line: rgb(234,88,12); --alpha-line: rgb(68,64,60); }
@media (prefers-color-scheme: dark) { :root { --page: #171412; --ink: #f5f5f4; --soft: #d6d3d1; --faint: #a8a29e;
  --line: #44403c; --student: rgb(29,78,160); --neutral: #292524; --teacher: rgb(166,76,12);
  --student-line: rgb(96,165,250); --teacher-line: rgb(251,146,60); --alpha-line: rgb(214,211,209); } }
body { font: 16px/1.7 system-ui, sans-serif; max-width: 900px; margin: 2rem auto; padding: 0 1rem; color: var(--ink);
  background: var(--page); }
h1 { font-size: 1.25rem; } h2 { font-size: 1rem; margin: 1.6rem 0 .3rem; color: var(--soft); }
.text { white-space: pre-wrap; overflow-wrap: anywhere; padding: 1rem; border: 1px solid var(--line);
  border-radius: 8px; }
.text span { border-radius: 3px; padding: 1px 0; }
.weight { --mixed: color-mix(in srgb, var(--student) var(--s, 0%),
  color-mix(in srgb, var(--teacher) var(--t, 0%), var(--neutral))); background: var(--mixed); fill: var(--mixed); }
.legend { display: flex; align-items: center; gap: .6rem; font-size: .85rem; color: var(--soft); }
.scale { flex: 0 0 200px; height: 12px; border-radius: 6px;
  background: linear-gradient(90deg, var(--student), var(--neutral), var(--teacher)); }
svg { width: 100%; height: auto; overflow: visible; } svg text { font: 11px system-ui, sans-serif; fill: var(--faint); }
svg .weight { stroke: var(--faint); stroke-width: .5; } svg .axis { fill: none; stroke: var(--line); }
@media (max-width: 600px) { svg text { font-size: 22px; } }
"""
LEGEND = '<p class="legend">student <span class="scale"></span> teacher</p>'


def weight(alpha: float) -> str:
    """The attributes that give an element the colour of alpha: the student's at 0, the teacher's at 1."""
    lean = min(max(alpha, 0.0), 1.0) * 2 - 1
    return f'class="weight" style="--{"t" if lean > 0 else "s"}:{abs(lean):.0%}"'


def colored_text(pieces: Sequence[str], mixture: Sequence[MixtureReport]) -> str:
    """HTML: each token on its colour, with its numbers as a tooltip."""
    return "".join(
        f'<span {weight(report.alpha)} title="{_numbers(report)}">{escape(piece)}</span>'
        for piece, report in zip(pieces, mixture, strict=True)
    )


def write_history(path: Path, outputs: Sequence[RequestOutput]) -> None:
    """One line of JSON per sample."""
    with disk.writing(path), path.open("w", encoding="utf-8") as file:
        for prompt, output in enumerate(outputs):
            for sample in output.outputs:
                columns = list(zip(*(sample.mixture or ()), strict=True)) or [()] * len(MixtureReport._fields)
                entry = {
                    "prompt": prompt,
                    "index": sample.index,
                    "text": sample.text,
                    "token_ids": list(sample.token_ids),
                    **{
                        name: [finite(value) for value in values]
                        for name, values in zip(MixtureReport._fields, columns, strict=True)
                    },
                }
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def write_plot(path: Path, pieces: Sequence[str], mixture: Sequence[MixtureReport]) -> None:
    if path.suffix == ".html":
        with disk.writing(path):
            path.write_text(_page(pieces, mixture), encoding="utf-8")
    elif path.suffix in PICTURES:
        with disk.writing(path):
            _draw(path, mixture)
    else:
        raise InvalidInputError(f"plot writes .html, {', '.join(PICTURES)}; got {path.name!r}")


def _page(pieces: Sequence[str], mixture: Sequence[MixtureReport]) -> str:
    alphas = [report.alpha for report in mixture]
    divergences = {
        "KL(q ‖ student)": ([report.kl_theta for report in mixture], "var(--student-line)"),
        "KL(q ‖ teacher)": ([report.kl_teacher for report in mixture], "var(--teacher-line)"),
    }
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>A sample of two models</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>
<h1>A sample of two models, {len(mixture)} tokens</h1>
{LEGEND}
<div class="text">{colored_text(pieces, mixture)}</div>
<h2>alpha, the teacher's weight</h2>
{curves({"alpha": (alphas, "var(--alpha-line)")}, highest=1.0)}
<h2>divergences, in nats</h2>
{curves(divergences)}
</body></html>
"""


def curves(series: Mapping[str, tuple[Sequence[float], str]], highest: float | None = None) -> str:
    """Lines over the tokens as SVG; infinite values are gaps."""
    finite = [value for values, _ in series.values() for value in values if math.isfinite(value)]
    top = highest if highest is not None else max([*finite, 1e-9])
    width, height = WIDTH - MARGIN, HEIGHT - 24
    drawn = []
    for number, (name, (values, stroke)) in enumerate(series.items()):
        spacing = width / max(len(values) - 1, 1)
        commands, is_open = [], False
        for index, value in enumerate(values):
            if not math.isfinite(value):
                is_open = False
                continue
            x, y = MARGIN + index * spacing, 6 + (1 - value / top) * (height - 6)
            commands.append(f"{'L' if is_open else 'M'}{x:.1f} {y:.1f}")
            is_open = True
        drawn.append(f'<path d="{" ".join(commands)}" style="fill:none;stroke:{stroke};stroke-width:1.5"/>')
        drawn.append(
            f'<text x="{MARGIN + 8 + 130 * number}" y="{HEIGHT - 4}" style="fill:{stroke}">{escape(name)}</text>'
        )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(", ".join(series))} over the tokens">'
        f'<path d="M{MARGIN} 6V{height}H{WIDTH}" class="axis"/>'
        f'<text x="0" y="12">{top:.3g}</text><text x="0" y="{height}">0</text>{"".join(drawn)}</svg>'
    )


def small_curve(alphas: Sequence[float], reach: float = 0.5) -> str:
    """Alpha over the tokens as a small SVG without a style sheet: from 1/2 - reach to 1/2 + reach."""
    if not alphas:
        return ""
    spacing = SMALL_WIDTH / max(len(alphas) - 1, 1)
    heights = [(0.5 - (alpha - 0.5) / (2 * reach)) * SMALL_HEIGHT for alpha in alphas]
    points = " ".join(f"{index * spacing:.1f},{height:.1f}" for index, height in enumerate(heights))
    line = 'style="fill:none;stroke:currentColor;stroke-width:1;vector-effect:non-scaling-stroke"'
    return (
        f'<svg viewBox="0 0 {SMALL_WIDTH} {SMALL_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="alpha over the tokens" style="width:100%;height:{SMALL_HEIGHT}px;display:block;margin-top:.4em;'
        'border-top:1px solid rgba(128,128,128,.3);border-bottom:1px solid rgba(128,128,128,.3)">'
        f'<line x1="0" x2="{SMALL_WIDTH}" y1="{SMALL_HEIGHT / 2}" y2="{SMALL_HEIGHT / 2}" '
        'style="stroke:rgba(128,128,128,.5);stroke-dasharray:3 3;vector-effect:non-scaling-stroke"/>'
        f'<polyline points="{points}" {line}/></svg>'
    )


def _draw(path: Path, mixture: Sequence[MixtureReport]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidInputError(
            f"plot needs matplotlib to write {path.suffix}: install it, or write a page, .html"
        ) from None
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot([report.alpha for report in mixture], color="#44403c", linewidth=1.2)
    above.set(ylabel="alpha (teacher's weight)", ylim=(-0.02, 1.02))
    below.plot(
        [report.kl_theta for report in mixture], color="#2563eb", linewidth=2.4, alpha=0.6, label="KL(q ‖ student)"
    )
    below.plot([report.kl_teacher for report in mixture], color="#ea580c", linewidth=1.2, label="KL(q ‖ teacher)")
    below.set(xlabel="token", ylabel="nats")
    below.legend(frameon=False)
    figure.savefig(path)


def _numbers(report: MixtureReport) -> str:
    return (
        f"alpha {report.alpha:.3f} · KL {report.kl_theta:.3g} / {report.kl_teacher:.3g} · "
        f"log p {report.logprob_theta:.2f} student, {report.logprob_teacher:.2f} teacher"
    )
