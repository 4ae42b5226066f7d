"""Controls, in their order: which tokens a row may not draw, and what others cost or gain.

    min_tokens, allowed ids, grammars, bad words, repeated n-grams, bias, penalties, the cost of repetitions (dry),
    callers' processors, distance from siblings

Each acts on the rows that ask for it, and returns its argument where none does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ramify.engine.demands import LARGEST
from ramify.engine.plan import Draw
from ramify.sampling import processors
from ramify.sampling.lookback import Ids, completes_repeated, longest_repeats
from ramify.sampling.piece import Rows
from ramify.sampling.settings import pairs_of_outputs, pairs_of_seen
from ramify.sampling.user_processors import run_processors
from ramify.structured.mask_threads import Mask
from ramify.structured.matcher import Asked, GrammarFaultError, flags_of, num_words, write_masks

Control = Callable[[Tensor, Rows], Tensor]


def control(logits: Tensor, rows: Rows) -> Tensor:
    """All of them."""
    for each in CONTROLS:
        logits = each(logits, rows)
    return logits


def ban_early_ends(logits: Tensor, rows: Rows) -> Tensor:
    if not rows.settings.has_min_tokens:
        return logits
    banned = [
        (row, token_id)
        for row, draw in enumerate(rows.draws)
        if draw.position < draw.demands.params.min_tokens
        for token_id in draw.demands.end_token_ids
    ]
    return processors.ban(logits, *_columns(banned, logits)) if banned else logits


def keep_allowed(logits: Tensor, rows: Rows) -> Tensor:
    allowed = rows.settings.allowed
    return logits if allowed is None else processors.allow_only(logits, *allowed)


def follow_grammars(logits: Tensor, rows: Rows) -> Tensor:
    """Only what goes on with a text of the row's grammar. Both of two models' logits get the same mask."""
    if not rows.grammatical:
        return logits
    kept = logits.clone()
    for row, allowed in rows.grammatical.items():
        kept[row].masked_fill_(~allowed, -torch.inf)
    return kept


def find_grammatical(rows: Rows, vocab_size: int, device: torch.device) -> None:
    """What the rows' grammars allow, on the thread that asks: siblings share matchers, and threads must not."""
    following = [row for row, draw in enumerate(rows.draws) if draw.matcher is not None]
    if not following:
        return
    found: dict[int, Mask] = {}
    asked = {
        row: Asked(draw.matcher, draw.output)
        for row in following
        if (draw := rows.draws[row]).matcher is not None and not draw.presumed
    }
    if asked:
        masks = np.zeros((len(asked), num_words(asked.values())), np.uint32)
        faults = write_masks(list(asked.values()), masks)
        rows.faults.update({row: faults[number] for number, row in enumerate(asked) if number in faults})
        found = {row: masks[number] for number, row in enumerate(asked) if number not in faults}
    for row in following:
        draw = rows.draws[row]
        if row in asked or draw.matcher is None:
            continue
        try:
            mask = draw.matcher.allowed_after(draw.output, draw.presumed)
        except GrammarFaultError as fault:
            rows.faults[row] = str(fault)
            continue
        if mask is not None:
            found[row] = mask
    for row, mask in found.items():
        rows.grammatical[row] = torch.from_numpy(flags_of(mask, vocab_size)).to(device)


def ban_bad_words(logits: Tensor, rows: Rows) -> Tensor:
    """The last token of a word is banned where the tokens before it have just been written."""
    if not rows.settings.has_bad_words:
        return logits
    banned = [
        (row, word[-1])
        for row, draw in enumerate(rows.draws)
        for word in draw.demands.bad_words
        if len(word) == 1 or tuple(draw.output[-len(word) + 1 :]) == word[:-1]
    ]
    return processors.ban(logits, *_columns(banned, logits)) if banned else logits


def ban_repeated(logits: Tensor, rows: Rows) -> Tensor:
    """No token that would complete an n-gram of prompt and output."""
    if not rows.settings.has_ngrams:
        return logits
    banned = [
        (row, token_id)
        for row, draw in enumerate(rows.draws)
        if (size := draw.demands.params.no_repeat_ngram_size)
        for token_id in completes_repeated(_seen(draw, rows.role), size).tolist()
    ]
    return processors.ban(logits, *_columns(banned, logits)) if banned else logits


def add_bias(logits: Tensor, rows: Rows) -> Tensor:
    bias = rows.settings.bias
    return logits if bias is None else processors.add_bias(logits, *bias)


def penalise_repetition(logits: Tensor, rows: Rows) -> Tensor:
    penalties = rows.settings.repetition
    if penalties is None:
        return logits
    seen_rows, token_ids = pairs_of_seen(rows.draws, rows.role, logits.shape[1], logits.device)
    return processors.penalise_repetition(logits, seen_rows, token_ids, penalties[seen_rows])


def penalise_frequency(logits: Tensor, rows: Rows) -> Tensor:
    frequency, presence = rows.settings.frequency, rows.settings.presence
    if frequency is None or presence is None:
        return logits
    seen, token_ids, counts = pairs_of_outputs(rows.draws, logits.shape[1], logits.device)
    return processors.penalise_frequency(
        logits, seen, token_ids, counts=counts, frequency=frequency[seen], presence=presence[seen]
    )


def charge_repetition(logits: Tensor, rows: Rows) -> Tensor:
    """DRY: a token that would go on with a repetition loses more the longer the repetition is."""
    if not rows.settings.is_dry:
        return logits
    charged = [
        (row, token_id, -cost)
        for row, draw in enumerate(rows.draws)
        if draw.demands.params.dry_multiplier
        for token_id, cost in _costs(draw, rows.role)
    ]
    if not charged:
        return logits
    where = _columns([(row, token_id) for row, token_id, _ in charged], logits)
    return processors.add_bias(logits, *where, logits.new_tensor([amount for _, _, amount in charged]))


def call_processors(logits: Tensor, rows: Rows) -> Tensor:
    if not rows.settings.has_processors:
        return logits
    return run_processors(logits, rows.draws, rows.role, rows.faults)


def push_from_siblings(logits: Tensor, rows: Rows) -> Tensor:
    """Diverse sampling: a token loses the penalty for every earlier sibling that took it in this step."""
    if not rows.settings.is_diverse:
        return logits
    pushed = [
        (row, token_id, -draw.demands.diversity_penalty)
        for row, draw in enumerate(rows.draws)
        if draw.demands.diversity_penalty
        for token_id in rows.taken.get(draw.request_id, ())
    ]
    if not pushed:
        return logits
    where = _columns([(row, token_id) for row, token_id, _ in pushed], logits)
    return processors.add_bias(logits, *where, logits.new_tensor([amount for _, _, amount in pushed]))


CONTROLS: tuple[Control, ...] = (
    ban_early_ends,
    keep_allowed,
    follow_grammars,
    ban_bad_words,
    ban_repeated,
    add_bias,
    penalise_repetition,
    penalise_frequency,
    charge_repetition,
    call_processors,
    push_from_siblings,
)


def _seen(draw: Draw, role: int) -> Ids:
    """The ids of one track's prompt and the output."""
    return np.asarray([*draw.demands.prompts[role], *draw.output], np.int64)


def _costs(draw: Draw, role: int) -> list[tuple[int, float]]:
    """What each token that would go on with a repetition loses."""
    params = draw.demands.params
    seen, last = _seen(draw, role), params.dry_penalty_last_n
    if last >= 0:
        seen = seen[max(len(seen) - last, 0) :]
    allowed, base = params.dry_allowed_length, params.dry_base
    # Beyond this a repetition costs more than any logit.
    longest = allowed + (int(math.log(LARGEST) / math.log(base)) if base > 1 else 1)
    token_ids, lengths = longest_repeats(seen, draw.demands.breakers, longest)
    return [
        (token_id, min(params.dry_multiplier * base ** (length - allowed), LARGEST))
        for token_id, length in zip(token_ids.tolist(), lengths.tolist(), strict=True)
        if length >= allowed
    ]


def charges_of(draw: Draw, role: int) -> list[tuple[int, float]]:
    """Tokens that would repeat the text, and what each loses by all rules about that; infinity: it is banned."""
    size = draw.demands.params.no_repeat_ngram_size
    banned = completes_repeated(_seen(draw, role), size).tolist() if size else []
    costs = _costs(draw, role) if draw.demands.params.dry_multiplier else []
    gone = set(banned)
    return [*((token_id, math.inf) for token_id in banned), *(each for each in costs if each[0] not in gone)]


def _columns(pairs: Sequence[tuple[int, int]], logits: Tensor) -> tuple[Tensor, Tensor]:
    rows, token_ids = torch.tensor(pairs, device=logits.device).unbind(1)
    return rows, token_ids
