"""`ramify chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ramify.cli.messages import say
from ramify.cli.options import ENGINE_FLAGS, chosen, flags_of, made, with_flags
from ramify.cli.recommendation import completed, said_fields, sampling_flags
from ramify.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from ramify.llm import LLM

ENGINE = flags_of(ENGINE_FLAGS, "Engine")
# Shown to people: longer than the library's bare default.
SAMPLING = sampling_flags({"max_tokens": 512})


@with_flags(SAMPLING, ENGINE)
def chat(
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    **values: Any,
) -> None:
    """Talk with the model; an empty line or Ctrl-D ends, Ctrl-C stops an answer."""
    made(SamplingParams, values, said_fields(values), output_kind=OutputKind.DELTA)  # refuses before anything is loaded
    from ramify.llm import LLM

    llm = LLM(say=say, **chosen(values, ENGINE_FLAGS))
    params = completed(llm, values, output_kind=OutputKind.DELTA)
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    interactive = sys.stdin.isatty()
    while True:
        try:
            said = input("\033[1myou:\033[0m " if interactive else "")
        except (EOFError, KeyboardInterrupt):
            break
        if not said.strip():
            break
        messages.append({"role": "user", "content": said})
        answer = _answer(llm, messages, params)
        messages.append({"role": "assistant", "content": answer})


def _answer(llm: LLM, messages: Sequence[dict[str, str]], params: SamplingParams) -> str:
    pieces = []
    stream = llm.stream_chat(messages, params)
    try:
        for output in stream:
            pieces.append(output.outputs[0].text)
            print(pieces[-1], end="", flush=True)
    except KeyboardInterrupt:
        stream.close()  # aborts the request; the conversation goes on
    print()
    return "".join(pieces)
