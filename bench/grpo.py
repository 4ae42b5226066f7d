"""GRPO with TRL on the default model: samples by Ramify and by transformers, the same trainer otherwise.

The reward is simple: how near a text's length is to that of a short sentence, and whether it ends like one. Both runs
see the same prompts in the same order and draw with the same parameters; what they draw differs, so rewards are
compared as means. Reported: the reward of every step, the time in generation (for Ramify with the sync of weights), its
share of the whole, and the ratio of both runs' generation times. Goal: 3.

    pip install -c constraints.txt -e ".[trl]"
    python -m bench.grpo [--steps 10] [--prompts 4] [--generations 8] [--tokens 48] [--rollouts ramify transformers]

On a quiet machine: a run takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.machine import commit, machine_name
from ramify import LLM
from ramify.models import embedded

PROMPTS = [
    "Write one short sentence about the sea.",
    "Write one short sentence about bread.",
    "Write one short sentence about a train.",
    "Write one short sentence about rain.",
    "Write one short sentence about an old house.",
    "Write one short sentence about a cat.",
    "Write one short sentence about the moon.",
    "Write one short sentence about a river.",
]
WANTED_LENGTH = 60  # characters


def reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """At most 1.5: 1 for the length, a half for a full stop at the end."""
    texts = [completion[0]["content"].strip() for completion in completions]
    return [max(0.0, 1 - abs(len(text) - WANTED_LENGTH) / WANTED_LENGTH) + 0.5 * text.endswith(".") for text in texts]


def saved_model(folder: Path) -> Path:
    """The default model as a Hugging Face folder."""
    import transformers

    gguf = embedded.fetch()
    load = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    read = transformers.AutoModelForCausalLM.from_pretrained(**load, dtype=torch.float32)
    config = transformers.LlamaConfig.from_dict(
        {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    )
    plain = transformers.LlamaForCausalLM(config)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**load).save_pretrained(folder)
    return folder


class Timed:
    """A call whose time is added up."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.seconds = 0.0

    def __call__(self, *args: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        try:
            return self.call(*args, **options)
        finally:
            self.seconds += time.perf_counter() - begun


def train(kind: str, model: Path, out: Path, asked: argparse.Namespace) -> dict[str, Any]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from ramify.integrations.trl import Rollouts

    rows = [{"prompt": [{"role": "user", "content": PROMPTS[index % len(PROMPTS)]}]} for index in range(64)]
    args = GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=asked.prompts * asked.generations,
        num_generations=asked.generations,
        max_completion_length=asked.tokens,
        max_steps=asked.steps,
        learning_rate=5e-6,
        temperature=1.0,
        beta=0.0,
        seed=7,
        shuffle_dataset=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=False,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    rollouts = Rollouts(LLM(str(model))) if kind == "ramify" else None
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list(rows),
        rollout_func=rollouts,
    )
    generating = Timed(trainer._generate)
    trainer._generate = generating
    begun = time.perf_counter()
    trainer.train()
    whole = time.perf_counter() - begun
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    told = {
        "rollouts": kind,
        "seconds": round(whole, 2),
        "seconds_generating": round(generating.seconds, 2),
        "share_of_generation": round(generating.seconds / whole, 3),
        "rewards": [round(entry["reward"], 4) for entry in steps],
        "mean_length": round(sum(entry["completions/mean_length"] for entry in steps) / len(steps), 1),
    }
    if rollouts is not None:
        told["seconds_syncing"] = round(rollouts.seconds_syncing, 2)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=4, help="different prompts a step")
    parser.add_argument("--generations", type=int, default=8, help="samples a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="longest sample")
    parser.add_argument("--rollouts", nargs="+", choices=("ramify", "transformers"), default=["ramify", "transformers"])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = saved_model(Path(scratch) / "model")
        runs = {kind: train(kind, model, Path(scratch) / kind, asked) for kind in asked.rollouts}
    for told in runs.values():
        print(json.dumps(told))
    summary: dict[str, Any] = {
        "bench": "grpo",
        "machine": machine_name(),
        "commit": commit(),
        **vars(asked),
        "runs": list(runs.values()),
    }
    if len(runs) == 2:
        times = [runs[kind]["seconds_generating"] for kind in ("transformers", "ramify")]
        summary["generation_ratio"] = round(times[0] / times[1], 2)
        summary["goal"] = 3.0
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
