"""Draws more_filters.png: what the rules beyond top-k, top-p and min-p make of the same distribution.

python docs/pictures/more_filters.py
"""

from __future__ import annotations

from pathlib import Path

from docs.pictures.filters import Panel, draw

PANELS: tuple[Panel, ...] = (
    ("top_n_sigma=2", "within 2 standard deviations of the largest logit", {"top_n_sigma": 2.0}),
    ("typical_p=0.5", "surprise nearest to the entropy, 50% in all", {"typical_p": 0.5}),
    ("epsilon_cutoff=0.02", "what has at least 2% stays", {"epsilon_cutoff": 0.02}),
    ("eta_cutoff=0.04", "at least 4%, less where the model is unsure", {"eta_cutoff": 0.04}),
    ("top_a=0.4", "at least 40% of the largest squared", {"top_a": 0.4}),
    ("p_less=True", "as likely as two draws are to agree", {"p_less": True}),
    ("xtc_probability=1", "of all above 10% only the last stays", {"xtc_probability": 1.0, "xtc_threshold": 0.1}),
    ("smoothing_factor=0.3", "the likely draw together, the tail falls away", {"smoothing_factor": 0.3}),
    ("dynatemp_range=0.9", "the model is rather sure here: colder", {"dynatemp_range": 0.9}),
)

if __name__ == "__main__":
    draw(PANELS, Path(__file__).with_suffix(".png"))
