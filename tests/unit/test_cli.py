"""The command line without a model: help at every width, flags' own words, what fits under a sample."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from ramify.cli.as_json import as_json
from ramify.cli.commands import app, main
from ramify.cli.options import in_flags_words, made
from ramify.cli.view import facts_that_fit, show_side_by_side
from ramify.errors import InvalidInputError
from ramify.models.generation_defaults import NO_DEFAULTS
from ramify.outputs import CompletionOutput, FinishReason, RequestOutput
from ramify.sampling_params import OutputKind, SamplingParams
from ramify.version import __version__

COMMANDS = (
    ("generate",),
    ("chat",),
    ("serve",),
    ("distill",),
    ("doctor",),
    ("models",),
    ("models", "pull"),
    ("models", "info"),
    (),
)
FACTS = {"score": "score -12.34", "tokens": "1234 tokens", "logprob": "logprob -123.4", "end": "length"}


def flags(*command: str) -> Iterator[str]:
    """Every name of every flag of a command, as the parser knows it."""
    found: Any = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]
    for parameter in found.params:
        yield from (name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("-"))


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_names_every_flag_in_full(command: tuple[str, ...], columns: int) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": str(columns)})
    assert shown.exit_code == 0, shown.output
    assert "…" not in shown.output
    missing = [flag for flag in flags(*command) if not re.search(rf"(?<![\w-]){flag}(?![\w-])", shown.output)]
    assert missing == []
    if columns >= 80:
        assert max(map(len, shown.output.splitlines())) <= columns


def test_what_a_command_does_is_told_in_full() -> None:
    listed = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output.split("Commands:")[1]
    assert "..." not in listed


def test_help_of_distill_says_nothing_of_switches_that_the_preset_sets() -> None:
    shown = CliRunner().invoke(app, ["distill", "--help"], env={"COLUMNS": "80"}).output
    recipe = shown[shown.index("\nRecipe ") : shown.index("\nEngine:")]
    assert "--enable-chat-template" in recipe
    assert "[default" not in recipe
    assert " distill [OPTIONS] PROBLEMS\n" in shown
    assert "<" not in shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("generate", "hi", "--temperature", "warm"), "'warm' is not a number"),
        (("generate", "hi", "-n", "many"), "'many' is not an integer"),
        (("serve", "--port", "abc"), "'abc' is not an integer"),
        (("serve", "--grace-period", "long"), "'long' is not a number"),
    ],
)
def test_words_in_the_place_of_numbers_are_refused_plainly(arguments: tuple[str, ...], expected: str) -> None:
    refused = CliRunner().invoke(app, [*arguments])
    assert refused.exit_code == 2
    assert expected in refused.output


def test_the_help_shows_how_a_bias_is_typed() -> None:
    shown = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "120"}).output
    assert "--logit-bias JSON " in shown
    assert """like '{"50": -2.5}'""" in " ".join(shown.split())


def test_help_puts_flags_under_their_panels() -> None:
    shown = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "80"}).output
    options, sampling, engine = (shown.index(f"\n{panel}:\n") for panel in ("Options", "Sampling", "Engine"))
    assert options < shown.index("--json") < sampling < shown.index("--temperature ") < engine < shown.index("--dtype")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("best_of must be at least n = 3, got 2", "--best-of must be at least --n = 3, got 2"),
        ("n must be 1 when temperature is 0", "--n must be 1 when temperature is 0"),
        (
            "stop strings cannot be used in a beam search; use stop_token_ids",
            "--stop strings cannot be used in a beam search; use --stop-token-ids",
        ),
        ("best_of > n needs strategy 'best_of_n'", "--best-of > n needs strategy 'best_of_n'"),
        (
            "2 cannot be taken:\n- n must be 1\n- seed must be 2",
            "2 cannot be taken:\n- --n must be 1\n- --seed must be 2",
        ),
    ],
)
def test_refusals_speak_of_flags(message: str, expected: str) -> None:
    names = [field.name for field in fields(SamplingParams)]
    assert in_flags_words(message, names) == expected


def test_a_refused_value_is_told_by_its_flag() -> None:
    some = [field for field in fields(SamplingParams) if field.name in ("n", "best_of")]
    with pytest.raises(InvalidInputError, match=r"^--best-of must be at least --n = 3, got 2$"):
        made(SamplingParams, {"n": 3, "best_of": 2}, some)


@pytest.mark.parametrize("width", range(1, 60))
def test_facts_are_whole_or_left_out(width: int) -> None:
    shown = facts_that_fit(FACTS, width)
    assert len(shown) <= width
    assert set(shown.split(" · ") if shown else []) <= set(FACTS.values())


@pytest.mark.parametrize("width", [20, 80])
@pytest.mark.parametrize(
    "text",
    ["a-long-" * 20, "https://example.org/" + "x" * 90, "山高月小，水落石出。" * 9],
    ids=["hyphens", "link", "chinese"],
)
def test_text_without_spaces_is_shown_to_its_end(text: str, width: int) -> None:
    """What did not fit a panel's line was cut off there, as all of a long text in Chinese."""
    samples = [CompletionOutput(index, text, (1,), -1.0, None, FinishReason.LENGTH) for index in range(2)]
    console = Console(width=width, file=io.StringIO())
    show_side_by_side(console, [RequestOutput("name", None, (1,), (samples[0],), finished=True)])
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "".join(re.findall(r"^│ (.*?) *│$", shown, re.MULTILINE)) == text
    show_side_by_side(console, [RequestOutput("name", None, (1,), tuple(samples), finished=True)])
    assert "…" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_fact_that_tells_most_stays_longest() -> None:
    assert facts_that_fit(FACTS, 60) == "score -12.34 · 1234 tokens · logprob -123.4 · length"
    assert facts_that_fit(FACTS, 40) == "score -12.34 · 1234 tokens · length"  # what is shorter may still fit
    assert facts_that_fit(FACTS, 30) == "score -12.34 · 1234 tokens"
    assert facts_that_fit(FACTS, 12) == "score -12.34"


Ran = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ran:
    """The command in this process, on a narrow terminal that is not one: exit status, output, errors."""

    def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
        for name, value in {"COLUMNS": "40", **environment}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["ramify", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        assert not isinstance(left.value.code, str)
        return (int(left.value.code or 0), *capsys.readouterr())

    return run


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--temperature", "nan", "error: --temperature must be a finite number >= 0, got nan"),
        ("--max-tokens", "many", "Error: Invalid value for '--max-tokens': 'many' is neither an integer nor none"),
    ],
)
def test_errors_are_not_wrapped_when_piped(run: Ran, flag: str, value: str, message: str) -> None:
    status, output, errors = run("generate", "x", flag, value)
    assert (status, output, errors.splitlines()[-1]) == (2, "", message)


@pytest.mark.parametrize(("flag", "value"), [("--port", "99999"), ("--block-size", "0"), ("--alpha-min", "2")])
def test_a_server_is_refused_by_its_flags_too(run: Ran, flag: str, value: str) -> None:
    assert run("serve", flag, value)[2].startswith(f"error: {flag} must be ")


@pytest.mark.parametrize("flags", [("--json",), ("--logprobs", "2"), ("--prompt-logprobs", "0")])
def test_plain_text_goes_with_nothing_that_is_not_text(run: Ran, flags: tuple[str, ...]) -> None:
    status, _, errors = run("generate", "x", "--plain", *flags)
    assert status == 2
    assert "--plain" in errors
    assert flags[0] in errors


def test_standard_input_is_read_once(run: Ran) -> None:
    assert "'-' stands for all of standard input" in run("generate", "-", "-")[2]


def test_shells_complete_commands_and_flags(run: Ran) -> None:
    status, script, _ = run("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert status == 0
    assert "_RAMIFY_COMPLETE=complete_bash" in script
    asked = {"COMP_WORDS": "ramify generate --freq", "COMP_CWORD": "2", "_RAMIFY_COMPLETE": "complete_bash"}
    assert run(**asked)[1].split() == ["--frequency-penalty"]


class EchoLLM:
    """Stands in for an LLM: says which seed it was asked with."""

    generation_defaults = NO_DEFAULTS

    def __init__(self, **_: Any) -> None: ...

    def generate(self, prompts: list[str], params: SamplingParams, **_: Any) -> list[RequestOutput]:
        texts = [f"{prompt!r} with {params.seed}, at most {params.max_tokens}" for prompt in prompts]
        return [_output(prompt, (text,)) for prompt, text in zip(prompts, texts, strict=True)]

    def stream_generate(self, prompt: str, params: SamplingParams) -> Iterator[RequestOutput]:
        assert params.output_kind is OutputKind.DELTA
        for piece in (f"{prompt!r}", " piece", " by piece"):
            yield _output(prompt, (piece,))


def _output(prompt: str, texts: tuple[str, ...]) -> RequestOutput:
    outputs = tuple(CompletionOutput(index, text, (1,), -1.0) for index, text in enumerate(texts))
    return RequestOutput("request", prompt, (1,), outputs, finished=True)


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramify.llm.LLM", EchoLLM)


@pytest.mark.usefixtures("echo")
def test_a_seed_is_drawn_and_printed_so_that_a_run_can_be_repeated(run: Ran) -> None:
    _, first, told = run("generate", "x", "--json")
    seed = json.loads(first)["seed"]
    assert told.splitlines() == [f"seed {seed} (the same again: --seed {seed})"]
    assert run("generate", "x", "--json")[1] != first
    assert run("generate", "x", "--json", "--seed", str(seed)) == (0, first, "")


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize("flags", [(), ("--plain",)])
def test_what_only_a_model_can_refuse_is_told_by_its_flag_too(
    run: Ran, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise InvalidInputError("prompt of 9 tokens plus max_tokens 90 must fit max_model_len = 64")

    monkeypatch.setattr(EchoLLM, "generate", refuse)
    monkeypatch.setattr(EchoLLM, "stream_generate", refuse)
    told = "error: prompt of 9 tokens plus --max-tokens 90 must fit --max-model-len = 64\n"
    assert run("generate", "x", *flags) == (2, "", told)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--limit", "0"), "--limit must be an integer >= 1, got 0"),
        (("--on-malformed", "x"), "--on-malformed must be one of 'stop', 'skip', got 'x'"),
        (("--alpha", "0.5"), "--alpha must be None: --alpha-method 'kl_symmetry' finds it, got 0.5"),
    ],
)
def test_distill_is_refused_by_its_flags_too(run: Ran, flags: tuple[str, ...], message: str) -> None:
    assert run("distill", "problems.jsonl", "--out", "run", *flags)[2] == f"error: {message}\n"


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize("flags", [("--temperature", "0"), ("--strategy", "beam_search")])
def test_no_seed_is_drawn_where_nothing_is_drawn(run: Ran, flags: tuple[str, ...]) -> None:
    _, output, told = run("generate", "x", "--json", *flags)
    assert (json.loads(output)["seed"], told) == (None, "")


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize(("typed", "limit"), [("none", None), ("7", 7)])
def test_max_tokens_may_be_none(run: Ran, typed: str, limit: int | None) -> None:
    output = run("generate", "x", "--max-tokens", typed, "--json", "--seed", "1")[1]
    assert json.loads(output)["outputs"][0]["text"] == f"'x' with 1, at most {limit}"


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize(("piped", "prompt"), [("hi\n", "hi"), ("hi\n\n", "hi\n"), ("two\nlines", "two\nlines")])
def test_one_newline_at_the_end_of_a_piped_prompt_goes(
    run: Ran, monkeypatch: pytest.MonkeyPatch, piped: str, prompt: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
    assert run("generate", "--plain", "--seed", "1")[1] == f"{prompt!r} piece by piece\n"


def test_json_has_no_infinity() -> None:
    """An empty output ranks last, by a score that JSON cannot write."""
    completion = CompletionOutput(0, "", (), 0.0, score=float("-inf"), finish_reason=FinishReason.STOP)
    line = json.dumps(as_json(RequestOutput("a", "x", (1,), (completion,), True), 7), allow_nan=False)
    [told] = json.loads(line)["outputs"]
    assert (told["score"], told["finish_reason"]) == (None, "stop")


@pytest.mark.usefixtures("echo")
def test_a_closed_standard_input_is_an_empty_one(run: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert run("generate", "--plain", "--seed", "1")[1] == "'' piece by piece\n"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_bytes_that_are_no_text_are_refused_before_a_model_is_loaded(
    run: Ran, monkeypatch: pytest.MonkeyPatch, errors: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\x80"), encoding="utf-8", errors=errors))
    assert run("generate") == (2, "", "error: standard input is no text in utf-8: invalid start byte\n")


def test_ctrl_c_while_the_commands_are_imported_ends_quietly() -> None:
    presses = "class Finder:\n    def find_spec(name, *_):\n        if name == 'typer': raise KeyboardInterrupt\n"
    code = f"import sys\n{presses}sys.meta_path.insert(0, Finder)\nfrom ramify.cli import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_ends_a_command_though_a_package_that_is_imported_swallows_exceptions() -> None:
    """As the import of torch does here and there: then the command ran on as if nobody had asked it to end."""
    presses = "if name == 'typer':\n   try: signal.raise_signal(signal.SIGINT)\n   except KeyboardInterrupt: pass"
    finder = f"class Finder:\n def find_spec(name, *_):\n  {presses}\n"
    code = f"import signal, sys\n{finder}sys.meta_path.insert(0, Finder)\nfrom ramify.cli import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(("command", "status"), [("serve", 0), ("generate", -signal.SIGTERM)])
def test_a_server_that_has_not_begun_ends_well_by_sigterm(command: str, status: int) -> None:
    """Its first seconds are imports. As the first process of a container it did not hear the signal at all then."""
    finder = "class Finder:\n def find_spec(name, *_):\n  if name == 'typer': signal.raise_signal(signal.SIGTERM)\n"
    code = f"import signal, sys\n{finder}sys.meta_path.insert(0, Finder)\nfrom ramify.cli import main\nmain()"
    run = [sys.executable, "-c", code, command]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


def test_ctrl_c_elsewhere_stays_an_exception_and_a_job_that_ignores_it_goes_on() -> None:
    presses = "import signal\nfrom ramify.cli.interruptions import end_at_once_while_importing\n"
    ends = f"{presses}end_at_once_while_importing()\ntry: signal.raise_signal(signal.SIGINT)\n"
    ends += "except KeyboardInterrupt: print('told')"
    ignores = f"{presses}signal.signal(signal.SIGINT, signal.SIG_IGN)\nend_at_once_while_importing()\n"
    ignores += "signal.raise_signal(signal.SIGINT)\nprint('goes on')"
    for code, expected in ((ends, "told\n"), (ignores, "goes on\n")):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_the_command_runs_as_a_module_too() -> None:
    """Where pip puts scripts into a folder that is not on the path."""
    command = [sys.executable, "-m", "ramify", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"ramify {__version__}\n", "")


def test_a_full_disk_under_standard_output_is_told_in_one_line() -> None:
    command = [sys.executable, "-c", "from ramify.cli import main; main()", "--help"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (1, "error: standard output cannot be written: the disk is full\n")


@pytest.mark.parametrize("broken", ["a full disk", "a closed pipe"])
def test_messages_that_cannot_be_written_cost_no_result(broken: str) -> None:
    """A command ended with status 1, and without its text, where standard error could not be written."""
    code = "from ramify.cli import commands, messages\nfrom ramify.distill.progress import Progress\n"
    code += (
        "def act(**_):\n messages.say('loading'); messages.say_warning('x'); print('the text'); messages.say('seed')\n"
    )
    code += " Progress('Samples', problems=1, done=0, tokens_of_problem=1, count_tokens=lambda: 0)._show()\n"
    code += "commands.app = act\ncommands.main()"
    reader, writer = os.pipe()
    os.close(reader)
    if broken == "a full disk":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writer, text=True, check=False, timeout=60
    )
    os.close(writer)
    assert (done.returncode, done.stdout) == (0, "the text\n")


@pytest.mark.usefixtures("echo")
def test_a_folder_that_may_not_be_read_is_told_in_one_line(run: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a file is there is a question that Python answers by an exception then."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "secret/generation_config.json")

    monkeypatch.setattr(EchoLLM, "__init__", refuse)
    assert run("generate", "x") == (2, "", "error: secret/generation_config.json: Permission denied\n")


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize(
    ("encoding", "plain"), [("ascii", "'?? caf?'"), ("latin-1", "'?? café'"), ("utf-8", "'月亮 café'")]
)
def test_what_an_output_has_no_character_for_is_not_the_end_of_the_rest(
    run: Ran, monkeypatch: pytest.MonkeyPatch, encoding: str, plain: str
) -> None:
    """A long run ended in a UnicodeEncodeError; without --plain for the dot beneath every sample alone."""

    def shown(*flags: str) -> str:
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
        assert run("generate", "月亮 café", "--seed", "1", *flags)[0] == 0
        return written.getvalue().decode(encoding)

    assert shown("--plain") == f"{plain} piece by piece\n"
    assert json.loads(shown("--json"))["prompt"] == "月亮 café"
    assert plain.strip("'") in shown()


@pytest.mark.usefixtures("echo")
def test_plain_prints_text_alone(run: Ran) -> None:
    _, output, told = run("generate", "a", "b", "--plain", "--seed", "1")
    assert (output, told) == ("'a' with 1, at most 64\n\n'b' with 1, at most 64\n", "")
