"""`ramify generate`: prompts in, continuations out."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ramify.cli.as_json import as_json
from ramify.cli.messages import say, say_error
from ramify.cli.options import ENGINE_FLAGS, SAMPLING_FIELDS, flag_of, flags_of, made, told_in_flags, with_flags
from ramify.cli.recommendation import completed, said_fields, sampling_flags
from ramify.cli.standard_input import read_all
from ramify.cli.streams import takes_all_characters
from ramify.cli.two_models import PAIR, TwoModels, two_models
from ramify.errors import InvalidInputError
from ramify.sampling_params import OutputKind, SamplingParams, SamplingStrategy, SamplingType

if TYPE_CHECKING:
    from ramify.llm import LLM
    from ramify.outputs import RequestOutput

ENGINE = flags_of(ENGINE_FLAGS, "Engine")
# Shown to people: longer than the library's bare default.
SAMPLING = sampling_flags({"max_tokens": 64})
MET_BY_A_MODEL = (*SAMPLING_FIELDS, *ENGINE_FLAGS)  # whose values may be refused when they are
LARGEST_SEED = 2**32 - 1  # of those drawn here: short enough to be typed again


@with_flags(SAMPLING, PAIR, ENGINE)
def generate(
    context: typer.Context,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Text to continue; '-' or none reads it from standard input."),
    ] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="The text alone, as it comes if there is one prompt and one sample.")
    ] = False,
    **values: Any,
) -> None:
    """Continue prompts, samples side by side.

    With --teacher and --theta, they are drawn from the mixture of two models.
    """
    _check_view(json_lines=json_lines, plain=plain, values=values)
    pair = two_models(context, values)
    made(SamplingParams, values, said_fields(values))  # refuses what is wrong before anything is loaded
    texts = _prompt_texts(prompts or ["-"])
    llm: LLM | TwoModels
    if pair is None:
        from ramify import LLM  # torch takes a moment: what is wrong above is told without it

        llm = made(LLM, values, ENGINE_FLAGS, say=say)
        params = completed(llm, values)
    else:
        llm, params = pair, pair.params
    draws_seed = params.seed is None and _uses_seed(params)
    if draws_seed:
        params = replace(params, seed=secrets.randbelow(LARGEST_SEED + 1))
    if plain and not isinstance(llm, TwoModels) and len(texts) == 1 and not params.requires_parallel_sampling():
        with told_in_flags(MET_BY_A_MODEL):
            error = _stream(llm, texts[0], params)
    else:
        with told_in_flags(MET_BY_A_MODEL):
            outputs = llm.generate(texts, params, use_tqdm=sys.stderr.isatty() and not json_lines)
        _show(outputs, params, json_lines=json_lines, plain=plain)
        error = next((output.error for output in outputs if output.error), None)
    if values["speculation"] is not None and not isinstance(llm, TwoModels):
        say(_speculation(llm.stats()))
    if draws_seed:
        say(f"seed {params.seed} (the same again: --seed {params.seed})")
    if error is not None:
        if json_lines or plain:  # elsewhere it stands beside the samples
            say_error(error)
        raise typer.Exit(1)


def _check_view(*, json_lines: bool, plain: bool, values: dict[str, Any]) -> None:
    if json_lines and plain:
        raise InvalidInputError("--plain and --json are two ways to print: choose one")
    for flag in ("logprobs", "prompt_logprobs"):
        if plain and values[flag] is not None:
            raise InvalidInputError(f"--plain prints text alone: use --json to get {flag_of(flag)}")


def _speculation(stats: Mapping[str, int]) -> str:
    """What was drafted, and how much of it was right."""
    return "{drafted_tokens} tokens were drafted ahead, {accepted_tokens} of them were drawn".format(**stats)


def _uses_seed(params: SamplingParams) -> bool:
    searches = params.resolved_strategy is SamplingStrategy.BEAM_SEARCH
    return params.sampling_type is SamplingType.RANDOM and not searches


def _prompt_texts(prompts: list[str]) -> list[str]:
    if prompts.count("-") > 1:
        raise InvalidInputError("'-' stands for all of standard input, so it can be given once")
    return [_read_prompt() if text == "-" else text for text in prompts]


def _read_prompt() -> str:
    if sys.stdin.isatty():
        say("Type a prompt, then Ctrl-D:")
    return read_all()


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> str | None:
    """Prints the text as it comes; returns the error if there was one."""
    error = None
    for output in llm.stream_generate(prompt, replace(params, output_kind=OutputKind.DELTA)):
        error = output.error
        print("".join(completion.text for completion in output.outputs), end="", flush=True)
    print()
    return error


def _show(outputs: Sequence[RequestOutput], params: SamplingParams, *, json_lines: bool, plain: bool) -> None:
    if json_lines:
        for output in outputs:
            print(json.dumps(as_json(output, params.seed), ensure_ascii=not takes_all_characters()))
    elif plain:
        print("\n\n".join(completion.text for output in outputs for completion in output.outputs))
    else:
        from ramify.cli.view import show_side_by_side

        show_side_by_side(Console(), outputs)
