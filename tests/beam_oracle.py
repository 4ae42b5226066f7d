"""Beam search as it is published, with whole lists: slow, and plain to see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Tokens = tuple[int, ...]
Weights = Callable[[Tokens], list[float]]  # log-probabilities of all tokens after these


def oracle(
    model: Weights,
    *,
    beam_width: int,
    num_groups: int,
    diversity_penalty: float,
    longest_output: int,
    end_token_ids: frozenset[int],
    length_penalty: float,
    early_stopping: Any,
) -> list[tuple[Tokens, float]]:
    """The published formula, written out with whole lists: every continuation of every beam, each step, each group."""
    width = beam_width // num_groups
    running: list[list[tuple[float, Tokens]]] = [[(0.0, ())] for _ in range(num_groups)]
    finished: list[list[tuple[float, Tokens]]] = [[] for _ in range(num_groups)]
    over = [False] * num_groups
    for length in range(1, longest_output + 1):
        taken: list[int] = []
        for group in range(num_groups):
            if over[group]:
                continue
            everything = sorted(
                (
                    (total + weight - diversity_penalty * taken.count(token), (*tokens, token))
                    for total, tokens in running[group]
                    for token, weight in enumerate(model(tokens))
                ),
                key=lambda beam: -beam[0],
            )
            for total, tokens in everything[:width]:
                if tokens[-1] in end_token_ids or length == longest_output:
                    finished[group].append((total / length**length_penalty, tokens))
            finished[group] = sorted(finished[group], key=lambda beam: -beam[0])[:width]
            going_on = [beam for beam in everything if beam[1][-1] not in end_token_ids][:width]
            taken += [tokens[-1] for _, tokens in (everything[:width] if length == longest_output else going_on)]
            running[group] = going_on
            reach = longest_output if early_stopping == "never" and length_penalty > 0 else length
            full = len(finished[group]) == width
            hopeless = full and going_on[0][0] / reach**length_penalty <= finished[group][-1][0]
            over[group] = length == longest_output or hopeless or (full and early_stopping is True)
    everything = sorted((beam for group in finished for beam in group), key=lambda beam: -beam[0])
    return [(tokens, score) for score, tokens in everything]
