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
from ramify.outputs import MixtureReport, RequestOutput

PICTURES = (".png", ".svg", ".pdf")
# The colours of alpha = 0, 1/2 and 1.
STUDENT, NEUTRAL, TEACHER = (96, 165, 250), (245, 245, 244), (251, 146, 60)
WIDTH, HEIGHT, MARGIN = 860, 130, 34

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.7 system-ui, sans-serif; max-width: 900px; margin: 2rem auto; padding: 0 1rem; color: #1c1917; }
h1 { font-size: 1.25rem; } h2 { font-size: 1rem; margin: 1.6rem 0 .3rem; color: #57534e; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; padding: 1rem; border: 1px solid #e7e5e4; border-radius: 8px; }
.text span { border-radius: 3px; padding: 1px 0; }
.legend { display: flex; align-items: center; gap: .6rem; font-size: .85rem; color: #57534e; }
.scale { flex: 0 0 200px; height: 12px; border-radius: 6px; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: #78716c; }
"""


def color(alpha: float) -> str:
    """Between the student's colour at 0, near white at 1/2 and the teacher's colour at 1."""
    share = min(max(alpha, 0.0), 1.0) * 2
    low, high = (STUDENT, NEUTRAL) if share <= 1 else (NEUTRAL, TEACHER)
    share = share if share <= 1 else share - 1
    return "rgb({},{},{})".format(*(round(a + (b - a) * share) for a, b in zip(low, high, strict=True)))


def colored_text(pieces: Sequence[str], mixture: Sequence[MixtureReport]) -> str:
    """HTML: each token on its colour, with its numbers as a tooltip."""
    return "".join(
        f'<span style="background:{color(report.alpha)}" title="{_numbers(report)}">{escape(piece)}</span>'
        for piece, report in zip(pieces, mixture, strict=True)
    )


def write_history(path: Path, outputs: Sequence[RequestOutput]) -> None:
    """One line of JSON per sample."""
    with path.open("w", encoding="utf-8") as file:
        for prompt, output in enumerate(outputs):
            for sample in output.outputs:
                columns = list(zip(*(sample.mixture or ()), strict=True)) or [()] * len(MixtureReport._fields)
                entry = {
                    "prompt": prompt,
                    "index": sample.index,
                    "text": sample.text,
                    "token_ids": list(sample.token_ids),
                    **{
                        name: [_as_json(value) for value in values]
                        for name, values in zip(MixtureReport._fields, columns, strict=True)
                    },
                }
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def write_plot(path: Path, pieces: Sequence[str], mixture: Sequence[MixtureReport]) -> None:
    if path.suffix == ".html":
        path.write_text(_page(pieces, mixture), encoding="utf-8")
    elif path.suffix in PICTURES:
        _draw(path, mixture)
    else:
        raise InvalidInputError(f"plot writes .html, {', '.join(PICTURES)}; got {path.name!r}")


def _page(pieces: Sequence[str], mixture: Sequence[MixtureReport]) -> str:
    ends = f"{color(0)}, {color(0.5)}, {color(1)}"
    alphas = [report.alpha for report in mixture]
    divergences = {
        "KL(q ‖ student)": ([report.kl_theta for report in mixture], "rgb(37,99,235)"),
        "KL(q ‖ teacher)": ([report.kl_teacher for report in mixture], "rgb(234,88,12)"),
    }
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>A sample of two models</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>
<h1>A sample of two models, {len(mixture)} tokens</h1>
<p class="legend">student <span class="scale" style="background:linear-gradient(90deg, {ends})"></span> teacher</p>
<div class="text">{colored_text(pieces, mixture)}</div>
<h2>alpha, the teacher's weight</h2>
{curves({"alpha": (alphas, "rgb(68,64,60)")}, highest=1.0)}
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
        drawn.append(f'<path d="{" ".join(commands)}" fill="none" stroke="{stroke}" stroke-width="1.5"/>')
        drawn.append(
            f'<text x="{MARGIN + 8 + 130 * number}" y="{HEIGHT - 4}" style="fill:{stroke}">{escape(name)}</text>'
        )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(", ".join(series))} over the tokens">'
        f'<path d="M{MARGIN} 6V{height}H{WIDTH}" fill="none" stroke="rgb(214,211,209)"/>'
        f'<text x="0" y="12">{top:.3g}</text><text x="0" y="{height}">0</text>{"".join(drawn)}</svg>'
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


def _as_json(value: float | bool) -> float | bool | None:
    """JSON has no infinity: null stands for it."""
    return value if math.isfinite(value) else None
