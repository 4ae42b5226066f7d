"""A group: a request as the engine keeps it, with its children, their texts and their ends.

`advance(candidates) -> continuations` is the one signature of all strategies: a pure function of what was drawn. A
parent named by several continuations is forked; a sequence that none names goes no further.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ramify.metrics import IterationStats
from ramify.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from ramify.request import Request
from ramify.sampling_params import OutputKind
from ramify.search.ranking import rank
from ramify.sequence import Sequence, SequenceStatus
from ramify.text.stream import TextStream


class Candidate(NamedTuple):
    """A token drawn for a child, after the last token of its parent sequence."""

    parent: str
    child: int
    token_id: int
    logprob: float


# What a strategy makes of candidates: child `child` goes on from sequence `parent` with this token.
Continuation = Candidate


def advance_independent(candidates: Items[Candidate]) -> list[Continuation]:
    """Parallel sampling and best-of-n: every child keeps what it drew."""
    return list(candidates)


@dataclass(slots=True)
class Child:
    """One continuation of the prompt, and how much of it has been handed out."""

    sequence: Sequence
    text: TextStream
    finish_reason: FinishReason | None = None
    num_end_tokens: int = 0  # 1 where the last token is the end itself, and no content
    last_token_time: float | None = None
    sent_characters: int = 0
    sent_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Changes:
    """What an advance did: (parent, fork) pairs whose blocks are shared, who ended, times since the token before."""

    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)


class Group:
    def __init__(
        self,
        request: Request,
        *,
        seed: int,
        longest_output: int,
        eos_token_ids: frozenset[int],
        make_text: Callable[[], TextStream],
    ) -> None:
        self.request = request
        self.params = request.sampling_params
        self.seed = seed
        self.longest_output = longest_output
        self.stop_token_ids = frozenset(self.params.stop_token_ids or ())
        self.end_token_ids = self.stop_token_ids | (frozenset() if self.params.ignore_eos else eos_token_ids)
        self.error: str | None = None
        self.metrics = RequestMetrics(request.arrival_time)
        self.num_cached_tokens = 0
        self._children = {request.root.seq_id: Child(request.root, make_text())}

    @property
    def finished(self) -> bool:
        return all(child.finish_reason is not None for child in self._children.values())

    def children_of(self, sequence: Sequence) -> range:
        """Which children draw from this sequence's next position: before its first token, all of them."""
        if sequence is self.request.root and not sequence.output_token_ids:
            return range(self.params.num_samples)
        return range(sequence.child, sequence.child + 1)

    # -- growing ---------------------------------------------------------------------------------------------

    def advance(self, candidates: Items[Candidate], now: float = 0.0) -> Changes:
        changes = Changes()
        adopted: set[str] = set()
        grown: list[tuple[Child, Continuation]] = []
        # Fork before anything is appended: a fork must not see its sibling's token.
        for item in advance_independent(candidates):
            parent = self._children[item.parent]
            if item.parent in adopted:
                child = self._fork(parent, item.child)
                changes.forks.append((parent.sequence, child.sequence))
            else:
                adopted.add(item.parent)
                child = parent
            grown.append((child, item))
        for child, item in grown:
            if child.last_token_time is not None:
                changes.latencies.append(now - child.last_token_time)
            child.last_token_time = now
            child.sequence.add_token_id(item.token_id, item.logprob)
            if self._check_end(child, item.token_id):
                changes.ended.append(child.sequence)
        return changes

    def stop_all(self, reason: FinishReason, error: str | None = None) -> list[Sequence]:
        """Ends every child that still runs or waits; returns their sequences."""
        self.error = error
        stopped = []
        for child in self._children.values():
            if child.finish_reason is None:
                child.text.end(may_stop=False)
                child.finish_reason = reason
                child.sequence.move(SequenceStatus.FINISHED_ABORTED)
                stopped.append(child.sequence)
        return stopped

    def _fork(self, parent: Child, index: int) -> Child:
        sequence = self.request.fork_sequence(f"{self.request.request_id}-{index}", parent.sequence.seq_id)
        sequence.child = index
        self._children[sequence.seq_id] = child = Child(sequence, parent.text.fork())
        return child

    def _check_end(self, child: Child, token_id: int) -> bool:
        sequence = child.sequence
        may_stop = len(sequence.output_token_ids) >= self.params.min_tokens
        if token_id in self.end_token_ids:
            if self.params.include_stop_str_in_output:
                child.text.push(token_id, may_stop=False)
            sequence.stop_reason = token_id if token_id in self.stop_token_ids else None
            child.num_end_tokens = 1
            return self._end(child, SequenceStatus.FINISHED_STOPPED, FinishReason.STOP)
        if child.text.push(token_id, may_stop=may_stop):
            return self._end(child, SequenceStatus.FINISHED_STOPPED, FinishReason.STOP)
        if len(sequence.output_token_ids) >= self.longest_output:
            if child.text.end(may_stop=may_stop):
                return self._end(child, SequenceStatus.FINISHED_STOPPED, FinishReason.STOP)
            return self._end(child, SequenceStatus.FINISHED_LENGTH_CAPPED, FinishReason.LENGTH)
        return False

    def _end(self, child: Child, status: SequenceStatus, reason: FinishReason) -> bool:
        child.text.end(may_stop=False)
        if child.text.stopped_by is not None:
            child.sequence.stop_reason = child.text.stopped_by
        child.finish_reason = reason
        child.sequence.move(status)
        return True

    # -- showing ---------------------------------------------------------------------------------------------

    def output(self) -> RequestOutput | None:
        """What is due to the caller now: always at the end, on the way only if the output kind asks for it."""
        kind = self.params.output_kind
        finished = self.finished
        if kind is OutputKind.FINAL_ONLY and not finished:
            return None
        if self.params.num_samples > self.params.n:
            outputs = self._ranked(finished)
        else:
            outputs = [self._completion(child, delta=kind is OutputKind.DELTA) for child in self._in_order()]
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=tuple(self.request.prompt_token_ids),
            outputs=tuple(outputs),
            finished=finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
            error=self.error,
        )

    def observe(self, stats: IterationStats, now: float) -> None:
        """Tells the step in which it ended what there was to see."""
        lengths = [len(child.sequence.output_token_ids) for child in self._children.values()]
        reasons = [child.finish_reason for child in self._children.values() if child.finish_reason is not None]
        stats.record_finished_request(
            now - self.metrics.arrival_time,
            len(self.request.prompt_token_ids),
            sum(lengths),
            reasons[0],
            self.num_cached_tokens,
        )
        stats.observe_parallel_sampling(self.params, max(lengths))

    def _in_order(self) -> list[Child]:
        return sorted(self._children.values(), key=lambda child: child.sequence.child)

    def _ranked(self, finished: bool) -> list[CompletionOutput]:
        children = self._in_order()
        empty = [len(child.sequence.output_token_ids) == child.num_end_tokens for child in children]
        try:
            ranked = rank(zip(map(self._completion, children), empty, strict=True), self.params.score)
        except Exception as error:  # a caller's own function may raise anything: it ends this request alone
            self.error = f"the score function failed: {type(error).__name__}: {error}"
            failed = [replace(self._completion(child), finish_reason=FinishReason.ERROR) for child in children]
            return failed[: self.params.n]
        if finished:
            for loser in ranked[self.params.n :]:
                sequence = children[loser.index].sequence
                if sequence.status is not SequenceStatus.FINISHED_ABORTED:
                    sequence.move(SequenceStatus.FINISHED_IGNORED)
        return [replace(output, index=place) for place, output in enumerate(ranked[: self.params.n])]

    def _completion(self, child: Child, *, delta: bool = False) -> CompletionOutput:
        text = child.text.visible
        token_ids = child.sequence.output_token_ids
        if delta:
            shown, child.sent_characters = child.sent_characters, len(text)
            given, child.sent_tokens = child.sent_tokens, len(token_ids)
            text, token_ids = text[shown:], token_ids[given:]
        return CompletionOutput(
            index=child.sequence.child,
            text=text,
            token_ids=tuple(token_ids),
            cumulative_logprob=child.sequence.cumulative_logprob,
            finish_reason=child.finish_reason,
            stop_reason=child.sequence.stop_reason,
        )
