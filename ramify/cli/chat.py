"""`ramify chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ramify.cli.messages import say
from ramify.cli.options import ENGINE_FLAGS, SAMPLING_FIELDS, chosen, flags_of, with_flags
from ramify.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from ramify.llm import LLM

ENGINE = flags_of(ENGINE_FLAGS, "Engine")
# Shown to people: longer and calmer than the library's bare defaults.
SAMPLING = flags_of(SAMPLING_FIELDS, "Sampling", {"max_tokens": 512, "temperature": 0.7, "top_p": 0.9})


@with_flags(SAMPLING, ENGINE)
def chat(
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    **values: Any,
) -> None:
    """Talk with the model; an empty line or Ctrl-D ends, Ctrl-C stops an answer."""
    from ramify.llm import LLM

    params = SamplingParams(**chosen(values, SAMPLING_FIELDS), output_kind=OutputKind.DELTA)
    llm = LLM(say=say, **chosen(values, ENGINE_FLAGS))
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
