"""Parent requests and their children, for callers who run every child as a request of its own.

Inside the engine a `Group` does this with sequences that share the prompt's blocks. Here a child is only a name and a
CompletionOutput. The rules are the same: which children there are, how they are ranked, what is due to the caller.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ramify import validation as check
from ramify.engine.metrics import IterationStats
from ramify.engine.search.ranking import BestOfNFilter
from ramify.errors import InvalidInputError
from ramify.foreign.truth import Truth
from ramify.outputs import CompletionOutput
from ramify.sampling_params import OutputKind, SamplingParams


class ParentOutput(NamedTuple):
    """What is due to a parent's caller; its fields are named as those of RequestOutput."""

    request_id: str
    outputs: list[CompletionOutput]
    finished: bool


@dataclass(eq=False)
class ParentRequest:
    """One request and its children: best_of of them if that is given, else n.

    Child i is named `{request_id}-{i}`, as the engine names sequences. Under a seed its parameters carry its number
    (`SamplingParams.child`), so run by itself it draws what the engine's child i draws. Noise is keyed by the pair
    (seed, i), never by their sum: children of parents with neighbouring seeds draw different noise, and child i of
    n = 4 is child i of n = 64.
    """

    request_id: str
    sampling_params: SamplingParams
    max_num_generation_tokens: int = field(default=0, init=False)  # of the longest child so far
    _completions: dict[int, CompletionOutput] = field(default_factory=dict, init=False, repr=False)
    _num_finished: int = field(default=0, init=False, repr=False)
    _sent: dict[int, tuple[int, int]] = field(default_factory=dict, init=False, repr=False)  # characters, tokens

    def __post_init__(self) -> None:
        check.text("request_id", self.request_id)
        params = self.sampling_params
        if params.num_together is not None:
            raise InvalidInputError(
                f"strategy {params.resolved_strategy.value!r} has children that look at each other, which requests of "
                "their own cannot: give it to the engine, or use BeamSearchManager or DiverseSamplingManager"
            )
        if params.output_kind is OutputKind.GROWTH:
            raise InvalidInputError(
                "output_kind 'growth' tells of steps, and a parent sees none: give the request to the engine"
            )
        # What all children have in common. They report cumulative outputs; `_delta` cuts deltas from them.
        self._child_params = replace(
            params,
            n=1,
            best_of=None,
            strategy=None,
            score="cumulative_logprob",
            output_kind=OutputKind.CUMULATIVE if params.output_kind is OutputKind.DELTA else params.output_kind,
        )

    @property
    def n(self) -> int:
        """How many outputs come back."""
        return self.sampling_params.n

    @property
    def best_of(self) -> int:
        """How many children are drawn."""
        return self.sampling_params.num_samples

    @property
    def all_finished(self) -> Truth:
        """Whether every child has ended; may be called too."""
        return Truth(self._num_finished == self.best_of)

    @property
    def child_names(self) -> list[str]:
        return [f"{self.request_id}-{index}" for index in range(self.best_of)]

    def get_child_info(self, index: int) -> tuple[str, SamplingParams]:
        """A child's name and its sampling parameters."""
        params = self._get_child_sampling_params(index)
        return f"{self.request_id}-{index}", params

    def get_child_index(self, child_request_id: str) -> int:
        """The number of the child with this name; its noise is keyed by the seed and this number."""
        parent_id, _, number = child_request_id.rpartition("-")
        index = int(number) if number.isascii() and number.isdigit() else self.best_of
        if parent_id != self.request_id or index >= self.best_of or str(index) != number:
            raise InvalidInputError(f"request {self.request_id!r} has no child {child_request_id!r}")
        return index

    def record_child_output(self, child_request_id: str, completion: CompletionOutput) -> ParentOutput:
        """Takes a child's cumulative output; returns what the output kind makes due now, often nothing."""
        index = self.get_child_index(child_request_id)
        before = self._completions.get(index)
        if before is not None and before.finished:
            raise InvalidInputError(f"child {child_request_id!r} has ended ({before.finish_reason}) already")
        self._completions[index] = completion = replace(completion, index=index)
        self._num_finished += completion.finished()
        self.max_num_generation_tokens = max(self.max_num_generation_tokens, len(completion.token_ids))
        return ParentOutput(self.request_id, self._due(completion), self.all_finished())

    def _get_child_sampling_params(self, index: int) -> SamplingParams:
        """The parent's own, for one sample: its seed and, to tell children of one seed apart, the child's number.

        Without a seed the engine gives every request a seed of its own, which does that too.
        """
        check.integer("index", index, 0, self.best_of - 1)
        return (
            self._child_params
            if self.sampling_params.seed is None
            else replace(self._child_params, child=self.sampling_params.child + index)
        )

    def _get_final_outputs(self) -> list[CompletionOutput]:
        """All children's outputs so far in their order or, with best_of, the n best of them, best first."""
        completions = [self._completions[index] for index in sorted(self._completions)]
        if self.best_of == self.n:
            return completions
        return BestOfNFilter(self.sampling_params.score).select_best(completions, self.n)

    def _due(self, completion: CompletionOutput) -> list[CompletionOutput]:
        kind = self.sampling_params.output_kind
        if kind is OutputKind.FINAL_ONLY:
            return self._get_final_outputs() if self.all_finished else []
        if self.best_of > self.n:  # this child may have changed the ranking of all
            return self._get_final_outputs()
        return [self._delta(completion) if kind is OutputKind.DELTA else completion]

    def _delta(self, completion: CompletionOutput) -> CompletionOutput:
        characters, tokens = self._sent.get(completion.index, (0, 0))
        self._sent[completion.index] = len(completion.text), len(completion.token_ids)
        return replace(
            completion,
            text=completion.text[characters:],
            token_ids=completion.token_ids[tokens:],
            logprobs=None if completion.logprobs is None else completion.logprobs[tokens:],
        )


class ParallelSamplingManager:
    """Many parent requests at once: their children, their outputs, and counts over all of them.

    A parent is kept until `finish_parent`; after that, only the counts remember it.
    """

    def __init__(self) -> None:
        self.total_parents = 0
        self.total_children = 0
        self.finished_parents = 0  # those whose children had all ended
        self.n_histogram: Counter[int] = Counter()
        self.best_of_histogram: Counter[int] = Counter()
        self._parents: dict[str, ParentRequest] = {}
        self._parent_of: dict[str, str] = {}

    def create_parent(self, request_id: str, sampling_params: SamplingParams) -> ParentRequest:
        parent = ParentRequest(request_id, sampling_params)
        names = parent.child_names
        for name in (request_id, *names):
            if name in self._parents or name in self._parent_of:
                raise InvalidInputError(f"request_id {name!r} is in use")
        self._parents[request_id] = parent
        self._parent_of.update(dict.fromkeys(names, request_id))
        self.total_parents += 1
        self.total_children += len(names)
        return parent

    def get_child_requests(self, parent: ParentRequest) -> list[tuple[str, SamplingParams]]:
        """The requests to run: every child's name and sampling parameters."""
        if self._parents.get(parent.request_id) is not parent:
            raise InvalidInputError(f"request {parent.request_id!r} is not, or no longer, a parent here")
        return [parent.get_child_info(index) for index in range(parent.best_of)]

    def record_output(self, request_id: str, completion: CompletionOutput) -> ParentOutput | None:
        """Takes a child's cumulative output; returns what is due to its parent's caller. None if it is no child."""
        parent_id = self._parent_of.get(request_id)
        return None if parent_id is None else self._parents[parent_id].record_child_output(request_id, completion)

    def finish_parent(self, parent_id: str, stats: IterationStats | None = None) -> ParentRequest | None:
        """Forgets a parent and its children, ended or not; returns None if there is no parent of that name.

        If all its children have ended, `stats` observes it.
        """
        parent = self._parents.pop(parent_id, None)
        if parent is None:
            return None
        for name in parent.child_names:
            del self._parent_of[name]
        if parent.all_finished:
            self.finished_parents += 1
            self.n_histogram[parent.n] += 1
            self.best_of_histogram[parent.best_of] += 1
            if stats is not None:
                stats.observe_parallel_sampling(parent, parent.max_num_generation_tokens)
        return parent

    def get_parent(self, request_id: str) -> ParentRequest | None:
        """The parent with this name, or the parent of the child with this name."""
        return self._parents.get(self._parent_of.get(request_id, request_id))

    def is_child_request(self, request_id: str) -> bool:
        return request_id in self._parent_of
