"""`ramify distill` without a model: recipes, problems, answers, filters, the journal."""

from __future__ import annotations

import json
import os
from dataclasses import fields, replace
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.distill.answers import as_number, is_match, reference_answer, sample_answer
from ramify.distill.files import ANSWERS, SAMPLES
from ramify.distill.journal import Journal
from ramify.distill.problems import Problem, read_problems
from ramify.distill.recipe import Recipe, load_preset, preset_names
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
        ({"oracle": ""}, "oracle"),
        ({"oracle_prompt": "{question} {answer}"}, "oracle_prompt must not hold"),
        ({"oracle_max_tokens": 0}, "oracle_max_tokens"),
        ({"oracle_temperature": -1}, "oracle_temperature"),
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


def test_a_mark_of_utf_8_may_begin_a_file(tmp_path: Path) -> None:
    """As editors write it on Windows, and only there: in a later line it is no JSON."""
    path = tmp_path / "problems.jsonl"
    line = b'{"question": "a", "answer": "1"}\r\n'
    path.write_bytes(b"\xef\xbb\xbf" + line + line)
    marked, malformed = read_problems(path)
    assert malformed == []
    path.write_bytes(line + line)
    assert read_problems(path)[0] == marked
    path.write_bytes(line + b"\xef\xbb\xbf" + line)
    assert [bad.line for bad in read_problems(path)[1]] == [2]


def test_answers_may_lack_where_an_oracle_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(
        '{"question": "a"}\n{"question": "b", "answer": null}\n{"question": "c", "answer": " "}\n'
        '{"question": "d", "answer": "4"}\n{"question": "e", "answer": 5}\n{"answer": "6"}\n'
    )
    problems, malformed = read_problems(path, answers_may_lack=True)
    assert [(problem.question, problem.answer) for problem in problems] == [
        ("a", None),
        ("b", None),
        ("c", None),
        ("d", "4"),
    ]
    assert [bad.line for bad in malformed] == [5, 6]
    answered = replace(problems[0], oracle_answer="7")
    assert (answered.solution, answered.digest) == ("7", problems[0].digest)
    assert "--oracle MODEL" in str(read_problems(path)[1][0])


def test_the_example_is_real_and_complete() -> None:
    problems, malformed = read_problems(GSM8K)
    assert len(problems) == 50
    assert malformed == []
    recipe = load_preset("math_qa")
    assert [reference_answer(problem.solution, recipe) for problem in problems[:3]] == ["18", "3", "70000"]
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
            "answer_by": "file",
            "finish_reason": "stop",
            "error": None,
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
    # Every place within a problem, and places of the later ones, whose lines look the same.
    for cut in [*range(ends[1] + 1), *range(ends[1], len(whole), 23)]:
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
    with Journal(tmp_path, RECIPE, PROBLEMS) as journal:
        journal.append(samples_of(PROBLEMS[0]))
    with pytest.raises(InvalidInputError, match=r"temperature was 0\.8, now it is 0\.5"):
        Journal(tmp_path, RECIPE.changed({"temperature": 0.5}), PROBLEMS)
    Journal(tmp_path, RECIPE, PROBLEMS).close()


def test_settings_that_nothing_was_made_with_may_be_others(tmp_path: Path) -> None:
    """A model's name with a typing error ended the run, and its folder then refused the right name."""
    Journal(tmp_path, RECIPE.changed({"model_theta": "smolm"}), PROBLEMS).close()
    Journal(tmp_path, RECIPE, PROBLEMS).close()
    assert json.loads((tmp_path / "settings.json").read_text()) == RECIPE.as_dict()
    (tmp_path / ANSWERS).write_text("{}\n")  # the oracle's answers are bound to what it was asked
    with pytest.raises(InvalidInputError, match=r"temperature was 0\.8, now it is 0\.5"):
        Journal(tmp_path, RECIPE.changed({"temperature": 0.5}), PROBLEMS)


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
    strange = [f'{{"line": {number}, "problem": "a", "sample": 0}}\n' for number in ("Infinity", "[" * 200_000)]
    for broken in (
        ["x\n", *lines[1:]],
        lines[1:],
        [*lines, *lines[:3]],
        [lines[0], *lines[3:]],
        *([one, *lines[1:]] for one in strange),
    ):
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


def test_a_folder_from_before_a_setting_existed_goes_on(tmp_path: Path) -> None:
    with Journal(tmp_path, RECIPE, PROBLEMS) as journal:
        journal.append(samples_of(PROBLEMS[0]))
    path = tmp_path / "settings.json"
    older = {name: value for name, value in json.loads(path.read_text()).items() if not name.startswith("oracle")}
    path.write_text(json.dumps(older))
    Journal(tmp_path, RECIPE, PROBLEMS).close()
    Journal(tmp_path, RECIPE.changed({"oracle_max_tokens": 9}), PROBLEMS).close()  # nobody was asked
    with pytest.raises(InvalidInputError, match="oracle was None, now it is 'large'"):
        Journal(tmp_path, RECIPE.changed({"oracle": "large"}), PROBLEMS)


def test_a_folder_with_a_setting_from_a_later_version_is_left_to_it(tmp_path: Path) -> None:
    """It was passed over, so samples that were made with it and without it stood together."""
    with Journal(tmp_path, RECIPE, PROBLEMS) as journal:
        journal.append(samples_of(PROBLEMS[0]))
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"later": 1}))
    with pytest.raises(InvalidInputError, match=r"made by another version .* does not have \(later\)"):
        Journal(tmp_path, RECIPE, PROBLEMS)


def test_the_page_names_every_setting() -> None:
    page = (ROOT / "docs" / "distill.md").read_text(encoding="utf-8")
    for field in fields(Recipe):
        assert f"`{field.name}`" in page, field.name
    for sample in samples_of(PROBLEMS[0]):
        for name in sample:
            assert f"`{name}`" in page, name
