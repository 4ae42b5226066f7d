"""What an engine has done so far: each step's facts, added up."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the engine started."""

    steps: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    blocks_in_use_peak: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
