"""A group: a request as the engine keeps it, with its strategy, its children and what is due to the caller."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

from ramify.engine.demands import Demands
from ramify.engine.metrics import IterationStats
from ramify.engine.plan import Comparison, Draw, TokenReport
from ramify.engine.request import Request
from ramify.engine.search.advance import Candidates, Continuation, Decisions, Extension, Independent, Strategy
from ramify.engine.search.beam import BeamSearch
from ramify.engine.search.child import Child, Ledger, go_on_all
from ramify.engine.search.distinct import WithoutReplacement
from ramify.engine.search.logprob_rows import Decode, logprob_row
from ramify.engine.search.ranking import best_of
from ramify.engine.sequence import Sequence, SequenceStatus
from ramify.outputs import (
    CompletionOutput,
    ContinuationLogprobs,
    FinishReason,
    GrownToken,
    GrowthStep,
    LogprobRow,
    PairLogprobs,
    RequestMetrics,
    RequestOutput,
    Standing,
)
from ramify.sampling_params import OutputKind, SamplingStrategy
from ramify.text.stream import LateText, TextStream


@dataclass(frozen=True, slots=True)
class Changes:
    """What an advance did: (parent, fork) pairs that share blocks now, who needs none any more, and for every token the
    time since the one before it (None for a first).

    `moves` are pairs whose fork took the place of a sequence that goes no further: it gives up what that one held.
    """

    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    moves: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    left: list[Sequence] = field(default_factory=list)
    latencies: list[float | None] = field(default_factory=list)


class Group:
    def __init__(
        self,
        request: Request,
        demands: Demands,
        text: TextStream,
        *,
        decode: Decode | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.request = request
        self.demands = demands
        self.strategy: Strategy = _strategy(demands)
        self.error: str | None = None
        self.metrics = RequestMetrics(request.arrival_time)
        self.num_cached_tokens = 0
        self.finished = False
        self.prompt_reports: list[TokenReport | None] = []  # None: computed before this request, and not told of
        self.comparisons: list[Comparison] = []  # with a second model, of the last tokens of the prompt reports
        root = request.root
        late = LateText(text, root.output_token_ids) if demands.is_quiet else None
        self.children = {root.child: Child(root, late or text, ledger=ledger)}
        self._decode = decode
        self._unbegun = ledger  # which has not heard of a token yet
        self._prompt_token_ids = tuple(request.prompt_token_ids)  # every output names them: made once
        self._grown: list[GrownToken] = []  # in this step, where somebody watches

    def awaits(self, draw: Draw) -> Child | None:
        """The child that a draw continues; None if it has ended since, or another request has taken the id."""
        parent = self.children.get(draw.parent)
        if parent is None or parent.finish_reason is not None or draw.demands.number != self.demands.number:
            return None
        return parent

    # -- growing ---------------------------------------------------------------------------------------------

    def advance(self, candidates: Items[Candidates], now: float = 0.0) -> Changes:
        decisions = self.strategy.advance(candidates)
        parents = {drawn.parent: self.children[drawn.parent] for drawn in candidates}
        return self._carry_out(decisions, parents, now)

    def advance_chosen(self, beams: Items[int], extensions: Items[Extension], now: float) -> Changes:
        """The same where it is known how these beams go on."""
        assert isinstance(self.strategy, BeamSearch), "nothing else is chosen elsewhere"
        decisions = self.strategy.advance_chosen(extensions)
        return self._carry_out(decisions, {number: self.children[number] for number in beams}, now)

    def _carry_out(self, decisions: Decisions, parents: Mapping[int, Child], now: float) -> Changes:
        changes = Changes()
        # Fork before anything is appended: a fork must not see its sibling's token. What ended is forked first, since
        # others may take the places of those that it goes on from.
        ended = [(self._fork(token), token) for token in decisions.ended]
        places = self._vacant_places(parents, decisions)
        grown: list[tuple[Child, Continuation]] = []
        forked: list[tuple[Child, Child]] = []
        for token in decisions.continued:
            child = parent = parents[token.parent]
            if token.child != token.parent and places:
                child = self._take_place(places.pop(), token)
                changes.moves.append((parent.sequence, child.sequence))
            elif token.child != token.parent:
                child = self._fork(token)
                forked.append((parent, child))
            grown.append((child, token))
        if self.demands.is_search and self.demands.is_quiet and self._unbegun is None:
            changes.latencies.extend(go_on_all(grown, now))
            grown = []
        for child, token in (*grown, *ended):
            changes.latencies.append(self.append(child, token, now))
        changes.forks.extend((old.sequence, new.sequence) for old, new in forked if new.finish_reason is None)
        continued = {token.child for token in decisions.continued}
        for number, parent in parents.items():
            if number in continued and parent.finish_reason is None:
                continue
            if number in self.children:  # else another has its place
                changes.left.append(parent.sequence)
        self._forget_losers()
        self.finished = decisions.over or self._all_have_ended
        return changes

    def append(self, child: Child, token: Continuation, now: float) -> float | None:
        """A child takes its token, under the eyes of whoever watches; returns the time since its last one."""
        if self._unbegun is not None:
            self._unbegun.begin(self.num_cached_tokens, self.metrics)
            self._unbegun = None
        if self.demands.is_watched:
            latency, grown = child.append_watched(token, self.demands, now, self._decode)
            self._grown.append(grown)
        else:
            latency = child.append(token, self.demands, now)
        self.note_end(child)
        return latency

    def note_end(self, child: Child) -> None:
        """A child took a token, which may have been its last."""
        if child.finish_reason is not None:
            self.finished = self._all_have_ended

    @property
    def _all_have_ended(self) -> bool:
        """Asked whenever one ends. The last are looked at first: of many that run in waves they wait until the end."""
        return all(child.finish_reason is not None for child in reversed(self.children.values()))

    def finish_unread(self) -> None:
        """Nothing is to be drawn (max_tokens 0): the prompt alone was asked about."""
        root = self.children[self.request.root.child]
        root.sequence.move(SequenceStatus.FINISHED_LENGTH_CAPPED)
        root.finish_reason = FinishReason.LENGTH
        self.finished = True

    def stop_all(self, reason: FinishReason, error: str | None = None) -> list[Sequence]:
        """Ends every child that still runs or waits; returns their sequences."""
        self.error = error
        stopped = [child for child in self.children.values() if child.finish_reason is None]
        for child in stopped:
            child.stop(reason)
        self.finished = True
        return [child.sequence for child in stopped]

    def _vacant_places(self, parents: Mapping[int, Child], decisions: Decisions) -> list[int]:
        """Children that go no further, where others that go on may take their places: in a search, whose members step
        together. What a request keeps is kept by name, so nobody takes another's there."""
        if not self.demands.is_search or self.request.keeps:
            return []
        going_on = {token.parent for token in decisions.continued}
        return [number for number in parents if number not in going_on]

    def _take_place(self, number: int, token: Continuation) -> Child:
        """What `_fork` comes to where another goes no further: its child becomes the fork.

        Most of it stays as it is: its name, its row on the device, most of its blocks. For 64 beams, of which a third
        are new in every step, this saves the host a tenth of a step.
        """
        child = self.children.pop(number)
        child.become(self.children[token.parent])
        child.sequence.child = token.child
        self.children[token.child] = child
        return child

    def _fork(self, token: Continuation) -> Child:
        parent = self.children[token.parent]
        sequence = self.request.fork_sequence(f"{self.request.request_id}-{token.child}", parent.sequence.seq_id)
        sequence.child = token.child
        self.children[token.child] = child = parent.fork(sequence)
        return child

    def _forget_losers(self) -> None:
        """Where the strategy decides, what it does not name any more goes: beams that nothing continued, or outdone."""
        kept = self.strategy.kept()
        if kept is None:
            return
        if self.children.keys() == kept:
            return
        for number in [number for number in self.children if number not in kept]:
            sequence = self.children.pop(number).sequence
            if not sequence.is_finished():
                sequence.move(SequenceStatus.FINISHED_IGNORED)
            self.request.sequences.pop(sequence.seq_id, None)

    # -- showing ---------------------------------------------------------------------------------------------

    def output(self) -> RequestOutput | None:
        """What is due to the caller now: always at the end, on the way only if the output kind asks for it."""
        kind = self.demands.params.output_kind
        if kind is OutputKind.FINAL_ONLY and not self.finished:
            return None
        standings = self.strategy.ranking()
        outputs: list[CompletionOutput] = []
        if self.finished or not self.demands.is_watched:
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
            scored=self._scored(),
            growth=self._growth(standings) if self.demands.is_watched else (),
        )

    def _growth(self, standings: list[Standing] | None) -> tuple[GrowthStep, ...]:
        """What was seen since the last output."""
        step = GrowthStep(tuple(self._grown), tuple(standings or ()))
        self._grown = []
        return (step,)

    def observe(self, stats: IterationStats, now: float) -> None:
        """Tells the step in which it ended what there was to see."""
        lengths = [len(child.sequence.output_token_ids) for child in self.children.values()]
        reasons = [child.finish_reason for child in self.children.values() if child.finish_reason is not None]
        stats.record_finished_request(
            now - self.metrics.arrival_time,
            len(self.request.prompt_token_ids),
            sum(lengths),
            reasons[0],
            self.num_cached_tokens,
        )
        stats.observe_parallel_sampling(self.demands.params, max(lengths))

    def _outputs(
        self, ranking: list[Standing] | None, *, delta: bool
    ) -> tuple[list[CompletionOutput], list[Standing] | None]:
        """The outputs that count, and where they are ranked, how all children stand."""
        if ranking is not None:
            return [
                replace(
                    self._completion(self.children[standing.child]),
                    index=rank,
                    score=standing.score,
                    inclusion=self.strategy.inclusion(standing.child),
                )
                for rank, standing in enumerate(ranking[: self.demands.params.n])
            ], ranking
        if self.demands.strategy is SamplingStrategy.BEST_OF_N:
            return self._best_of()
        in_order = [self.children[number] for number in sorted(self.children)]
        if delta and not self.finished:  # of thousands that run in waves, most wait or have ended
            in_order = [child for child in in_order if child.has_news]
        return [self._completion(child, delta=delta) for child in in_order], None

    def _best_of(self) -> tuple[list[CompletionOutput], list[Standing] | None]:
        children = [self.children[number] for number in sorted(self.children)]
        params = self.demands.params
        best = best_of([(self._completion(child), child.is_empty) for child in children], params.score, params.n)
        if best.error is not None:
            self.error = best.error
        elif self.finished and best.standings is not None:
            for loser in best.standings[params.n :]:
                sequence = self.children[loser.child].sequence
                if sequence.status is not SequenceStatus.FINISHED_ABORTED:
                    sequence.move(SequenceStatus.FINISHED_IGNORED)
        return best.outputs, best.standings

    def _completion(self, child: Child, *, delta: bool = False) -> CompletionOutput:
        return child.completion(self._decode, self.demands.params, delta=delta)

    def _prompt_logprobs(self) -> list[LogprobRow | None] | None:
        if self.demands.params.prompt_logprobs is None or self.request.root.num_told is not None:
            return None
        targets = self.request.reported_token_ids[1:]
        rows = [
            None if report is None else logprob_row(token_id, report, self._decode)
            for token_id, report in zip(targets, self.prompt_reports, strict=False)
        ]
        return [None, *rows]

    def _scored(self) -> ContinuationLogprobs | PairLogprobs | None:
        num_told = self.request.root.num_told
        reports = [report for report in self.prompt_reports if report is not None]
        if num_told is None or len(reports) < num_told:  # it ended before all was told
            return None
        token_ids = self.request.reported_token_ids[-num_told:]
        with_alternatives = bool(self.demands.params.prompt_logprobs)

        def scored(by_model: Items[TokenReport]) -> ContinuationLogprobs:
            told = zip(token_ids, by_model, strict=True)
            return ContinuationLogprobs(
                tuple(token_ids),
                tuple(report.logprob for report in by_model),
                tuple(report.rank for report in by_model),
                tuple(logprob_row(*each, self._decode) for each in told) if with_alternatives else None,
                self.num_cached_tokens,
            )

        if not self.comparisons:
            return scored(reports)
        return PairLogprobs(
            scored(reports),
            scored([compared.report for compared in self.comparisons]),
            tuple(compared.forward_kl for compared in self.comparisons),
            tuple(compared.reverse_kl for compared in self.comparisons),
        )


def _strategy(demands: Demands) -> Strategy:
    if demands.is_distinct:
        return WithoutReplacement(
            num_samples=demands.params.n,
            longest_output=demands.longest_output,
            end_token_ids=demands.end_token_ids,
        )
    if not demands.is_beam_search:
        return Independent()
    return BeamSearch(
        beam_width=demands.params.resolved_beam_width,
        longest_output=demands.longest_output,
        end_token_ids=demands.end_token_ids,
        length_penalty=demands.params.length_penalty,
        early_stopping=demands.params.early_stopping,
        num_groups=demands.params.num_beam_groups,
        diversity_penalty=demands.params.diversity_penalty,
    )
