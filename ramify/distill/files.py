"""The files that a run writes into its folder."""

from __future__ import annotations

ANSWERS = "answers.jsonl"
SAMPLES = "samples.jsonl"
SETTINGS = "settings.json"
DATA = "data.jsonl"
REPORT = "report.html"
WRITTEN = frozenset({ANSWERS, SAMPLES, SETTINGS, DATA, REPORT})
