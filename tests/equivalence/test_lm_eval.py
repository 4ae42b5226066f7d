"""lm-eval's `local-completions` through the server: the numbers of a direct computation with transformers.

lm-eval brings some 600 MB of packages, too many for every checkout: `pip install -c constraints.txt -e ".[eval]"`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ramify import AsyncLLM
from ramify.server.app import create_app
from ramify.server.config import ServerConfig
from tests.serving import serving

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[eval]'")

QUESTIONS = [
    ("The capital of France is", ["Paris", "Rome", "a small dog", "Berlin"], 0),
    ("Water freezes when it is", ["hot", "cold", "loud", "late at night"], 1),
    ("At night the sky is", ["green", "dark", "made of cheese and bread", "dry"], 1),
    ("Two plus two is", ["four", "five", "a river", "eleven hundred"], 0),
    ("A cat is an", ["animal", "engine", "idea about numbers", "hour"], 0),
    ("Der Himmel über Zürich ist", ["blau", "naïve", "日本", "schnell"], 0),
    ("Bees make", ["honey", "steel", "laws", "engines"], 0),
    ("The opposite of up is", ["down", "left", "purple", "over"], 0),
]
CHOICE_TASK = """
task: ramify_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_target: label
doc_to_choice: choices
metric_list:
  - metric: acc
  - metric: acc_norm
"""
WRITING_TASK = """
task: ramify_writing
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: question
doc_to_target: "{{{{choices[label]}}}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, default_gguf: Path) -> Path:
    """Tasks, their data, and the tokenizer of the reference, as transformers saves it."""
    made = tmp_path_factory.mktemp("lm_eval")
    lines = [
        json.dumps({"question": question, "choices": choices, "label": label}) for question, choices, label in QUESTIONS
    ]
    (made / "questions.jsonl").write_text("\n".join(lines))
    for name, task in (("choices", CHOICE_TASK), ("writing", WRITING_TASK)):
        (made / f"{name}.yaml").write_text(task.format(data=made / "questions.jsonl"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_gguf.parent, gguf_file=default_gguf.name)
    tokenizer.save_pretrained(made / "tokenizer")
    return made


@pytest.fixture(scope="module")
def results(folder: Path, default_gguf: Path) -> Iterator[dict[str, Any]]:
    patch = pytest.MonkeyPatch()
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        patch.setenv(name, str(folder / "cache"))
    patch.setenv("OPENAI_API_KEY", "sesame")
    from lm_eval.tasks import TaskManager

    llm = AsyncLLM(str(default_gguf), num_kv_blocks=256)
    with serving(create_app(llm, ServerConfig(api_key="sesame"))) as url:
        yield lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "base_url": f"{url}/v1/completions",
                "model": default_gguf.name,
                "auth_token": "sesame",  # of the tokenizer, which lm-eval finds by the server's own routes
                "num_concurrent": 2,
                "max_retries": 1,
            },
            tasks=["ramify_choices", "ramify_writing"],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            batch_size=4,
            log_samples=True,
            bootstrap_iters=0,
        )
    llm.engine.stop()
    patch.undo()


@pytest.fixture(scope="module")
def reference(default_gguf: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        default_gguf.parent, gguf_file=default_gguf.name, dtype=torch.float32
    ).eval()


def score(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    """The logprob of a continuation, and whether greedy decoding would write it: two lines of transformers."""
    whole, start = tokenizer(context + continuation)["input_ids"], len(tokenizer(context)["input_ids"])
    with torch.no_grad():
        logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    rows, targets = logprobs[start - 1 : -1], torch.tensor(whole[start:])
    return float(rows.gather(1, targets[:, None]).sum()), bool((rows.argmax(-1) == targets).all())


def test_a_task_of_choices_gets_the_numbers_of_transformers(
    results: dict[str, Any], folder: Path, reference: Any
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    samples = sorted(results["samples"]["ramify_choices"], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(QUESTIONS)
    right, right_by_length = [], []
    for sample, (question, choices, label) in zip(samples, QUESTIONS, strict=True):
        wanted = [score(reference, tokenizer, question, f" {choice}") for choice in choices]
        got = [(float(logprob), greedy in (True, "True")) for [(logprob, greedy)] in sample["resps"]]
        assert [scored[0] for scored in got] == pytest.approx([scored[0] for scored in wanted], abs=1e-3)
        assert [scored[1] for scored in got] == [scored[1] for scored in wanted]
        right.append(max(range(4), key=lambda place: wanted[place][0]) == label)
        by_length = [scored[0] / len(choice) for scored, choice in zip(wanted, choices, strict=True)]
        right_by_length.append(max(range(4), key=by_length.__getitem__) == label)
    numbers = results["results"]["ramify_choices"]
    assert numbers["acc,none"] == pytest.approx(sum(right) / len(right))
    assert numbers["acc_norm,none"] == pytest.approx(sum(right_by_length) / len(right))
    assert 0 < sum(right) < len(right), "a task that is all right or all wrong would show little"


def test_a_task_of_writing_gets_the_text_of_transformers(results: dict[str, Any], folder: Path, reference: Any) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    samples = sorted(results["samples"]["ramify_writing"], key=lambda sample: sample["doc_id"])
    for sample, (question, _, _) in zip(samples, QUESTIONS, strict=True):
        ids = torch.tensor([tokenizer(question)["input_ids"]])
        written = reference.generate(ids, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))
        text = tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
        assert sample["resps"][0][0] == text.split(".")[0]
