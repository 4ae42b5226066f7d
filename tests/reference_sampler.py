"""The sampler as its promises read, one row at a time, in plain Python and float64: slow, obvious, and only for tests.

    min_tokens, allowed ids, bad words, bias -> penalties -> processors -> temperature -> top-k -> top-p -> min-p

Greedy rows skip the temperature and the filters. It shares no line with ramify/sampling.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from ramify import SamplingParams

NEVER = -math.inf
FLOAT32_ROUNDING = 2.0**-24  # the largest relative error of one rounding


@dataclass(frozen=True, slots=True)
class ReferenceRow:
    """What may be drawn, and how likely it is.

    `rounding` is how far float32 may put a logit from where it stands here; `undecided` says that some border lies so
    close to a token, or to the mass of some tokens, that float32 may put it on the other side.
    """

    logits: list[float]  # minus infinity: cannot be drawn
    probabilities: list[float]
    kept: set[int]
    rounding: float
    undecided: bool


class _Filter:
    """Logits on their way through the filters, and whether a border came too close to call."""

    def __init__(self, logits: list[float], rounding: float) -> None:
        self.logits = logits
        self.rounding = rounding
        self.undecided = False

    def keep_from(self, border: float) -> None:
        """What is at least the border stays, ties included."""
        self.undecided |= any(0 < abs(value - border) < self.rounding for value in self.logits if value > NEVER)
        self.logits = [value if value >= border else NEVER for value in self.logits]

    def top_k(self, count: int) -> None:
        in_order = sorted(self.logits, reverse=True)
        if 0 < count < len(in_order):
            self.keep_from(in_order[count - 1])

    def top_p(self, wanted: float) -> None:
        """The smallest set whose mass reaches what is wanted, of all the mass that is left."""
        if wanted >= 1:
            return
        in_order = sorted((value for value in self.logits if value > NEVER), reverse=True)
        masses = [math.exp(value - in_order[0]) for value in in_order]
        total = math.fsum(masses)
        reached = 0.0
        crossing = None
        tolerance = 1e-6 + self.rounding
        for place, mass in enumerate(masses):
            reached += mass / total
            is_last_of_equals = place + 1 == len(in_order) or in_order[place + 1] < in_order[place]
            if is_last_of_equals and place + 1 < len(in_order):
                self.undecided |= abs(reached - wanted) < tolerance
            if crossing is None and reached >= wanted:
                crossing = in_order[place]
            if reached > wanted + tolerance:
                break
        if crossing is not None:
            self.keep_from(crossing)

    def min_p(self, share: float) -> None:
        if share > 0:
            self.keep_from(max(self.logits) + math.log(share))


def reference_filters(
    logits: Sequence[float], *, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0, rounding: float = 0.0
) -> ReferenceRow:
    row = _Filter(list(logits), rounding)
    row.top_k(top_k)
    row.top_p(top_p)
    row.min_p(min_p)
    return _finished(row.logits, rounding, row.undecided)


def reference_controls(
    logits: Sequence[float],
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    end_token_ids: Collection[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> list[float]:
    """Everything that comes before the temperature."""
    row = [float(value) for value in logits]
    if len(output) < params.min_tokens:
        for token_id in end_token_ids:
            row[token_id] = NEVER
    if params.allowed_token_ids is not None:
        row = [value if token_id in params.allowed_token_ids else NEVER for token_id, value in enumerate(row)]
    for word in bad_words:
        beginning = list(word[:-1])
        written = list(output[len(output) - len(beginning) :]) if len(beginning) <= len(output) else None
        if written == beginning:
            row[word[-1]] = NEVER
    for token_id, bias in (params.logit_bias or {}).items():
        row[token_id] += bias
    for token_id in {*prompt, *output}:
        if row[token_id] > 0:
            row[token_id] /= params.repetition_penalty
        else:
            row[token_id] *= params.repetition_penalty
    for token_id, count in Counter(output).items():
        row[token_id] -= params.frequency_penalty * count + params.presence_penalty
    for processor in params.logits_processors or ():
        row = processor([*prompt, *output], torch.tensor(row, dtype=torch.float64)).tolist()
    return row


def reference_row(
    logits: Sequence[float],
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    end_token_ids: Collection[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    slack: float = 0.0,
) -> ReferenceRow:
    """`slack` is how far the logits themselves may be from those of whoever is compared."""
    row = reference_controls(
        logits, params, prompt=prompt, output=output, end_token_ids=end_token_ids, bad_words=bad_words
    )
    possible = [value for value in row if value > NEVER]
    if not possible:
        return ReferenceRow(row, [0.0] * len(row), set(), 0.0, undecided=False)
    top = max(possible)
    # Logits further down have no weight in float64 either; how they are rounded does not matter.
    largest = max(abs(value) for value in possible if value >= top - 700 * max(1.0, params.temperature))
    if params.temperature == 0:
        return _finished(row, slack + FLOAT32_ROUNDING * largest, undecided=False)
    scaled = [(value - top) / params.temperature for value in row]
    # One rounding when a control changed the logit, one when it was divided; the temperature magnifies the first.
    rounding = (slack + 2 * FLOAT32_ROUNDING * largest) / params.temperature
    return reference_filters(scaled, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, rounding=rounding)


def _finished(logits: list[float], rounding: float, undecided: bool) -> ReferenceRow:
    top = max(logits)
    weights = [math.exp(value - top) for value in logits]
    total = math.fsum(weights)
    kept = {token_id for token_id, value in enumerate(logits) if value > NEVER}
    return ReferenceRow(logits, [weight / total for weight in weights], kept, rounding, undecided)
