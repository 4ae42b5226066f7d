"""How a checkpoint's makers recommend to draw from it: temperature, filters and repetition penalty.

A recommendation fills what a caller left unsaid and changes nothing that was said. It is read from
generation_config.json, from a GGUF file's metadata, or known for the embedded model; a value that SamplingParams would
refuse is refused here by the name of its file and key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ramify.errors import FileFormatError, InvalidInputError
from ramify.sampling_params import SamplingParams, SamplingStrategy
from ramify.validation import shown

CONFIG_FILE = "generation_config.json"
# The fields of SamplingParams that are recommended, by the keys that GGUF files have for them.
GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
RECOMMENDED_FIELDS = tuple(GGUF_KEYS)
FILTERS = frozenset({"top_p", "top_k", "min_p"})  # greedy has no use for them


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Recommended fields of SamplingParams, and where they come from."""

    values: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    def params(self, given: Mapping[str, Any] | None = None) -> SamplingParams:
        """SamplingParams of the given fields, with the recommendation in place of those that are left out."""
        asked = SamplingParams(**(given or {}))
        return replace(asked, **self._fitting(asked, given or {}))

    def used(self, given: Mapping[str, Any]) -> GenerationDefaults:
        """The part of the recommendation that `params` would use."""
        return replace(self, values=self._fitting(SamplingParams(**given), given))

    def _fitting(self, asked: SamplingParams, given: Mapping[str, Any]) -> dict[str, Any]:
        """Never a value that would have the request refused: nobody asked for it."""
        if asked.resolved_strategy is SamplingStrategy.BEAM_SEARCH:
            return {}  # nothing is drawn: beams look for what the model itself finds likeliest
        fitting = {name: value for name, value in self.values.items() if name not in given}
        if fitting.get("temperature") == 0 and asked.num_samples > 1:
            del fitting["temperature"]  # several samples were asked for, and greedy ones are all the same
        if fitting.get("temperature", asked.temperature) == 0:
            return {name: value for name, value in fitting.items() if name not in FILTERS}
        return fitting

    def __bool__(self) -> bool:
        return bool(self.values)

    def __str__(self) -> str:
        return f"{', '.join(f'{name} {value:g}' for name, value in self.values.items())} (from {self.source})"


NO_DEFAULTS = GenerationDefaults()  # samples come from the model as it is


def defaults_from_config(config: Mapping[str, Any]) -> GenerationDefaults:
    """From the content of generation_config.json.

    An explicit `do_sample: false` recommends greedy, as in `transformers`; temperature and filters then do nothing.
    """
    values = {name: _checked(CONFIG_FILE, name, name, config.get(name)) for name in RECOMMENDED_FIELDS}
    do_sample = config.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise _refusal(CONFIG_FILE, "do_sample", f"must be true or false, got {shown(do_sample)}")
    if do_sample is False:
        values = {"temperature": 0.0, "repetition_penalty": values["repetition_penalty"]}
    return _defaults(values, CONFIG_FILE)


def defaults_from_gguf(metadata: Mapping[str, Any]) -> GenerationDefaults:
    values = {
        name: _checked("GGUF metadata", key, name, _shortest(metadata.get(key))) for name, key in GGUF_KEYS.items()
    }
    return _defaults(values, "the GGUF file's metadata")


def _defaults(values: Mapping[str, float | None], source: str) -> GenerationDefaults:
    said = {name: value for name, value in values.items() if value is not None}
    return GenerationDefaults(said, source) if said else NO_DEFAULTS


def _checked(place: str, key: str, name: str, value: Any) -> float | None:
    """The value, within the limits that SamplingParams has for the field; None where the file says nothing."""
    if value is None:
        return None
    try:
        return getattr(SamplingParams(**{name: value}), name)  # type: ignore[no-any-return]
    except InvalidInputError as error:
        raise _refusal(place, key, str(error).removeprefix(f"{name} ")) from None


def _refusal(place: str, key: str, what: str) -> FileFormatError:
    return FileFormatError(
        f"{place}: {key} {what}; generation_config 'none' loads the model without its recommendation"
    )


def _shortest(value: Any) -> Any:
    """A float32 as the decimal number that was meant: GGUF files store 0.95 as 0.949999988."""
    return float(f"{value:.7g}") if isinstance(value, float) and math.isfinite(value) else value
