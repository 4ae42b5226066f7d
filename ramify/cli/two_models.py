"""The flags of `ramify generate` for two models, whose mixture every token is then drawn from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ramify.cli.messages import say
from ramify.cli.options import (
    ENGINE_FLAGS,
    MIXTURE_FIELDS,
    PAIR_FIELDS,
    SAMPLING_FIELDS,
    chosen,
    flag_of,
    flags_of,
    in_flags_words,
)
from ramify.distill.recipe import Recipe, load_preset, preset_names
from ramify.errors import InvalidInputError
from ramify.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ramify.outputs import RequestOutput

PANEL = "Two models"
TOGETHER = "--teacher and --theta must be given together: a mixture has two models"
# Beside the fields: the other arguments of OptimalSampling and its `generate`.
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "preset": (
        str | None,
        typer.Option(
            metavar="TEXT",
            help=f"what is left out here, as `ramify distill` has it: {', '.join(preset_names())}, or a YAML file",
            rich_help_panel=PANEL,
        ),
    ),
    "theta_prompts": (
        list[str] | None,
        typer.Option(
            "--theta-prompt",
            metavar="TEXT",
            help="what the student sees; PROMPT is then the teacher's (default: the same) (repeatable)",
            rich_help_panel=PANEL,
        ),
    ),
    "enable_chat_template": (
        bool | None,
        typer.Option(
            help="give prompts as a user's message, by each model's chat template  [default: off]",
            rich_help_panel=PANEL,
        ),
    ),
}
PAIR = [
    *flags_of(PAIR_FIELDS, PANEL),
    *(
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])
        for name, (kind, option) in _OPTIONS.items()
    ),
    *flags_of(MIXTURE_FIELDS, PANEL),
]
PAIR_NAMES = tuple(flag.name for flag in PAIR)
_NAMES_OF_MODELS = {"teacher": "model_teacher", "theta": "model_theta"}


@dataclass(frozen=True, slots=True)
class TwoModels:
    """What the command line says of two models: `recipe` and `params` are checked, nothing is loaded yet."""

    recipe: Recipe
    params: SamplingParams
    theta_prompts: Sequence[str] | None
    engine_options: Mapping[str, Any]

    def generate(self, prompts: Sequence[str], params: SamplingParams, *, use_tqdm: bool) -> list[RequestOutput]:
        """Loads both models and continues every prompt; `params` are the own ones, perhaps with a seed."""
        theta_prompts = self.theta_prompts
        if theta_prompts is not None and len(theta_prompts) != len(prompts):
            raise InvalidInputError(
                f"--theta-prompt must be given once for each prompt: got {len(theta_prompts)} for {len(prompts)}"
            )
        from ramify.optimal import OptimalSampling

        try:
            sampler = OptimalSampling(preset=self.recipe, say=say, **self.engine_options)
        except InvalidInputError as error:
            raise InvalidInputError(in_flags_words(str(error), self.engine_options)) from None
        options: dict[str, Any] = {field.name: getattr(params, field.name) for field in fields(params)}
        return sampler.generate(list(prompts), theta_prompts, use_tqdm=use_tqdm, **options).outputs


def two_models(context: typer.Context, values: Mapping[str, Any]) -> TwoModels | None:
    """What was said of two models; None if one is asked for."""
    said = {name: value for name, value in values.items() if _is_said(context, name)}
    if not said.keys() & {"teacher", "theta", "preset"}:
        for name in PAIR_NAMES:
            if name in said:
                raise InvalidInputError(f"{_flag(name)} is for two models: it needs --teacher and --theta, or --preset")
        return None
    if "model" in said:
        raise InvalidInputError("--model names one model, --teacher and --theta name two: give one or the other")
    if "preset" not in said and not {"teacher", "theta"} <= said.keys():
        raise InvalidInputError(TOGETHER)
    recipe = load_preset(said["preset"]) if "preset" in said else Recipe()
    of_recipe = {_NAMES_OF_MODELS.get(name, name): value for name, value in said.items() if _is_setting(name)}
    sampling = chosen(dict(said), [field for field in SAMPLING_FIELDS if field.name in said])
    try:
        recipe = recipe.changed(of_recipe)
        defaults = recipe.sampling_options()
        if "preset" not in said:
            defaults["max_tokens"] = values["max_tokens"]  # the command's own default
        params = SamplingParams(**(defaults | sampling))
    except InvalidInputError as error:
        raise InvalidInputError(in_flags_words(str(error), (*PAIR_NAMES, *sampling))) from None
    if params.prompt_logprobs is not None:
        raise InvalidInputError("--prompt-logprobs is for one model: the prompts of two are not mixed")
    engine = chosen(dict(said), [field for field in ENGINE_FLAGS if field.name in said])
    if "devices" in said:
        engine["devices"] = said["devices"]
    return TwoModels(recipe, params, said.get("theta_prompts"), engine)


def _is_said(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and not source.name.startswith("DEFAULT")


def _is_setting(name: str) -> bool:
    return name in PAIR_NAMES and name not in {"preset", "theta_prompts", "devices"}


def _flag(name: str) -> str:
    return "--theta-prompt" if name == "theta_prompts" else flag_of(name)
