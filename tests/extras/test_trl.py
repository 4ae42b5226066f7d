"""TRL's trainers on samples from Ramify: after each sync the engine is the trainer's policy, logprobs and draws."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ramify import LLM, InvalidInputError, SamplingParams
from tests.conftest import CheckpointMaker

pytest.importorskip("trl", reason="TRL is not installed: make test-extras")

CLOSE = 1e-4
TEMPERATURE = 0.8


@pytest.fixture(autouse=True)
def _experiments_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture(scope="module")
def folder(make_checkpoint: CheckpointMaker) -> Path:
    return make_checkpoint("llama", eos_token_id=2, pad_token_id=3)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A word for every token: nothing of it is in the checkpoint's folder, whose engine takes token ids."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    words = {f"w{number}": number for number in range(320)}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w2", pad_token="w3")


def logprobs_of(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
    """At the temperature of the draw, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    rows = (logits.float() / TEMPERATURE).log_softmax(-1)
    return rows.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()  # type: ignore[no-any-return]


def even(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward that a model can learn: even numbers."""
    return [sum(token_id % 2 == 0 for token_id in ids) / max(len(ids), 1) for ids in completion_ids]


def test_the_engine_follows_the_trainer_step_by_step(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from ramify.integrations.trl import Rollouts

    llm = LLM(str(folder), logprobs_mode="processed")
    rollouts = Rollouts(llm, seed=11)
    seen: list[dict[str, Any]] = []

    def watched(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """What the engine draws, beside what the trainer's own model says of it at that moment."""
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        told = rollouts(prompts, trainer)
        worst = 0.0
        for prompt, completion, logprobs in zip(*(told[key] for key in sorted_keys), strict=True):
            wanted = logprobs_of(trainer.model, prompt, completion)
            worst = max(worst, *(abs(one - other) for one, other in zip(logprobs, wanted, strict=True)))
        saved = tmp_path / f"step{len(seen)}"
        trainer.model.save_pretrained(saved)
        seen.append({"told": told, "worst": worst, "saved": saved, "weights": before})
        return told

    sorted_keys = ("prompt_ids", "completion_ids", "logprobs")
    args = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        max_steps=3,
        learning_rate=1e-2,
        temperature=TEMPERATURE,
        beta=0.0,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=even,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["w5 w6 w7", "w8 w9", "w10 w11 w12 w13"]}),
        processing_class=tokenizer,
        rollout_func=watched,
    )
    trainer.train()
    assert len(seen) == 3
    assert max(step["worst"] for step in seen) < CLOSE
    for step in seen:
        told = step["told"]
        assert len({tuple(ids) for ids in told["prompt_ids"]}) == 1, "four samples of one prompt, one request"
        assert len(told["completion_ids"]) == 4
        # What an engine made of the weights of that moment draws with the same seed.
        alone = LLM(str(step["saved"]))
        params = SamplingParams(n=4, seed=11, temperature=TEMPERATURE, max_tokens=6)
        [output] = alone.generate(told["prompt_ids"][0], params, use_tqdm=False)
        assert [list(sample.token_ids) for sample in output.outputs] == told["completion_ids"]
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(seen[0]["weights"][name], seen[2]["weights"][name]), "the trainer did train"
    assert llm.stats()["generated_tokens"] == sum(len(ids) for step in seen for ids in step["told"]["completion_ids"])


def test_the_asynchronous_trainers_protocols(folder: Path, tokenizer: Any) -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import RolloutWorkerProtocol, WeightTransferProtocol

    from ramify.integrations.trl import RolloutWorker

    llm = LLM(str(folder), logprobs_mode="both")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [{"prompt": "w5 w6 w7", "wanted": 4}, {"prompt": [{"role": "user", "content": "w8 w9"}], "wanted": 2}]
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}w1"

    def near(completion_ids: Sequence[Sequence[int]], wanted: Sequence[int], **_: Any) -> list[float | None]:
        return [
            None if not ids else -abs(len(ids) - length) for ids, length in zip(completion_ids, wanted, strict=True)
        ]

    worker = RolloutWorker(
        llm,
        rows,
        [even, near],
        tokenizer,
        num_generations=3,
        prompts_at_once=2,
        params=SamplingParams(temperature=TEMPERATURE, max_tokens=5),
        queue_maxsize=7,
    )
    transfer = worker.weight_transfer
    for made, protocol in ((worker, RolloutWorkerProtocol), (transfer, WeightTransferProtocol)):
        names = [*vars(protocol), *getattr(protocol, "__annotations__", {})]
        assert all(hasattr(made, name) for name in names if not name.startswith("_"))
    with pytest.raises(RuntimeError, match="not running"):
        worker.check_health(60)

    def sync(version: int) -> None:
        transfer.pause()
        transfer.send_weights(model.named_parameters())
        transfer.resume()
        worker.update_model_version(version)

    transfer.init_weight_transfer()
    sync(1)
    worker.start()
    try:
        first = [worker.rollout_buffer.get(timeout=60) for _ in range(6)]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        stale = model_copy(folder)
        sync(2)
        later: list[Any] = []
        while len(later) < 3:
            sample = worker.rollout_buffer.get(timeout=60)
            later += [sample] if sample.model_version == 2 else []
        worker.check_health(60)
    finally:
        worker.stop()
        transfer.destroy()
    for samples, policy in ((first, stale), (later, model)):
        for sample in samples:
            length = int(sample.completion_mask.sum())
            prompt, completion = sample.input_ids[:-length].tolist(), sample.input_ids[-length:].tolist()
            assert sample.old_log_probs[:-length].tolist() == [0.0] * len(prompt)
            wanted = logprobs_of(policy, prompt, completion)
            assert sample.old_log_probs[-length:].tolist() == pytest.approx(wanted, abs=CLOSE)
    groups = {sample.group_id: [each for each in first if each.group_id == sample.group_id] for sample in first}
    assert [len(own) for own in groups.values()] == [3, 3]
    for own in groups.values():
        assert math.fsum(sample.advantage for sample in own) == pytest.approx(0, abs=1e-6)
    assert isinstance(first[3].completion, list), "a conversation is answered by a message"
    assert "rollout/tokens_per_second" in worker.metrics_queue.get(timeout=1)
    with pytest.raises(RuntimeError, match="not running"):
        worker.check_health(60)


def model_copy(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_a_worker_that_fails_says_so(folder: Path, tokenizer: Any) -> None:
    from ramify.integrations.trl import RolloutWorker

    def broken(**_: Any) -> list[float]:
        raise ValueError("no reward today")

    worker = RolloutWorker(LLM(str(folder)), [{"prompt": "w5"}], broken, tokenizer, params=SamplingParams(max_tokens=2))
    worker.start()
    for _ in range(600):
        if worker._error is not None:
            break
        time.sleep(0.05)
    with pytest.raises(RuntimeError, match="no reward today"):
        worker.check_health(60)
    worker.stop()


def test_adapters_are_merged_for_the_engine_and_taken_out_again(folder: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from ramify.integrations.trl import policy_weights

    adapted = peft.get_peft_model(
        model_copy(folder), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    llm = LLM(str(folder))
    prompt, completion = [5, 6, 7], [9, 10, 11]
    with torch.no_grad():
        rows = adapted(torch.tensor([[*prompt, *completion]])).logits[0, 2:-1].log_softmax(-1)
    wanted = rows.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()
    with policy_weights(adapted) as weights:
        llm.load_weights(weights)
    assert llm.logprobs(prompt, [completion])[0].logprobs == pytest.approx(wanted, abs=CLOSE)
    assert not any(getattr(module, "merged", False) for module in adapted.modules())


def test_logprobs_that_are_not_of_the_draw_are_refused(folder: Path) -> None:
    from ramify.integrations.trl import draw

    llm = LLM(str(folder))
    with pytest.raises(InvalidInputError, match='logprobs_mode="processed"'):
        draw(llm, [[5, 6]], SamplingParams(temperature=0.7))
    drawn = draw(llm, [[5, 6], [7], [5, 6]], SamplingParams(seed=1, max_tokens=4))
    assert [len(each.logprobs) for each in drawn] == [len(each.token_ids) for each in drawn]
    assert drawn[0] != drawn[2], "two samples of one prompt, not one twice"
    assert llm.stats()["prompt_tokens_computed"] == 3, "the prompt that repeats is computed once"
