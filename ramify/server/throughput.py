"""A line now and then on what the engines do, as long as they do anything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from ramify.server.service import Service

_log = logging.getLogger(__name__)


class Throughput:
    """Compares an engine's counters with those of the last time."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def line(self, stats: Mapping[str, int], seconds: float) -> str | None:
        """What happened in so many seconds, or None if nothing did."""
        before, self._last = self._last, dict(stats)
        steps, drawn, prompts = (
            stats[name] - before.get(name, 0) for name in ("steps", "generated_tokens", "prompt_tokens_computed")
        )
        if not steps:
            return None
        return (
            f"{stats['running']} running, {stats['waiting']} waiting; {drawn / seconds:.1f} tokens/s drawn, "
            f"{prompts / seconds:.1f} tokens/s of prompts; cache {stats['blocks_in_use'] / stats['blocks_total']:.0%}"
        )


async def log_throughput(service: Service, interval: float) -> None:
    """Runs until it is cancelled; a line for each model that did something since the last."""
    each = {name: Throughput() for name in service.models}
    clock = asyncio.get_running_loop().time
    for name, model in service.models.items():
        each[name].line(model.engine.stats(), 1.0)  # what loading counted is no news
    last = clock()
    while True:
        await asyncio.sleep(interval)
        now = clock()
        for name, model in service.models.items():
            line = each[name].line(model.engine.stats(), now - last)
            if line is not None:
                _log.info("%s: %s", name, line)
        last = now
