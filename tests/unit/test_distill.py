"""`ramify distill` without a model: recipes, problems, answers, filters, the journal, the report."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.distill.answers import as_number, is_match, reference_answer, sample_answer
from ramify.distill.journal import SAMPLES, Journal
from ramify.distill.problems import Problem, read_problems
from ramify.distill.recipe import Recipe, load_preset, preset_names
from ramify.distill.report import EXAMPLES, write_report
from ramify.distill.samples import mixture_logprob, prompts_of, rejection
from ramify.distill.template import Template
from ramify.errors import InvalidInputError, RamifyError
from ramify.outputs import CompletionOutput, FinishReason, MixtureReport

ROOT = Path(__file__).parents[2]
GSM8K = ROOT / "examples" / "problems" / "gsm8k_50.jsonl"
PROBLEM = Problem(1, "What is 2 + {answer}?", "Two and two.\n#### 1,234")


# -- recipes ------------------------------------------------------------------------------------------------------


def test_the_presets_of_the_document_are_there_and_where_they_are_looked_for() -> None:
    assert preset_names() == ["base", "distillation", "math_qa", "small_tasks"]
    for name in preset_names():
        recipe = load_preset(name)
        assert (ROOT / "configs" / f"{name}.yaml").is_file()
        assert load_preset(str(ROOT / "configs" / f"{name}.yaml")) == recipe
        prompts = prompts_of(PROBLEM, recipe)
        assert PROBLEM.question in prompts[0]
        assert PROBLEM.question in prompts[1]
        assert "1,234" not in prompts[1], "the student may not see the answer"
    assert load_preset("base") == Recipe()
    assert "1,234" in prompts_of(PROBLEM, load_preset("distillation"))[0]
    assert load_preset("math_qa").match == "number"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"theta_prompt": "{question} {answer}"}, "theta_prompt"),
        ({"theta_prompt": "{final_answer}"}, "theta_prompt"),
        ({"teacher_prompt": "{qestion}"}, "teacher_prompt"),
        ({"teacher_prompt": "{question.__class__}"}, "teacher_prompt"),
        ({"teacher_prompt": "{question"}, "teacher_prompt"),
        ({"teacher_prompt": ""}, "teacher_prompt"),
        ({"match": "fuzzy"}, "match"),
        ({"answer_pattern": "(("}, "answer_pattern"),
        ({"n": 0}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"alpha_method": "fixed"}, "alpha"),
        ({"alpha": 0.3}, "alpha"),
        ({"min_length": 600}, "min_length"),
        ({"max_tokens": None}, "max_tokens"),
        ({"stop": "x"}, "stop"),
        ({"seed": 2**64}, "seed"),
        ({"require_finished": 1}, "require_finished"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_wrong_settings_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInputError, match=named):
        Recipe().changed(values)


def test_presets_that_are_no_presets(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="base, distillation, math_qa, small_tasks or a YAML file"):
        load_preset("nothing")
    with pytest.raises(InvalidInputError, match="preset must be one of base"):
        load_preset(3)
    for text, said in (("- a\n", "name: value"), ("a: [", "not YAML"), ("n: many\n", "n must be")):
        path = tmp_path / "own.yaml"
        path.write_text(text)
        with pytest.raises(InvalidInputError, match=said):
            load_preset(str(path))
    path.write_text("# nothing\n")
    assert load_preset(str(path)) == Recipe()


def test_what_is_put_into_a_template_is_not_looked_at_again() -> None:
    assert Template("t", "{{{question}}} {answer}").fill({"question": "{answer}", "answer": "b"}) == "{{answer}} b"


def test_every_problem_has_a_seed_of_its_own() -> None:
    recipe = Recipe(seed=3)
    seeds = {recipe.problem_seed(line, digest) for line in range(50) for digest in ("a", "b")}
    assert len(seeds) == 100
    assert recipe.problem_seed(1, "a") == Recipe(seed=3, n=4).problem_seed(1, "a")
    assert recipe.problem_seed(1, "a") != Recipe(seed=4).problem_seed(1, "a")
    for seed in seeds:
        recipe.sampling(seed)


# -- problems -----------------------------------------------------------------------------------------------------


def test_problems_are_read_and_bad_lines_told(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    lines: list[bytes] = [
        b'{"question": "a", "answer": "1"}',
        b"not json",
        b"",
        b"[1]",
        b'{"question": "b"}',
        b'{"question": 3, "answer": "1"}',
        b'{"question": " ", "answer": "1"}',
        b'{"question": "\xff", "answer": "1"}',
        b'{"question": "\\ud800", "answer": "1"}',
        b"[" * 100_000,
        '{"question": "é", "answer": "", "more": 1}'.encode(),
    ]
    path.write_bytes(b"\n".join(lines))
    problems, malformed = read_problems(path)
    assert [(problem.line, problem.question) for problem in problems] == [(1, "a"), (11, "é")]
    assert [bad.line for bad in malformed] == [2, 4, 5, 6, 7, 8, 9, 10]
    said = [str(bad) for bad in malformed]
    for fragment, message in zip(
        ("not JSON", "a list", "'answer'", "a number", "empty", "UTF-8", "surrogate", "not JSON"), said, strict=True
    ):
        assert fragment in message
    assert read_problems(path, limit=1) == ([problems[0]], [])
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_problems(tmp_path / "nowhere")


def test_the_example_is_real_and_complete() -> None:
    problems, malformed = read_problems(GSM8K)
    assert len(problems) == 50
    assert malformed == []
    recipe = load_preset("math_qa")
    assert [reference_answer(problem.answer, recipe) for problem in problems[:3]] == ["18", "3", "70000"]
    assert len({problem.digest for problem in problems}) == 50


def test_the_small_tasks_are_what_their_script_makes() -> None:
    made = run_path(str(ROOT / "examples" / "problems" / "make_small_tasks.py"))
    tasks = made["made"](made["TASKS"], made["SEED"])
    lines = (ROOT / "examples" / "problems" / "small_tasks.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == tasks
    assert len({task["question"] for task in tasks}) == 90
    recipe = load_preset("small_tasks")
    for task in tasks:
        assert is_match(task["answer"], reference_answer(task["answer"], recipe), recipe.match)


# -- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "wanted", "match", "matches"),
    [
        ("18", "18", "number", True),
        ("$1,200.50", "1200.5", "number", True),
        ("−3", "-3", "number", True),
        ("18 eggs", "18", "number", True),
        ("19", "18", "number", False),
        ("none", "18", "number", False),
        ("a  b", "a b", "exact", True),
        ("A", "a", "exact", False),
    ],
)
def test_answers_are_compared(found: str, wanted: str, match: Any, matches: bool) -> None:
    assert is_match(found, wanted, match) is matches


def test_answers_are_found() -> None:
    math = load_preset("math_qa")
    assert sample_answer("#### 5\nno:\n#### $1,018", math) == "$1,018"
    assert sample_answer("the answer is 5", math) is None
    assert sample_answer("first 3, then 12.", Recipe(match="number")) == "12"
    assert sample_answer("  so  ", Recipe(match="exact")) == "so"
    assert sample_answer(" ", Recipe(match="exact")) is None
    assert as_number("no number") is None
    assert reference_answer("steps\n#### 42", math) == "42"
    assert reference_answer("no mark", math) == "no mark"


def test_filters_say_why() -> None:
    def sample(text: str, tokens: int, reason: FinishReason = FinishReason.STOP) -> CompletionOutput:
        return CompletionOutput(0, text, tuple(range(tokens)), 0.0, finish_reason=reason)

    recipe = Recipe(match="number", min_length=3, require_finished=True)
    for completion, found, why in (
        (sample("18", 5), "18", None),
        (sample("19", 5), "19", "another answer"),
        (sample("", 5), None, "no answer"),
        (sample("18", 2), "18", "too short"),
        (sample("18", 5, FinishReason.LENGTH), "18", "not finished"),
        (sample("18", 5, FinishReason.ERROR), "18", "error"),
    ):
        assert rejection(completion, found, "18", recipe) == why
    assert rejection(sample("", 0, FinishReason.LENGTH), None, "18", Recipe()) is None


def test_the_mixtures_logprob_follows_from_what_is_known() -> None:
    made = MixtureReport(0.25, -0.5, 0, 0, 0, 0, -2.0, -1.0, False)
    assert mixture_logprob(made) == pytest.approx(-0.75 * 2 - 0.25 + 0.5)
    alone = made._replace(alpha=1.0, logprob_theta=float("-inf"))
    assert mixture_logprob(alone) == -1.0


# -- the journal --------------------------------------------------------------------------------------------------

RECIPE = Recipe(n=3, seed=5)
PROBLEMS = [Problem(line, f"question {line} é", "#### 1") for line in (1, 2, 4, 5)]


def samples_of(problem: Problem, n: int = 3) -> list[dict[str, Any]]:
    return [
        {
            "line": problem.line,
            "problem": problem.digest,
            "sample": index,
            "accepted": index != 1,
            "rejected_because": None if index != 1 else "another answer",
            "question": problem.question,
            "answer": "1",
            "sample_answer": "<1>",
            "text": "a<b>&",
            "token_ids": [1, 2, 3],
            "tokens": ["a", "<b>", "&"],
            "logprobs_teacher": [-1.0, None, -0.5],
            "logprobs_theta": [-2.0, -1.0, -0.5],
            "logprobs_mixture": [-1.5, -1.0, -0.5],
            "alpha": [0.0, 0.5, 1.0],
        }
        for index in range(n)
    ]


def test_a_run_that_was_cut_anywhere_goes_on_to_the_same_samples(tmp_path: Path) -> None:
    """Every byte at which a kill could have left the file."""
    with Journal(tmp_path, RECIPE, PROBLEMS) as journal:
        for problem in PROBLEMS:
            journal.append(samples_of(problem))
        whole = journal.path.read_bytes()
    ends = [0]
    for problem in PROBLEMS:
        ends.append(
            ends[-1] + sum(len(json.dumps(sample, ensure_ascii=False).encode()) + 1 for sample in samples_of(problem))
        )
    assert ends[-1] == len(whole)
    for cut in range(len(whole)):
        (tmp_path / SAMPLES).write_bytes(whole[:cut])
        with Journal(tmp_path, RECIPE, PROBLEMS) as journal:
            finished = sum(end <= cut for end in ends[1:])
            assert journal.done == {problem.line for problem in PROBLEMS[:finished]}
            assert journal.path.read_bytes() == whole[: ends[finished]]
            if cut % 97 == 0:
                for problem in PROBLEMS:
                    if problem.line not in journal.done:
                        journal.append(samples_of(problem))
                assert journal.path.read_bytes() == whole


def test_other_settings_are_refused(tmp_path: Path) -> None:
    Journal(tmp_path, RECIPE, PROBLEMS).close()
    with pytest.raises(InvalidInputError, match=r"temperature was 0\.8, now it is 0\.5"):
        Journal(tmp_path, RECIPE.changed({"temperature": 0.5}), PROBLEMS)
    Journal(tmp_path, RECIPE, PROBLEMS).close()


def test_other_problems_are_refused_and_more_are_welcome(tmp_path: Path) -> None:
    with Journal(tmp_path, RECIPE, PROBLEMS[:2]) as journal:
        journal.append(samples_of(PROBLEMS[0]))
    with Journal(tmp_path, RECIPE, PROBLEMS) as journal:
        assert journal.done == {1}
    with pytest.raises(InvalidInputError, match="line 1"):
        Journal(tmp_path, RECIPE, PROBLEMS[1:])
    with pytest.raises(InvalidInputError, match="line 1"):
        Journal(tmp_path, RECIPE, [Problem(1, "another", "#### 1"), *PROBLEMS[1:]])


def test_damage_and_strangers_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / SAMPLES).write_text("somebody's data\n")
    with pytest.raises(InvalidInputError, match="not written by this command"):
        Journal(tmp_path, RECIPE, PROBLEMS)
    assert (tmp_path / SAMPLES).read_text() == "somebody's data\n"
    folder = tmp_path / "own"
    with Journal(folder, RECIPE, PROBLEMS) as journal:
        for problem in PROBLEMS:
            journal.append(samples_of(problem))
    lines = (folder / SAMPLES).read_text().splitlines(keepends=True)
    for broken in (["x\n", *lines[1:]], lines[1:], [*lines, *lines[:3]], [lines[0], *lines[3:]]):
        (folder / SAMPLES).write_text("".join(broken))
        with pytest.raises(InvalidInputError, match="damaged in line"):
            Journal(folder, RECIPE, PROBLEMS)
        assert (folder / SAMPLES).read_text() == "".join(broken)


def test_two_runs_do_not_write_to_one_folder(tmp_path: Path) -> None:
    with Journal(tmp_path, RECIPE, PROBLEMS), pytest.raises(InvalidInputError, match="another run"):
        Journal(tmp_path, RECIPE, PROBLEMS)


@settings(max_examples=30)
@given(room=st.integers(0, 400))
def test_a_full_disk_leaves_whole_problems(room: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A write that is cut short by a full disk, as the system reports it."""
    folder = tmp_path_factory.mktemp("full")
    with Journal(folder, RECIPE, PROBLEMS) as journal:
        journal.append(samples_of(PROBLEMS[0]))
        before = journal.path.read_bytes()
        left = [room]
        write = os.write

        def limited(file: int, content: bytes) -> int:
            if not left[0]:
                raise OSError(28, "No space left on device")
            written = write(file, content[: left[0]])
            left[0] -= written
            return written

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "write", limited)
            with pytest.raises(RamifyError, match="no space is left"):
                journal.append(samples_of(PROBLEMS[1]))
        assert journal.path.read_bytes() == before
        journal.append(samples_of(PROBLEMS[1]))
        assert journal.done == {1, 2}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RamifyError, match="cannot write"):
        Journal(tmp_path / "file" / "folder", RECIPE, PROBLEMS)


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


def test_the_report_is_well_formed_and_says_what_happened(tmp_path: Path) -> None:
    many = [Problem(line, f"<script>alert({line})</script>", "#### 1") for line in range(1, 21)]
    with Journal(tmp_path, RECIPE, many) as journal:
        for problem in reversed(many):
            journal.append(samples_of(problem))
        write_report(tmp_path / "report.html", journal, RECIPE, 25)
    page = (tmp_path / "report.html").read_text()
    reader = read(page)
    assert "40 of 60 samples accepted" in page
    assert "another answer" in page
    assert "20 of 25" in page
    assert reader.count["svg"] == 3
    assert page.count('class="example"') == EXAMPLES
    assert "problem 1, sample 0" in page


def test_a_report_of_nothing(tmp_path: Path) -> None:
    with Journal(tmp_path, RECIPE, PROBLEMS) as journal:
        write_report(tmp_path / "report.html", journal, RECIPE, 4)
    read((tmp_path / "report.html").read_text())


def test_the_page_names_every_setting() -> None:
    page = (ROOT / "docs" / "distill.md").read_text(encoding="utf-8")
    for field in fields(Recipe):
        assert f"`{field.name}`" in page, field.name
    for sample in samples_of(PROBLEMS[0]):
        for name in sample:
            assert f"`{name}`" in page, name
