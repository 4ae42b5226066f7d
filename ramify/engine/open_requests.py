"""OpenRequests: those that have not ended, and how one ends: its blocks, its output, what is counted of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ramify.engine.kept import KeptPrefixes
from ramify.engine.metrics import IterationStats
from ramify.engine.scheduler import Scheduler
from ramify.engine.search.group import Group
from ramify.engine.sequence import Sequence
from ramify.outputs import FinishReason, RequestOutput


class OpenRequests:
    def __init__(self, scheduler: Scheduler, kept: KeptPrefixes, clock: Callable[[], float]) -> None:
        self.scheduler = scheduler
        self.kept = kept
        self.clock = clock
        self.groups: dict[str, Group] = {}  # by the requests' ids
        self.last_step = IterationStats()  # what the latest step did

    def due(self, group: Group) -> list[RequestOutput]:
        due = self._output(group)
        return [] if due is None else [due]

    def _output(self, group: Group) -> RequestOutput | None:
        if group.finished:
            now = self.clock()
            group.metrics = replace(group.metrics, finished_time=now)
            del self.groups[group.request.request_id]
            if self.scheduler.speculation is not None:
                self.scheduler.speculation.end(group.request.request_id)
            group.observe(self.last_step, now)
        return group.output()

    def leave(self, group: Group, sequence: Sequence) -> None:
        """It computes nothing more: its blocks are kept, if that was asked for, else free."""
        if group.request.keeps and sequence.is_finished():
            self.kept.keep(sequence.seq_id, sequence, sequence)
        self.scheduler.remove(sequence)

    def keep_the_shortest(self, group: Group) -> None:
        """Children that ended with their first token never held blocks: the root, not yet past it, holds theirs."""
        root = group.request.root
        for child in group.children.values():
            sequence = child.sequence
            is_short = sequence.is_finished() and len(sequence.output_token_ids) == 1
            if is_short and sequence is not root and sequence.seq_id not in self.kept:
                self.kept.keep(sequence.seq_id, sequence, root)

    def stop(self, group: Group, reason: FinishReason, error: str | None = None) -> RequestOutput:
        for sequence in group.stop_all(reason, error):
            self.scheduler.remove(sequence)
        output = self._output(group)
        assert output is not None, "a finished group always has an output"
        return output
