"""Trees of prefixes on a model with exact logits: every act against recomputing, every position once, no block lost."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from ramify import InvalidInputError, Request, SamplingParams
from ramify.drive.intake import Intake
from ramify.drive.loops import Calls
from ramify.drive.node import Node
from ramify.drive.tree import Tree, node_seed
from ramify.engine.core import EngineCore
from ramify.engine.drafting.lookup import LookupDrafter
from ramify.errors import CacheExhaustedError
from tests.fake import VOCAB, FakeDevice, fake_engine, letters, logits_after

PROMPT = [5, 6, 7, 8, 9, 10]


def tree_of(core: EngineCore, max_nodes: int | None = None) -> Tree:
    intake = Intake(letters(), vocab_size=VOCAB, max_logprobs=20, check_request=core.check)
    return Tree(core, Calls(core), intake, max_nodes=max_nodes)


def check_blocks(core: EngineCore) -> None:
    """What is in use is what nodes keep."""
    core.kept.sweep()
    assert core.scheduler.managers[0].num_in_use == len(core.kept.blocks()[0])
    assert not core.has_unfinished()


def alone(token_ids: Sequence[int], params: SamplingParams, **options: Any) -> list[tuple[int, ...]]:
    """What an engine draws that knows no tree."""
    core = fake_engine(num_blocks=400, **options)
    core.add_request(Request("0", None, list(token_ids), params))
    while True:
        for output in core.step():
            if output.finished:
                return [completion.token_ids for completion in output.outputs]


def logprobs_of(prefix: Sequence[int], token_ids: Sequence[int]) -> list[float]:
    told = []
    for index, token in enumerate(token_ids):
        told.append(float(logits_after([*prefix, *token_ids[:index]]).log_softmax(-1)[token]))
    return told


class Acts:
    """Random acts on the nodes of one tree, each compared with recomputing from scratch."""

    def __init__(self, seed: int, *, runs_ahead: bool, num_blocks: int) -> None:
        self.numbers = random.Random(seed)
        self.core = fake_engine(num_blocks=num_blocks, runs_ahead=runs_ahead, max_model_len=64)
        self.tree = tree_of(self.core)
        self.nodes: list[Node] = []
        self.num_refused = 0

    def some(self) -> list[Node]:
        """Nodes that can go on, one of them perhaps twice."""
        alive = [node for node in self.nodes if not node.has_ended and len(node.token_ids) < 50]
        return self.numbers.choices(alive, k=self.numbers.randint(1, 4)) if alive else []

    def act(self) -> None:
        numbers = self.numbers
        name = numbers.choice(
            ["root", "sample", "sample", "sample", "extend", "ask", "next", "release", "drop", "forget"]
        )
        before = len(self.nodes)
        try:
            getattr(self, name)()
        except CacheExhaustedError:
            self.num_refused += 1
            assert len(self.nodes) == before
            self.release()
        check_blocks(self.core)
        if len(self.nodes) > 30:
            self.drop()

    def root(self) -> None:
        self.nodes.append(self.tree.root(self.numbers.choices(range(1, 12), k=self.numbers.randint(1, 20))))

    def sample(self) -> None:
        numbers, nodes = self.numbers, self.some()
        n = numbers.randint(1, 3)
        diverse: dict[str, Any] = (
            {"strategy": "diverse", "diversity_penalty": 2.0} if n > 1 and numbers.random() < 0.3 else {}
        )
        params = SamplingParams(
            **diverse,
            n=n,
            max_tokens=numbers.randint(1, 6),
            temperature=numbers.choice([1.0, 3.0, *([0.0] if n == 1 else [])]),
            top_k=numbers.choice([-1, 5]),
            seed=numbers.choice([None, 3]),
            stop_token_ids=numbers.choice([None, list(range(100))]),
        )
        turns = [node.num_sampled + nodes[:place].count(node) for place, node in enumerate(nodes)]
        for node, turn, children in zip(nodes, turns, self.tree.sample(nodes, params), strict=True):
            seed = node_seed(params.seed or 0, node.id, turn)
            options: dict[str, Any] = {
                field: getattr(params, field) for field in ("n", "max_tokens", "temperature", "top_k")
            }
            again = SamplingParams(seed=seed, stop_token_ids=params.stop_token_ids, **diverse, **options)
            expected = alone(node.token_ids, again, max_model_len=64)
            assert [child.own_token_ids for child in children] == expected
            for child in children:
                assert child.token_ids == (*node.token_ids, *child.own_token_ids)
                assert child.parent_id == node.id
                assert child.logprob == pytest.approx(sum(logprobs_of(node.token_ids, child.own_token_ids)), abs=1e-4)
            self.nodes += children

    def given(self, count: int) -> list[list[int]]:
        return [self.numbers.choices(range(1, VOCAB), k=self.numbers.randint(1, 5)) for _ in range(count)]

    def extend(self) -> None:
        nodes = self.some()
        given = self.given(len(nodes))
        for node, token_ids, child in zip(nodes, given, self.tree.extend(nodes, given), strict=True):
            assert child.token_ids == (*node.token_ids, *token_ids)
            assert child.token_logprobs == pytest.approx(logprobs_of(node.token_ids, token_ids), abs=1e-5)
            assert child.total_logprob == pytest.approx(node.total_logprob + sum(child.token_logprobs))
            self.nodes.append(child)

    def ask(self) -> None:
        nodes = self.some()
        given = self.given(len(nodes))
        for node, token_ids, told in zip(nodes, given, self.tree.logprobs(nodes, given), strict=True):
            assert told == pytest.approx(logprobs_of(node.token_ids, token_ids), abs=1e-5)

    def next(self) -> None:
        nodes = self.some()
        told = self.tree.next_logprobs(nodes)
        assert told.shape == (len(nodes), VOCAB)
        for node, row in zip(nodes, told, strict=True):
            torch.testing.assert_close(row, logits_after(list(node.token_ids)).log_softmax(-1), atol=1e-5, rtol=0)

    def release(self) -> None:
        leaving = self.numbers.sample(self.nodes, len(self.nodes) // 3)
        self.tree.release(leaving)
        assert all(node.is_released for node in leaving)
        self.nodes = [node for node in self.nodes if node not in leaving]

    def drop(self) -> None:
        """Nobody holds them any more."""
        self.nodes = self.numbers.sample(self.nodes, len(self.nodes) // 2)
        assert len(self.tree) == len(self.nodes)

    def forget(self) -> None:
        """The engine loses everything, as after a step that broke off."""
        if self.numbers.random() < 0.2:
            self.core.reset()


def run(num_acts: int, seed: int, *, runs_ahead: bool, num_blocks: int) -> Acts:
    acts = Acts(seed, runs_ahead=runs_ahead, num_blocks=num_blocks)
    for _ in range(num_acts):
        acts.act()
    acts.tree.close()
    check_blocks(acts.core)
    assert acts.core.scheduler.managers[0].num_in_use == 0
    return acts


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_random_acts(runs_ahead: bool) -> None:
    run(60, 1, runs_ahead=runs_ahead, num_blocks=300)
    assert run(60, 2, runs_ahead=runs_ahead, num_blocks=40).num_refused, "a small cache is filled now and then"


@pytest.mark.long
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_ten_thousand_random_acts(runs_ahead: bool) -> None:
    for seed in range(10):
        run(500, seed, runs_ahead=runs_ahead, num_blocks=[300, 40][seed % 2])


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_thousand_nodes_compute_every_position_once(runs_ahead: bool) -> None:
    core = fake_engine(num_blocks=4_000, runs_ahead=runs_ahead, eos_token_ids=frozenset())
    tree = tree_of(core)
    levels = [[tree.root(PROMPT)]]
    for number in (10, 10, 9):
        params = SamplingParams(n=number, max_tokens=3, seed=4)
        levels.append([child for children in tree.sample(levels[-1], params) for child in children])
    assert len(tree) == 1 + 10 + 100 + 900
    device = core.device
    assert isinstance(device, FakeDevice)
    parents = sum(len(level) for level in levels[:-1])
    # Of every child two positions, of every parent its last one, of the root all before it.
    assert sum(map(device.num_tokens, device.plans)) == 2 * (len(tree) - 1) + parents + len(PROMPT) - 1
    tree.close()
    check_blocks(core)
    assert core.stats()["blocks_in_use"] == 0


def test_nodes_draw_their_own_noise_and_a_tree_repeats() -> None:
    drawn = []
    for _ in range(2):
        core = fake_engine(eos_token_ids=frozenset())
        tree = tree_of(core)
        copies = [tree.root(PROMPT) for _ in range(6)]
        params = SamplingParams(max_tokens=4, seed=7)
        first = [children[0].own_token_ids for children in tree.sample(copies, params)]
        again = [children[0].own_token_ids for children in tree.sample(copies, params)]
        twice = [children[0].own_token_ids for children in tree.sample([copies[0], copies[0]], params)]
        assert len({*first, *again, *twice}) == 14
        drawn.append((first, again, twice))
    assert drawn[0] == drawn[1]


def test_processed_logprobs_are_of_what_sample_draws_from() -> None:
    core = fake_engine()
    tree = tree_of(core)
    node = tree.root(PROMPT)
    params = SamplingParams(temperature=0.5, top_k=4, logit_bias={3: 5.0}, repetition_penalty=1.5)
    [told] = tree.next_logprobs(node, "processed", params)
    logits = logits_after(PROMPT)
    logits[3] += 5.0
    seen = logits[PROMPT]
    logits[PROMPT] = torch.where(seen > 0, seen / 1.5, seen * 1.5)
    logits = logits / 0.5
    logits[logits < logits.topk(4).values[-1]] = -torch.inf
    torch.testing.assert_close(told, logits.log_softmax(-1), atol=1e-5, rtol=0)
    assert int((told > -torch.inf).sum()) == 4
    [children] = tree.sample(node, replace(params, n=16, max_tokens=1))
    assert {child.own_token_ids[0] for child in children} <= set((told > -torch.inf).nonzero().flatten().tolist())


def test_processed_logprobs_are_of_the_controls_that_need_words_and_coins_too() -> None:
    """Breakers of repetitions were forgotten there, and every node of every seed had one and the same coin."""
    core = fake_engine(num_blocks=400, logprobs_mode="processed")
    core.encode_words = letters().encode_words
    tree = tree_of(core)
    [breaker] = letters().encode("b", add_special_tokens=False)
    root = tree.root([20, breaker, 21, 20, breaker])
    [free], [broken] = (
        tree.next_logprobs(root, "processed", SamplingParams(dry_multiplier=9.0, dry_sequence_breakers=breakers))
        for breakers in (["c"], ["b"])
    )
    torch.testing.assert_close(broken, logits_after(list(root.token_ids)).log_softmax(-1), atol=1e-5, rtol=0)
    assert float(free[21]) < float(broken[21]) - 5

    params = SamplingParams(xtc_probability=0.5, xtc_threshold=0.01, max_tokens=1, seed=5)
    excluded = []
    for _ in range(12):
        [told] = tree.next_logprobs(root, "processed", params)
        excluded.append(bool(told.isinf().any()))
        [[child]] = tree.sample(root, replace(params, logprobs=1))
        assert child.output is not None
        assert child.output.logprobs is not None
        drawn = child.own_token_ids[0]
        assert child.output.logprobs[0][drawn].logprob == pytest.approx(float(told[drawn]), abs=1e-5)
    assert 0 < sum(excluded) < 12


def test_next_logprobs_are_told_where_tokens_are_drafted() -> None:
    """What looks at the logits is a processor, and requests with one had been refused there."""
    core = fake_engine(drafter=LookupDrafter("ngram"))
    tree = tree_of(core)
    [told] = tree.next_logprobs(tree.root(PROMPT))
    torch.testing.assert_close(told, logits_after(PROMPT).log_softmax(-1), atol=1e-5, rtol=0)


def test_processed_logprobs_ignore_nothing() -> None:
    core = fake_engine()
    tree = tree_of(core)
    with pytest.raises(InvalidInputError, match="bad_words need a tokenizer"):
        tree.next_logprobs(tree.root(PROMPT), "processed", SamplingParams(bad_words=["a"]))


def test_text_and_ends() -> None:
    core = fake_engine(eos_token_ids=frozenset(range(2, 290)))
    tree = tree_of(core)
    root = tree.root("abc")
    assert root.text == ""
    [[child]] = tree.sample(root, SamplingParams(max_tokens=8, seed=1))
    assert child.has_ended
    assert child.depth == 1
    with pytest.raises(InvalidInputError, match="node 1 has ended"):
        tree.sample(child)
    [given] = tree.extend(root, "bb")
    assert given.text == "bb"
    assert "bb" in repr(given)
    # A caller's own end is no end of the tree.
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True, stop_token_ids=list(range(100)))
    [[stopped]] = tree.sample(given, params)
    assert stopped.output is not None
    assert stopped.output.finish_reason == "stop"
    assert not stopped.has_ended


def test_refusals_change_nothing() -> None:
    core = fake_engine()
    tree, other = tree_of(core, max_nodes=3), tree_of(core)
    root = tree.root(PROMPT)
    refused: list[tuple[str, Any]] = [
        ("belongs to another tree", lambda: other.sample(root)),
        ("nodes must be nodes of this tree", lambda: tree.sample([3])),  # type: ignore[list-item]
        ("strategy must be one of", lambda: tree.sample(root, SamplingParams(strategy="beam_search", beam_width=2))),
        ("strategy must be one of", lambda: tree.sample(root, SamplingParams(best_of=3))),
        ("max_tokens must be at least 1", lambda: tree.sample(root, SamplingParams(max_tokens=0))),
        ("prompt_logprobs are not told", lambda: tree.sample(root, SamplingParams(prompt_logprobs=1))),
        ("output_kind must be", lambda: tree.sample(root, SamplingParams(output_kind="delta"))),
        ("child names noise", lambda: tree.sample(root, SamplingParams(seed=1, child=2))),
        ("one per node: got 2 for 1", lambda: tree.extend(root, [[1], [2]])),
        ("number 0 has no tokens", lambda: tree.extend(root, [[]])),
        (r"continuations\[0\] must be", lambda: tree.logprobs(root, [[VOCAB]])),
        ("mode must be one of", lambda: tree.next_logprobs(root, "cooked")),  # type: ignore[arg-type]
        ("go with mode", lambda: tree.next_logprobs(root, "raw", SamplingParams())),
        ("prompt must not be empty", lambda: tree.root([])),
        ("max_model_len", lambda: tree.sample(root, SamplingParams(max_tokens=1_000))),
    ]
    for message, act in refused:
        with pytest.raises(InvalidInputError, match=message):
            act()
    with pytest.raises(CacheExhaustedError, match="1 nodes, and 3 more would pass max_nodes = 3"):
        tree.sample(root, SamplingParams(n=3))
    assert len(tree) == 1
    assert tree.sample([], SamplingParams()) == []
    assert tree.next_logprobs([]).shape == (0, VOCAB)
    tree.release(root)
    with pytest.raises(InvalidInputError, match="node 0 was released"):
        tree.logprobs(root, [[1]])
    tree.release(root)
    check_blocks(core)
    with pytest.raises(InvalidInputError, match="max_nodes must be"):
        tree_of(core, max_nodes=0)


def test_what_breaks_a_call_off_leaves_the_tree_as_it_was() -> None:
    core = fake_engine(eos_token_ids=frozenset())
    tree = tree_of(core)
    nodes = [tree.root([number, 2, 3, 4, 5]) for number in range(8)]
    calls = 0

    def interrupted(_: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise KeyboardInterrupt
        return logits

    lengths: dict[str, Any] = {"max_tokens": 3, "n": 2}
    with pytest.raises(KeyboardInterrupt):
        tree.sample(nodes, SamplingParams(logits_processors=[interrupted], **lengths))
    check_blocks(core)
    assert len(tree) == 8

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("no such thing")

    with pytest.raises(InvalidInputError, match="no such thing"):
        tree.sample(nodes, SamplingParams(logits_processors=[broken], **lengths))
    assert core.stats()["blocks_in_use"] == len(core.kept.blocks()[0]), "given back at once"
    check_blocks(core)
    assert [node.num_sampled for node in nodes] == [0] * 8
    assert len(tree.sample(nodes, SamplingParams(**lengths))) == 8
    gc.collect()
    check_blocks(core)


def test_a_full_cache_says_so_to_plain_requests_too() -> None:
    core = fake_engine(num_blocks=10, eos_token_ids=frozenset())
    tree = tree_of(core)
    [node] = tree.extend(tree.root(PROMPT), [list(range(1, 25))])
    core.add_request(Request("0", None, [1] * 12, SamplingParams(max_tokens=4)))
    [output] = core.step()
    assert output.finished
    assert output.error is not None
    assert "8 of 10 KV blocks are kept for nodes of trees" in output.error
    assert core.stats()["requests_finished"] == 3, "two for the extension, and this one"
    tree.release(node)
    core.add_request(Request("1", None, [1] * 12, SamplingParams(max_tokens=4)))
    while core.has_unfinished():
        outputs = core.step()
    assert outputs[0].error is None
