"""A tree of prefixes: nodes that the engine keeps in blocks, so that a search computes every position once.

    root("Once")            a node is tokens, and what the engine has computed of them
      sample -> node, node  drawn continuations; each node has noise of its own
        extend -> node      given continuations
    logprobs, next_logprobs what the model thinks of continuations, without going on

Every method takes many nodes: a level of a tree is one batch. A node that is released, or that nobody holds any more,
gives its blocks back. If the engine had to forget them (a step broke off, the weights were replaced), they are computed
again when the node is next used.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from ramify import validation as check
from ramify.drive.intake import Intake, Prompt
from ramify.drive.loops import Calls
from ramify.drive.node import Node
from ramify.drive.scoring import raise_first_error
from ramify.engine.core import EngineCore
from ramify.engine.plan import Draw
from ramify.engine.request import Request
from ramify.errors import CacheExhaustedError, InvalidInputError
from ramify.outputs import RequestOutput
from ramify.sampling.pipeline import Sampler, Source
from ramify.sampling_params import OutputKind, SamplingParams, SamplingStrategy
from ramify.structured.matcher import Matcher

STRATEGIES = (SamplingStrategy.PARALLEL, SamplingStrategy.DIVERSE)
UNREAD = SamplingParams(max_tokens=1, temperature=0, detokenize=False)  # a token that nobody reads ends the request
LOOKED_AT = replace(UNREAD, speculate=False)  # drafts would call who looks, too
TOLD = SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False)


class Tree:
    """Made by `LLM.tree`. `max_nodes` bounds the nodes alive at a time; the cache's blocks bound what they hold."""

    def __init__(
        self,
        core: EngineCore,
        calls: Calls,
        intake: Intake,
        *,
        max_nodes: int | None = None,
        check_weights: Callable[[], None] = lambda: None,
    ) -> None:
        self.max_nodes = None if max_nodes is None else check.integer("max_nodes", max_nodes, 1)
        self._core, self._calls, self._intake = core, calls, intake
        self._check_weights = check_weights
        self.nodes: weakref.WeakSet[Node] = weakref.WeakSet()  # alive
        self._num_made = 0

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Nodes alive."""
        return len(self.nodes)

    # -- growing ---------------------------------------------------------------------------------------------

    def root(self, prompt: Prompt) -> Node:
        """A node that others grow from; nothing is computed before that."""
        self._check_room(1)
        request = self._intake.request(prompt, UNREAD)
        return self._add(Node(self, None, request.prompt_token_ids))

    def sample(self, nodes: Node | Iterable[Node], params: SamplingParams | None = None) -> list[list[Node]]:
        """For each node, `params.n` drawn continuations, as new nodes.

        The noise is each node's own: copies of a node, and a second call with the same node, draw independently; the
        same acts in a new tree draw the same with the same seed. What a node holds counts as a prompt, but to
        `structured_outputs` all after the root is one text.
        """
        listed = self._checked(nodes)
        params = self._intake.defaults.params() if params is None else params
        self._check_sampling(params)
        for node in listed:
            if node.has_ended:
                raise InvalidInputError(f"node {node.id} has ended with the model's own end: nothing follows it")
            self._matcher(node, params)  # raises if its text does not fit
        self._check_room(len(listed) * params.num_samples)
        seeds = self._seeds(listed, params.seed)
        self._settle(listed)
        requests = [
            self._request(
                node.token_ids,
                replace(params, seed=seed),
                begins_with=node.kept_as,
                keeps=True,
                begun=node.new_token_ids,
            )
            for node, seed in zip(listed, seeds, strict=True)
        ]
        with self._run(requests, params.num_samples) as outputs:
            children = [
                [
                    self._add(
                        Node(
                            self,
                            node,
                            (*node.token_ids, *each.token_ids),
                            name=f"{output.request_id}-{each.index}",
                            output=each,
                            logprob=each.cumulative_logprob,
                        )
                    )
                    for each in output.outputs
                ]
                for node, output in zip(listed, outputs, strict=True)
            ]
            for node in listed:
                node.num_sampled += 1
            return children

    def extend(
        self, nodes: Node | Iterable[Node], continuations: str | Sequence[str] | Sequence[Sequence[int]]
    ) -> list[Node]:
        """For each node, one given continuation (text or token ids), as a new node with the logprobs of its tokens."""
        listed = self._checked(nodes)
        given = self._continuations(listed, continuations)
        self._check_room(len(listed))
        with self._score(listed, given, keeps=True) as (names, logprobs):
            return [
                self._add(Node(self, node, (*node.token_ids, *token_ids), told, name=name))
                for node, token_ids, name, told in zip(listed, given, names, logprobs, strict=True)
            ]

    # -- asking ----------------------------------------------------------------------------------------------

    def logprobs(
        self, nodes: Node | Iterable[Node], continuations: str | Sequence[str] | Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """For each node, the raw logprobs of one given continuation's tokens; no node is made."""
        listed = self._checked(nodes)
        with self._score(listed, self._continuations(listed, continuations), keeps=False) as (_, logprobs):
            return logprobs

    def next_logprobs(
        self,
        nodes: Node | Iterable[Node],
        mode: Literal["raw", "processed"] = "raw",
        params: SamplingParams | None = None,
    ) -> Tensor:
        """(nodes, vocabulary) float32 on the CPU: logprobs of every token that could follow each node.

        "raw": the model's own. "processed": after the controls, temperature and filters of `params`, as `sample` with
        them would draw the first token.
        """
        check.choice("mode", mode, ("raw", "processed"))
        if params is not None and mode == "raw":
            raise InvalidInputError('params change processed logprobs alone: they go with mode="processed"')
        listed = self._checked(nodes)
        params = self._intake.defaults.params() if params is None else params
        self._check_sampling(params)
        draws = [] if mode == "raw" else self._first_draws(listed, params)
        self._settle(listed)
        rows: list[Tensor] = [torch.empty(0)] * len(listed)

        def looking(index: int) -> Callable[[Sequence[int], Tensor], Tensor]:
            def look(_: Sequence[int], logits: Tensor) -> Tensor:
                rows[index] = logits.detach().to("cpu", torch.float32, copy=True)
                return logits

            return look

        requests = [
            self._request(
                node.token_ids, replace(LOOKED_AT, logits_processors=[looking(index)]), begins_with=node.kept_as
            )
            for index, node in enumerate(listed)
        ]
        with self._run(requests):
            pass  # the rows have been looked at
        if not rows:
            return torch.empty(0, self._intake.vocab_size)
        logits = torch.stack(rows)
        return logits.log_softmax(-1) if mode == "raw" else self._processed(logits, draws)

    # -- giving back -----------------------------------------------------------------------------------------

    def release(self, nodes: Node | Iterable[Node]) -> None:
        """Gives the blocks of these nodes back; their children keep theirs. A released node cannot be used again."""
        listed = [nodes] if isinstance(nodes, Node) else list(nodes)
        for node in listed:
            if not isinstance(node, Node) or not node.belongs_to(self):
                raise check.refuse("nodes", node, "nodes of this tree")
        names = [node.kept_as for node in listed if node.kept_as is not None]
        self._calls.between(lambda: self._core.release(names))
        for node in listed:
            node.keep(None)
            self.nodes.discard(node)

    def close(self) -> None:
        """Releases every node."""
        self.release(list(self.nodes))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones left out; empty without a tokenizer."""
        tokenizer = self._intake.codec.tokenizer
        return "" if tokenizer is None else tokenizer.decode(list(token_ids))

    def text_after(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> str:
        """The text of tokens that go on after others, special ones left out; empty without a tokenizer."""
        return self._intake.codec.text_after(prompt_token_ids, token_ids)

    # -- what the methods share --------------------------------------------------------------------------------

    def new_id(self) -> int:
        self._num_made += 1
        return self._num_made - 1

    def drop(self, name: str) -> None:
        self._core.kept.drop(name)

    def _add(self, node: Node) -> Node:
        self.nodes.add(node)
        return node

    def _checked(self, nodes: Any) -> list[Node]:
        listed = [nodes] if isinstance(nodes, Node) else list(nodes) if isinstance(nodes, Iterable) else [nodes]
        for node in listed:
            if not isinstance(node, Node):
                raise check.refuse("nodes", node, "nodes of this tree")
            if not node.belongs_to(self):
                raise InvalidInputError(f"node {node.id} belongs to another tree")
            if node.is_released:
                raise InvalidInputError(f"node {node.id} was released")
        return listed

    def _check_room(self, count: int) -> None:
        if self.max_nodes is not None and len(self) + count > self.max_nodes:
            raise CacheExhaustedError(
                f"the tree has {len(self)} nodes, and {count} more would pass max_nodes = {self.max_nodes}: "
                "release some"
            )

    def _check_sampling(self, params: SamplingParams) -> None:
        self._intake.check_params(params)
        if params.resolved_strategy not in STRATEGIES:
            raise InvalidInputError(
                f"strategy must be one of {[each.value for each in STRATEGIES]} in a tree, whose caller searches and "
                f"ranks; got {params.resolved_strategy.value!r}"
            )
        if params.max_tokens == 0:
            raise InvalidInputError(
                "max_tokens must be at least 1 in a tree: use logprobs or next_logprobs to ask only"
            )
        if params.prompt_logprobs is not None:
            raise InvalidInputError(
                "prompt_logprobs are not told by a tree, which computed its nodes before: use logprobs"
            )
        if params.output_kind is not OutputKind.FINAL_ONLY:
            raise InvalidInputError(f"output_kind must be 'final_only' in a tree, got {str(params.output_kind)!r}")
        if params.child:
            raise InvalidInputError(f"child names noise of a prompt's own, and nodes have theirs: got {params.child}")

    def _continuations(self, nodes: list[Node], given: Any) -> list[list[int]]:
        checked = self._intake.continuations(given)
        if len(checked) != len(nodes):
            raise InvalidInputError(f"continuations must be one per node: got {len(checked)} for {len(nodes)} nodes")
        return checked

    def _seeds(self, nodes: list[Node], given: int | None) -> list[int]:
        """Of each node: a function of the seed, the node's id, and how often it was sampled from, here too."""
        seed = self._core.seed if given is None else given
        before: dict[int, int] = {}
        seeds = []
        for node in nodes:
            turn = node.num_sampled + before.get(node.id, 0)
            before[node.id] = before.get(node.id, 0) + 1
            seeds.append(node_seed(seed, node.id, turn))
        return seeds

    def _request(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        begins_with: str | None = None,
        keeps: bool = False,
        next_token_id: int | None = None,
        begun: Sequence[int] = (),
    ) -> Request:
        request = self._intake.request(token_ids, params)
        request.begun = tuple(begun)
        request.begins_with, request.keeps, request.next_token_id = begins_with, keeps, next_token_id
        return request

    def _matcher(self, node: Node, params: SamplingParams) -> Matcher | None:
        """Where a node stands in the grammar, which begins at the root."""
        structure, begin = params.structure, self._core.begin_matcher
        if structure is None or begin is None:
            return None
        return begin(structure, sorted({*self._core.eos_token_ids, *(params.stop_token_ids or ())}), node.new_token_ids)

    def _settle(self, nodes: list[Node]) -> None:
        """Computes all but the last token of nodes that the engine does not keep: whoever goes on computes that one."""
        kept = self._core.kept
        unsettled = {
            node.id: node
            for node in nodes
            if (node.kept_as is None or node.kept_as not in kept) and len(node.token_ids) > 1
        }
        requests = [self._request(node.token_ids[:-1], UNREAD, keeps=True) for node in unsettled.values()]
        with self._run(requests, 1):
            for node, request in zip(unsettled.values(), requests, strict=True):
                node.keep(request.root.seq_id)

    @contextmanager
    def _score(
        self, nodes: list[Node], continuations: list[list[int]], *, keeps: bool
    ) -> Generator[tuple[list[str], list[list[float]]]]:
        """What each node's continuation is kept as, and the logprobs of its tokens."""
        self._settle(nodes)
        requests = [
            self._request(
                (*node.token_ids, *token_ids[:-1]),
                TOLD,
                begins_with=node.kept_as,
                keeps=keeps,
                next_token_id=token_ids[-1],
            )
            for node, token_ids in zip(nodes, continuations, strict=True)
        ]
        told = []
        with self._run(requests, int(keeps)) as outputs:
            for node, token_ids, output in zip(nodes, continuations, outputs, strict=True):
                rows = (output.prompt_logprobs or [])[len(node.token_ids) :]
                told.append([row[token].logprob for row, token in zip(rows, token_ids, strict=True) if row is not None])
            yield [request.root.seq_id for request in requests], told

    def _first_draws(self, nodes: list[Node], params: SamplingParams) -> list[Draw]:
        """The first tokens that `sample` would draw next, with all that could be drawn told of."""
        asked = replace(
            params,
            n=1,
            best_of=None,
            max_tokens=1,
            min_tokens=min(params.min_tokens, 1),
            logprobs=self._intake.vocab_size,
            speculate=False,
        )
        draws = []
        for node, seed in zip(nodes, self._seeds(nodes, params.seed), strict=True):
            request = Request(str(node.id), None, node.token_ids, asked)
            self._core.capacity.check(request)
            demands = self._core.demands_of(request, seed=seed)
            draws.append(Draw(str(node.id), 0, 0, 0, (), demands, matcher=self._matcher(node, params)))
        return draws

    def _processed(self, logits: Tensor, draws: list[Draw]) -> Tensor:
        """By the sampler's own pipeline, as if these were drawn."""
        result = Sampler("processed").sample([Source(logits, range(len(draws)))], draws)
        if result.faults:
            raise InvalidInputError(next(iter(result.faults.values())))
        told = torch.full_like(logits, -torch.inf)
        for index in range(len(draws)):
            report = result.reports[index]
            told[index, torch.as_tensor(report.top_token_ids)] = torch.as_tensor(report.top_logprobs)
        return told

    @contextmanager
    def _run(self, requests: list[Request], num_kept: int = 0) -> Generator[list[RequestOutput]]:
        """The outputs, for the lines inside. All or nothing: whatever breaks off the call or these lines, nothing stays
        kept of these requests."""
        names = [f"{request.request_id}-{child}" for request in requests for child in range(num_kept)]
        try:
            outputs = self._calls.run(requests, use_tqdm=False, check=self._check_weights) if requests else []
            if any(output.error is not None for output in outputs):
                self._calls.between(lambda: self._core.release(names))
                raise_first_error(outputs)
            yield outputs
        except BaseException:
            for name in names:
                self.drop(name)
            raise


def node_seed(seed: int, node_id: int, turn: int) -> int:
    """Nodes of one depth, copies of one prefix and repeated draws from one node never meet the same noise."""
    digest = hashlib.blake2b(f"node:{seed}:{node_id}:{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest)
