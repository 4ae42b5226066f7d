"""lm-eval on its model `ramify`, on `local-completions` through the server, and on its own `hf`: the same numbers.

Those of choices and of texts are compared with a direct computation with transformers too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from ramify import AsyncLLM, InvalidInputError
from ramify.server.app import create_app
from ramify.server.config import ServerConfig
from tests.conftest import CheckpointMaker
from tests.serving import serving

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: make test-extras")

if TYPE_CHECKING:
    from ramify.integrations.lm_eval import RamifyLM

Evaluate = Callable[..., dict[str, Any]]
TASKS = ("ramify_choices", "ramify_rolling", "ramify_writing")
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
fewshot_split: test
fewshot_config:
  sampler: first_n
metric_list:
  - metric: acc
  - metric: acc_norm
"""
ROLLING_TASK = """
task: ramify_rolling
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: question
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks and their data."""
    made = tmp_path_factory.mktemp("lm_eval")
    lines = [
        json.dumps({"question": question, "choices": choices, "label": label}) for question, choices, label in QUESTIONS
    ]
    (made / "questions.jsonl").write_text("\n".join(lines))
    for name, task in (("choices", CHOICE_TASK), ("rolling", ROLLING_TASK), ("writing", WRITING_TASK)):
        (made / f"{name}.yaml").write_text(task.format(data=made / "questions.jsonl"))
    return made


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: CheckpointMaker, default_gguf: Path) -> Path:
    """A tiny random model with the default model's tokenizer, as transformers saves both."""
    made = make_checkpoint("llama", vocab_size=49_152, num_hidden_layers=2, max_position_embeddings=1024)
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_gguf.parent, gguf_file=default_gguf.name)
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def evaluate(folder: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    patch = pytest.MonkeyPatch()
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        patch.setenv(name, str(folder / "cache"))
    patch.setenv("OPENAI_API_KEY", "sesame")
    patch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)  # it asks pip for all packages, every time
    from lm_eval.tasks import TaskManager

    def run(tasks: Sequence[str] = TASKS, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = lm_eval.simple_evaluate(
            tasks=list(tasks),
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            batch_size=4,
            log_samples=True,
            bootstrap_iters=0,
            **options,
        )
        return found

    yield run
    patch.undo()


@pytest.fixture(scope="module")
def served(evaluate: Evaluate, checkpoint: Path) -> dict[str, Any]:
    llm = AsyncLLM(str(checkpoint), num_kv_blocks=256)
    with serving(create_app(llm, ServerConfig(api_key="sesame"))) as url:
        found = evaluate(
            model="local-completions",
            model_args={
                "base_url": f"{url}/v1/completions",
                "model": checkpoint.name,
                "auth_token": "sesame",  # of the tokenizer, which lm-eval finds by the server's own routes
                "num_concurrent": 2,
                "max_retries": 1,
            },
        )
    llm.engine.stop()
    return found


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> RamifyLM:
    from ramify.integrations.lm_eval import RamifyLM

    return RamifyLM(str(checkpoint), num_kv_blocks=1024)


@pytest.fixture(scope="module")
def hugging_face(checkpoint: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(checkpoint), dtype="float32", device="cpu", batch_size=4)


@pytest.fixture(scope="module", params=["ramify", "local-completions"])
def results(request: pytest.FixtureRequest, evaluate: Evaluate) -> dict[str, Any]:
    """Of each of our models."""
    if request.param == "ramify":
        return evaluate(model=request.getfixturevalue("model"))
    found: dict[str, Any] = request.getfixturevalue("served")
    return found


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def score(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    """The logprob of a continuation, and whether greedy decoding would write it: two lines of transformers."""
    whole, start = tokenizer(context + continuation)["input_ids"], len(tokenizer(context)["input_ids"])
    with torch.no_grad():
        logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    rows, targets = logprobs[start - 1 : -1], torch.tensor(whole[start:])
    return float(rows.gather(1, targets[:, None]).sum()), bool((rows.argmax(-1) == targets).all())


def test_a_task_of_choices_gets_the_numbers_of_transformers(
    results: dict[str, Any], checkpoint: Path, reference: Any
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
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


def test_a_task_of_writing_gets_the_text_of_transformers(
    results: dict[str, Any], checkpoint: Path, reference: Any
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    samples = sorted(results["samples"]["ramify_writing"], key=lambda sample: sample["doc_id"])
    for sample, (question, _, _) in zip(samples, QUESTIONS, strict=True):
        ids = torch.tensor([tokenizer(question)["input_ids"]])
        written = reference.generate(ids, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))
        text = tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
        assert sample["resps"][0][0] == text.split(".")[0]


def numbers(found: dict[str, Any]) -> dict[str, float]:
    return {
        f"{task} {name}": value
        for task, metrics in found["results"].items()
        for name, value in metrics.items()
        if isinstance(value, float)
    }


def test_all_models_agree_to_four_decimals(results: dict[str, Any], evaluate: Evaluate, hugging_face: Any) -> None:
    wanted, got = evaluate(model=hugging_face), numbers(results)
    assert {name.split(",")[0] for name in got} >= {
        "ramify_choices acc",
        "ramify_choices acc_norm",
        "ramify_rolling word_perplexity",
        "ramify_writing exact_match",
    }
    assert got == pytest.approx(numbers(wanted), rel=1e-4, abs=5e-5)
    for task in ("ramify_choices", "ramify_rolling"):
        for one, other in zip(by_document(results, task), by_document(wanted, task), strict=True):
            assert [float(each) for each in _flat(one["resps"])] == pytest.approx(
                [float(each) for each in _flat(other["resps"])], abs=1e-3
            )


def by_document(found: dict[str, Any], task: str) -> list[Any]:
    return sorted(found["samples"][task], key=lambda sample: sample["doc_id"])


def _flat(resps: Any) -> list[Any]:
    """Logprobs, without what else stands beside them."""
    return [each[0] if isinstance(each, list | tuple) else each for [each] in resps]


def test_few_shot_contexts_are_read_once(evaluate: Evaluate, model: RamifyLM, hugging_face: Any) -> None:
    """Eight questions after the same seven: what they share comes out of the cache, and the numbers stay."""
    model.llm.reset_prefix_cache()
    before = model.llm.stats()
    found = evaluate(["ramify_choices"], model=model, num_fewshot=7)
    after = model.llm.stats()
    cached = after["prompt_tokens_cached"] - before["prompt_tokens_cached"]
    assert cached > after["prompt_tokens_computed"] - before["prompt_tokens_computed"]
    wanted = evaluate(["ramify_choices"], model=hugging_face, num_fewshot=7)
    assert numbers(found) == pytest.approx(numbers(wanted), rel=1e-4, abs=5e-5)


def test_chats_are_rendered_as_by_transformers(evaluate: Evaluate, model: RamifyLM, hugging_face: Any) -> None:
    options: dict[str, Any] = {"apply_chat_template": True, "num_fewshot": 1, "fewshot_as_multiturn": True}
    options["system_instruction"] = "Answer in one word."
    tasks = ["ramify_choices", "ramify_writing"]
    found, wanted = (evaluate(tasks, model=each, **options) for each in (model, hugging_face))
    assert numbers(found) == pytest.approx(numbers(wanted), rel=1e-4, abs=5e-5)
    for one, other in zip(by_document(found, tasks[1]), by_document(wanted, tasks[1]), strict=True):
        assert one["arguments"] == other["arguments"], "the very prompts"
        assert one["resps"] == other["resps"]


def test_what_is_too_long_loses_its_beginning_as_with_hf(model: RamifyLM, hugging_face: Any) -> None:
    from ramify.integrations.lm_eval import RamifyLM

    short = RamifyLM(llm=model.llm, max_length=24)
    asked = [(None, list(range(100, 160)), [7, 8, 9]), (None, [5], list(range(200, 224)))]
    longest = hugging_face._max_length
    hugging_face._max_length = 24
    try:
        wanted = hugging_face._loglikelihood_tokens(asked, disable_tqdm=True)
    finally:
        hugging_face._max_length = longest
    got = short._loglikelihood_tokens(asked, disable_tqdm=True)
    assert [logprob for logprob, _ in got] == pytest.approx([logprob for logprob, _ in wanted], abs=1e-3)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in wanted]
    with pytest.raises(InvalidInputError, match="1 to max_length = 24 tokens, got 25"):
        short._loglikelihood_tokens([(None, [5], list(range(25)))])


def test_it_is_registered_and_made_of_arguments(checkpoint: Path) -> None:
    from importlib.metadata import entry_points

    from lm_eval.api.registry import get_model

    from ramify.integrations.lm_eval import RamifyLM

    assert get_model("ramify") is RamifyLM
    made = RamifyLM.create_from_arg_string(
        f"pretrained={checkpoint},num_kv_blocks=64,max_length=128", {"batch_size": "auto", "device": "cpu"}
    )
    assert (made.max_length, made.llm.stats()["blocks_total"]) == (128, 64)
    if not torch.cuda.is_available():  # what the command says where nobody says anything
        RamifyLM.create_from_arg_string(f"pretrained={checkpoint},num_kv_blocks=64", {"device": "cuda:0"})
    with pytest.raises(InvalidInputError, match="with llm, no other engine"):
        RamifyLM("other", llm=made.llm)
    declared = [each.value for each in entry_points(group="lm_eval.models") if each.name == "ramify"]
    assert declared in ([], ["ramify.integrations.lm_eval:RamifyLM"]), "empty where the package is not installed"


def test_tasks_say_how_texts_are_drawn() -> None:
    from ramify.integrations.lm_eval import Writing

    plain = Writing.of({"until": ["\n\n", ""], "max_gen_toks": 7}, 256)
    assert (plain.params.temperature, plain.params.max_tokens, plain.until) == (0, 7, ("\n\n",))
    drawn = Writing.of({"until": "stop", "do_sample": True, "temperature": 0.7, "top_p": 0.9}, 256)
    assert (drawn.params.temperature, drawn.params.top_p, drawn.longest) == (0.7, 0.9, 256)
    assert Writing.of({"do_sample": False, "temperature": 0.7}, 9).params.temperature == 0
    assert Writing.of({"until": [f"<{number}>" for number in range(30)]}, 9).cut("a<29>b") == "a"
    with pytest.raises(InvalidInputError, match="num_beams"):
        Writing.of({"num_beams": 4}, 9)
