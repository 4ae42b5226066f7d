"""lm-eval on the default model: its own model `hf` beside `ramify`, the same tasks of local files.

A task of choices with five examples before every question, and one of writing. Reported: seconds of each model, loading
not counted, the metrics of both, which must agree to four decimals, and the ratio of times. Goal: 2.

    pip install -c constraints.txt -e ".[eval]"
    python -m bench.lm_eval_models [--questions 64] [--batch-size 16]

On a quiet machine: some minutes, nearly all of them `hf`'s.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.machine import commit, machine_name
from ramify.models import embedded

CHOICES = """
task: bench_choices
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_target: label
doc_to_choice: choices
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
WRITING = """
task: bench_writing
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
fewshot_split: test
output_type: generate_until
doc_to_text: question
doc_to_target: "{{{{choices[label]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 24}}
metric_list: [{{metric: exact_match}}]
"""


def write_tasks(folder: Path, count: int) -> None:
    numbers = random.Random(5)
    lines = []
    for _ in range(count):
        left, right = numbers.randrange(2, 30), numbers.randrange(2, 30)
        choices = [str(left + right + offset) for offset in numbers.sample(range(-9, 10), 4)]
        label = numbers.randrange(4)
        choices[label] = str(left + right)
        question = f"Tom has {left} apples and buys {right} more. How many apples does he have then? Answer:"
        lines.append(json.dumps({"question": question, "choices": choices, "label": label}))
    (folder / "questions.jsonl").write_text("\n".join(lines))
    for name, task in (("choices", CHOICES), ("writing", WRITING)):
        (folder / f"{name}.yaml").write_text(task.format(data=folder / "questions.jsonl"))


def measure(model: Any, folder: Path) -> tuple[float, dict[str, float]]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    begun = time.perf_counter()
    found = lm_eval.simple_evaluate(
        model=model, tasks=["bench_choices", "bench_writing"], task_manager=tasks, num_fewshot=5, bootstrap_iters=0
    )
    seconds = time.perf_counter() - begun
    told = {
        f"{task} {name.split(',')[0]}": value
        for task, metrics in found["results"].items()
        for name, value in metrics.items()
        if isinstance(value, float) and "stderr" not in name
    }
    return seconds, told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16, help="of hf; ramify makes its own")
    asked = parser.parse_args()
    import lm_eval.evaluator
    from lm_eval.models.huggingface import HFLM

    from ramify.integrations.lm_eval import RamifyLM

    lm_eval.evaluator.add_env_info = lambda _: None  # it asks pip for every package, in the time that is measured
    gguf = embedded.fetch()
    with tempfile.TemporaryDirectory() as scratch:
        write_tasks(Path(scratch), asked.questions)
        ramify = measure(RamifyLM(str(gguf)), Path(scratch))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        options = {"gguf_file": gguf.name, "dtype": "float32", "device": device, "batch_size": asked.batch_size}
        hf = HFLM(str(gguf.parent), **options)
        other = measure(hf, Path(scratch))
    summary = {
        "bench": "lm_eval_models",
        "machine": machine_name(),
        "commit": commit(),
        **vars(asked),
        "seconds": {"ramify": round(ramify[0], 2), "hf": round(other[0], 2)},
        "ratio": round(other[0] / ramify[0], 2),
        "goal": 2.0,
        "metrics": ramify[1],
        "agree": all(abs(value - other[1][name]) < 5e-5 for name, value in ramify[1].items()),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
