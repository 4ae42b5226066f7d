"""The recipes of docs/recipes, copied from their pages and run, with small sizes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ramify import AsyncLLM
from ramify.server.app import create_app
from tests.serving import ENGINE_PROCESS, serving

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "recipes"

pytestmark = pytest.mark.usefixtures("default_gguf")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to write into that has the checkout's examples, where the blocks are run."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blocks(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (RECIPES / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run(name: str, block: str, names: dict[str, Any], **changes: str) -> None:
    """A block of a page; changes: what stands on the left of an assignment, and the smaller value on its right."""
    for left, right in changes.items():
        variables = left.replace("__", ", ")
        block, count = re.subn(rf"^{variables} = .*$", f"{variables} = {right}", block, flags=re.MULTILINE)
        assert count == 1, f"{name} has no line {variables} = …"
    exec(compile(block, str(RECIPES / name), "exec"), names)


Printed = Callable[[], str]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    return lambda: capsys.readouterr().out


def test_every_page_is_run() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    here += (ROOT / "tests" / "extras" / "test_recipe.py").read_text(encoding="utf-8")
    assert [
        page.name for page in RECIPES.glob("*.md") if page.name != "index.md" and f'"{page.name}"' not in here
    ] == []


def test_a_search_over_lines(printed: Printed) -> None:
    [block] = blocks("tree_search.md")
    run("tree_search.md", block.replace("n=32", "n=2"), {}, budget__wanted="60, 2")
    told = printed()
    assert "nothing found" not in told
    assert re.search(r"^\d+ nodes, \d+ positions of prompts computed$", told, re.MULTILINE)


def test_a_function_and_the_model_as_judges(printed: Printed) -> None:
    rule, _, judge = blocks("reward_model.md")
    names: dict[str, Any] = {}
    run("reward_model.md", rule.replace("max_tokens=60", "max_tokens=12").replace("best_of=8", "best_of=3"), names)
    assert names["output"].outputs[0].score <= 0
    run("reward_model.md", judge, names, tasks__n="2, 3")
    assert len(re.findall(r"^\S.* +\d+%$", printed(), re.MULTILINE)) == 5
    assert len(names["odds"]) == 3


def test_votes_on_word_problems(printed: Printed) -> None:
    [block] = blocks("self_consistency.md")
    run("self_consistency.md", block, {}, count__n__max_tokens="1, 2, 16")
    assert re.search(r"^the majority +\d+\.0%$", printed(), re.MULTILINE)


def test_a_server_and_its_clients(printed: Printed) -> None:
    llm = AsyncLLM(num_kv_blocks=512, engine_process=ENGINE_PROCESS)
    names: dict[str, Any] = {}
    with serving(create_app(llm)) as url:
        for block in blocks("serving.md"):
            run(
                "serving.md",
                block.replace("http://127.0.0.1:8000", url).replace("max_tokens=24", "max_tokens=6"),
                names,
            )
    llm.engine.stop()
    told = printed()
    assert [line[0] for line in told.splitlines() if re.match(r"\d ", line)] == ["0", "1", "2", "3"]
    assert told.splitlines()[-1] == "The capital of France is Paris."


@pytest.mark.long
def test_a_judge_of_hugging_faces_kind(folder: Path, printed: Printed) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=1, num_labels=1)
    torch.manual_seed(0)
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder / "my-reward-model")
    backend = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0", pad_token="w1")
    words.save_pretrained(folder / "my-reward-model")

    rule, judge, _ = blocks("reward_model.md")
    names: dict[str, Any] = {}
    for block in (rule, judge):
        run("reward_model.md", block.replace("max_tokens=60", "max_tokens=12"), names)
    assert names["rewards"].shape == (8,)
    assert names["best"].text in printed()


@pytest.mark.long
def test_a_student_learns(folder: Path, printed: Printed) -> None:
    """Two steps of training on two samples: that it runs, and that the engine gets the student's weights."""
    import json

    from ramify import LLM

    lines = (ROOT / "examples" / "problems" / "small_tasks.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    (folder / "held_out.jsonl").write_text("\n".join(lines), encoding="utf-8")
    encode = LLM().get_tokenizer().encode
    samples = [json.loads(line) for line in lines]
    data = [{**each, "token_ids": encode(f" {each['answer']}\n")} for each in samples]
    (folder / "run").mkdir()
    (folder / "run" / "data.jsonl").write_text("\n".join(map(json.dumps, data)), encoding="utf-8")
    [block] = blocks("distillation.md")
    names: dict[str, Any] = {}
    run("distillation.md", block, names, epochs__batch_size__tasks="1, 2, 2")
    assert re.search(r"^before: \d+%$\n^after epoch 1: loss \d\.\d{3}, \d+%$", printed(), re.MULTILINE)
    question, answer = names["pairs"][0]
    told = names["llm"].logprobs([question], [answer])[0]
    import torch

    with torch.no_grad():
        rows = names["model"](torch.tensor([[*question, *answer]])).logits[0, len(question) - 1 : -1].log_softmax(-1)
    wanted = rows.gather(1, torch.tensor(answer)[:, None]).sum().item()
    assert told.cumulative_logprob == pytest.approx(wanted, abs=1e-3)
