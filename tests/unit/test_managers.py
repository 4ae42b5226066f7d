"""Document 4's classes at work, and the faults of the module it describes, which are not repeated here."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ramify import (
    BeamSearchManager,
    BeamState,
    BestOfNFilter,
    CompletionOutput,
    DiverseSamplingManager,
    FinishReason,
    InvalidInputError,
    IterationStats,
    Logprob,
    ParallelSamplingManager,
    ParentRequest,
    Request,
    SamplingParams,
)
from ramify.engine.demands import Demands
from ramify.engine.plan import Draw
from ramify.sampling.draw import block_noise, draw
from ramify.sampling.pipeline import Sampler, Source
from tests.drive import finish, tokens_of
from tests.fake import fake_engine
from tests.noise import noise_keys


def completion(
    index: int = 0, *, text: str = "text", tokens: int = 3, logprob: float = -1.0, **changes: Any
) -> CompletionOutput:
    made = CompletionOutput(index, text, tuple(range(10, 10 + tokens)), logprob, finish_reason=FinishReason.LENGTH)
    return replace(made, **changes)


EMPTY = completion(text="", tokens=1, logprob=-0.01, finish_reason=FinishReason.STOP)  # the EOS alone, and likely


# -- CompletionOutput --------------------------------------------------------------------------------------------


def test_append_makes_a_longer_output_and_leaves_the_first_alone() -> None:
    short = CompletionOutput(2, "a", (5,), -0.5, score=-0.5)
    longer = short.append(6, "b", -0.25)
    assert longer == CompletionOutput(2, "ab", (5, 6), -0.75)
    assert short == CompletionOutput(2, "a", (5,), -0.5, score=-0.5)


def test_nothing_is_appended_to_what_has_ended_or_reports_every_token() -> None:
    with pytest.raises(InvalidInputError, match="has ended"):
        completion().append(1, "", 0.0)
    with pytest.raises(InvalidInputError, match="one row per token"):
        completion(finish_reason=None, logprobs=[{1: Logprob(-0.5, 1, None)}]).append(1, "", 0.0)


def test_the_score_of_an_output_is_its_own_or_its_logprob() -> None:
    assert completion(logprob=-2.0).compute_score() == -2.0
    assert completion(logprob=-2.0, score=7.0).compute_score() == 7.0
    assert EMPTY.compute_score() == -math.inf


@pytest.mark.parametrize(
    ("changes", "empty"),
    [
        ({"tokens": 0, "text": ""}, True),
        ({"tokens": 1, "text": "", "finish_reason": FinishReason.STOP}, True),
        ({"tokens": 1, "text": "", "finish_reason": FinishReason.STOP, "stop_reason": 10}, True),
        ({"tokens": 1, "text": "", "finish_reason": FinishReason.STOP, "stop_reason": "###"}, False),
        ({"tokens": 1, "text": "", "finish_reason": FinishReason.LENGTH}, False),
        ({"tokens": 2, "text": "", "finish_reason": FinishReason.STOP}, False),
        ({"tokens": 1, "text": "a", "finish_reason": FinishReason.STOP}, False),
    ],
)
def test_empty_is_no_token_before_the_one_that_ended_it(changes: dict[str, Any], empty: bool) -> None:
    assert completion(**changes).is_empty() is empty


# -- BestOfNFilter -----------------------------------------------------------------------------------------------


def test_the_best_come_first_and_their_index_is_their_rank() -> None:
    outputs = [completion(index, logprob=logprob) for index, logprob in enumerate([-3.0, -1.0, -2.0, -9.0])]
    best = BestOfNFilter().select_best(outputs, 3)
    assert [(completion.index, completion.score, completion.cumulative_logprob) for completion in best] == [
        (0, -1.0, -1.0),
        (1, -2.0, -2.0),
        (2, -3.0, -3.0),
    ]
    assert [completion.index for completion in outputs] == [0, 1, 2, 3], "what was given is not changed"


def test_an_empty_output_ranks_last_and_not_first() -> None:
    for score in (None, "mean_logprob", lambda _output: 1.0):
        best = BestOfNFilter(score).select_best([EMPTY, completion(1, logprob=-50.0)], 2)
        assert [completion.is_empty() for completion in best] == [False, True]


def test_scores_are_those_of_sampling_params() -> None:
    outputs = [completion(0, tokens=2, logprob=-2.0), completion(1, tokens=8, logprob=-4.0, text="a")]
    assert BestOfNFilter("cumulative_logprob").select_best(outputs)[0].cumulative_logprob == -2.0
    assert BestOfNFilter("mean_logprob").select_best(outputs)[0].cumulative_logprob == -4.0
    assert BestOfNFilter(lambda output: -len(output.text)).select_best(outputs)[0].text == "a"
    with pytest.raises(InvalidInputError, match="score_fn must be one of"):
        BestOfNFilter("best")  # type: ignore[arg-type]


def test_a_score_that_is_no_number_is_refused_instead_of_shuffling() -> None:
    with pytest.raises(InvalidInputError, match="score must be a number that can be compared, got nan"):
        BestOfNFilter(lambda _output: math.nan).select_best([completion()])


# -- ParentRequest -----------------------------------------------------------------------------------------------


def test_best_of_is_drawn_and_the_n_best_return_best_first() -> None:
    # The source generated n and never looked at best_of.
    parent = ParentRequest("a", SamplingParams(n=2, best_of=5, seed=3))
    assert (parent.n, parent.best_of) == (2, 5)
    for index, logprob in enumerate([-3.0, -1.0, -5.0, -2.0]):
        due = parent.record_child_output(f"a-{index}", completion(logprob=logprob))
        assert due == ("a", [], False)
    due = parent.record_child_output("a-4", EMPTY)
    assert due.finished
    assert parent.all_finished
    assert [(completion.index, completion.cumulative_logprob, completion.score) for completion in due.outputs] == [
        (0, -1.0, -1.0),
        (1, -2.0, -2.0),
    ]


def test_children_come_back_in_order_whoever_ends_first() -> None:
    parent = ParentRequest("a", SamplingParams(n=3))
    for index in (2, 0, 1):
        due = parent.record_child_output(f"a-{index}", completion(tokens=index + 1))
    assert [(completion.index, len(completion.token_ids)) for completion in due.outputs] == [(0, 1), (1, 2), (2, 3)]
    assert parent.max_num_generation_tokens == 3


def test_a_child_wants_one_output_by_its_parents_seed_and_its_own_number() -> None:
    params = SamplingParams(n=2, best_of=4, seed=11, temperature=0.7, score="mean_logprob", strategy="best_of_n")
    name, child = ParentRequest("a", params).get_child_info(3)
    assert name == "a-3"
    assert child == SamplingParams(seed=11, child=3, temperature=0.7)
    assert not child.requires_parallel_sampling()
    with pytest.raises(InvalidInputError, match=r"index must be an integer in 0..3, got 4"):
        ParentRequest("a", params).get_child_info(4)


def test_children_of_different_parents_never_share_noise() -> None:
    # The source gave child i the seed s + i: child 1 of seed 42 was child 0 of seed 43.
    keys = []
    for seed in range(40, 50):
        parent = ParentRequest(f"parent-{seed}", SamplingParams(n=8, seed=seed))
        for index in range(parent.best_of):
            name, params = parent.get_child_info(index)
            assert params.seed is not None
            assert params.child == parent.get_child_index(name)
            keys.append((params.seed, params.child, 0))
    assert len(set(keys)) == 80
    noise = block_noise(noise_keys(keys, torch.device("cpu")), 4096)
    assert len({tuple(row) for row in noise.tolist()}) == 80


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9}], ids=["plain", "filtered"])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_children_run_as_requests_of_their_own_are_the_engines_children(
    runs_ahead: bool, filters: dict[str, Any]
) -> None:
    # All children of a seed once had the same parameters, and so the same text.
    prompt, params = list(range(20, 33)), SamplingParams(n=4, seed=7, max_tokens=12, **filters)
    [together] = finish(fake_engine(runs_ahead=runs_ahead), [(prompt, params)])
    manager = ParallelSamplingManager()
    parent = manager.create_parent("story", params)
    children = manager.get_child_requests(parent)
    assert [child.child for _, child in children] == [0, 1, 2, 3]
    apart = finish(fake_engine(runs_ahead=runs_ahead), [(prompt, child) for _, child in children])
    for (name, _), output in zip(children, apart, strict=True):
        due = manager.record_output(name, output.outputs[0])
    assert due is not None
    assert due.finished
    assert due.outputs == list(together.outputs)
    assert len(set(tokens_of(together))) == 4, "and they are four texts"


def test_without_a_seed_children_of_their_own_differ_by_the_engines_seeds() -> None:
    children = ParallelSamplingManager()
    parent = children.create_parent("story", SamplingParams(n=4, max_tokens=12))
    apart = finish(fake_engine(), [([20, 21], child) for _, child in children.get_child_requests(parent)])
    assert len({tokens for output in apart for tokens in tokens_of(output)}) == 4


@pytest.mark.parametrize("name", ["a", "a-3", "a--1", "a-01", "b-0", "a-", "a-٣", "-0", "a-0-0"])
def test_a_name_that_is_no_childs_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="has no child"):
        ParentRequest("a", SamplingParams(n=3)).record_child_output(name, completion())


def test_a_child_that_has_ended_says_no_more() -> None:
    parent = ParentRequest("a", SamplingParams(n=2))
    parent.record_child_output("a-0", completion())
    with pytest.raises(InvalidInputError, match=r"child 'a-0' has ended \(length\) already"):
        parent.record_child_output("a-0", completion())


@pytest.mark.parametrize(
    "params",
    [SamplingParams(strategy="beam_search"), SamplingParams(n=2, strategy="diverse", diversity_penalty=1.0)],
    ids=["beam_search", "diverse"],
)
def test_strategies_whose_children_look_at_each_other_are_refused(params: SamplingParams) -> None:
    with pytest.raises(InvalidInputError, match="look at each other"):
        ParentRequest("a", params)


TEXTS = st.lists(st.lists(st.text(max_size=4), min_size=1, max_size=5), min_size=1, max_size=4)


@given(TEXTS, st.randoms(use_true_random=False))
def test_deltas_concatenate_to_the_final_outputs(texts: list[list[str]], order: random.Random) -> None:
    streamed, final = (
        ParentRequest("a", SamplingParams(n=len(texts), output_kind=kind)) for kind in ("delta", "final_only")
    )
    assert streamed.get_child_info(0)[1].output_kind == "cumulative", "deltas are cut from whole outputs"
    children = [CompletionOutput(index, "", (), 0.0) for index in range(len(texts))]
    joined = ["" for _ in texts]
    tokens: list[tuple[int, ...]] = [() for _ in texts]
    turns = [index for index, pieces in enumerate(texts) for _ in pieces]
    order.shuffle(turns)
    left = [list(pieces) for pieces in texts]
    for index in turns:
        child = children[index] = children[index].append(len(left[index]), left[index].pop(0), -1.0)
        if not left[index]:
            child = replace(child, finish_reason=FinishReason.STOP)
        [delta] = streamed.record_child_output(f"a-{index}", child).outputs
        joined[delta.index] += delta.text
        tokens[delta.index] += delta.token_ids
        due = final.record_child_output(f"a-{index}", child)
    assert due.finished
    assert streamed.all_finished
    assert joined == [completion.text for completion in due.outputs] == ["".join(pieces) for pieces in texts]
    assert tokens == [completion.token_ids for completion in due.outputs]


def test_cumulative_outputs_of_best_of_are_the_best_so_far() -> None:
    parent = ParentRequest("a", SamplingParams(n=1, best_of=2, output_kind="cumulative"))
    assert parent.record_child_output("a-0", completion(logprob=-5.0)).outputs[0].score == -5.0
    due = parent.record_child_output("a-1", completion(logprob=-1.0))
    assert [completion.score for completion in due.outputs] == [-1.0]
    assert due.finished


# -- ParallelSamplingManager -------------------------------------------------------------------------------------


def engine_outputs(params: SamplingParams) -> tuple[CompletionOutput, ...]:
    engine = fake_engine(num_blocks=512, max_num_seqs=16)
    engine.add_request(Request("a", prompt_token_ids=[1, 2, 3], sampling_params=params))
    while True:
        for output in engine.step():
            return output.outputs


@pytest.mark.parametrize("score", ["cumulative_logprob", "mean_logprob", lambda output: output.token_ids[0]])
def test_the_manager_returns_what_the_engine_returns(score: Any) -> None:
    """Every child of n = 12, recorded as a request of its own, gives best_of = 12 as the engine makes it."""
    wanted = SamplingParams(n=4, best_of=12, seed=5, max_tokens=12, score=score, stop_token_ids=list(range(100)))
    manager = ParallelSamplingManager()
    parent = manager.create_parent("a", wanted)
    children = engine_outputs(SamplingParams(n=12, seed=5, max_tokens=12, stop_token_ids=list(range(100))))
    assert any(child.is_empty() for child in children), "one that ends at once, to be ranked last"
    for (name, _), child in zip(manager.get_child_requests(parent), children, strict=True):
        due = manager.record_output(name, child)
    assert due is not None
    assert tuple(due.outputs) == engine_outputs(wanted)


def test_parents_and_children_are_found_by_name() -> None:
    manager = ParallelSamplingManager()
    parent = manager.create_parent("a", SamplingParams(n=2))
    assert [name for name, _ in manager.get_child_requests(parent)] == ["a-0", "a-1"]
    assert manager.get_parent("a") is manager.get_parent("a-1") is parent
    assert [manager.is_child_request(name) for name in ("a-0", "a-1", "a", "a-2")] == [True, True, False, False]
    assert manager.get_parent("b") is None
    assert manager.record_output("b", completion()) is None, "a request that has no parent"
    assert manager.finish_parent("b") is None


def test_names_in_use_are_refused_also_where_a_child_has_them() -> None:
    manager = ParallelSamplingManager()
    manager.create_parent("a", SamplingParams(n=2))
    manager.create_parent("b-1", SamplingParams())
    for taken in ("a", "a-1", "b"):
        with pytest.raises(InvalidInputError, match="is in use"):
            manager.create_parent(taken, SamplingParams(n=2))
    assert manager.total_parents == 2
    assert not manager.is_child_request("b-0")


def test_statistics_count_parents_and_children() -> None:
    manager, stats = ParallelSamplingManager(), IterationStats()
    parent = manager.create_parent("a", SamplingParams(n=2, best_of=3))
    manager.create_parent("b", SamplingParams(n=4))
    for index, (name, _) in enumerate(manager.get_child_requests(parent)):
        manager.record_output(name, completion(tokens=index + 4))
    assert manager.finish_parent("a", stats) is parent
    manager.finish_parent("b", stats)  # aborted: it did not end, and is not observed
    assert (manager.total_parents, manager.total_children, manager.finished_parents) == (2, 7, 1)
    assert (stats.n_params, stats.best_of_params, stats.max_num_generation_tokens) == ([2], [3], [6])
    assert (dict(manager.n_histogram), dict(manager.best_of_histogram)) == ({2: 1}, {3: 1})
    with pytest.raises(InvalidInputError, match="no longer, a parent here"):
        manager.get_child_requests(parent)


def kept_by(manager: Any) -> int:
    """Entries of all of the manager's dicts and lists, counts aside."""
    return sum(
        len(value)
        for name, value in vars(manager).items()
        if isinstance(value, dict | list | set) and not name.endswith("histogram")
    )


def test_ten_thousand_parents_leave_nothing_behind() -> None:
    # The source forgot only those children that had not ended: all others stayed in its table for ever.
    manager, numbers = ParallelSamplingManager(), random.Random(0)
    alive: weakref.WeakSet[ParentRequest] = weakref.WeakSet()
    running: list[str] = []
    for number in range(10_000):
        params = SamplingParams(n=2, best_of=numbers.randint(2, 5), seed=number)
        parent = manager.create_parent(f"parent-{number}", params)
        alive.add(parent)
        running.append(parent.request_id)
        for name, _ in manager.get_child_requests(parent):
            if numbers.random() < 0.8:
                manager.record_output(name, completion(tokens=numbers.randint(1, 9)))
        if len(running) > 20:
            manager.finish_parent(running.pop(numbers.randrange(len(running))))
            assert len(manager._parents) == 20
    del parent
    assert kept_by(manager) > 20
    for name in running:
        assert manager.finish_parent(name) is not None
    assert kept_by(manager) == 0
    gc.collect()
    assert len(alive) == 0
    assert manager.total_parents == 10_000
    assert len(manager.n_histogram) == 1


# -- BeamSearchManager -------------------------------------------------------------------------------------------


def logprobs_after(tokens: Sequence[int], vocabulary: int = 5) -> list[tuple[int, float]]:
    """A small language model: a distribution from a hash of what came before."""
    numbers = random.Random(repr(tuple(tokens)))
    logits = [numbers.gauss(0, 1.5) for _ in range(vocabulary)]
    total = math.log(sum(map(math.exp, logits)))
    return [(token, logit - total) for token, logit in enumerate(logits)]


def search(manager: BeamSearchManager, start: int = 0, steps: int = 100) -> list[BeamState]:
    """Runs a search to its end; returns its best beams."""
    request_id = f"request-{start}"
    beams = manager.init_request(request_id)
    for _ in range(steps):
        if not beams:
            break
        beams = manager.update_beams(request_id, [logprobs_after((start, *beam.token_ids)) for beam in beams])
    best = manager.get_best_sequences(request_id, 50)
    manager.finish_request(request_id)
    assert kept_by(manager) == 0
    return best


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("start", range(5))
def test_a_search_as_wide_as_the_tree_finds_the_best_sequences_there_are(start: int, length_penalty: float) -> None:
    manager = BeamSearchManager(200, length_penalty, "never", end_token_ids=[0], longest_output=3)
    expected = []
    for tokens in product(range(5), repeat=3):
        length = tokens.index(0) + 1 if 0 in tokens else 3
        if not any(tokens[length:]):  # each sequence that ends early once
            total = sum(dict(logprobs_after((start, *tokens[:at])))[tokens[at]] for at in range(length))
            expected.append((tokens[:length], total / length**length_penalty))
    expected.sort(key=lambda pair: -pair[1])
    best = search(manager, start)
    assert [beam.token_ids for beam in best] == [tokens for tokens, _ in expected[:50]]
    assert [beam.score for beam in best] == pytest.approx([score for _, score in expected[:50]])
    assert all(beam.finished for beam in best)


def test_a_beam_of_one_is_greedy() -> None:
    tokens: list[int] = []
    while len(tokens) < 8 and tokens[-1:] != [0]:
        tokens.append(max(logprobs_after((4, *tokens)), key=lambda pair: pair[1])[0])
    [best] = search(BeamSearchManager(1, end_token_ids=[0], longest_output=8), 4)
    assert best.token_ids == tuple(tokens)


def test_early_stopping_is_read() -> None:
    """Two beams finish at once; the running one is worse now, and would be better when long."""

    def steps_taken(early_stopping: Any) -> int:
        manager = BeamSearchManager(2, 1.0, early_stopping, end_token_ids=[0, 1], longest_output=30)
        beams = manager.init_request("a")
        first = {0: math.log(0.5), 1: math.log(0.3), 2: math.log(0.2)}
        later = {2: math.log(0.98), 3: math.log(0.01), 0: math.log(0.005), 1: math.log(0.005)}
        steps = 0
        while beams:
            beams = manager.update_beams("a", [later if steps else first] * len(beams))
            steps += 1
        return steps

    taken = {rule: steps_taken(rule) for rule in (True, False, "never")}
    assert taken[True] == 1, "two have finished: enough"
    assert taken[False] == 1, "log 0.2 is below log 0.3 at length 1"
    assert taken["never"] > 1, "log 0.2 / 30 could still be better"


def test_early_stopping_false_waits_where_true_does_not() -> None:
    def best(early_stopping: Any) -> tuple[int, ...]:
        manager = BeamSearchManager(2, 1.0, early_stopping, end_token_ids=[0, 1], longest_output=3)
        beams = manager.init_request("a")
        for scores in ({2: -0.2, 0: -2.0, 3: -4.0}, {2: -0.2, 0: -0.9, 3: -4.0}, {0: -0.1, 3: -4.0, 2: -5.0}):
            if beams:
                beams = manager.update_beams("a", [scores] * len(beams))
        return manager.get_best_sequences("a")[0].token_ids

    assert best(True) == (2, 0), "the second that finished"
    assert best(False) == (2, 2, 0), "it was running then, and better than the first"


def test_the_length_penalty_is_read() -> None:
    lengths = [
        len(search(BeamSearchManager(4, penalty, "never", end_token_ids=[0], longest_output=12), 1)[0].token_ids)
        for penalty in (-2.0, 3.0)
    ]
    assert lengths[0] < lengths[1]


def test_a_beam_can_be_ended_from_outside() -> None:
    manager = BeamSearchManager(2, early_stopping=True)
    beams = manager.init_request("a")
    with pytest.raises(InvalidInputError, match="without tokens"):
        manager.mark_finished("a", 0)
    beams = manager.update_beams("a", [[(1, -0.5), (2, -1.5), (3, -2.5)]])
    assert [beam.token_ids for beam in beams] == [(1,), (2,)]
    manager.mark_finished("a", 0)
    with pytest.raises(InvalidInputError, match="has ended already"):
        manager.mark_finished("a", 0)
    assert manager.get_best_sequences("a", 2) == [BeamState((1,), -0.5, True, -0.5), BeamState((2,), -1.5, False, -1.5)]
    # Places are those of the list last returned, so what is brought for the ended beam is not looked at.
    beams = manager.update_beams("a", [[(7, 0.0)], [(1, -0.5), (2, -1.0)]])
    assert [beam.token_ids for beam in beams] == [(2, 1), (2, 2)]
    manager.mark_finished("a", 1)
    assert manager.update_beams("a", [[], []]) == [], "two have finished, and early_stopping is True"
    assert [beam.token_ids for beam in manager.get_best_sequences("a", 2)] == [(1,), (2, 2)]


def test_beam_states_are_snapshots() -> None:
    first = BeamState().extend(3, -1.0)
    assert (first.extend(4, -0.5), first) == (BeamState((3, 4), -1.5), BeamState((3,), -1.0))
    with pytest.raises(InvalidInputError, match="finished beam"):
        replace(first, finished=True).extend(1, 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0}, "beam_width must be an integer in 1"),
        ({"length_penalty": math.nan}, "length_penalty must be a finite number"),
        ({"early_stopping": "sometimes"}, "early_stopping must be True, False or 'never'"),
        ({"longest_output": 0}, "longest_output must be"),
        ({"end_token_ids": [-1]}, r"end_token_ids\[0\] must be"),
    ],
)
def test_bad_options_of_a_beam_search_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        BeamSearchManager(**options)


def test_bad_steps_of_a_beam_search_are_refused() -> None:
    manager = BeamSearchManager(2)
    with pytest.raises(InvalidInputError, match="no request 'a'"):
        manager.update_beams("a", [])
    manager.init_request("a")
    with pytest.raises(InvalidInputError, match="'a' is in use"):
        manager.init_request("a")
    with pytest.raises(InvalidInputError, match="one entry for each of 1 beams, got 2"):
        manager.update_beams("a", [[], []])
    with pytest.raises(InvalidInputError, match="logprob must be a finite number"):
        manager.update_beams("a", [[(1, math.nan)]])
    assert manager.update_beams("a", [[(1, -math.inf), (2, -1.0)]]) == [BeamState((2,), -1.0, False, -1.0)]


# -- DiverseSamplingManager --------------------------------------------------------------------------------------


def test_the_penalty_counts_earlier_siblings_at_the_same_step() -> None:
    manager = DiverseSamplingManager(0.5)
    manager.init_request("a", 4)
    for sample_idx, token_id in enumerate([7, 7, 8]):
        manager.record_token("a", sample_idx, token_id)
    assert [manager.compute_diversity_penalty("a", 3, token_id) for token_id in (7, 8, 9)] == [1.0, 0.5, 0.0]
    # At the next step what was taken before does not count, and nobody is pushed by those after it.
    manager.record_token("a", 3, 9)
    manager.record_token("a", 3, 5)
    assert manager.compute_diversity_penalty("a", 0, 7) == manager.compute_diversity_penalty("a", 0, 5) == 0.0


def test_siblings_of_one_group_leave_each_other_alone() -> None:
    manager = DiverseSamplingManager(1.0, group_size=2)
    manager.init_request("a", 4)
    for sample_idx in range(3):
        manager.record_token("a", sample_idx, 7)
    manager.init_request("b", 4)
    assert manager.compute_diversity_penalty("b", 1, 7) == 0.0
    assert manager.compute_diversity_penalty("a", 3, 7) == 2.0, "0 and 1 are an earlier group, 2 is of its own"


def test_the_penalty_is_really_applied_as_the_engine_applies_it() -> None:
    """Siblings that draw one after the other with the manager's penalty draw what the engine's sampler draws."""
    vocabulary, siblings, steps, seed = 12, 6, 20, 9
    params = SamplingParams(n=siblings, strategy="diverse", diversity_penalty=1.5, seed=seed)
    manager = DiverseSamplingManager(1.5)
    manager.init_request("a", siblings)
    demands, sampler = Demands(params, seed=seed), Sampler()
    differences = 0
    for step in range(steps):
        logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(step)) * 2
        draws = [Draw("a", child, child, step, (), demands) for child in range(siblings)]
        theirs = sampler.sample([Source(logits, [0] * siblings)], draws).token_ids
        ours = []
        for child in range(siblings):
            penalties = [manager.compute_diversity_penalty("a", child, token) for token in range(vocabulary)]
            keys = noise_keys([(seed, child, step)], logits.device)
            ours.append(int(draw(logits - torch.tensor(penalties), keys)))
            manager.record_token("a", child, ours[-1])
            differences += ours[-1] != int(draw(logits, keys))
        assert ours == theirs
    assert differences > 10, "the penalty changes what is drawn"
    manager.finish_request("a")
    assert kept_by(manager) == 0


def test_bad_values_of_diverse_sampling_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="diversity_penalty must be a finite number >= 0"):
        DiverseSamplingManager(-1.0)
    with pytest.raises(InvalidInputError, match="group_size must be"):
        DiverseSamplingManager(1.0, 0)
    manager = DiverseSamplingManager()
    manager.init_request("a", 2)
    with pytest.raises(InvalidInputError, match="'a' is in use"):
        manager.init_request("a", 2)
    with pytest.raises(InvalidInputError, match=r"sample_idx must be an integer in 0..1, got 2"):
        manager.record_token("a", 2, 1)
    with pytest.raises(InvalidInputError, match="no request 'b'"):
        manager.compute_diversity_penalty("b", 0, 1)
