"""batch_invariant in bfloat16, on widths of real models: requests alone and in three busy schedules, bit for bit.

Tiny models split nothing: these have the widths, heads and vocabularies of 0.6B, 1.5B and 1B models, with three layers:
how sums are split follows from a layer's shape, so more of them would only take longer. Every busy schedule of every
shape is a process of its own (bits_process.py), as many at once as there are processors: kernels are compiled side by
side. Each of them asks for a third of the requests alone too.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import bits
from tests.gpu.bits_process import ALONE, BUSY, SAMPLES, SCHEDULES, requests

ROOT = Path(__file__).parents[2]
SECONDS = 600  # of a process; one by one, on two cores, none takes that
# How often, at least, what must not change a bit happens in a busy schedule.
OFTEN = {
    "steps ahead": 100,
    "steps with shared reads": 50,
    "steps with prompts and decodes": 5,
    "prompt_tokens_cached": 50_000,
}
OFTEN_IN = {
    "prompts in pieces, without graphs": {"pieces of prompts": 700},
    "a cache that runs out": {
        "preemptions": 50,
        "outputs computed again as prompts": 50,
        "of these beyond the first cut": 10,
    },
}
COMMON = {
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
    "rope_theta": 500_000,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": False,
    },
    "1.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "llama1B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
}


class Told(NamedTuple):
    """Of one schedule: answers by the requests' numbers, and how often what happened."""

    answers: list[list[Any]]
    counts: Counter[str]


Answers = dict[str, tuple[dict[int, list[Any]], Counter[str]]]  # by schedule


class Processes:
    """All of them, from the start on; whoever asks for a schedule waits for what it needs."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor) -> None:
        self._running: dict[str, list[Future[Answers]]] = {}
        for shape, facts in SHAPES.items():
            (folder / shape).mkdir()
            (folder / shape / "config.json").write_text(json.dumps({**COMMON, **facts}))
            self._running[shape] = [pool.submit(_run, folder / shape, schedule) for schedule in BUSY]

    def told(self, shape: str, schedule: str) -> Told:
        answers: dict[int, list[Any]] = {}
        counts: Counter[str] = Counter()
        for running in self._running[shape] if schedule == ALONE else [self._running[shape][BUSY.index(schedule)]]:
            own, seen = running.result()[schedule]
            answers |= own
            counts += seen
        return Told([answers[number] for number in range(len(answers))], counts)


def _run(folder: Path, schedule: str) -> Answers:
    out = folder / schedule
    program = [sys.executable, "-m", "tests.gpu.bits_process", str(folder), schedule, str(out)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    print(done.stdout)
    assert done.returncode == 0, f"{folder.name}, {schedule}: {done.stderr[-3000:]}"
    told: Answers = pickle.loads(out.read_bytes())
    return told


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield Processes(tmp_path_factory.mktemp("shapes"), pool)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("schedule", BUSY)
def test_requests_alone_and_in_busy_schedules(processes: Processes, shape: str, schedule: str) -> None:
    alone, busy = processes.told(shape, ALONE), processes.told(shape, schedule)
    asked = requests(100_000)
    assert len(alone.answers) == len(asked)
    bits.check(alone.answers, busy.answers, asked)
    # What the schedules are for did happen, and nothing of it to those who were alone.
    for name in ("steps with shared reads", "prompt_tokens_cached", "preemptions"):
        assert alone.counts[name] == 0, name
    for name, fewest in {**OFTEN, **OFTEN_IN.get(schedule, {})}.items():
        assert busy.counts[name] >= fewest, name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_samples_of_a_long_prompt_begin_with_those_of_few(processes: Processes, shape: str, schedule: str) -> None:
    *_, last = told = processes.told(shape, schedule).answers[-len(SAMPLES) :]
    for n, (_, samples) in zip(SAMPLES, told, strict=True):
        assert samples == last[1][:n]
