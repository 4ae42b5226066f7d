"""A group: a request as the engine keeps it, with its strategy, its children and what is due to the caller."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

from ramify.metrics import IterationStats
from ramify.outputs import (
    CompletionOutput,
    FinishReason,
    GrownToken,
    GrowthStep,
    LogprobRow,
    RequestMetrics,
    RequestOutput,
    Standing,
)
from ramify.plan import Rules, TokenReport
from ramify.request import Request
from ramify.sampling_params import OutputKind, SamplingStrategy
from ramify.search.advance import Candidate, Continuation, Independent, Strategy
from ramify.search.beam import BeamSearch, num_candidates
from ramify.search.child import Child, Ends
from ramify.search.ranking import rank
from ramify.search.reports import Decode, logprob_row
from ramify.sequence import Sequence, SequenceStatus
from ramify.text.stream import TextStream


@dataclass(frozen=True, slots=True)
class Changes:
    """What an advance did: (parent, fork) pairs that share blocks now, who needs none any more, and for every token the
    time since the one before it (None for a first)."""

    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    left: list[Sequence] = field(default_factory=list)
    latencies: list[float | None] = field(default_factory=list)


class Group:
    def __init__(
        self,
        request: Request,
        *,
        seed: int,
        longest_output: int,
        eos_token_ids: frozenset[int],
        make_text: Callable[[], TextStream],
        bad_words: tuple[tuple[int, ...], ...] = (),
        decode: Decode | None = None,
    ) -> None:
        self.request = request
        self.params = params = request.sampling_params
        self.seed = seed
        stop_token_ids = frozenset(params.stop_token_ids or ())
        self.ends = Ends(
            end_token_ids=stop_token_ids | (frozenset() if params.ignore_eos else eos_token_ids),
            stop_token_ids=stop_token_ids,
            min_tokens=params.min_tokens,
            longest_output=longest_output,
            include_stop=params.include_stop_str_in_output,
        )
        self.is_beam_search = params.resolved_strategy is SamplingStrategy.BEAM_SEARCH
        self.rules = Rules(
            params=params,
            end_token_ids=self.ends.end_token_ids,
            bad_words=bad_words,
            prompts=tuple(track.prompt_token_ids for track in request.root.tracks),
            num_candidates=num_candidates(
                beam_width=params.resolved_beam_width,
                num_end_tokens=len(self.ends.end_token_ids),
            )
            if self.is_beam_search
            else 0,
        )
        self.strategy: Strategy = self._make_strategy()
        self.is_independent = isinstance(self.strategy, Independent)
        # Whether the step after a draw can be launched before the host knows the token.
        self.may_run_ahead = params.num_together is None and not params.looks_back
        self.is_streamed = params.output_kind is not OutputKind.FINAL_ONLY
        self.is_watched = params.output_kind is OutputKind.GROWTH
        # Whether children, once they are there, can be recorded one by one: nothing is due for all of a step together.
        self.children_go_alone = self.is_independent and (params.num_samples == 1 or not self.is_streamed)
        self.asks_about_prompt = params.prompt_logprobs is not None
        self.error: str | None = None
        self.metrics = RequestMetrics(request.arrival_time)
        self.num_cached_tokens = 0
        self.finished = False
        self.prompt_reports: list[TokenReport] = []
        self._decode = decode
        self._prompt_token_ids = tuple(request.prompt_token_ids)  # every output names them: made once
        self._grown: list[GrownToken] = []  # in this step, where somebody watches
        self._children = {request.root.child: Child(request.root, make_text())}

    def _make_strategy(self) -> Strategy:
        if not self.is_beam_search:
            return Independent()
        return BeamSearch(
            beam_width=self.params.resolved_beam_width,
            longest_output=self.ends.longest_output,
            end_token_ids=self.ends.end_token_ids,
            length_penalty=self.params.length_penalty,
            early_stopping=self.params.early_stopping,
            num_groups=self.params.num_beam_groups,
            diversity_penalty=self.params.diversity_penalty,
        )

    def children_of(self, sequence: Sequence) -> range:
        """Which children draw from this sequence's next position: before its first token, all of them."""
        if self.params.num_samples > 1 and not sequence.output_token_ids and not self.is_beam_search:
            return range(self.params.num_samples)
        return range(sequence.child, sequence.child + 1)

    # -- growing ---------------------------------------------------------------------------------------------

    def advance(self, candidates: Items[Candidate], now: float = 0.0) -> Changes:
        decisions = self.strategy.advance(candidates)
        changes = Changes()
        if self.is_independent and all(item.child == item.parent for item in decisions.continued):
            for item in decisions.continued:  # the usual case: nobody forks, nobody is dropped
                latency, ended = self.go_on(item, now)
                changes.latencies.append(latency)
                if ended:
                    changes.left.append(self._children[item.child].sequence)
            return changes
        parents = [self._children[number] for number in dict.fromkeys(item.parent for item in candidates)]
        # Fork before anything is appended: a fork must not see its sibling's token.
        grown = [(self._child(item), item) for item in (*decisions.continued, *decisions.ended)]
        holding = {id(child) for child, _ in grown[: len(decisions.continued)]}
        for child, item in grown:
            changes.latencies.append(None if child.last_token_time is None else now - child.last_token_time)
            child.last_token_time = now
            if self._append(child, item):
                holding.discard(id(child))
            elif item.child != item.parent:
                changes.forks.append((self._children[item.parent].sequence, child.sequence))
        changes.left.extend(parent.sequence for parent in parents if id(parent) not in holding)
        self._forget_losers()
        self.finished = decisions.over or all(child.finish_reason is not None for child in self._children.values())
        return changes

    def go_on(self, item: Continuation, now: float) -> tuple[float | None, bool]:
        """One child goes on by itself; returns the time since its last token, and whether it has ended."""
        child = self._children[item.child]
        latency = None if child.last_token_time is None else now - child.last_token_time
        child.last_token_time = now
        ended = self._append(child, item) if self.is_watched else child.append(item, self.ends)
        if ended:
            self.finished = all(child.finish_reason is not None for child in self._children.values())
        return latency, ended

    def _append(self, child: Child, item: Continuation) -> bool:
        """The child takes its token, under the eyes of whoever watches."""
        if not self.is_watched:
            return child.append(item, self.ends)
        ended, grown = child.append_watched(item, self.ends, self._decode)
        self._grown.append(grown)
        return ended

    def finish_unread(self) -> None:
        """Nothing is to be drawn (max_tokens 0): the prompt alone was asked about."""
        root = self._children[self.request.root.child]
        root.sequence.move(SequenceStatus.FINISHED_LENGTH_CAPPED)
        root.finish_reason = FinishReason.LENGTH
        self.finished = True

    def stop_all(self, reason: FinishReason, error: str | None = None) -> list[Sequence]:
        """Ends every child that still runs or waits; returns their sequences."""
        self.error = error
        stopped = [child for child in self._children.values() if child.finish_reason is None]
        for child in stopped:
            child.stop(reason)
        self.finished = True
        return [child.sequence for child in stopped]

    def _child(self, item: Continuation) -> Child:
        parent = self._children[item.parent]
        if item.child == item.parent:
            return parent
        sequence = self.request.fork_sequence(f"{self.request.request_id}-{item.child}", parent.sequence.seq_id)
        sequence.child = item.child
        self._children[item.child] = child = parent.fork(sequence)
        return child

    def _forget_losers(self) -> None:
        """Where the strategy ranks, what it does not name any more goes: beams that nothing continued, or outdone."""
        ranking = self.strategy.ranking()
        if ranking is None:
            return
        kept = {item.child for item in ranking}
        for number in [number for number in self._children if number not in kept]:
            sequence = self._children.pop(number).sequence
            if not sequence.is_finished():
                sequence.move(SequenceStatus.FINISHED_IGNORED)
            self.request.sequences.pop(sequence.seq_id, None)

    # -- showing ---------------------------------------------------------------------------------------------

    def output(self) -> RequestOutput | None:
        """What is due to the caller now: always at the end, on the way only if the output kind asks for it."""
        kind = self.params.output_kind
        if kind is OutputKind.FINAL_ONLY and not self.finished:
            return None
        standings = self.strategy.ranking()
        outputs: list[CompletionOutput] = []
        if self.finished or not self.is_watched:
            outputs, standings = self._outputs(standings, delta=kind is OutputKind.DELTA)
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs(),
            outputs=tuple(outputs),
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
            error=self.error,
            growth=self._growth(standings) if self.is_watched else (),
        )

    def _growth(self, standings: list[Standing] | None) -> tuple[GrowthStep, ...]:
        """What was seen since the last output."""
        step = GrowthStep(tuple(self._grown), tuple(standings or ()))
        self._grown = []
        return (step,)

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

    def _outputs(
        self, ranking: list[Standing] | None, *, delta: bool
    ) -> tuple[list[CompletionOutput], list[Standing] | None]:
        """The outputs that count, and where they are ranked, how all children stand."""
        if ranking is not None:
            return [
                replace(self._completion(self._children[item.child]), index=place, score=item.score)
                for place, item in enumerate(ranking[: self.params.n])
            ], ranking
        if self.params.resolved_strategy is SamplingStrategy.BEST_OF_N:
            return self._best_of()
        in_order = [self._children[number] for number in sorted(self._children)]
        return [self._completion(child, delta=delta) for child in in_order], None

    def _best_of(self) -> tuple[list[CompletionOutput], list[Standing] | None]:
        children = [self._children[number] for number in sorted(self._children)]
        completions = [(self._completion(child), child.is_empty) for child in children]
        try:
            ranked = rank(completions, self.params.score)
        except Exception as error:  # a caller's own function may raise anything: it ends this request alone
            self.error = f"the score function failed: {type(error).__name__}: {error}"
            failed = [replace(output, finish_reason=FinishReason.ERROR) for output, _ in completions]
            return failed[: self.params.n], None
        if self.finished:
            for loser in ranked[self.params.n :]:
                sequence = self._children[loser.index].sequence
                if sequence.status is not SequenceStatus.FINISHED_ABORTED:
                    sequence.move(SequenceStatus.FINISHED_IGNORED)
        standings = [Standing(item.index, item.score or 0.0, item.finished()) for item in ranked]
        return [replace(output, index=place) for place, output in enumerate(ranked[: self.params.n])], standings

    def _completion(self, child: Child, *, delta: bool = False) -> CompletionOutput:
        return child.completion(self._decode, with_logprobs=self.params.logprobs is not None, delta=delta)

    def _prompt_logprobs(self) -> list[LogprobRow | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        targets = self.request.prompt_token_ids[1:]
        rows = [logprob_row(*item, self._decode) for item in zip(targets, self.prompt_reports, strict=False)]
        return [None, *rows]
