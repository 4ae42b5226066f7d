"""Flags that are left to the model: what it recommends for them, and what the user is told of it."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import Field
from typing import TYPE_CHECKING, Any

from ramify.cli.messages import say
from ramify.cli.options import SAMPLING_FIELDS, chosen, flags_of, optional
from ramify.models.generation_defaults import RECOMMENDED_FIELDS
from ramify.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ramify.llm import LLM

MUCH_ALIKE = 0.5  # samples below this temperature often begin with the same words


def sampling_flags(defaults: Mapping[str, Any], *, without: Collection[str] = frozenset()) -> list[inspect.Parameter]:
    """The flags of SamplingParams; those that a model may recommend are None if they are left out."""
    some = [field for field in SAMPLING_FIELDS if field.name not in without]
    return [
        optional(flag, shown="the model's own") if flag.name in RECOMMENDED_FIELDS else flag
        for flag in flags_of(some, "Sampling", defaults)
    ]


def said_fields(values: Mapping[str, Any]) -> tuple[Field[Any], ...]:
    """The fields of SamplingParams that the command line says: all its flags but those that are left to the model."""
    return tuple(
        field
        for field in SAMPLING_FIELDS
        if field.name in values and (field.name not in RECOMMENDED_FIELDS or values[field.name] is not None)
    )


def completed(llm: LLM, values: dict[str, Any], **others: Any) -> SamplingParams:
    """What the flags say, and what the model recommends for the rest; tells what of it is used."""
    given = {**chosen(values, said_fields(values)), **others}
    used, params = llm.generation_defaults.used(given), llm.generation_defaults.params(given)
    if used:
        say(f"Sampling with {used}; --generation-config none leaves that out")
    if "temperature" in used.values and params.temperature < MUCH_ALIKE and params.num_samples > 1:
        say(f"{params.num_samples} samples at temperature {params.temperature:g} are much alike; try --temperature 1")
    return params
