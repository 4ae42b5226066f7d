"""Draws filters.png: what temperature, top-k, top-p and min-p make of one real next-token distribution.

Every number is the engine's own: with logprobs_mode="processed" it reports the distribution that it draws from.

    python docs/pictures/filters.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ramify import LLM, SamplingParams

PROMPT = "She opened the door and saw a"
NUM_TOKENS = 13  # shown by name; all others are one bar
Panel = tuple[str, str, dict[str, Any]]  # title, meaning, controls
PANELS: tuple[Panel, ...] = (
    ("temperature=1", "the model's own distribution", {}),
    ("temperature=0.5", "sharper: the likely gain, nothing is removed", {"temperature": 0.5}),
    ("temperature=1.2", "flatter: the unlikely gain", {"temperature": 1.2}),
    ("top_k=3", "the 3 likeliest stay", {"top_k": 3}),
    ("top_p=0.5", "the fewest that together reach 50% stay", {"top_p": 0.5}),
    ("min_p=0.2", "what has 20% of the likeliest's share stays", {"min_p": 0.2}),
)
WIDEST, LABEL_WIDTH = 0.66, 0.1  # in probability
KEPT, REMOVED, OWN, INK = "#1f6f8b", "#d4d4d4", "#e07a3f", "#333333"


def distribution(llm: LLM, **controls: Any) -> dict[str, float]:
    """The likeliest tokens after the controls, with their probabilities."""
    params = SamplingParams(max_tokens=1, logprobs=20, seed=0, **controls)
    [output] = llm.generate(PROMPT, params, use_tqdm=False)
    row = (output.outputs[0].logprobs or [])[0]
    likeliest = sorted(row.values(), key=lambda item: item.rank)[:20]
    return {(item.decoded_token or "").strip(): math.exp(item.logprob) for item in likeliest}


def draw(panels: Sequence[Panel], target: Path) -> None:
    """One panel each, three in a row."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    llm = LLM(logprobs_mode="processed")
    own = distribution(llm)
    names = list(own)[:NUM_TOKENS]
    rest = f"{llm.architecture.vocab_size - NUM_TOKENS:,} others"
    before = [own[name] for name in names]
    before.append(1 - sum(before))

    plt.rcParams.update({"font.size": 11, "text.color": INK, "axes.labelcolor": INK, "font.family": "DejaVu Sans"})
    height = -(-len(panels) // 3)
    figure, axes = plt.subplots(height, 3, figsize=(13.5, 4.6 * height), sharex=True, sharey=True)
    places = range(len(before))
    for axis, (title, meaning, controls) in zip(axes.flat, panels, strict=True):
        kept = distribution(llm, **controls)
        after = [kept.get(name, 0.0) for name in names]
        after.append(max(0.0, 1 - sum(after)))
        if after[-1] < 1e-6:
            after[-1] = 0.0
        for place, old, new in zip(places, before, after, strict=True):
            axis.barh(place, new or old, color=KEPT if new else REMOVED, height=0.72)
            label = f"{new:.1%}" if new else "removed"
            # Behind the bar; behind the mark too, where that is so near that it would stand in the number.
            end = old if not new or new < old < new + LABEL_WIDTH else new
            axis.text(
                end + 0.008,
                place,
                label,
                va="center",
                fontsize=9.5,
                color=INK if new else "#9a9a9a",
            )
            if new and controls:
                axis.plot([old, old], [place - 0.36, place + 0.36], color=OWN, linewidth=2)
        axis.set_title(title, loc="left", fontweight="bold", fontsize=13, family="DejaVu Sans Mono", pad=24)
        axis.text(0, 1.022, meaning, transform=axis.transAxes, fontsize=10.5, color="#666666")
        axis.set_xlim(0, WIDEST)
        axis.set_yticks(list(places), [*names, rest])
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axis.tick_params(length=0, labelcolor=INK)
        axis.grid(axis="x", color="#eeeeee")
        axis.set_axisbelow(True)
        for side in ("top", "right", "bottom"):
            axis.spines[side].set_visible(False)
        axis.spines["left"].set_color("#bbbbbb")
        axis.axhline(NUM_TOKENS - 0.5, color="#bbbbbb", linewidth=0.8, linestyle=(0, (4, 3)))
    axes[0][0].invert_yaxis()
    figure.suptitle(f"“{PROMPT} …”: what the next word is drawn from", x=0.012, ha="left", fontsize=16)
    figure.legend(
        handles=[
            Patch(color=KEPT, label="can be drawn: probability afterwards (together 100%)"),
            Line2D([], [], color=OWN, linewidth=2, label="probability before"),
            Patch(color=REMOVED, label="removed: its probability before"),
        ],
        loc="lower center",
        ncols=3,
        frameon=False,
        fontsize=11,
    )
    figure.tight_layout(rect=(0, 0.045, 1, 0.985), h_pad=2.2)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    draw(PANELS, Path(__file__).with_suffix(".png"))
