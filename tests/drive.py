"""Drives an engine core in tests: requests in, finished outputs out, in the requests' order."""

from __future__ import annotations

from collections.abc import Sequence

from ramify import Request, RequestOutput, SamplingParams
from ramify.engine.core import EngineCore

Asked = tuple[Sequence[int], SamplingParams]


def finish(engine: EngineCore, asked: Sequence[Asked], *, most_steps: int = 20_000) -> list[RequestOutput]:
    """Adds all requests at once and steps until all have ended; the engine must then hold nothing."""
    for number, (prompt, params) in enumerate(asked):
        engine.add_request(Request(str(number), None, prompt, params))
    finished: dict[str, RequestOutput] = {}
    for _ in range(most_steps):
        if not engine.has_unfinished():
            break
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    assert not engine.has_unfinished(), "the engine does not come to an end"
    assert engine.stats()["blocks_in_use"] == 0
    for manager in engine.scheduler.managers:
        manager.check()
    return [finished[str(number)] for number in range(len(asked))]


def tokens_of(output: RequestOutput) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in output.outputs]
