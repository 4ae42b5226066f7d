"""Recipe: everything that decides which samples a run makes and which of them it accepts.

A preset is a YAML file with some of these fields; the others have the defaults below. The package's own presets are in
`ramify/distill/configs`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

from ramify import validation as check
from ramify.config import DEFAULT_MODEL, SEED_HIGH, SEED_LOW, AlphaMethod, MixtureConfig, setting
from ramify.distill.template import ANSWERS, Template
from ramify.errors import InvalidInputError, RamifyError
from ramify.foreign.keywords import own_keywords
from ramify.sampling_params import SamplingParams

Match = Literal["none", "exact", "number"]
MIXTURE_NAMES = tuple(each.name for each in fields(MixtureConfig))
SAMPLING_NAMES = ("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    model_teacher: str = setting(DEFAULT_MODEL, "the teacher: folder, .gguf file, hub id or embedded model")
    model_theta: str = setting(DEFAULT_MODEL, "the student; the same name as the teacher's is loaded once")
    teacher_prompt: str = setting("{question}", "the teacher's prompt, with {question}, {answer}, {final_answer}")
    theta_prompt: str = setting("{question}", "the student's prompt, with {question}")
    teacher_system_prompt: str | None = setting(None, "a system prompt for the teacher")
    theta_system_prompt: str | None = setting(None, "a system prompt for the student")
    enable_chat_template: bool = setting(False, "give prompts as a user's message, by each model's chat template")
    alpha_method: AlphaMethod = setting("kl_symmetry", "kl_symmetry, fixed, entropy, ess_balance or kl_budget")
    alpha: float | None = setting(None, "the teacher's weight, for alpha_method fixed")
    kl_budget: float | None = setting(None, "how far from the student, in nats a token, for alpha_method kl_budget")
    alpha_min: float = setting(0.0, "no weight below this, whatever the method finds")
    alpha_max: float = setting(1.0, "no weight above this")
    teacher_top_k: int = setting(-1, "only the teacher's k likeliest tokens (-1 or 0: all)")
    teacher_top_p: float = setting(1.0, "only the teacher's likeliest tokens of this mass")
    force_teacher_first_token: bool = setting(False, "the first token is the teacher's")
    force_teacher_special_tokens: bool = setting(False, "where the teacher's likeliest token is special, it decides")
    n: int = setting(1, "samples of each problem")
    max_tokens: int = setting(512, "longest sample, in tokens")
    temperature: float = setting(0.8, "of both models")
    top_p: float = setting(1.0, "only the mixture's likeliest tokens of this mass")
    top_k: int = setting(-1, "only the mixture's k likeliest tokens (-1 or 0: all)")
    min_p: float = setting(0.0, "only tokens this likely beside the mixture's likeliest")
    stop: tuple[str, ...] = setting((), "strings that end a sample")
    seed: int = setting(0, "the run's seed; every problem has its own, made from it")
    match: Match = setting("none", "accept samples whose answer matches: none (all), exact, number")
    answer_pattern: str | None = setting(None, "where a sample's answer stands: a regular expression, its last match")
    reference_pattern: str | None = setting(None, "where the problem's final answer stands in its answer")
    min_length: int = setting(0, "accept samples of at least so many tokens")
    require_finished: bool = setting(False, "accept only samples that came to an end within max_tokens")
    oracle: str | None = setting(None, "a model that writes the answers of problems that have none")
    oracle_prompt: str = setting("{question}", "the oracle's prompt, with {question}")
    oracle_system_prompt: str | None = setting(None, "a system prompt for the oracle")
    oracle_max_tokens: int = setting(512, "longest answer of the oracle, in tokens")
    oracle_temperature: float = setting(0.0, "of the oracle; 0 takes its likeliest tokens")

    def __post_init__(self) -> None:
        for name in ("model_teacher", "model_theta"):
            check.text(name, getattr(self, name))
        for name in ("teacher_system_prompt", "theta_system_prompt", "oracle_system_prompt", "oracle"):
            if getattr(self, name) is not None:
                check.text(name, getattr(self, name))
        check.boolean("enable_chat_template", self.enable_chat_template)
        object.__setattr__(self, "stop", tuple(check.items("stop", self.stop, 16)))
        check.integer("seed", self.seed, SEED_LOW, SEED_HIGH)
        check.choice("match", self.match, get_args(Match))
        check.integer("min_length", self.min_length, 0)
        check.boolean("require_finished", self.require_finished)
        if check.integer("max_tokens", self.max_tokens, 1) < self.min_length:
            raise InvalidInputError(
                f"min_length must be at most max_tokens ({self.max_tokens}), got {self.min_length}: nothing would pass"
            )
        Template("teacher_prompt", self.teacher_prompt)
        for name, who in (("theta_prompt", "the student"), ("oracle_prompt", "the oracle")):
            leaked = Template(name, getattr(self, name)).names & ANSWERS
            if leaked:
                raise InvalidInputError(f"{name} must not hold {{{min(leaked)}}}: {who} may not see the answer")
        for name in ("answer_pattern", "reference_pattern"):
            _check_pattern(name, getattr(self, name))
        MixtureConfig(**self.mixture_options())  # which checks them
        self.sampling(0)
        check.integer("oracle_max_tokens", self.oracle_max_tokens, 1)
        check.number("oracle_temperature", self.oracle_temperature, 0)

    def mixture_options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in MIXTURE_NAMES}

    def sampling_options(self) -> dict[str, Any]:
        """The samples' settings as SamplingParams takes them; the seed is left to whoever draws."""
        return {name: getattr(self, name) for name in SAMPLING_NAMES} | {"stop": list(self.stop) or None}

    def sampling(self, seed: int) -> SamplingParams:
        return SamplingParams(seed=seed, **self.sampling_options())

    def oracle_sampling(self, seed: int) -> SamplingParams:
        """One answer, ended by what ends a sample."""
        return SamplingParams(
            max_tokens=self.oracle_max_tokens,
            temperature=self.oracle_temperature,
            stop=list(self.stop) or None,
            seed=seed,
        )

    def changed(self, values: Mapping[str, Any]) -> Recipe:
        """With some fields replaced; an unknown name raises."""
        known = [each.name for each in fields(self)]
        return replace(self, **own_keywords(values, known, {}, what="a setting of a recipe"))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"stop": list(self.stop)}

    def problem_seed(self, line: int, digest: str) -> int:
        """A problem's own seed, which does not depend on when and with which others it is sampled."""
        key = json.dumps([self.seed, line, digest]).encode()
        return int.from_bytes(hashlib.sha256(key).digest()[:8], "big")


def _check_pattern(name: str, pattern: object) -> None:
    if pattern is None:
        return
    try:
        re.compile(check.text(name, pattern, longest=1000))
    except re.error as error:
        raise InvalidInputError(f"{name} must be a regular expression, got {pattern!r}: {error}") from None


def preset_names() -> list[str]:
    return sorted(file.name.removesuffix(".yaml") for file in _presets().iterdir() if file.name.endswith(".yaml"))


def load_preset(name: object) -> Recipe:
    """One of the package's presets by name, or a YAML file by its path."""
    if name in preset_names():
        return _parse(str(name), _presets().joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
    if not isinstance(name, str | Path) or not Path(name).is_file():
        shown = str(name) if isinstance(name, Path) else name
        raise InvalidInputError(f"preset must be one of {', '.join(preset_names())} or a YAML file, got {shown!r}")
    try:
        return _parse(str(name), Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"preset {name} cannot be read: {error}") from None


def _parse(name: str, text: str) -> Recipe:
    try:
        import yaml
    except ModuleNotFoundError:
        raise RamifyError("presets are read by pyyaml, which is not there: pip install pyyaml") from None

    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidInputError(f"{name} is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise InvalidInputError(f"{name} must hold settings as `name: value`, got {type(values).__name__}")
    return Recipe().changed({str(key): value for key, value in values.items()})


def _presets() -> Any:
    return files("ramify.distill").joinpath("configs")
