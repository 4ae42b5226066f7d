"""OptimalSampling on real weights and on tiny checkpoints that have a tokenizer: what its users see."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from ramify import LLM, InvalidInputError, MixtureReport, OptimalSampling, SamplingParams
from ramify.cli.commands import app
from ramify.config import AlphaMethod
from ramify.models.loader import ModelLoader
from ramify.optimal import DIAGNOSTICS, OptimalOutputs
from tests.conftest import CheckpointMaker, rewrite_config
from tests.document_blocks import OPTIMAL_BLOCKS

PROBLEM, ANSWER = "Tom has 3 apples and buys 4 more. How many apples has he?", "The answer is 7."
TEACHER, THETA = f"{PROBLEM}\n{ANSWER}\nReasoning:", f"{PROBLEM}\nReasoning:"


@pytest.fixture(scope="module")
def sampler(default_gguf: Path) -> OptimalSampling:
    """One checkpoint on both sides."""
    return OptimalSampling(str(default_gguf), str(default_gguf), max_model_len=256)


@pytest.fixture(scope="module")
def folders(make_checkpoint: CheckpointMaker, default_gguf: Path) -> tuple[Path, Path]:
    """Two tiny random models with the default model's tokenizer, one of them padded to more entries than it has."""
    from ramify import ModelConfig

    tokenizer = ModelLoader(ModelConfig(model=str(default_gguf))).load_tokenizer()
    assert tokenizer is not None
    made = []
    for vocab_size, layers in ((49_280, 2), (49_152, 1)):
        folder = make_checkpoint("llama", vocab_size=vocab_size, num_hidden_layers=layers, max_position_embeddings=1024)
        tokenizer.backend.save(str(folder / "tokenizer.json"))
        made.append(folder)
    return made[0], made[1]


def test_an_end_that_only_one_model_has_room_for_is_no_end(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """min_tokens bans all ends, and one was beyond the smaller vocabulary: that broke the step, for every request."""
    teacher = shutil.copytree(folders[0], tmp_path / "teacher")
    rewrite_config(teacher, eos_token_id=[2, 49_200])
    made = OptimalSampling(str(teacher), str(folders[1]), max_model_len=128)
    outputs = made.generate(TEACHER, THETA, n=2, max_tokens=4, min_tokens=4, seed=3, use_tqdm=False)
    assert outputs.num_tokens == [4, 4]


@pytest.mark.parametrize("number", [0, 1])
def test_the_documents_examples_run_with_only_import_and_models_changed(
    folders: tuple[Path, Path], number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code = OPTIMAL_BLOCKS[number].code
    for old, new in (
        ("from optimal_sampling import OptimalSamplingV1", "from ramify import OptimalSamplingV1"),
        ("Qwen/Qwen2.5-32B-Instruct", str(folders[0])),
        ("Qwen/Qwen2.5-7B-Instruct", str(folders[1])),
    ):
        assert old in code
        code = code.replace(old, new)
    names: dict[str, Any] = {}
    exec(compile(code, "<document>", "exec"), names)
    outputs = names["outputs"]
    assert isinstance(outputs, OptimalOutputs)
    assert capsys.readouterr().out.rstrip("\n") == outputs.generated_texts[0].rstrip("\n")
    assert outputs.num_tokens == [512], "a random model does not end by itself"


def test_flat_lists_have_one_entry_per_sample_prompt_by_prompt(sampler: OptimalSampling) -> None:
    prompts = [TEACHER, "Once upon a time,"]
    outputs = sampler.generate(prompts, n=3, max_tokens=5, seed=4, ignore_eos=True, use_tqdm=False)
    assert [len(output.outputs) for output in outputs.outputs] == [3, 3]
    assert outputs.num_tokens == [5] * 6
    assert [sample.text for output in outputs.outputs for sample in output.outputs] == outputs.generated_texts
    assert [len(ids) for ids in outputs.generated_ids] == [5] * 6
    assert [len(values) for values in outputs.alpha_history] == [5] * 6
    for name in DIAGNOSTICS:
        assert [len(values) for values in outputs.diagnostics[name]] == [5] * 6
    stats = outputs.alpha_stats
    assert stats["count"] == 30
    assert 0 <= stats["min"] <= stats["mean"] <= stats["max"] <= 1
    again = sampler.generate(prompts, n=3, max_tokens=5, seed=4, ignore_eos=True, use_tqdm=False)
    assert again.generated_ids == outputs.generated_ids


def test_identical_prompts_of_one_checkpoint_mix_to_the_model_itself(
    sampler: OptimalSampling, default_gguf: Path
) -> None:
    outputs = sampler.generate(THETA, max_tokens=12, seed=9, temperature=0.8, use_tqdm=False)
    assert all(alpha == pytest.approx(0.5, abs=1e-3) for alpha in outputs.alpha_history[0])
    assert all(value == pytest.approx(0, abs=1e-6) for value in outputs.diagnostics["kl_theta"][0])
    params = SamplingParams(max_tokens=12, seed=9, temperature=0.8)
    [alone] = LLM(str(default_gguf), max_model_len=256).generate(THETA, params, use_tqdm=False)
    assert outputs.generated_ids[0] == list(alone.outputs[0].token_ids)


@pytest.mark.parametrize(("alpha", "prompt"), [(1.0, TEACHER), (0.0, THETA)], ids=["teacher", "student"])
def test_at_the_ends_of_alpha_it_is_one_model(default_gguf: Path, alpha: float, prompt: str) -> None:
    made = OptimalSampling(
        str(default_gguf), str(default_gguf), alpha_method="fixed", alpha=alpha, max_model_len=256, num_kv_blocks=64
    )
    outputs = made.generate(TEACHER, THETA, n=3, max_tokens=16, seed=21, use_tqdm=False)
    llm = LLM(str(default_gguf), max_model_len=256, num_kv_blocks=64)
    params = SamplingParams(n=3, max_tokens=16, seed=21, temperature=0.8)
    [alone] = llm.generate(prompt, params, use_tqdm=False)
    assert outputs.generated_ids == [list(sample.token_ids) for sample in alone.outputs]


def test_each_model_sees_its_own_prompt_and_nothing_of_the_others(default_gguf: Path) -> None:
    made = OptimalSampling(
        str(default_gguf),
        str(default_gguf),
        teacher_system_prompt="You know the answer.",
        theta_system_prompt="You are a student.",
        enable_chat_template=True,
        max_model_len=256,
    )
    [(teacher, theta)] = made.render(TEACHER, THETA)
    assert teacher.text is not None
    assert theta.text is not None
    assert "You know the answer." in teacher.text
    assert ANSWER in teacher.text
    assert "You are a student." in theta.text
    assert PROBLEM in theta.text
    for secret in ("You know the answer.", ANSWER):
        assert secret not in theta.text
    assert made.tokenizer is not None
    assert made.tokenizer.decode(theta.token_ids, skip_special_tokens=False) == theta.text
    outputs = made.generate(TEACHER, THETA, max_tokens=3, use_tqdm=False)
    assert outputs.outputs[0].prompt == teacher.text
    stats = made.stats()
    assert stats["teacher"]["prompt_tokens_computed"] == len(teacher.token_ids)
    assert stats["theta"]["prompt_tokens_computed"] == len(theta.token_ids)


def test_without_templates_a_system_prompt_stands_before_the_prompt(folders: tuple[Path, Path]) -> None:
    made = OptimalSampling(*map(str, folders), teacher_system_prompt="Be exact.", max_model_len=128)
    [(teacher, theta)] = made.render("2 + 2 =")
    assert (teacher.text, theta.text) == ("Be exact.\n\n2 + 2 =", "2 + 2 =")
    with pytest.raises(InvalidInputError, match="prompt was given as token ids"):
        made.generate([[1, 2, 3]], use_tqdm=False)


def test_a_preset_says_what_the_caller_does_not(folders: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        f"model_teacher: {folders[0]}\nmodel_theta: {folders[1]}\ntheta_system_prompt: Be brief.\n"
        "alpha_method: fixed\nalpha: 0.25\nn: 3\nmax_tokens: 4\ntop_k: 5\n"
    )
    made = OptimalSampling(preset=path, max_model_len=128)
    [(teacher, theta)] = made.render("2 + 2 =")
    assert (teacher.text, theta.text) == ("2 + 2 =", "Be brief.\n\n2 + 2 =")
    outputs = made.generate("2 + 2 =", seed=1, use_tqdm=False)
    assert outputs.num_tokens == [4, 4, 4]
    assert {value for values in outputs.alpha_history for value in values} == {0.25}
    assert made.generate("2 + 2 =", n=1, max_tokens=2, seed=1, use_tqdm=False).generated_ids == [
        outputs.generated_ids[0][:2]
    ]
    changed = OptimalSampling(preset=str(path), model_theta=str(folders[0]), alpha=0.5, theta_system_prompt=None)
    assert (changed.mixture_config.alpha, changed.loads_one_checkpoint) == (0.5, True)
    assert changed.render("2 + 2 =")[0][1].text == "2 + 2 ="


def test_the_command_line_draws_what_python_draws(folders: tuple[Path, Path]) -> None:
    flags = ["--teacher", str(folders[0]), "--theta", str(folders[1]), "--max-model-len", "128", "-n", "2"]
    flags += ["--theta-prompt", THETA, "--alpha-min", "0.25", "--theta-system-prompt", "Be brief.", "--seed", "3"]
    said = CliRunner().invoke(app, ["generate", TEACHER, *flags, "--max-tokens", "6", "--json"])
    assert said.exit_code == 0, said.output
    drawn = json.loads(said.stdout)["outputs"]
    options: Any = {"alpha_min": 0.25, "theta_system_prompt": "Be brief.", "max_model_len": 128}
    expected = OptimalSampling(*map(str, folders), **options).generate(
        TEACHER, THETA, n=2, max_tokens=6, seed=3, use_tqdm=False
    )
    assert [each["token_ids"] for each in drawn] == expected.generated_ids
    assert [each["alpha"] for each in drawn] == expected.alpha_history


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--alpha", "0.3"], "--alpha is for two models: it needs --teacher and --theta, or --preset"),
        (["--theta-prompt", "x"], "--theta-prompt is for two models"),
        (["--teacher", "x"], "--teacher and --theta must be given together"),
        (["--teacher", "x", "--theta", "y", "--model", "z"], "--model names one model"),
        (["--teacher", "x", "--theta", "y", "--alpha-method", "fixed"], "--alpha-method 'fixed' needs"),
        (["--teacher", "x", "--theta", "y", "--prompt-logprobs", "1"], "--prompt-logprobs is for one model"),
        (["--teacher", "x", "--theta", "y", "--theta-prompt", "a", "--theta-prompt", "b"], "got 2 for 1"),
        (["--teacher", "x", "--theta", "y", "--generation-config", "auto"], "--generation-config must be 'none'"),
        (["--preset", "mathqa"], "base, distillation, math_qa, small_tasks or a YAML file"),
    ],
)
def test_flags_of_two_models_are_refused_before_anything_is_loaded(flags: list[str], said: str) -> None:
    made = CliRunner().invoke(app, ["generate", "hi", *flags])
    assert isinstance(made.exception, InvalidInputError)
    assert said in str(made.exception)


def test_presets_that_are_not_there_are_refused_with_those_that_are() -> None:
    with pytest.raises(
        InvalidInputError, match="base, distillation, math_qa, small_tasks or a YAML file, got 'mathqa'"
    ):
        OptimalSampling(preset="mathqa")
    with pytest.raises(InvalidInputError, match="model_teacher and model_theta must be given, or a preset"):
        OptimalSampling("smollm2-135m")


def test_each_token_costs_one_position_per_model(sampler: OptimalSampling) -> None:
    sampler.reset_prefix_cache()
    before = sampler.stats()
    [(teacher, theta)] = sampler.render(TEACHER, THETA)
    sampler.generate(TEACHER, THETA, n=4, max_tokens=8, ignore_eos=True, seed=0, use_tqdm=False)
    after = sampler.stats()
    for name, rendered in (("teacher", teacher), ("theta", theta)):
        computed = after[name]["positions_computed"] - before[name]["positions_computed"]
        assert computed == len(rendered.token_ids) + 4 * (8 - 1), "the prompt once, then every token but the last"
    assert sampler.loads_one_checkpoint
    assert after["engine"]["blocks_in_use"] == 0


class Reader(HTMLParser):
    """Text and tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}, "a page of ours fetches nothing"

    def handle_data(self, data: str) -> None:
        self.text += data


def test_what_is_saved_and_plotted(sampler: OptimalSampling, tmp_path: Path) -> None:
    outputs = sampler.generate(TEACHER, THETA, n=2, max_tokens=20, seed=3, use_tqdm=False)
    outputs.save_alpha_history(tmp_path / "history.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["alpha"] for line in lines] == outputs.alpha_history
    assert [line["kl_theta"] for line in lines] == outputs.diagnostics["kl_theta"]
    assert [line["token_ids"] for line in lines] == outputs.generated_ids
    for name in ("page.html", "curves.png", "curves.svg"):
        outputs.plot(tmp_path / name, sample=1)
    page = Reader()
    page.feed((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert outputs.generated_texts[1].strip() in page.text
    assert "script" not in page.tags
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidInputError, match=r"sample must be in 0\.\.1, got 2"):
        outputs.plot(tmp_path / "page.html", sample=2)
    with pytest.raises(InvalidInputError, match=r"plot writes \.html"):
        outputs.plot(tmp_path / "page.txt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha_method": "fixed", "alpha": 1.5}, "alpha must be"),
        ({"alpha_method": "fixed"}, "needs alpha"),
        ({"alpha": 0.5}, "alpha must be None"),
        ({"alpha_min": 0.8, "alpha_max": 0.2}, "alpha_min must be at most"),
        ({"alpha_method": "best"}, "alpha_method must be"),
        ({"teacher_top_p": 0.0}, "teacher_top_p must be"),
        ({"alpha_min": float("nan")}, "alpha_min must be"),
        ({"temprature": 1.0}, "'temprature' is not an engine option"),
        ({"teacher_system_prompt": 3}, "teacher_system_prompt must be"),
    ],
    ids=str,
)
def test_bad_options_are_refused_before_anything_is_loaded(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        OptimalSampling("no such model", "neither this", **options)


def test_bad_prompts_are_refused_before_anything_starts(sampler: OptimalSampling) -> None:
    for prompts, theta, message in (
        ([TEACHER, TEACHER], [THETA], "theta_prompts must be one per prompt: got 1 for 2 prompts"),
        ([TEACHER], [""], "theta_prompt must not be empty"),
        ([TEACHER], [[1, 10**6]], "theta_prompt_token_ids"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            sampler.generate(prompts, theta, use_tqdm=False)
    for options, message in (
        ({"prompt_logprobs": 1}, "prompt_logprobs must be None for two models"),
        ({"output_kind": "delta"}, "output_kind must be 'final_only'"),
        ({"n": 0}, "n must be"),
        ({"max_tokens": 10**6}, "must fit"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            sampler.generate(TEACHER, **options, use_tqdm=False)
    assert sampler.stats()["engine"]["waiting"] == 0


def test_different_tokenizers_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in folders[1].iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokens = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokens["model"]["vocab"]
    one, two = list(vocabulary)[1000:1002]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(tokens), encoding="utf-8")
    with pytest.raises(InvalidInputError, match="must have the same tokenizer"):
        OptimalSampling(str(folders[0]), str(other))


def test_folders_without_tokenizer_are_compared_by_vocabulary(make_checkpoint: CheckpointMaker) -> None:
    small, large, same = (make_checkpoint("llama", vocab_size=size) for size in (320, 384, 320))
    with pytest.raises(InvalidInputError, match="these have 320 and 384 entries"):
        OptimalSampling(str(small), str(large))
    outputs = OptimalSampling(str(small), str(same), max_model_len=64).generate(
        [[1, 2, 3]], max_tokens=4, use_tqdm=False
    )
    assert outputs.num_tokens == [4]
    assert outputs.generated_texts == [""]


def test_different_context_lengths_give_the_shorter(make_checkpoint: CheckpointMaker) -> None:
    long, short = make_checkpoint("llama"), make_checkpoint("llama")
    rewrite_config(short, max_position_embeddings=64)
    made = OptimalSampling(str(long), str(short))
    assert made.max_model_len == 64
    with pytest.raises(InvalidInputError, match="must fit max_model_len = 64"):
        made.generate([[1] * 60], max_tokens=8, use_tqdm=False)


def test_the_page_about_two_models_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    """Its code runs, and its tables name every method and every number there is."""
    text = (Path(__file__).parents[2] / "docs" / "two_models.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    exec(compile(block, "two_models.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 2
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    named = [name for line in rows for name in re.findall(r"`\"?(\w+)\"?`", line.split("|")[1])]
    assert named[0] == "alpha_method"
    methods = len(get_args(AlphaMethod))
    assert named[1 : 1 + methods] == list(get_args(AlphaMethod))
    assert named[1 + methods :] == list(MixtureReport._fields)
