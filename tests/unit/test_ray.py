"""`ramify.ray` where Ray is not: what it says, and what needs no cluster (tests/extras has the others)."""

from __future__ import annotations

import asyncio
import datetime
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ramify.ray
from ramify.cli import main
from ramify.distill.problems import Problem
from ramify.distill.recipe import Recipe
from ramify.errors import InvalidInputError, RamifyError
from ramify.ray import problems
from ramify.ray.cluster import joined, reason_of
from ramify.ray.front import opening
from ramify.ray.problems import DistillStage
from ramify.ray.prompts import GenerateStage
from ramify.ray.row_journal import RowJournal, row_name
from ramify.sampling_params import SamplingParams

GSM8K = Path(__file__).parents[2] / "examples" / "problems" / "gsm8k_50.jsonl"


class NoRows:
    """A dataset of which nothing is known yet."""

    def columns(self, *, fetch_if_missing: bool) -> None:
        assert not fetch_if_missing


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "ray" or name.startswith("ray.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)


@pytest.mark.usefixtures("no_ray")
def test_without_ray_the_extra_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names_it = r'needs ray.*: pip install "\.\[ray\]"'
    with pytest.raises(RamifyError, match=names_it):
        ramify.ray.generate(NoRows())
    with pytest.raises(RamifyError, match=names_it):
        ramify.ray.distill(NoRows(), "base")
    told = command(capsys, "distill", str(GSM8K), "-o", str(tmp_path / "out"), "--ray")
    assert told == 'error: ramify.ray needs ray: pip install ".[ray]" in a checkout'
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ray-engines", "2"], "error: --ray-engines needs --ray"),
        (["--ray-gpus", "0"], "error: --ray-gpus needs --ray"),
        (["--ray", "--ray-engines", "0"], "error: --ray-engines must be an integer >= 1, got 0"),
    ],
)
def test_flags_of_a_cluster(flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(capsys, "distill", str(GSM8K), "-o", str(tmp_path / "out"), *flags) == said


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ramify", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_the_journal_keeps_whole_rows_for_whoever_opens_it_next(tmp_path: Path) -> None:
    first, second = RowJournal(str(tmp_path)), RowJournal(str(tmp_path))
    first.append("a", [{"text": "été", "score": float("-inf")}])
    second.append("b", [{"text": None}, {"text": "2"}])
    assert first.find("a") is None, "what came later is not looked for"
    torn = next(path for path in tmp_path.iterdir() if "été" in path.read_text(encoding="utf-8"))
    torn.write_bytes(torn.read_bytes() + b'{"row": "c", "entr')
    later = RowJournal(str(tmp_path))
    assert later.find("a") == [{"text": "été", "score": float("-inf")}]
    assert later.find("b") == [{"text": None}, {"text": "2"}]
    assert later.find("c") is None


def test_a_row_is_known_by_all_that_decides_what_it_becomes() -> None:
    assert row_name("model", {"n": 1, "seed": 2}, "prompt", 1) == row_name("model", {"seed": 2, "n": 1}, "prompt", 1)
    names = {row_name("model", {"n": n}, prompt, key) for n in (1, 2) for prompt in ("a", [1]) for key in (1, "1")}
    assert len(names) == 8
    with pytest.raises(InvalidInputError, match="cannot be written down"):
        row_name("model", object())
    seeds = {ramify.ray.row_seed(seed, prompt, key) for seed in (0, 1) for prompt in ("a", "b") for key in (None, 1)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("question", [b"bytes", datetime.date(2024, 1, 2), None, 3])
def test_rows_that_hold_no_text_are_refused_by_name_or_passed_over(
    question: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What JSON has no name for raised a TypeError before anybody asked whether such rows are to be left out."""
    monkeypatch.setattr(problems, "_sample_desk", lambda *_: None)

    def samples(on_refused: str) -> list[dict[str, Any]]:
        stage = DistillStage(recipe=Recipe(), options={}, journal=str(tmp_path), on_refused=on_refused)
        return asyncio.run(stage._samples(Problem(1, question, "4")))

    assert samples("skip") == [{"problem": None, "error": "a problem needs question and answer, both text"}]
    with pytest.raises(InvalidInputError, match="needs question and answer, both text"):
        samples("stop")


def test_a_prompt_that_no_journal_can_hold_is_passed_over_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramify.async_llm.AsyncLLM", lambda *_, **__: None)
    for on_refused in ("skip", "stop"):
        stage = GenerateStage(
            model=None,
            params=SamplingParams(),
            options={},
            prompt="prompt",
            key=None,
            journal=str(tmp_path),
            on_refused=on_refused,
        )
        if on_refused == "skip":
            [row] = asyncio.run(stage._samples(b"bytes", None))
            assert "cannot be written down here" in row["error"]
        else:
            with pytest.raises(InvalidInputError, match="cannot be written down here"):
                asyncio.run(stage._samples(b"bytes", None))


def test_an_address_where_nobody_listens_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RamifyError, match=f"no Ray cluster answers at {address}.*refused"), joined(address):
            pass
    with pytest.raises(RamifyError, match="must be HOST:PORT, got 'there'"), joined("there"):
        pass


def test_the_engines_own_error_is_found_in_rays_report() -> None:
    report = "ray::MapWorker died\n  File x\nramify.errors.ModelNotFoundError: no model at /a: b\nThe actor died.\n"
    assert reason_of(RuntimeError(report)) == "no model at /a: b"
    assert reason_of(RuntimeError("something\nelse")) == "else"
    assert reason_of(RuntimeError()) == "RuntimeError"


@pytest.mark.parametrize("wrong", [{"num_engines": 0}, {"num_cpus": 0}, {"num_gpus": -1}, {"batch_size": 0}])
def test_pools_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        ramify.ray.Pool(**wrong)


def test_one_engine_an_actor() -> None:
    with pytest.raises(InvalidInputError, match="data_parallel_size must be 1 on a cluster, got 2: Pool"):
        ramify.ray.generate(NoRows(), data_parallel_size=2)
    with pytest.raises(InvalidInputError, match="data_parallel_size must be 1 on a cluster, got 2: Pool"):
        ramify.ray.distill(NoRows(), "base", data_parallel_size=2)


def test_as_many_rows_as_keep_an_engine_full() -> None:
    pool = ramify.ray.Pool()
    assert pool.rows_at_a_time({}, n=1) == 64
    assert pool.rows_at_a_time({"max_num_seqs": 8}, n=4) == 1
    assert ramify.ray.Pool(batch_size=5).rows_at_a_time({}, n=1) == 5


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"prompt": "Once upon"}', "Once upon"),
        (b'{"prompt": ["Once", "twice"]}', "Once"),
        (b'{"prompt": [5, 6]}', "5 6"),
        (b'{"prompt": [[5, 6], [7]]}', "5 6"),
        (
            b'{"messages": [{"role": "user", "content": "Hi"}, {"content": [{"text": "you"}]}, 3]}',
            'Hi\n[{"text": "you"}]',
        ),
        (b'{"messages": [], "prompt": ""}', "/path"),
        (b"[" * 100_000, "/path"),
        (b"\xff", "/path"),
        (b"7", "/path"),
        (b"", "/path"),
    ],
)
def test_what_a_request_opens_with(body: bytes, told: str) -> None:
    assert opening("/path", body) == told
