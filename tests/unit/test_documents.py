"""The source documents' own snippets run: parameters, configuration and sequences.

A block is chosen by its document and a line of it. The last tests hold the lists to the documents: every Python block
is either executed here (or in tests/e2e, where it needs weights) or listed with the reason why it is not.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from ramify import (
    CacheConfig,
    CompletionOutput,
    EngineConfig,
    FinishReason,
    ModelConfig,
    Request,
    SamplingParams,
    SamplingStrategy,
    SamplingType,
    SchedulerConfig,
    Sequence,
    SequenceData,
    SequenceStatus,
)
from ramify.config import ModelDType
from tests.document_blocks import (
    FOUNDATIONS,
    LOADING,
    OPTIMAL_BLOCKS,
    OPTIMAL_SAMPLING,
    PARALLEL_SAMPLING,
    TOKEN_SAMPLER,
    TOKEN_SAMPLER_BLOCKS,
    Block,
    find_block,
    python_blocks,
    run_as_body,
    run_code,
    run_expression,
    split_prose,
)

Test = TypeVar("Test", bound=Callable[..., None])
EXECUTED: list[Block] = [LOADING, *TOKEN_SAMPLER_BLOCKS, *OPTIMAL_BLOCKS]


def runs(document: str, line: str, *, lead: str | None = None) -> Callable[[Test], Test]:
    """Gives a test its block, and counts the block as executed."""
    block = find_block(document, line, lead=lead)
    EXECUTED.append(block)

    def decorate(test: Test) -> Test:
        decorated: Test = pytest.mark.parametrize("block", [block], ids=[document.partition("-")[0]])(test)
        return decorated

    return decorate


def completions(number: int) -> list[CompletionOutput]:
    return [
        CompletionOutput(index, f"text {index}", (index,), -1.0, finish_reason=FinishReason.LENGTH)
        for index in range(number)
    ]


def prompted(**changes: Any) -> Sequence:
    return Sequence("main", [1, 2, 3], request_id="request", **changes)


# -- document 1: parameters ----------------------------------------------------------------------------------


@runs(PARALLEL_SAMPLING, 'prompt = "请写一个关于未来的故事开头"')
def test_three_story_openings_are_asked_for(block: Block) -> None:
    # `outputs[0]: "…"` is an annotation of an element: it needs only that the name exists.
    names = run_code(block.code, SamplingParams=SamplingParams, outputs=completions(3))
    assert names["sampling_params"].n == 3 == len(re.findall(r"^outputs\[\d\]: ", block.code, re.MULTILINE))
    assert names["sampling_params"].sampling_type is SamplingType.RANDOM


@runs(PARALLEL_SAMPLING, 'prompt = "写一个Python函数计算斐波那契数列"')
def test_five_programs_are_asked_for(block: Block) -> None:
    params = run_code(block.code, SamplingParams=SamplingParams)["sampling_params"]
    assert (params.n, params.temperature, params.num_samples) == (5, 0.6, 5)


@runs(PARALLEL_SAMPLING, "SamplingParams(n=3)")
def test_n_is_the_number_of_outputs_and_defaults_to_one(block: Block) -> None:
    assert run_expression(block.code, SamplingParams=SamplingParams).n == 3
    assert SamplingParams().n == 1


@runs(PARALLEL_SAMPLING, "SamplingParams(n=3, best_of=5)", lead="#### best_of 参数")
def test_best_of_is_the_number_of_candidates_and_defaults_to_n(block: Block) -> None:
    params = run_expression(block.code, SamplingParams=SamplingParams)
    assert (params.n, params.best_of, params.num_samples) == (3, 5, 5)
    assert SamplingParams(n=3).num_samples == 3


@runs(PARALLEL_SAMPLING, "SamplingParams(n=3)  # 等价于 n=3, best_of=3")
def test_n_alone_is_the_same_as_best_of_equal_to_n(block: Block) -> None:
    code, prose = split_prose(block.code)
    assert prose.splitlines()[1:] == ["1. 生成 3 个序列", "2. 直接返回这 3 个序列"]
    for params in (run_expression(code, SamplingParams=SamplingParams), SamplingParams(n=3, best_of=3)):
        assert (params.n, params.num_samples, params.resolved_strategy) == (3, 3, SamplingStrategy.PARALLEL)


@runs(PARALLEL_SAMPLING, "SamplingParams(n=3, best_of=5)", lead="**使用 n 和 best_of**：")
def test_five_candidates_are_ranked_by_cumulative_logprob_and_three_return(block: Block) -> None:
    code, prose = split_prose(block.code)
    assert prose.splitlines()[2] == "2. 根据累积 log 概率排序"
    params = run_expression(code, SamplingParams=SamplingParams)
    assert (params.num_samples, params.n, params.score) == (5, 3, "cumulative_logprob")
    assert params.resolved_strategy is SamplingStrategy.BEST_OF_N


@runs(PARALLEL_SAMPLING, "# 场景1：生成 3 个不同的故事")
def test_the_complete_example_runs_with_only_its_import_changed(block: Block) -> None:
    names = run_code(block.code)
    assert names["SamplingParams"] is SamplingParams
    stories, best, greedy = names["params1"], names["params2"], names["params3"]
    assert (stories.n, stories.temperature, stories.top_p, stories.max_tokens) == (3, 0.8, 0.9, 100)
    assert (best.n, best.best_of, best.resolved_strategy) == (2, 5, SamplingStrategy.BEST_OF_N)
    assert greedy.sampling_type is SamplingType.GREEDY
    required = [params.requires_parallel_sampling() for params in (stories, best, greedy)]
    assert required == [True, True, False]


@runs(PARALLEL_SAMPLING, "params = SamplingParams(n=3, temperature=0.8)")
def test_the_chat_example_asks_for_three(block: Block) -> None:
    assert run_code(block.code, SamplingParams=SamplingParams)["params"] == SamplingParams(n=3, temperature=0.8)


@runs(PARALLEL_SAMPLING, "params = SamplingParams(n=5, temperature=0.6, best_of=10)")
def test_the_code_tool_example_draws_ten_and_returns_five(block: Block) -> None:
    params = run_code(block.code, SamplingParams=SamplingParams)["params"]
    assert (params.n, params.num_samples, params.resolved_strategy) == (5, 10, SamplingStrategy.BEST_OF_N)


@runs(PARALLEL_SAMPLING, "params = SamplingParams(n=10, temperature=0.9)")
def test_the_writing_example_asks_for_ten(block: Block) -> None:
    assert run_code(block.code, SamplingParams=SamplingParams)["params"].num_samples == 10


# -- document 1: sequences -----------------------------------------------------------------------------------


@runs(PARALLEL_SAMPLING, '    request.fork_sequence(f"seq-{i}") ')
def test_one_request_grows_into_best_of_sequences(block: Block) -> None:
    request = Request("request", prompt_token_ids=[1, 2, 3], sampling_params=SamplingParams(n=2, best_of=4))
    sequences = run_code(block.code, request=request, best_of=request.sampling_params.num_samples)["sequences"]
    assert [sequence.seq_id for sequence in sequences] == ["seq-0", "seq-1", "seq-2", "seq-3"]
    assert all(request.get_seq(sequence.seq_id) is sequence for sequence in sequences)
    assert all(sequence.prompt_token_ids == [1, 2, 3] for sequence in sequences)


@runs(PARALLEL_SAMPLING, "        next_token = sample(logits, temperature=0.8)")
def test_every_sequence_draws_its_own_tokens(block: Block) -> None:
    source = random.Random(7)

    def sample(logits: list[float], temperature: float) -> int:
        weights = [math.exp(logit / temperature) for logit in logits]
        return source.choices(range(len(logits)), weights)[0]

    parent = prompted()
    sequences = [parent.fork(f"seq-{index}") for index in range(3)]
    drawn: list[int] = []

    def recorded(logits: list[float], temperature: float) -> int:
        drawn.append(sample(logits, temperature))
        return drawn[-1]

    run_code(block.code, sequences=sequences, max_tokens=8, logits=[0.1, 0.5, 0.2, 0.4], sample=recorded)
    assert [sequence.output_token_ids for sequence in sequences] == [drawn[0::3], drawn[1::3], drawn[2::3]]
    assert len({tuple(sequence.output_token_ids) for sequence in sequences}) == 3
    assert parent.output_token_ids == []


@runs(PARALLEL_SAMPLING, "sequences.sort(key=lambda s: s.cumulative_logprob, reverse=True)")
def test_the_best_sequences_by_cumulative_logprob_are_chosen(block: Block) -> None:
    sequences = [Sequence(str(index), [1]) for index in range(5)]
    for sequence, logprob in zip(sequences, (-3.0, -0.5, -2.0, -0.1, -9.0), strict=True):
        sequence.add_token_id(7, logprob)
    best = run_as_body(block.code, sequences=sequences, n=3)
    assert [sequence.seq_id for sequence in best] == ["3", "1", "2"]


@runs(PARALLEL_SAMPLING, "original_seq = Sequence(")
def test_forks_write_without_changing_the_original(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_code(block.code, Sequence=Sequence)
    assert capsys.readouterr().out == "[]\n", "what the comment after print says"
    assert [sequence.output_token_ids for sequence in names["sequences"]] == [[100], [200], [300]]
    assert all(sequence.prompt_token_ids == [1, 2, 3, 4, 5] for sequence in names["sequences"])
    assert names["original_seq"].get_token_ids() == [1, 2, 3, 4, 5]


@runs(PARALLEL_SAMPLING, "seq.add_token_id(100, logprob=-0.5)   # log P(token_1) = -0.5")
def test_logprobs_add_up_to_what_the_document_says(block: Block) -> None:
    seq = prompted()
    code, prose = split_prose(block.code)
    run_code(code, seq=seq)
    stated = float(prose.splitlines()[0].rpartition("=")[2])
    assert stated == -1.6
    assert seq.cumulative_logprob == pytest.approx(stated)
    assert seq.output_token_ids == [100, 200, 300]
    assert math.exp(seq.cumulative_logprob) == pytest.approx(math.exp(-0.5) * math.exp(-0.3) * math.exp(-0.8))


# -- document 3 ----------------------------------------------------------------------------------------------


@runs(FOUNDATIONS, 'ModelDType = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]')
def test_the_dtypes_are_the_documents(block: Block) -> None:
    assert run_code(block.code)["ModelDType"] == ModelDType


@runs(FOUNDATIONS, "    temperature=0.8,  # 增加随机性")
def test_filters_combine(block: Block) -> None:
    params = run_expression(block.code, SamplingParams=SamplingParams)
    assert params == SamplingParams(temperature=0.8, top_p=0.9, top_k=50)


@runs(FOUNDATIONS, 'stop = ["</s>", "\\n\\n", "Human:"]')
def test_the_documents_stop_strings_are_accepted(block: Block) -> None:
    stop = run_code(block.code)["stop"]
    assert SamplingParams(stop=stop).stop_strings == ("</s>", "\n\n", "Human:")


@runs(FOUNDATIONS, "stop_token_ids = [2, 50256]  # EOS tokens")
def test_the_documents_stop_ids_are_accepted(block: Block) -> None:
    stop_token_ids = run_code(block.code)["stop_token_ids"]
    assert SamplingParams(stop_token_ids=stop_token_ids).stop_token_ids == (2, 50256)


@runs(FOUNDATIONS, "max_tokens = 100")
def test_the_documents_limit_is_accepted(block: Block) -> None:
    assert SamplingParams(max_tokens=run_code(block.code)["max_tokens"]).max_tokens == 100


@runs(FOUNDATIONS, 'def fork(self, new_seq_id: str) -> "Sequence":')
def test_the_documents_fork_can_be_written_with_our_classes_and_agrees_with_ours(block: Block) -> None:
    fork = run_code(block.code, Sequence=Sequence, SequenceData=SequenceData)["fork"]
    parent = prompted(sampling_params=SamplingParams(n=2))
    parent.add_token_id(7)
    theirs, ours = fork(parent, "new"), parent.fork("new")
    for copy in (theirs, ours):
        assert (copy.seq_id, copy.request_id, copy.status) == ("new", "request", SequenceStatus.WAITING)
        assert copy.get_token_ids() == [1, 2, 3, 7]
        assert copy.sampling_params is parent.sampling_params
        copy.add_token_id(8)
    assert parent.get_token_ids() == [1, 2, 3, 7]


@runs(FOUNDATIONS, "SamplingParams(n=3, best_of=5)")
def test_five_are_created_and_three_return(block: Block) -> None:
    params = run_expression(block.code, SamplingParams=SamplingParams)
    assert (params.num_samples, params.n, params.resolved_strategy) == (5, 3, SamplingStrategy.BEST_OF_N)


@runs(FOUNDATIONS, "        self.model_config.max_model_len = 2048  # 默认值")
@pytest.mark.parametrize("user", [None, 512])
@pytest.mark.parametrize("checkpoint", [None, 1024])
def test_the_context_is_inferred_as_the_document_does(block: Block, user: int | None, checkpoint: int | None) -> None:
    # The document writes the answer back into its config; ours is frozen and gives it as a value.
    hf_config = SimpleNamespace() if checkpoint is None else SimpleNamespace(max_position_embeddings=checkpoint)
    theirs = SimpleNamespace(model_config=SimpleNamespace(max_model_len=user))
    run_code(block.code, self=theirs, hf_config=hf_config)
    assert ModelConfig(max_model_len=user).resolve_max_model_len(checkpoint) == theirs.model_config.max_model_len


@runs(FOUNDATIONS, "# 分步构建配置")
def test_an_engine_config_is_built_from_its_parts(block: Block) -> None:
    names = run_code(
        block.code,
        ModelConfig=ModelConfig,
        CacheConfig=CacheConfig,
        SchedulerConfig=SchedulerConfig,
        EngineConfig=EngineConfig,
    )
    assert names["engine_config"] == EngineConfig.from_options(
        model="Qwen/Qwen2.5-0.6B", block_size=16, max_num_seqs=256
    )


# -- nothing is missed ---------------------------------------------------------------------------------------

DEFINITION = "defines a part of folovllm itself; ours is in the package and has tests of its own"
SAMPLER = "formula inside the sampler, on arrays, and no call of the API"
TRANSFORMERS = "a call of the transformers library"

NOT_EXECUTED: list[tuple[str, str, str]] = [
    (FOUNDATIONS, "class ModelConfig:", DEFINITION),
    (FOUNDATIONS, "    if self.block_size <= 0:", DEFINITION),
    (FOUNDATIONS, "next_token = argmax(probs)", SAMPLER),
    (FOUNDATIONS, "logits_scaled = logits / temperature", SAMPLER),
    (FOUNDATIONS, "top_k_probs, top_k_indices = torch.topk(probs, k)", SAMPLER),
    (FOUNDATIONS, "mask = cumsum_probs <= p", SAMPLER),
    (FOUNDATIONS, "threshold = p * max(probs)", SAMPLER),
    (FOUNDATIONS, "model = AutoModelForCausalLM.from_pretrained(", TRANSFORMERS),
    (FOUNDATIONS, "tokenizer = AutoTokenizer.from_pretrained(", TRANSFORMERS),
    (FOUNDATIONS, "def _get_dtype(self) -> torch.dtype:", DEFINITION),
    (FOUNDATIONS, "class SamplingParams:", DEFINITION),
    (FOUNDATIONS, "class SequenceStatus(Enum):", DEFINITION),
    (FOUNDATIONS, "def get_seqs(self, status: Optional[SequenceStatus] = None) -> List[Sequence]:", DEFINITION),
]


@pytest.mark.parametrize("document", [PARALLEL_SAMPLING, TOKEN_SAMPLER, FOUNDATIONS, OPTIMAL_SAMPLING])
def test_every_python_block_is_executed_or_listed_with_a_reason_and_not_both(document: str) -> None:
    listed = [find_block(place, line) for place, line, _ in NOT_EXECUTED]
    accounted = Counter(block for block in [*EXECUTED, *listed] if block.document == document)
    assert accounted == Counter(python_blocks(document))


def test_what_is_left_out_of_the_first_document_is_nothing() -> None:
    assert [line for document, line, _ in NOT_EXECUTED if document == PARALLEL_SAMPLING] == []
