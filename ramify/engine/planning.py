"""What is asked of the device for one step: a schedule's works, and the draws of those that have caught up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ramify.engine.metrics import IterationStats
from ramify.engine.plan import Draw, Plan, PromptReport, quickly
from ramify.engine.prompt_reports import prompt_reports
from ramify.engine.schedule import Schedule
from ramify.engine.search.chosen import ChosenSearches
from ramify.engine.search.group import Group
from ramify.engine.sequence import Sequence


def make_plan(
    schedule: Schedule, groups: Mapping[str, Group], step: IterationStats, *, device_chooses: bool
) -> tuple[Plan, list[Sequence]]:
    """The plan, and the sequences that its draws continue. Notes in groups and in the step who is scheduled first.

    device_chooses: it can choose the continuations of beams.
    """
    now = step.timestamp
    draws: list[Draw] = []
    drawing: list[Sequence] = []
    reports: list[PromptReport] = []
    searches = ChosenSearches()
    for sequence, rows, caught_up in schedule.sequences:
        request_id = sequence.request_id
        group = groups[request_id]
        demands = group.demands
        if group.metrics.first_scheduled_time is None:
            group.metrics = replace(group.metrics, first_scheduled_time=now)
            step.record_queue_time(now - group.metrics.arrival_time)
        if demands.params.prompt_logprobs is not None:
            reports += prompt_reports(group, sequence, rows, schedule, caught_up=caught_up)
        if not caught_up or demands.longest_output == 0:
            continue
        output, parent = sequence.data.output_token_ids, sequence.child
        position = len(output) + sequence.num_pending
        for child in (parent,) if position else range(demands.num_first_draws):
            draws.append(
                quickly(Draw, (request_id, parent, child, position, rows, demands, output, 0, sequence.matcher))
            )
            drawing.append(sequence)
        is_decode = position and not rows[0].offset  # not one that computes again what it had
        if is_decode and demands.is_chosen_by_kernels and device_chooses:
            searches.add(group, sequence, len(draws) - 1)
        if sequence.drafted:
            draws += draws.pop().run_over(sequence.drafted)
            drawing += [sequence] * len(sequence.drafted)
    onward = None if schedule.going_on is None else schedule.going_on.onward
    return Plan(schedule.works, draws, reports, onward, searches.selections()), drawing
