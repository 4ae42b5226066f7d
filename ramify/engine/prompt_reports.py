"""What a step can tell about a prompt's tokens, of those that a request wants to hear of."""

from __future__ import annotations

from ramify.engine.plan import PromptReport, Row
from ramify.engine.schedule import Schedule
from ramify.engine.search.group import Group
from ramify.engine.sequence import Sequence


def prompt_reports(
    group: Group, sequence: Sequence, rows: tuple[Row, ...], schedule: Schedule, *, caught_up: bool
) -> list[PromptReport]:
    """About tokens not told about yet; each is told by the row before it."""
    prompt, last = group.request.reported_token_ids, rows[0]
    if len(sequence.tracks) > 1:  # two models are compared where both compute the same tokens, in their last step
        count = sequence.num_at_once
        first, second = (row._replace(offset=row.offset - count + 1) for row in rows) if caught_up else (None, None)
        if first is None:
            return []
        return [PromptReport(group.request.request_id, first, prompt[-count:], group.demands, second)]
    chunk = schedule.works[last.model].chunks[last.chunk]
    # What lies before the chunk was asked for by an earlier step, which may still be under way.
    told = max(len(group.prompt_reports), chunk.start)
    end = min(chunk.end, len(prompt) - 1)
    if sequence.child != 0 or told >= end:
        return []
    first = last._replace(offset=told - chunk.start)
    return [PromptReport(group.request.request_id, first, prompt[told + 1 : end + 1], group.demands)]
