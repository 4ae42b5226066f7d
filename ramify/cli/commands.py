"""`ramify`: generate, chat, serve, distill, bench, models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ramify.cli.distill import distill
from ramify.cli.options import (
    ENGINE_FIELDS,
    ENGINE_FLAGS,
    MIXTURE_FIELDS,
    PAIR_FIELDS,
    SAMPLING_FIELDS,
    SERVER_FIELDS,
    chosen,
    flags_of,
    with_flags,
)
from ramify.config import DEFAULT_MODEL, EngineConfig, MixtureConfig
from ramify.errors import InvalidInputError, RamifyError
from ramify.sampling_params import OutputKind, SamplingParams
from ramify.server.config import PairConfig, ServerConfig
from ramify.version import __version__

if TYPE_CHECKING:
    from ramify.llm import LLM
    from ramify.outputs import LogprobRow, RequestOutput
    from ramify.server.service import ServedModel

app = typer.Typer(
    name="ramify",
    help="Sample from language models: one prompt, many continuations.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="The embedded default model and its cache.", no_args_is_help=True)
app.add_typer(models_app, name="models")

ENGINE = flags_of(ENGINE_FLAGS, "Engine")
# A command line shows text to people: longer, and in a chat calmer, than the library's bare defaults.
GENERATE = flags_of(SAMPLING_FIELDS, "Sampling", {"max_tokens": 64})
SERVER = flags_of(SERVER_FIELDS, "Server")
PAIR = flags_of(PAIR_FIELDS, "Two models")
MIXTURE = flags_of(MIXTURE_FIELDS, "Two models")
SERVED_ENGINE = flags_of(ENGINE_FIELDS, "Engine", {"model": None})  # the default depends on --teacher
CHAT = flags_of(SAMPLING_FIELDS, "Sampling", {"max_tokens": 512, "temperature": 0.7, "top_p": 0.9})


def main() -> None:
    """The command's entry point: an error of ours is one line."""
    try:
        app()
    except RamifyError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {_escape(str(error))}", highlight=False)
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()  # the reader is gone, and Python would complain about that on exit
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ramify {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True),
    ] = False,
) -> None: ...


@app.command()
@with_flags(GENERATE, ENGINE)
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts; '-' or none reads one from standard input.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    **values: Any,
) -> None:
    """Continue prompts and show the continuations side by side."""
    params = SamplingParams(**chosen(values, SAMPLING_FIELDS))
    texts = [_read_prompt() if text == "-" else text for text in prompts or ["-"]]
    llm = _load(values)
    outputs = llm.generate(texts, params, use_tqdm=sys.stderr.isatty() and not as_json)
    if as_json:
        for output in outputs:
            print(json.dumps(_as_json(output), ensure_ascii=False))
    else:
        from ramify.cli.view import show_side_by_side

        show_side_by_side(Console(), outputs)
    if any(output.error for output in outputs):
        raise typer.Exit(1)


@app.command()
@with_flags(CHAT, ENGINE)
def chat(
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    **values: Any,
) -> None:
    """Talk with the model; an empty line or Ctrl-D ends, Ctrl-C stops an answer."""
    params = SamplingParams(**chosen(values, SAMPLING_FIELDS), output_kind=OutputKind.DELTA)
    llm = _load(values)
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


@app.command()
@with_flags(SERVER, PAIR, MIXTURE, SERVED_ENGINE)
def serve(**values: Any) -> None:
    """Serve a model, or a mixture of two, over HTTP in the protocol of OpenAI (needs the extra `server`)."""
    options = chosen(values, SERVER_FIELDS)
    options["api_key"] = options["api_key"] or os.environ.get("RAMIFY_API_KEY")
    config = ServerConfig(**options)
    pair, mixture = PairConfig(**chosen(values, PAIR_FIELDS)), MixtureConfig(**chosen(values, MIXTURE_FIELDS))
    if pair.teacher is None and mixture != MixtureConfig():
        raise InvalidInputError("flags of a mixture (--alpha-method and others) need --teacher and --theta")
    engine_options = chosen(values, ENGINE_FIELDS)
    model = engine_options.pop("model") or (DEFAULT_MODEL if pair.teacher is None else None)
    EngineConfig.from_options(**engine_options)  # a mistake shows before anything is loaded
    try:
        from ramify.server.run import serve as run_server
    except ModuleNotFoundError as error:
        raise RamifyError(f'the server needs {error.name}: pip install ".[server]" in a checkout') from None

    def load_models() -> list[ServedModel]:
        from ramify.server.load import load_model, load_pair

        served = []
        if model is not None:
            served.append(load_model(model, engine_options, config.served_model_name, _say))
        if pair.teacher is not None:
            name = config.served_model_name if model is None else None  # given for the one model, if there are both
            served.append(load_pair(pair, mixture, engine_options, name, _say))
        return served

    run_server(config, load_models, _say)


app.command()(distill)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Compare with rivals on the CPU workloads; further arguments go to bench/offline.py (try -- --help)."""
    script = Path(__file__).parents[2] / "bench" / "offline.py"
    if not script.exists():
        raise RamifyError("the benchmarks are part of the repository, not of the installed package: clone it")
    raise typer.Exit(subprocess.run([sys.executable, str(script), *context.args], check=False).returncode)


@models_app.command("list")
def list_models() -> None:
    """What runs without naming a model, and where it is kept."""
    from ramify.models import embedded

    state = "cached" if embedded.is_cached() else "not fetched yet (ramify models pull)"
    print(f"{embedded.NAME}  SmolLM2-135M-Instruct, {embedded.LICENSE}, {embedded.FILE_SIZE // 10**6} MB, {state}")
    print(f"  {embedded.cached_path()}")


@models_app.command("pull")
def pull_model() -> None:
    """Fetch the embedded default model into the cache."""
    from ramify.models import embedded

    fresh = not embedded.is_cached()
    path = embedded.fetch(_say)
    print(f"{'fetched' if fresh else 'already there'}: {path}")


def _load(values: dict[str, Any]) -> LLM:
    from ramify.llm import LLM

    return LLM(say=_say, **chosen(values, ENGINE_FLAGS))


def _read_prompt() -> str:
    if sys.stdin.isatty():
        _say("Type a prompt, then Ctrl-D:")
    return sys.stdin.read()


def _say(message: str) -> None:
    Console(stderr=True).print(_escape(message), highlight=False, style="dim")


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


def _as_json(output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": output.prompt,
        "error": output.error,
        **_logprobs_json("prompt_logprobs", output.prompt_logprobs),
        "outputs": [
            {
                "index": completion.index,
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "cumulative_logprob": completion.cumulative_logprob,
                "score": completion.score,
                "finish_reason": None if completion.finish_reason is None else completion.finish_reason.value,
                "stop_reason": completion.stop_reason,
                **_logprobs_json("logprobs", completion.logprobs),
            }
            for completion in output.outputs
        ],
    }


def _logprobs_json(name: str, rows: Sequence[LogprobRow | None] | None) -> dict[str, Any]:
    """Only where asked for. Each token's row has the likeliest first, and the token itself last if not among them."""
    if rows is None:
        return {}
    return {name: [None if row is None else _row_json(row) for row in rows]}


def _row_json(row: LogprobRow) -> list[dict[str, Any]]:
    return [
        {"token_id": token_id, "token": entry.decoded_token, "logprob": entry.logprob, "rank": entry.rank}
        for token_id, entry in row.items()
    ]


def _escape(text: str) -> str:
    return text.replace("[", "\\[")
