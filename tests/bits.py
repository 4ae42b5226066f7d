"""Requests of all kinds, and all that their outputs tell, to the bit: the same alone and in every company?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from ramify import LLM, RequestOutput, SamplingParams


class Asked(NamedTuple):
    prompt: list[int]
    params: SamplingParams


def random_requests(
    count: int,
    numbers: random.Random,
    *,
    vocab_size: int,
    longest_prompt: int,
    most_tokens: int,
    beams: bool = True,
    writers: float = 0.0,
) -> list[Asked]:
    """With every kind of sampler, n, filters and penalties; some prompts begin alike, some are the same.

    writers: how many of them have a short prompt and write for three times as long as others: those fill a cache.
    """
    beginnings = [
        [numbers.randrange(vocab_size) for _ in range(numbers.randint(longest_prompt // 3, longest_prompt))]
        for _ in range(3)
    ]
    asked = []
    for _ in range(count):
        beginning = numbers.choice([[], *beginnings])
        shared = beginning[: numbers.choice([len(beginning), numbers.randint(0, len(beginning))])]
        own = [numbers.randrange(vocab_size) for _ in range(numbers.randint(1, max(1, longest_prompt - len(shared))))]
        prompt = (shared + own)[:longest_prompt] if numbers.random() < 0.8 or not shared else list(shared)
        params = _params(numbers, vocab_size, most_tokens, beams=beams)
        if writers and numbers.random() < writers:
            prompt = prompt[: numbers.randint(1, longest_prompt // 16)]
            params = replace(params, max_tokens=numbers.randint(most_tokens, 3 * most_tokens))
        asked.append(Asked(prompt, params))
    return asked


def _params(numbers: random.Random, vocab_size: int, most_tokens: int, *, beams: bool) -> SamplingParams:
    options: dict[str, Any] = {
        "max_tokens": numbers.randint(1, most_tokens),
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": numbers.choice([None, 0, 1, 5]),
        "prompt_logprobs": numbers.choice([None, None, None, 2]),
    }
    if beams and numbers.random() < 0.1:
        width = numbers.randint(2, 4)
        return SamplingParams(strategy="beam_search", beam_width=width, n=width, **{**options, "logprobs": None})
    options |= {"seed": numbers.randrange(2**32), "n": numbers.choice([1, 1, 1, 2, 5])}
    options["temperature"] = numbers.choice([0.7, 1.0, 1.0, 1.5] if options["n"] > 1 else [0.0, 0.7, 1.0, 1.5])
    if numbers.random() < 0.4:
        options |= {"top_k": numbers.choice([-1, 3, 20]), "top_p": numbers.choice([1.0, 0.9, 0.5])}
    if numbers.random() < 0.2:
        options["min_p"] = 0.05
    if numbers.random() < 0.1:
        options |= numbers.choice(
            [{"typical_p": 0.8}, {"top_n_sigma": 1.5}, {"xtc_probability": 0.5}, {"dry_multiplier": 1.0}]
        )
    elif numbers.random() < 0.3 and options["n"] > 1:
        sets: list[dict[str, Any]] = [
            {"strategy": "diverse", "diversity_penalty": 1.5},
            {"strategy": "without_replacement"},
        ]
        return SamplingParams(**options, **numbers.choice(sets))
    if numbers.random() < 0.3:
        options |= {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    if numbers.random() < 0.2:
        options["logit_bias"] = {numbers.randrange(vocab_size): 3.0 for _ in range(3)}
    if numbers.random() < 0.1 and options["temperature"] > 0:
        options["best_of"] = options["n"] + 2
    return SamplingParams(**options)


def told(output: RequestOutput) -> list[Any]:
    """Everything that a caller can see of it, numbers as they are."""
    assert output.error is None
    prompt = [None if place is None else _numbers(place) for place in output.prompt_logprobs or []]
    return [
        prompt,
        [
            (
                tuple(completion.token_ids),
                float(completion.cumulative_logprob).hex(),
                None if completion.score is None else float(completion.score).hex(),
                [_numbers(place) for place in completion.logprobs or []],
            )
            for completion in output.outputs
        ],
    ]


def _numbers(place: Any) -> list[tuple[int, str, int]]:
    return [(token, float(each.logprob).hex(), each.rank) for token, each in place.items()]


def told_alone(llm: LLM, asked: Sequence[Asked]) -> list[list[Any]]:
    """Each with nobody beside it and nothing in the cache."""
    answers = []
    for prompt, params in asked:
        llm.reset_prefix_cache()
        answers += [told(output) for output in llm.generate([prompt], params, use_tqdm=False)]
    return answers


def told_together(
    llm: LLM, asked: Sequence[Asked], numbers: random.Random | None, *, waves: int = 1
) -> list[list[Any]]:
    """In any order, some later than others: what earlier waves left in the cache is found by later ones.

    Without numbers in this order.
    """
    order = list(range(len(asked)))
    if numbers is not None:
        numbers.shuffle(order)
    answers: list[list[Any]] = [[] for _ in asked]
    for wave in range(waves):
        chosen = order[wave::waves]
        outputs = llm.generate(
            [asked[index].prompt for index in chosen],
            [replace(asked[index].params) for index in chosen],
            use_tqdm=False,
        )
        for index, output in zip(chosen, outputs, strict=True):
            answers[index] = told(output)
    return answers


def check(alone: Sequence[list[Any]], together: Sequence[list[Any]], asked: Sequence[Asked]) -> None:
    pairs = enumerate(zip(alone, together, strict=True))
    wrong = [f"{index} ({_kind(asked[index])}): {_difference(*pair)}" for index, pair in pairs if pair[0] != pair[1]]
    assert not wrong, f"{len(wrong)} of {len(asked)} differ: " + "; ".join(wrong[:20])


def _kind(asked: Asked) -> str:
    neutral = SamplingParams()
    values = {field.name: getattr(asked.params, field.name) for field in fields(SamplingParams)}
    told = {name: value for name, value in values.items() if value != getattr(neutral, name)}
    return f"{len(asked.prompt)} tokens, {told}"


def _difference(one: Any, other: Any, where: str = "") -> str:
    """The first place where two answers are not the same."""
    if not isinstance(one, (list, tuple)) or not isinstance(other, (list, tuple)) or len(one) != len(other):
        return f"{where}: {one!s:.60} and {other!s:.60}"
    place, pair = next((place, pair) for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
    return _difference(*pair, f"{where}[{place}]")
