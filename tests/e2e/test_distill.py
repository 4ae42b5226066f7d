"""`ramify distill` as its users run it: the default model on both sides, real problems, kill -9 at random moments."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ramify import EngineConfig, InvalidInputError, ModelConfig, OptimalSampling, SamplingParams
from ramify.distill.problem_lines import ProblemLines
from ramify.distill.problems import read_problems
from ramify.distill.recipe import Recipe, load_preset
from ramify.distill.run import Run, Summary
from ramify.distill.samples import as_samples, prompts_of
from ramify.drive.build import build_engine
from ramify.models.loader import ModelLoader
from tests.conftest import CheckpointMaker

ROOT = Path(__file__).parents[2]
GSM8K = ROOT / "examples" / "problems" / "gsm8k_50.jsonl"
SMALL_TASKS = GSM8K.with_name("small_tasks.jsonl")

pytestmark = pytest.mark.usefixtures("default_gguf")


def command(out: Path, *flags: str, problems: Path = GSM8K) -> list[str]:
    return [
        sys.executable,
        "-c",
        "from ramify.cli import main; main()",
        "distill",
        str(problems),
        "-o",
        str(out),
        *flags,
    ]


def run(
    out: Path, *flags: str, problems: Path = GSM8K, limit_bytes: int | None = None
) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if limit_bytes is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    return subprocess.run(
        command(out, *flags, problems=problems),
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
        preexec_fn=limit,
        env=os.environ | {"COLUMNS": "200"},
    )


def samples(out: Path, name: str = "samples.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / name).read_text(encoding="utf-8").splitlines()]


def named(out: Path) -> dict[tuple[int, int], tuple[list[int], bool]]:
    """What was drawn, by problem and sample; twice the same is an error."""
    made: dict[tuple[int, int], tuple[list[int], bool]] = {}
    for sample in samples(out):
        assert (sample["line"], sample["sample"]) not in made, "a sample stands there twice"
        made[sample["line"], sample["sample"]] = sample["token_ids"], sample["accepted"]
    return made


def kill_and_go_on(out: Path, flags: list[str], kills: int, seed: int, expected_seconds: float) -> list[int]:
    """Starts the command again and again, each killed at a random moment; then once to its end.

    Returns how many bytes were there after each kill.
    """
    moments = random.Random(seed)
    sizes = []
    for _ in range(kills):
        process = subprocess.Popen(command(out, *flags), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(moments.uniform(0.2, expected_seconds))
        process.send_signal(signal.SIGKILL)
        process.wait()
        sizes.append((out / "samples.jsonl").stat().st_size if (out / "samples.jsonl").exists() else 0)
    last = run(out, *flags)
    assert last.returncode == 0, last.stderr
    return sizes


def test_samples_can_be_trained_on(tmp_path: Path) -> None:
    flags = ["--preset", "math_qa", "-n", "2", "--max-tokens", "12", "--limit", "3", "--no-require-finished"]
    flags += ["--min-length", "4", "--match", "none", "--seed", "7"]
    done = run(tmp_path / "out", *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "3 problems, 6 samples, 6 accepted"
    made = samples(tmp_path / "out")
    assert {(sample["line"], sample["sample"]) for sample in made} == {
        (line, index) for line in (1, 2, 3) for index in (0, 1)
    }
    for sample in made:
        assert len(sample["token_ids"]) >= 4
        assert "".join(sample["tokens"]).removesuffix("<|im_end|>") == sample["text"]
        for name in ("tokens", "logprobs_teacher", "logprobs_theta", "logprobs_mixture", "alpha"):
            assert len(sample[name]) == len(sample["token_ids"])
        assert sample["prompt"].endswith("<|im_start|>assistant\n")
        assert "####" not in sample["prompt"].replace('"#### "', ""), "the student saw the solution"
    assert samples(tmp_path / "out", "data.jsonl") == sorted(
        made, key=lambda sample: (sample["line"], sample["sample"])
    )
    assert (tmp_path / "out" / "report.html").stat().st_size > 1000

    again = run(tmp_path / "out", *flags)
    assert again.stdout.splitlines()[0] == "3 problems (3 from before), 6 samples, 6 accepted"
    assert samples(tmp_path / "out") == made
    other = run(tmp_path / "out", *flags, "--temperature", "0.5")
    assert other.returncode == 2
    assert "temperature was 0.8, now it is 0.5" in " ".join(other.stderr.split())


def test_the_mixtures_logprobs_are_those_of_the_engine() -> None:
    """log q* made from both models' logprobs and log Z is what the sampler itself reports."""
    recipe = load_preset("math_qa").changed({"max_tokens": 10, "n": 2, "min_length": 0})
    sampler = OptimalSampling(preset=recipe, max_model_len=1024)
    [problem] = read_problems(GSM8K, limit=1)[0]
    params = SamplingParams(n=2, max_tokens=10, temperature=0.8, seed=1, logprobs=0)
    [output] = sampler.finish([sampler.request(*prompts_of(problem, recipe), params)], most_at_once=1)
    for sample, completion in zip(as_samples(problem, output, recipe, sampler), output.outputs, strict=True):
        assert completion.logprobs is not None
        reported = [row[token].logprob for row, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        assert sample["logprobs_mixture"] == pytest.approx(reported, abs=1e-4)


def test_killed_and_started_again_gives_the_unbroken_runs_samples(tmp_path: Path) -> None:
    flags = ["-n", "2", "--max-tokens", "24", "--limit", "6", "--max-num-seqs", "4"]
    whole = run(tmp_path / "whole", *flags)
    assert whole.returncode == 0, whole.stderr
    kill_and_go_on(tmp_path / "broken", flags, kills=3, seed=2, expected_seconds=8)
    assert named(tmp_path / "broken") == named(tmp_path / "whole")


@pytest.mark.long
def test_fifty_problems_killed_ten_times(tmp_path: Path) -> None:
    # So few tokens hold no whole solution: what is short enough to be sampled fifty times is accepted as it is.
    accepting = ["--match", "none", "--no-require-finished"]
    flags = ["--preset", "math_qa", *accepting, "--max-tokens", "48", "--max-num-seqs", "16"]
    start = time.monotonic()
    whole = run(tmp_path / "whole", *flags)
    assert whole.returncode == 0, whole.stderr
    seconds = time.monotonic() - start
    sizes = kill_and_go_on(tmp_path / "broken", flags, kills=10, seed=3, expected_seconds=max(seconds / 4, 6))
    assert len(set(sizes)) > 2, "the kills came at telling moments"
    assert named(tmp_path / "broken") == named(tmp_path / "whole")
    assert len(named(tmp_path / "whole")) == 200


@pytest.fixture
def small_model(make_checkpoint: CheckpointMaker, default_gguf: Path) -> Path:
    """A tiny random model with the default model's tokenizer."""
    tokenizer = ModelLoader(ModelConfig(model=str(default_gguf))).load_tokenizer()
    assert tokenizer is not None
    folder = make_checkpoint("llama", vocab_size=49_152, num_hidden_layers=1, max_position_embeddings=1024)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    return folder


def test_a_run_that_accepts_nothing_says_so_and_why(tmp_path: Path) -> None:
    flags = ["--limit", "1", "-n", "3", "--max-tokens", "5", "--match", "number", "--answer-pattern", "never"]
    done = run(tmp_path / "out", *flags)
    assert done.returncode == 3, done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith("1 problem, 3 samples, 0 accepted (0%; 95% confidence: 0% to ")
    assert said[1] == "rejected: 3 no answer"
    assert re.search(r"^advice: \d of 3 samples hit max_tokens 5: raise --max-tokens$", done.stdout, re.MULTILINE)
    assert said[-1] == f"nothing accepted: {tmp_path / 'out' / 'data.jsonl'} is empty"
    assert "of 3 samples hit max_tokens 5" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_the_oracle_answers_what_lacks_answers_and_a_broken_run_equals_an_unbroken_one(
    tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = SMALL_TASKS.read_text(encoding="utf-8").splitlines()[:4]
    lines = [json.dumps({"question": json.loads(task)["question"]}) for task in tasks[:3]] + [tasks[3]]
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    name = str(small_model)
    chosen = {"oracle": name, "model_teacher": name, "model_theta": name, "n": 2, "max_tokens": 8}
    # A random model says nothing sensible, but soon some vowel, which is its end here.
    recipe = load_preset("small_tasks").changed(chosen | {"stop": ("a", "e", "i", "o"), "oracle_temperature": 1.0})
    problems, _ = read_problems(path, answers_may_lack=True)
    sampler = OptimalSampling(preset=recipe, max_model_len=512)
    oracle = build_engine(EngineConfig.from_options(model=name, max_model_len=512), lambda _: None)

    def go(out: Path) -> Summary:
        return Run(recipe, problems, out, lambda: sampler, load_oracle=lambda: oracle)()

    def content(out: Path, name: str) -> list[tuple[int, list[int], str]]:
        return sorted((each["line"], each["token_ids"], each["answer"]) for each in samples(out, name))

    whole = go(tmp_path / "whole")
    by = {each["line"]: each["answer_by"] for each in samples(tmp_path / "whole")}
    unusable = {bad.line for bad in whole.refused}
    assert all("no answer: the oracle's" in str(bad) for bad in whole.refused)
    assert by == dict.fromkeys({1, 2, 3} - unusable, "oracle") | {4: "file"}
    assert 0 < len(unusable) < 3, "answers of both kinds"
    assert (whole.problems, whole.samples) == (4 - len(unusable), 8 - 2 * len(unusable))
    append, left = ProblemLines.append, [2]

    def until_killed(self: ProblemLines, entries: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        append(self, entries)

    monkeypatch.setattr(ProblemLines, "append", until_killed)
    for num_written in (2, 2, 10):  # among the answers, then among the samples, then to the end
        left[0] = num_written
        with suppress(KeyboardInterrupt):
            go(tmp_path / "broken")
    for name in ("answers.jsonl", "samples.jsonl", "data.jsonl"):
        assert content(tmp_path / "broken", name) == content(tmp_path / "whole", name)
    assert path.read_text(encoding="utf-8") == "\n".join(lines), "the file given is never changed"
    (tmp_path / "whole" / "answers.jsonl").unlink()
    with pytest.raises(InvalidInputError, match="lacks the answer of line"):
        go(tmp_path / "whole")


def test_bad_lines_stop_or_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    good = GSM8K.read_text(encoding="utf-8").splitlines()[0]
    too_long = json.dumps({"question": "why " * 9000, "answer": "1"})
    path.write_text(f"{good}\nnonsense\n{too_long}\n", encoding="utf-8")
    flags = ["--max-tokens", "4"]
    stopped = run(tmp_path / "out", *flags, problems=path)
    assert stopped.returncode == 2
    assert "line 2: not JSON" in stopped.stderr
    assert not (tmp_path / "out").exists(), "nothing was begun"
    skipped = run(tmp_path / "out", *flags, "--on-malformed", "skip", problems=path)
    assert skipped.returncode == 0, skipped.stderr
    assert "line 2: not JSON" in skipped.stderr
    assert "line 3: " in skipped.stderr
    assert skipped.stdout.splitlines()[0] == "1 problem, 1 sample, 1 accepted"


def test_a_full_disk_stops_with_a_message_and_loses_nothing(tmp_path: Path) -> None:
    """The system refuses to let any file grow past some size, as a full disk would."""
    flags = ["--max-tokens", "8", "--limit", "4", "--max-num-seqs", "1"]
    full = run(tmp_path / "out", *flags, limit_bytes=4000)
    assert full.returncode == 2
    assert "make room" in " ".join(full.stderr.split())
    assert "Traceback" not in full.stderr
    there = named(tmp_path / "out")
    assert 0 < len(there) < 4
    assert run(tmp_path / "out", *flags).returncode == 0
    assert there.items() <= named(tmp_path / "out").items()
    assert len(named(tmp_path / "out")) == 4


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path / "out", "--max-tokens", "400", "-n", "4"),
        stderr=subprocess.PIPE,
        text=True,
        # What runs in the background of a shell, this suite perhaps, hands down that Ctrl-C is to be ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )
    path = tmp_path / "out" / "settings.json"
    while not path.exists() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(4)  # into the loading of the model or the sampling
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "the same command goes on" in " ".join(said.split())
    assert "Traceback" not in said


def test_a_run_from_python(tmp_path: Path) -> None:
    recipe = Recipe(max_tokens=6, n=2, seed=4)
    problems, _ = read_problems(GSM8K, limit=2)
    made = Run(recipe, problems, tmp_path, lambda: OptimalSampling(preset=recipe, max_model_len=1024))()
    assert (made.problems, made.sampled_now, made.samples, made.accepted) == (2, 2, 4, 4)
