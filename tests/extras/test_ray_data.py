"""Datasets and runs through two actors of a real cluster: sample for sample what one engine makes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import ramify.ray
from ramify import LLM, EngineConfig, InvalidInputError, OptimalSampling, SamplingParams
from ramify.distill.problems import read_problems
from ramify.distill.recipe import Recipe
from ramify.distill.run import Run
from ramify.drive.build import build_engine
from tests.extras.conftest import ROOT, within

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-extras")

GSM8K = ROOT / "examples" / "problems" / "gsm8k_50.jsonl"
TWO = ramify.ray.Pool(num_engines=2, num_cpus=1, batch_size=2)
# Two sequences at a time, so that there is a half-way; and the same bits whatever else is in a step.
SLOW: Any = {"max_model_len": 512, "max_num_seqs": 2, "batch_invariant": True}


def rows() -> list[dict[str, Any]]:
    lines = GSM8K.read_text(encoding="utf-8").splitlines()
    return [{"line": number, **json.loads(line)} for number, line in enumerate(lines, start=1)]


def taken(dataset: Any) -> list[dict[str, Any]]:
    return within(240, lambda: sorted(dataset.take_all(), key=lambda row: (row["line"], row["sample"] or 0)))


def actors(stage: str) -> list[int]:
    """The processes of a stage in the cluster of this run, which its token names."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_ours = f"RAY_AUTH_TOKEN={os.environ['RAY_AUTH_TOKEN']}".encode() in (folder / "environ").read_bytes()
            if is_ours and f"MapBatches({stage})".encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


@contextmanager
def killing(stage: str, folder: Path, *, after: int) -> Iterator[list[int]]:
    """While the block runs: one actor is killed as soon as so many lines are in the folder's files."""
    killed: list[int] = []
    ends = threading.Event()

    def watch() -> None:
        while not ends.wait(0.01) and not killed:
            if sum(path.read_bytes().count(b"\n") for path in folder.glob("*.jsonl")) >= after:
                for process in actors(stage)[-1:]:
                    os.kill(process, signal.SIGKILL)
                    killed.append(process)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        ends.set()
        thread.join(10)


def test_rows_are_those_of_one_engine_with_an_actor_killed_half_way(
    driver: str, small_model: str, tmp_path: Path
) -> None:
    params = SamplingParams(n=2, max_tokens=24, temperature=0.9, logprobs=1)
    given = rows()
    dataset = ray.data.from_items(given, override_num_blocks=25)
    journal = tmp_path / "journal"

    def run() -> list[dict[str, Any]]:
        made = ramify.ray.generate(
            dataset, params, model=small_model, prompt="question", key="line", journal=str(journal), pool=TWO, **SLOW
        )
        return taken(made)

    with killing("GenerateStage", journal, after=10) as killed:
        made = run()
    assert killed, "an actor was killed"

    each = [params.clone(seed=ramify.ray.row_seed(0, row["question"], row["line"])) for row in given]
    alone = LLM(small_model, **SLOW).generate([row["question"] for row in given], each, use_tqdm=False)
    assert [(row["line"], row["sample"]) for row in made] == [
        (line, sample) for line in range(1, 51) for sample in (0, 1)
    ]
    for row, wanted in zip(made, [sample for output in alone for sample in output.outputs], strict=True):
        assert (row["text"], list(row["token_ids"])) == (wanted.text, list(wanted.token_ids))
        assert row["cumulative_logprob"] == wanted.cumulative_logprob
        assert [len(place) for place in row["logprobs"]] == [len(place) for place in wanted.logprobs or ()]
        assert (row["finish_reason"], row["error"]) == (str(wanted.finish_reason), None)
        assert {name: row[name] for name in ("question", "answer")} == {
            name: given[row["line"] - 1][name] for name in ("question", "answer")
        }
    written = sum(path.read_bytes().count(b"\n") for path in journal.glob("part-*.jsonl"))
    again = run()
    assert [list(row["token_ids"]) for row in again] == [list(row["token_ids"]) for row in made]
    assert sum(path.read_bytes().count(b"\n") for path in journal.glob("part-*.jsonl")) == written, "all was there"
    assert driver


def test_distill_as_a_stage_equals_the_run_of_one_engine(driver: str, small_model: str, tmp_path: Path) -> None:
    recipe = Recipe(
        model_teacher=small_model, model_theta=small_model, n=2, max_tokens=8, teacher_prompt="{question} {answer}"
    )
    problems, _ = read_problems(GSM8K, limit=4)
    Run(recipe, problems, tmp_path, lambda: OptimalSampling(preset=recipe, **SLOW))()
    wanted = sorted(samples(tmp_path), key=lambda sample: (sample["line"], sample["sample"]))
    too_long = {"line": 5, "question": "why " * 9000, "answer": "1", "source": "here"}
    given = [{**row, "source": "here"} for row in rows()[:4]]
    dataset = ray.data.from_items([*given, too_long], override_num_blocks=3)
    made = taken(ramify.ray.distill(dataset, recipe, on_refused="skip", pool=TWO, **SLOW))
    refused = made.pop()
    assert (refused["line"], refused["sample"], refused["source"]) == (5, None, "here")
    assert "max_model_len" in refused["error"]
    same = ("line", "sample", "problem", "prompt", "text", "accepted", "finish_reason", "error")
    ids = ("token_ids", "tokens", "prompt_token_ids")
    lists = (*ids, "alpha", "logprobs_teacher", "logprobs_theta", "logprobs_mixture")
    for row, sample in zip(made, wanted, strict=True):
        assert {name: row[name] for name in same} == {name: sample[name] for name in same}
        assert all(list(row[name]) == sample[name] for name in lists)
        assert (row["final_answer"], row["source"]) == (sample["answer"], "here")
    assert driver


def test_what_is_wrong_is_told_before_anything_starts(driver: str) -> None:
    dataset = ray.data.from_items([{"prompt": "a", "text": "b"}])
    with pytest.raises(InvalidInputError, match="no column 'question': there is 'prompt', 'text'"):
        ramify.ray.generate(dataset, prompt="question")
    with pytest.raises(InvalidInputError, match=r"writes itself \(text\)"):
        ramify.ray.generate(dataset)
    with pytest.raises(InvalidInputError, match="max_model_len"):
        ramify.ray.generate(dataset.drop_columns(["text"]), max_model_len=-1)
    params = SamplingParams(best_of=2, score=len)
    with pytest.raises(InvalidInputError, match="journal cannot be used with functions"):
        ramify.ray.generate(dataset.drop_columns(["text"]), params, journal="somewhere")
    assert driver


def samples(folder: Path, name: str = "samples.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


def test_the_command_on_a_cluster_equals_the_command_here(cluster: str, small_model: str, tmp_path: Path) -> None:
    """The first problems lack answers, which an oracle writes there too; an actor is killed among the samples."""
    lines = GSM8K.read_text(encoding="utf-8").splitlines()
    lines[:3] = [json.dumps({"question": json.loads(line)["question"]}) for line in lines[:3]]
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    out = tmp_path / "out"
    flags = ["--ray", "--ray-address", cluster, "--ray-engines", "2", "--ray-cpus", "1", "--on-malformed", "skip"]
    flags += [
        "--model-teacher",
        small_model,
        "--model-theta",
        small_model,
        "--oracle",
        small_model,
        "--oracle-max-tokens",
        "4",
    ]
    flags += ["-n", "2", "--max-tokens", "24", "--max-num-seqs", "2", "--max-model-len", "512", "--batch-invariant"]
    with killing("WholeProblemStage", out, after=20) as killed:
        done = subprocess.run(
            [sys.executable, "-c", "from ramify.cli import main; main()", "distill", str(path), "-o", str(out), *flags],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
            env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        )
    assert done.returncode == 0, done.stderr
    assert killed, "an actor was killed"
    assert "Traceback" not in done.stderr

    recipe = Recipe(
        model_teacher=small_model, model_theta=small_model, oracle=small_model, oracle_max_tokens=4, n=2, max_tokens=24
    )
    problems, _ = read_problems(path, answers_may_lack=True)
    summary = Run(
        recipe,
        problems,
        tmp_path / "here",
        lambda: OptimalSampling(preset=recipe, **SLOW),
        load_oracle=lambda: build_engine(EngineConfig.from_options(model=small_model, **SLOW), lambda _: None),
        stops_at_refused=False,
    )()
    assert done.stdout.startswith(f"{summary.problems} problems, {summary.samples} samples, ")
    assert summary.problems >= 47
    for name in ("samples.jsonl", "answers.jsonl"):
        there, here = (
            sorted(samples(place, name), key=lambda entry: (entry["line"], entry["sample"]))
            for place in (out, tmp_path / "here")
        )
        assert there == here
    assert (out / "data.jsonl").read_bytes() == (tmp_path / "here" / "data.jsonl").read_bytes()
