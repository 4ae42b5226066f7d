"""What a run of `ramify distill` tells: its progress, what became of the samples, advice, the report."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ramify.cli.commands import app
from ramify.distill.advice import advice
from ramify.distill.problems import Problem
from ramify.distill.progress import Progress
from ramify.distill.recipe import Recipe, load_preset
from ramify.distill.report import page
from ramify.distill.tally import EXAMPLES, Tally, percent
from ramify.errors import InvalidInputError
from tests.unit.test_distill import PROBLEMS, RECIPE, samples_of

# -- the report ---------------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Whether tags are closed in order, and nothing is fetched."""

    VOID = ("meta", "!doctype")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href", "onclick"} & {name for name, _ in attrs}
        assert tag not in ("script", "link", "img", "iframe")
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag not in self.VOID and not (self.open and self.open[-1] == "svg" and tag == "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "path":
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self.count[tag] = self.count.get(tag, 0) + 1


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def tally_of(samples: Iterable[dict[str, Any]]) -> Tally:
    tally = Tally()
    for sample in samples:
        tally.add(sample)
    return tally


def test_the_report_is_well_formed_and_says_what_happened() -> None:
    many = [Problem(line, f"<script>alert({line})</script>", "#### 1") for line in range(20, 0, -1)]
    tally = tally_of(sample for problem in many for sample in samples_of(problem))
    made = page(tally, RECIPE, 25, preset="<own>", advised=["21 of 40 samples <hit> max_tokens"])
    reader = read(made)
    assert "40 of 60 samples accepted" in made
    assert "<h1>&lt;own&gt;: smollm2-135m as teacher and student</h1>" in made
    assert "<li>21 of 40 samples &lt;hit&gt; max_tokens</li>" in made
    assert "another answer" in made
    assert "20 of 25" in made
    assert reader.count["svg"] == 3
    assert made.count('class="example"') == EXAMPLES
    assert "problem 1, sample 0" in made
    assert reader.count["details"] == 1, "short samples are not folded"
    other = page(tally, RECIPE.changed({"model_teacher": "large"}), 25)
    assert "<h1>own settings: large as teacher, smollm2-135m as student</h1>" in other
    assert "what to change" not in other


def test_long_samples_are_folded_and_nothing_of_them_is_lost() -> None:
    question = "why " * 200
    [sample] = samples_of(Problem(1, question, "1"), n=1)
    sample |= {"tokens": [f"t{i} " for i in range(300)], "alpha": [0.5] * 300, "token_ids": list(range(300))}
    made = page(tally_of([sample]), RECIPE, 1)
    assert read(made).count["details"] == 3
    assert "220 more tokens" in made
    assert "400 more characters" in made
    assert question in re.sub(r"<span class=.more.>[^<]*</span>|<[^>]*>", "", made)


def test_pages_follow_the_readers_theme() -> None:
    made = page(tally_of(samples_of(PROBLEMS[0])), RECIPE, 1)
    assert made.count("prefers-color-scheme: dark") == 2
    body = made.split("</style>")[1]
    assert not re.search(r"rgb\(|#[0-9a-f]{6}", body), "a colour that no theme changes"


def test_a_report_of_nothing() -> None:
    read(page(Tally(), RECIPE, 4))


# -- what became of the samples -----------------------------------------------------------------------------------


def rejected(reason: str, finish_reason: str, count: int, line: int = 1) -> list[dict[str, Any]]:
    [sample] = samples_of(Problem(line, "?", "1"), n=1)
    return [sample | {"accepted": False, "rejected_because": reason, "finish_reason": finish_reason}] * count


def test_few_accepted_samples_come_with_advice() -> None:
    recipe = load_preset("math_qa").changed({"max_tokens": 256})
    tally = tally_of(
        rejected("not finished", "length", 21)
        + rejected("another answer", "stop", 10)
        + rejected("no answer", "stop", 7)
        + rejected("too short", "stop", 2)
    )
    said = advice(tally, recipe)
    assert said[0] == "21 of 40 samples hit max_tokens 256: raise --max-tokens"
    assert said[1].startswith("10 of 40 samples come to another answer: give the teacher more weight")
    assert "answer_pattern" in said[2]
    assert len(said) == 3, "two samples of forty are not worth a line"
    for flag in re.findall(r"--([a-z-]+)", " ".join(said)):
        assert flag.replace("-", "_") in {field.name for field in fields(Recipe)}
    blind = advice(tally, recipe.changed({"teacher_prompt": "{question}"}))
    assert "show the teacher the right one ({answer} in --teacher-prompt)" in blind[1]
    alone = recipe.changed({"alpha_method": "fixed", "alpha": 1.0})
    assert "more weight" not in " ".join(advice(tally, alone))


def test_enough_accepted_samples_come_without_advice() -> None:
    assert advice(tally_of(samples_of(PROBLEMS[0])), RECIPE) == []
    assert advice(Tally(), RECIPE) == []


def test_the_interval_counts_problems_that_agree_within_themselves_once() -> None:
    """Ten problems, each wholly right or wholly wrong, are ten observations, however many samples they have."""

    def interval(n: int) -> tuple[float, float]:
        samples = [sample for line in range(1, 11) for sample in samples_of(Problem(line, "?", "1"), n=n)]
        return tally_of(sample | {"accepted": sample["line"] <= 5} for sample in samples).interval()

    assert interval(50) == pytest.approx(interval(1), abs=0.02)
    low, high = interval(1)
    assert (low, high) == pytest.approx((0.2366, 0.7634), abs=0.01), "Wilson's of 5 in 10"
    alike = [sample | {"accepted": sample["sample"] % 2 == 0} for p in PROBLEMS for sample in samples_of(p, n=50)]
    narrow = tally_of(alike).interval()
    assert narrow[1] - narrow[0] < 0.15, "problems that all are half right: every sample counts"
    assert tally_of(rejected("no answer", "stop", 40)).interval()[1] > 0.7, "one problem says little"
    assert Tally().interval() == (0.0, 1.0)
    assert [percent(1, 3), percent(0.004), percent(0), percent(1, 0)] == ["33%", "0.4%", "0%", "none"]


# -- progress -----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress_on(stream: io.StringIO, state: dict[str, float]) -> Progress:
    return Progress(
        "Samples",
        problems=4,
        done=1,
        tokens_of_problem=100,
        count_tokens=lambda: int(state["tokens"]),
        stream=stream,
        clock=lambda: state["seconds"],
    )


def test_progress_moves_with_every_token_and_never_backwards() -> None:
    state: dict[str, float] = {"tokens": 1000, "seconds": 0}
    with progress_on(io.StringIO(), state) as progress:
        assert progress.share() == 0.25
        state["tokens"] += 50
        assert progress.share() == pytest.approx(0.375), "no problem has ended, and it moves"
        progress.ended(tokens=20, samples=2, accepted=1)
        assert progress.share() == pytest.approx(0.575), "one that ends early counts in full"
        state |= {"tokens": 1090, "seconds": 3}
        progress.ended(tokens=50)
        progress.ended(tokens=20)
        assert progress.share() == 1
        assert progress.describe() == "Samples: 4 of 4 problems, 90 tokens (30/s), 50% accepted"


def test_redirected_progress_is_a_plain_line_now_and_then() -> None:
    stream, state = io.StringIO(), {"tokens": 0.0, "seconds": 0.0}
    with progress_on(stream, state) as progress:
        for _ in range(250):  # 25 seconds of steps
            state["tokens"] += 1
            state["seconds"] += 0.1
            progress.tick()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"5\d%, Samples: 1 of 4 problems, 10\d tokens \(10/s\)", lines[0])
    assert not re.search(r"[\r\x1b]", stream.getvalue())


def test_a_terminal_gets_a_bar() -> None:
    stream, state = Terminal(), {"tokens": 0.0, "seconds": 0.0}
    with progress_on(stream, state) as progress:
        state |= {"tokens": 100, "seconds": 10}
        progress.tick()
    assert "50%|" in stream.getvalue()
    assert "1 of 4 problems, 100 tokens (10/s)" in stream.getvalue()


# -- the command, before it loads anything ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--oracle-prompt", "{question}"], "--oracle-prompt needs --oracle"),
        (["--theta-prompt", "{answer}"], "--theta-prompt must not hold {answer}"),
        (["--preset", "mathqa"], "preset must be one of base, distillation, math_qa, small_tasks or a YAML file"),
        ([], "2 lines of"),
    ],
)
def test_the_command_refuses_before_anything_is_loaded(flags: list[str], said: str, tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"question": "a"}\n{"question": "b", "answer": null}\n')
    made = CliRunner().invoke(app, ["distill", str(path), "-o", str(tmp_path / "out"), *flags])
    assert isinstance(made.exception, InvalidInputError)
    assert said in str(made.exception)
    assert not (tmp_path / "out").exists()


def test_the_file_of_problems_is_never_one_that_is_written(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "a", "answer": "1"}\n')
    made = CliRunner().invoke(app, ["distill", str(path), "-o", str(tmp_path)])
    assert isinstance(made.exception, InvalidInputError)
    assert "choose another --out" in str(made.exception)
    assert path.read_text() == '{"question": "a", "answer": "1"}\n'
    for link, problems in ((tmp_path / "link.jsonl", path), (tmp_path / "out" / "data.jsonl", path)):
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(problems)
    for out, problems in ((tmp_path, tmp_path / "link.jsonl"), (tmp_path / "out", path)):
        made = CliRunner().invoke(app, ["distill", str(problems), "-o", str(out)])
        assert "choose another --out" in str(made.exception)


def test_devices_given_once_are_told_as_the_flag_has_them(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"question": "a", "answer": "1"}\n')
    for command in (["distill", str(path), "-o", str(tmp_path / "out")], ["serve", "--teacher", "a", "--theta", "b"]):
        made = CliRunner().invoke(app, [*command, "--devices", "cpu"])
        assert str(made.exception) == (
            "--devices must be the teacher's devices and the student's, two in all, like 'cuda:0,cuda:1' and 'cuda:2', "
            "got ['cpu']"
        )
    made = CliRunner().invoke(app, ["serve", "--teacher", "a"])
    assert str(made.exception) == "--teacher and --theta must be given together: a mixture has two models"
