"""Tally: what became of all samples, gathered in one pass, and how sure the share of accepted ones is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

BINS = 20
EXAMPLES = 12
ACCEPTED = "accepted"
NORMAL_95 = 1.96  # standard deviations around the mean that hold 95 % of a normal distribution


@dataclass
class Tally:
    reasons: Counter[str] = field(default_factory=Counter)  # why samples were rejected, and how many were accepted
    lengths: dict[bool, list[int]] = field(default_factory=lambda: {True: [], False: []})
    alphas: Counter[int] = field(default_factory=Counter)
    of_problem: Counter[int] = field(default_factory=Counter)  # samples of each problem
    accepted_of_problem: Counter[int] = field(default_factory=Counter)
    cut_off: int = 0  # rejected samples that ran into max_tokens
    from_oracle: set[int] = field(default_factory=set)  # problems whose answers an oracle wrote
    first_error: str | None = None
    tokens: int = 0
    alpha_sum: float = 0.0
    gain_sum: float = 0.0
    gains: int = 0
    examples: dict[bool, list[dict[str, Any]]] = field(default_factory=lambda: {True: [], False: []})

    @property
    def samples(self) -> int:
        return self.of_problem.total()

    @property
    def accepted(self) -> int:
        return self.reasons[ACCEPTED]

    def rejected(self) -> Counter[str]:
        """How many samples for which reason, the commonest first."""
        return Counter({reason: count for reason, count in self.reasons.most_common() if reason != ACCEPTED})

    def add(self, sample: dict[str, Any]) -> None:
        accepted, line = bool(sample["accepted"]), int(sample["line"])
        self.reasons[ACCEPTED if accepted else sample["rejected_because"]] += 1
        self.lengths[accepted].append(len(sample["token_ids"]))
        self.of_problem[line] += 1
        self.accepted_of_problem[line] += int(accepted)
        self.cut_off += int(not accepted and sample.get("finish_reason") == "length")
        self.first_error = self.first_error or sample.get("error")
        if sample.get("answer_by") == "oracle":
            self.from_oracle.add(line)
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

    def interval(self) -> tuple[float, float]:
        """Between which shares of accepted samples the true one lies, with 95 % confidence; (0, 1) without samples.

        Wilson's interval. Samples of one problem resemble each other, so as many count as would be as sure of the
        share if all were independent: by the spread between problems, at least one for each problem.
        """
        samples, problems = self.samples, len(self.of_problem)
        if not samples:
            return 0.0, 1.0
        share = self.accepted / samples
        deviations = [self.accepted_of_problem[line] - share * count for line, count in self.of_problem.items()]
        variance = sum(deviation**2 for deviation in deviations) / samples**2 * problems / max(problems - 1, 1)
        independent = float(problems)
        if 0 < share < 1:
            independent = min(samples, max(problems, share * (1 - share) / max(variance, 1e-12)))
        spread = NORMAL_95**2 / independent
        middle = (share + spread / 2) / (1 + spread)
        half = NORMAL_95 * sqrt(share * (1 - share) / independent + spread / (4 * independent)) / (1 + spread)
        return max(middle - half, 0.0), min(middle + half, 1.0)


def percent(part: float, whole: float = 1.0) -> str:
    """A share for people: 68%; a small one keeps a digit more, so that it is not read as nothing."""
    if not whole:
        return "none"
    share = part / whole
    return f"{share:.1%}" if 0 < share < 0.1 else f"{share:.0%}"
