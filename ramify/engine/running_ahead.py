"""Who is in the next step while this one's tokens are not known: those who just go on, with a token to come.

Anybody of whom the next step depends on these tokens waits until they are known: who may fork, who looks back at tokens
that the device does not keep, whose token under way is the last.
"""

from __future__ import annotations

from collections.abc import Mapping

from ramify.engine.device import Device
from ramify.engine.launched import Launched
from ramify.engine.schedule import Schedule
from ramify.engine.scheduler import Scheduler
from ramify.engine.search.group import Group


def schedule_ahead(
    launched: Launched, scheduler: Scheduler, device: Device, groups: Mapping[str, Group]
) -> Schedule | None:
    """The step after a launched one, if it can be decided now and somebody goes on."""
    if not device.runs_ahead or not _can_be_followed(launched.schedule, scheduler):
        return None
    _expect(launched, scheduler, device, groups)
    return scheduler.schedule(may_preempt=False) if scheduler.has_any_to_go_on() else None


def _can_be_followed(schedule: Schedule, scheduler: Scheduler) -> bool:
    """Whether the step after this one can be decided now. What is guessed follows from what is known."""
    if schedule.is_empty or schedule.is_short or schedule.num_drafted:
        return False
    return scheduler.speculation is None or scheduler.speculation.rests()


def _expect(launched: Launched, scheduler: Scheduler, device: Device, groups: Mapping[str, Group]) -> None:
    """One more token for those that just go on, a pause for those that may change."""
    are_left = device.drew_by_kernels
    chosen = {each.number for each in launched.plan.selections} if are_left else set()
    scheduler.stop_those_at_their_end()
    drawn = zip(launched.plan.draws, launched.drawing, strict=True)
    for number, (draw, sequence) in enumerate(drawn, start=launched.num_going_on):
        if sequence.is_finished():
            continue
        demands = draw.demands
        if demands.steps_together:
            is_set = are_left and demands.is_set_by_kernels and draw.position > 0
            is_search = demands.number in chosen and scheduler.is_whole(sequence)
            if (is_set or is_search) and draw.position + 1 < demands.longest_output:
                scheduler.go_on_together(sequence)
            else:
                sequence.is_blocked = True
            continue
        forks = not draw.position and demands.num_first_draws > 1
        may_run_ahead = demands.may_run_ahead
        if not may_run_ahead and demands.may_run_ahead_by_kernels:
            may_run_ahead = device.looks_back(demands.choice)
        if may_run_ahead and not forks and draw.position + 1 < demands.longest_output:
            child = groups[sequence.request_id].children[sequence.child]
            scheduler.go_on_unseen(sequence, child, demands, number, is_quiet=demands.is_quiet)
        else:
            sequence.is_blocked = True
