"""`ramify generate`: prompts in, continuations out."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from ramify.cli.as_json import as_json
from ramify.cli.messages import say
from ramify.cli.options import ENGINE_FLAGS, SAMPLING_FIELDS, chosen, flags_of, with_flags
from ramify.sampling_params import SamplingParams

ENGINE = flags_of(ENGINE_FLAGS, "Engine")
# Shown to people: longer than the library's bare default.
SAMPLING = flags_of(SAMPLING_FIELDS, "Sampling", {"max_tokens": 64})


@with_flags(SAMPLING, ENGINE)
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts; '-' or none reads one from standard input.")
    ] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    **values: Any,
) -> None:
    """Continue prompts and show the continuations side by side."""
    from ramify.llm import LLM

    params = SamplingParams(**chosen(values, SAMPLING_FIELDS))
    texts = [_read_prompt() if text == "-" else text for text in prompts or ["-"]]
    llm = LLM(say=say, **chosen(values, ENGINE_FLAGS))
    outputs = llm.generate(texts, params, use_tqdm=sys.stderr.isatty() and not json_lines)
    if json_lines:
        for output in outputs:
            print(json.dumps(as_json(output), ensure_ascii=False))
    else:
        from ramify.cli.view import show_side_by_side

        show_side_by_side(Console(), outputs)
    if any(output.error for output in outputs):
        raise typer.Exit(1)


def _read_prompt() -> str:
    if sys.stdin.isatty():
        say("Type a prompt, then Ctrl-D:")
    return sys.stdin.read()
