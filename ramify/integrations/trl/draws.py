"""Samples as trainers want them: one for each prompt of a list, with the logprobs of what was really drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ramify.engine.demands import Demands
from ramify.errors import InvalidInputError
from ramify.llm import LLM
from ramify.outputs import CompletionOutput
from ramify.sampling_params import SamplingParams


class Drawn(NamedTuple):
    """A completion, its end token included, and the logprob of each token by the distribution it was drawn from."""

    token_ids: list[int]
    logprobs: list[float]


def draw(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Drawn]:
    """A sample for each prompt, in their order. Prompts that repeat are one request with that many samples."""
    check_logprobs(llm, params)
    places: dict[tuple[int, ...], list[int]] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault(tuple(prompt), []).append(place)
    asked = [replace(params, n=len(own), logprobs=0, detokenize=False) for own in places.values()]
    outputs = llm.generate([list(prompt) for prompt in places], asked, use_tqdm=False)
    drawn: list[Drawn] = [Drawn([], [])] * len(prompts)
    for own, output in zip(places.values(), outputs, strict=True):
        if output.error is not None:
            raise InvalidInputError(f"no samples for prompt {own[0]}: {output.error}")
        for place, sample in zip(own, output.outputs, strict=True):
            drawn[place] = Drawn(list(sample.token_ids), _logprobs(sample))
    return drawn


def check_logprobs(llm: LLM, params: SamplingParams) -> None:
    """Raises InvalidInputError if the engine tells the model's own logprobs, and the draw is from something else."""
    demands = Demands(params)
    is_changed = demands.narrows or demands.is_shaped or demands.is_controlled or demands.diversity_penalty
    named = params.bad_words or params.logits_processors  # words become token ids only in an engine
    is_own = demands.temperature == 1 and not (is_changed or named)
    if llm.config.model_config.logprobs_mode == "raw" and not is_own:
        raise InvalidInputError(
            "a trainer needs the logprobs of what was really drawn, after temperature and filters: make the engine "
            'with LLM(…, logprobs_mode="processed"), or draw at temperature 1 without filters'
        )


def _logprobs(sample: CompletionOutput) -> list[float]:
    rows = sample.logprobs if sample.processed_logprobs is None else sample.processed_logprobs
    return [row[token_id].logprob for token_id, row in zip(sample.token_ids, rows or (), strict=True)]


def params_of(args: Any, more: Mapping[str, Any]) -> SamplingParams:
    """What a trainer's arguments say of its samples; `more` are fields of SamplingParams that TRL has no names for."""
    said: dict[str, Any] = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "max_tokens": args.max_completion_length,
        **(getattr(args, "generation_kwargs", None) or {}),
        **more,
    }
    return SamplingParams(**{name: value for name, value in said.items() if value is not None})


def token_ids_of(
    prompts: Sequence[Any], tokenizer: Any, *, tools: Sequence[Any] | None = None, **chat_options: Any
) -> list[list[int]]:
    """Prompts as TRL tokenizes them: texts as they are, conversations by the chat template."""
    ids = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids.append(list(tokenizer(prompt)["input_ids"]))
            continue
        rendered = tokenizer.apply_chat_template(
            prompt, tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=True, **chat_options
        )
        ids.append(list(rendered["input_ids"]))
    return ids
