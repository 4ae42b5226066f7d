"""Advice: where few samples are accepted, what stood in the way and which setting to change."""

from __future__ import annotations

from ramify.distill.recipe import Recipe
from ramify.distill.tally import Tally
from ramify.distill.template import ANSWERS, Template

FEW = 0.5  # below this share of accepted samples there is something to advise
RARE = 0.1  # a reason behind fewer samples than this share is not worth a line


def advice(tally: Tally, recipe: Recipe) -> list[str]:
    """One line per cause, the commonest first; none if most samples were accepted."""
    if not tally.samples or tally.accepted >= FEW * tally.samples:
        return []
    causes = [
        (tally.cut_off, f"hit max_tokens {recipe.max_tokens}: raise --max-tokens"),
        (tally.reasons["no answer"], _no_answer(recipe)),
        (tally.reasons["another answer"], _another_answer(recipe)),
        (tally.reasons["too short"], f"are shorter than min_length {recipe.min_length}: lower --min-length"),
        (tally.reasons["error"], f"ended with an error: {tally.first_error}"),
    ]
    return [
        f"{count:,} of {tally.samples:,} samples {text}"
        for count, text in sorted(causes, key=lambda cause: -cause[0])
        if count and count >= RARE * tally.samples
    ]


def _no_answer(recipe: Recipe) -> str:
    if recipe.answer_pattern is None:
        sought = "a number" if recipe.match == "number" else "any text"
        return f"do not hold {sought}: say in --teacher-prompt and --theta-prompt what the answer looks like"
    return (
        f"hold nothing that answer_pattern finds ({recipe.answer_pattern}): say in --teacher-prompt and --theta-prompt "
        f"how the answer is written, or change --answer-pattern"
    )


def _another_answer(recipe: Recipe) -> str:
    if not Template("teacher_prompt", recipe.teacher_prompt).names & ANSWERS:
        return "come to another answer: show the teacher the right one ({answer} in --teacher-prompt)"
    ways = ["lower --temperature", "draw more samples (-n)", "take a stronger teacher (--model-teacher)"]
    if recipe.alpha != 1:
        flag = "--alpha" if recipe.alpha_method == "fixed" else "--alpha-min"
        ways.insert(0, f"give the teacher more weight (a higher {flag})")
    return f"come to another answer: {', '.join(ways[:-1])}, or {ways[-1]}"
