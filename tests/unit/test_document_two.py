"""Document 2's classes on the engine's own parts: its blocks run, and its loop draws what the engine draws."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ramify import (
    LLM,
    CacheExhaustedError,
    EngineConfig,
    InvalidInputError,
    ModelRunner,
    Sampler,
    SamplingParams,
    Sequence,
    SequenceStatus,
    UnsupportedError,
)
from tests.document_blocks import TOKEN_SAMPLER, TOKEN_SAMPLER_BLOCKS, find_block, run_code

CREATED = find_block(TOKEN_SAMPLER, "        self.sampler = Sampler() # 采样器诞生！")
PREPARE_SAMPLE = find_block(TOKEN_SAMPLER, "    def prepare_sample(self, seqs: list[Sequence]):")
RUN = find_block(TOKEN_SAMPLER, "    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int]:")
SAMPLER = find_block(TOKEN_SAMPLER, "class Sampler(nn.Module):")
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "torch_dtype": "float32",
}
PROMPTS = [list(range(10, 31)), [7], list(range(40, 45))]  # over two blocks, a single token, within a block
OPTIONS: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "enforce_eager": True, "num_kv_blocks": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made: Path = tmp_path_factory.mktemp("tiny")
    (made / "config.json").write_text(json.dumps(SHAPE))
    return str(made)


@pytest.fixture(scope="module")
def only_runner(folder: str) -> ModelRunner:
    return ModelRunner(EngineConfig.from_options(model=folder, max_num_seqs=4, max_num_batched_tokens=64, **OPTIONS))


@pytest.fixture
def runner(only_runner: ModelRunner) -> Iterator[ModelRunner]:
    """With an empty cache, and as it was afterwards."""
    yield only_runner
    only_runner.release(list(only_runner._known.values()))
    assert only_runner.num_free_blocks == 16
    only_runner._manager.check()
    only_runner._manager.reset_prefix_cache()


def sequences(**options: Any) -> list[Sequence]:
    return [
        Sequence(str(index), prompt, sampling_params=SamplingParams(**{"seed": index, **options}))
        for index, prompt in enumerate(PROMPTS)
    ]


def generate(run: Any, seqs: list[Sequence], count: int) -> list[tuple[int, ...]]:
    """The caller's loop, as the document's engine has it around its runner."""
    for step in range(count):
        for seq, token_id in zip(seqs, run(seqs, step == 0), strict=True):
            seq.add_token_id(token_id)
    return [tuple(seq.output_token_ids) for seq in seqs]


# -- the document's blocks -----------------------------------------------------------------------------------


def test_there_are_four_blocks_and_each_is_run_below() -> None:
    assert {CREATED, PREPARE_SAMPLE, RUN, SAMPLER} == set(TOKEN_SAMPLER_BLOCKS)


def test_the_documents_runner_is_born_with_our_sampler() -> None:
    made = run_code(
        CREATED.code,
        Config=EngineConfig,
        Event=object,
        Qwen3ForCausalLM=lambda config: config,
        hf_config="Qwen3",
    )["ModelRunner"](EngineConfig(), 0, [])
    assert isinstance(made.sampler, Sampler)
    likeliest = made.sampler(torch.tensor([[0.0, 3.0], [2.0, 1.0]]), torch.zeros(2))
    assert likeliest.tolist() == [1, 0]


def test_the_documents_temperatures_are_ours(runner: ModelRunner) -> None:
    def tensor(values: list[float], dtype: torch.dtype, pin_memory: bool) -> Any:
        assert pin_memory
        return SimpleNamespace(cuda=lambda **_: torch.tensor(values, dtype=dtype))

    device = SimpleNamespace(tensor=tensor, float32=torch.float32)  # no GPU is needed to read its numbers
    theirs = run_code(PREPARE_SAMPLE.code, torch=device, Sequence=Sequence)["ModelRunner"]
    seqs = [Sequence(str(at), [1], sampling_params=SamplingParams(temperature=at)) for at in (0.1, 0.8, 1.5, 0)]
    ours = runner.prepare_sample(seqs)
    assert torch.equal(ours, theirs().prepare_sample(seqs))
    assert ours.dtype == torch.float32


def test_the_documents_run_drives_our_runner(runner: ModelRunner, folder: str) -> None:
    # Its context is a global that must be reset; ours is the runner's own and lasts for one step.
    resets: list[None] = []
    theirs = run_code(RUN.code, Sequence=Sequence, reset_context=lambda: resets.append(None))["ModelRunner"]
    written = generate(lambda seqs, is_prefill: theirs.run(runner, seqs, is_prefill), sequences(temperature=0), 6)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    outputs = LLM(folder, **OPTIONS).generate(PROMPTS, params, use_tqdm=False)
    assert written == [output.outputs[0].token_ids for output in outputs]
    assert len(resets) == 6


def frequencies(drawn: Tensor, vocab_size: int) -> Tensor:
    return torch.bincount(drawn, minlength=vocab_size) / len(drawn)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_documents_sampler_and_ours_draw_from_the_same_distribution(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)  # faster for thousands of calls, slower for one
    theirs = run_code(SAMPLER.code)["Sampler"]()
    logits = torch.linspace(-2, 2, 12).repeat(6_000, 1)
    temperatures = torch.full((6_000,), temperature)
    expected = torch.softmax(logits[0] / temperature, dim=-1)
    torch.manual_seed(0)
    for sampler in (Sampler(seed=3), theirs):  # theirs last: it divides the logits it was given in place
        seen = frequencies(sampler(logits, temperatures), 12)
        # Five standard deviations of a binomial share.
        assert ((seen - expected).abs() < 5 * (expected * (1 - expected) / 6_000).sqrt()).all(), type(sampler)


# -- Sampler -------------------------------------------------------------------------------------------------


def test_a_sampler_repeats_itself_by_its_seed_and_each_call_is_new() -> None:
    logits, temperatures = torch.zeros(8, 1000), torch.ones(8)
    one, same, other = Sampler(7), Sampler(7), Sampler(8)
    first, second = one(logits, temperatures), one(logits, temperatures)
    assert torch.equal(first, same(logits, temperatures))
    assert not torch.equal(first, second)
    assert not torch.equal(first, other(logits, temperatures))
    assert len(set(first.tolist())) > 4, "rows draw apart"


def test_without_a_seed_torchs_governs() -> None:
    torch.manual_seed(5)
    one = Sampler()
    torch.manual_seed(5)
    same, other = Sampler(), Sampler()
    assert one.seed == same.seed != other.seed


def test_a_sampler_leaves_its_logits_alone_and_never_draws_what_is_ruled_out() -> None:
    logits = torch.zeros(200, 600)
    logits[:, 1:] = -torch.inf
    before = logits.clone()
    assert Sampler(0)(logits, torch.full((200,), 5.0)).tolist() == [0] * 200
    assert torch.equal(logits, before)
    assert Sampler(0)(logits.half(), torch.full((200,), 1e-40)).tolist() == [0] * 200


@pytest.mark.parametrize(
    ("logits", "temperatures", "why"),
    [
        (torch.zeros(3), torch.ones(3), "logits must be a floating-point tensor"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.ones(2), "logits must be a floating-point tensor"),
        ([[0.0]], torch.ones(1), "logits must be a floating-point tensor"),
        (torch.zeros(2, 3), torch.ones(3), r"temperatures must be a tensor \(2,\)"),
        (torch.zeros(2, 3), 1.0, r"temperatures must be a tensor \(2,\)"),
        (torch.zeros(1, 3), torch.tensor([-1.0]), "temperatures must be finite and at least 0"),
        (torch.zeros(1, 3), torch.tensor([torch.nan]), "temperatures must be finite"),
        (torch.full((1, 3), torch.nan), torch.ones(1), "logits are not finite"),
        (torch.full((1, 3), -torch.inf), torch.ones(1), "logits are not finite"),
    ],
)
def test_what_cannot_be_drawn_from_is_refused(logits: Any, temperatures: Any, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        Sampler(0)(logits, temperatures)


# -- ModelRunner ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 0.7, 1.0])
def test_a_runner_draws_what_the_engine_draws(runner: ModelRunner, folder: str, temperature: float) -> None:
    written = generate(runner.run, sequences(temperature=temperature), 20)
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=20, ignore_eos=True) for seed in range(3)]
    outputs = LLM(folder, **OPTIONS).generate(PROMPTS, params, use_tqdm=False)
    assert written == [output.outputs[0].token_ids for output in outputs]


def test_children_of_a_runners_sequence_are_the_engines_children(runner: ModelRunner, folder: str) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True)
    parent = Sequence("parent", PROMPTS[0], sampling_params=params)
    children = [parent.fork(f"child-{number}") for number in range(3)]
    for number, child in enumerate(children):
        child.child = number
    written = generate(runner.run, children, 8)
    [output] = LLM(folder, **OPTIONS).generate([PROMPTS[0]], params, use_tqdm=False)
    assert written == [completion.token_ids for completion in output.outputs]


def test_sequences_without_a_seed_differ_and_a_run_repeats(runner: ModelRunner) -> None:
    def fork_apart() -> list[tuple[int, ...]]:
        runner._arrivals = iter(range(100))  # type: ignore[assignment]
        seqs = [Sequence(str(number), [3, 4, 5]) for number in range(3)]
        written = generate(runner.run, seqs, 6)
        runner.release(seqs)
        return written

    first = fork_apart()
    assert len(set(first)) == 3
    assert fork_apart() == first


def test_a_fork_shares_what_is_cached_and_goes_on_by_itself(runner: ModelRunner) -> None:
    parent = Sequence("parent", list(range(50, 90)), sampling_params=SamplingParams(temperature=0))
    parent.add_token_id(runner.run([parent], True)[0])
    fork = parent.fork("fork")
    with pytest.raises(InvalidInputError, match="'fork' was not prefilled"):
        runner.run([fork], False)
    input_ids, positions = runner.prepare_prefill([fork])
    assert positions.tolist() == list(range(32, 41)), "two whole blocks of 16 were found"
    assert input_ids.tolist() == parent.get_token_ids()[32:]
    assert runner.num_free_blocks == 16 - 3 - 1
    logits = runner.run_model(input_ids, positions, True)
    decoded = runner.run_model(*runner.prepare_decode([parent]), False)
    assert torch.allclose(logits, decoded, atol=1e-4)
    runner.release([parent])
    assert runner.num_free_blocks == 16 - 3
    assert parent.tracks[0].num_computed == 0


def test_refusals_are_ours_and_take_nothing(runner: ModelRunner) -> None:
    seq = Sequence("a", [1, 2, 3])
    for seqs, is_prefill, why in [
        ([], True, "at least one sequence"),
        ([seq, Sequence("a", [1])], True, "different seq_ids"),
        ([Sequence(str(number), [1]) for number in range(5)], True, "at most max_num_seqs = 4, got 5"),
        ([Sequence("b", [320])], True, r"tokens of 'b'"),
        ([Sequence("b", [1] * 129)], True, "at most max_model_len = 128 tokens, got 129"),
        ([Sequence("b", [1] * 60), Sequence("c", [1] * 60)], True, "at most max_num_batched_tokens = 64 tokens"),
        ([seq], False, "'a' was not prefilled"),
    ]:
        with pytest.raises(InvalidInputError, match=why):
            runner.run(seqs, is_prefill)
    seq.move(SequenceStatus.FINISHED_ABORTED)
    with pytest.raises(InvalidInputError, match=r"'a' has ended \(finished_aborted\)"):
        runner.run([seq], True)
    with pytest.raises(InvalidInputError, match="prepare_prefill comes before run_model"):
        runner.run_model(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), True)
    assert runner.num_free_blocks == 16


@pytest.mark.parametrize(
    "asked",
    [
        *({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"logprobs": 1}, {"prompt_logprobs": 1}),
        *({"presence_penalty": 1.0}, {"repetition_penalty": 1.2}, {"logit_bias": {1: 2.0}}, {"min_tokens": 2}),
        *({"allowed_token_ids": [1]}, {"bad_words": ["a"]}, {"logits_processors": [lambda *_: None]}),
        *({"strategy": "beam_search"}, {"strategy": "diverse", "n": 2}),
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_the_sampler_does_not_know_is_refused(runner: ModelRunner, asked: dict[str, Any]) -> None:
    seq = Sequence("b", [1], sampling_params=SamplingParams(**asked))
    with pytest.raises(InvalidInputError, match="'b' asks for more than a temperature and a seed"):
        runner.run([seq], True)
    assert runner.num_free_blocks == 16


def test_a_prepared_step_is_the_one_that_runs(runner: ModelRunner) -> None:
    seq = Sequence("a", [1, 2, 3])
    input_ids, positions = runner.prepare_prefill([seq])
    for wrong in ((input_ids[:2], positions[:2]), (input_ids + 1, positions), (input_ids, positions + 1)):
        with pytest.raises(InvalidInputError, match="must be those that were prepared last"):
            runner.run_model(*wrong, True)
        input_ids, positions = runner.prepare_prefill([seq])
    with pytest.raises(InvalidInputError, match="prepare_decode comes before run_model"):
        runner.run_model(input_ids, positions, False)
    assert runner.run_model(*runner.prepare_prefill([seq]), True).shape == (1, 320)
    with pytest.raises(InvalidInputError, match="'a' has nothing to compute"):
        runner.prepare_prefill([seq])


def test_a_full_cache_says_so_before_anything_is_taken(runner: ModelRunner) -> None:
    held = [Sequence(str(number), [number] * 60) for number in range(1, 5)]
    for seq in held:
        runner.run([seq], True)
    assert runner.num_free_blocks == 0
    late = Sequence("late", [9, 9])
    with pytest.raises(CacheExhaustedError, match="1 blocks are needed and 0 are free: release what has ended"):
        runner.run([late], True)
    runner.release(held[:1])
    assert len(runner.run([late], True)) == 1


def test_one_rank_and_no_events(folder: str) -> None:
    config = EngineConfig.from_options(model=folder, **OPTIONS)
    for rank, event in ((1, None), (0, [object()]), (0, object())):
        with pytest.raises(UnsupportedError, match="a model runs on one rank"):
            ModelRunner(config, rank, event)
    with pytest.raises(InvalidInputError, match="config must be an EngineConfig"):
        ModelRunner(folder)  # type: ignore[arg-type]
    assert ModelRunner(config, 0, []).rank == 0
