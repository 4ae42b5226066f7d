"""ReplicaCore: several engines in place of one core, for plain calls (`drive/loops.py`)."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from ramify.engine.capacity import Capacity
from ramify.engine.request import Request
from ramify.errors import EngineLostError, InvalidInputError, RamifyError
from ramify.outputs import CompletionOutput, FinishReason, RequestOutput
from ramify.remote.link import Link
from ramify.remote.packing import check_crosses
from ramify.replicas.pool import Pool
from ramify.replicas.states import States
from ramify.text.codec import TextCodec

SECONDS_BETWEEN_STEPS = 0.25  # the longest: whoever draws a progress bar wants to be called now and then
SECONDS_BETWEEN_QUESTIONS = 0.5
NO_PROCESSORS = (
    "logits_processors cannot be used with data_parallel_size above 1: functions do not cross to other processes"
)


class ReplicaCore:
    """A step waits for what the engines give; what is asked of it is done by the pool's thread."""

    def __init__(self, links: Sequence[Link], model: int, codec: TextCodec, capacity: Capacity, *, seed: int) -> None:
        self.capacity = capacity
        self._arrived: queue.SimpleQueue[list[RequestOutput] | tuple[Request, RamifyError]] = queue.SimpleQueue()
        self.pool = Pool(
            links,
            model,
            codec,
            capacity,
            seed=seed,
            deliver=self._arrived.put,
            fail=lambda request, error: self._arrived.put((request, error)),
        )
        self._states = States(links, model)
        self._open: dict[str, None] = {}
        self._new: list[Request] = []
        self._is_complete = False
        self._num_generated = 0
        self._asked_at = -SECONDS_BETWEEN_QUESTIONS

    # -- what a core does ----------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raises InvalidInputError for a request that cannot be served; asks nobody."""
        if request.request_id in self._open:
            raise InvalidInputError(f"request_id {request.request_id!r} is in use")
        check_crosses(request.sampling_params, NO_PROCESSORS)
        self.capacity.check(request)

    def add_request(self, request: Request) -> None:
        self.check(request)
        self._open[request.request_id] = None
        self._new.append(request)

    def abort(self, request_id: str) -> None:
        """What it still gives is dropped."""
        if request_id in self._open:
            del self._open[request_id]
            self.pool.abort(request_id)

    def has_unfinished(self) -> bool:
        return bool(self._open)

    def step(self) -> list[RequestOutput]:
        """What has come since the last one; waits a moment if nothing has."""
        self._hand_over()
        arrived = []
        with suppress(queue.Empty):
            arrived.append(self._arrived.get(timeout=SECONDS_BETWEEN_STEPS))
            while True:
                arrived.append(self._arrived.get_nowait())
        outputs: list[RequestOutput] = []
        for item in arrived:
            outputs += item if isinstance(item, list) else [self._failed(*item)]
        outputs = [output for output in outputs if output.request_id in self._open]
        for output in outputs:
            if output.finished:
                del self._open[output.request_id]
        return outputs

    def _hand_over(self) -> None:
        """All new requests at once. When none came between two steps, these were all."""
        if self._new:
            new, self._new = self._new, []
            self.pool.submit([request for request in new if request.request_id in self._open])
            self._is_complete = False
        elif not self._is_complete:
            self._is_complete = True
            self.pool.expect_no_more()

    def _failed(self, request: Request, error: RamifyError) -> RequestOutput:
        """A request that two engines took with them ends with its error, and the others go on; all else is raised."""
        is_alone = isinstance(error, EngineLostError) and self.pool.num_there
        if not is_alone and request.request_id in self._open:
            del self._open[request.request_id]
            raise error
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=tuple(request.prompt_token_ids),
            outputs=(CompletionOutput(0, "", (), 0.0, finish_reason=FinishReason.ERROR),),
            finished=True,
            error=str(error),
        )

    @property
    def is_own_thread(self) -> bool:
        """Whether the calling thread is one that calls wait for: a score function runs in such a one."""
        return self.pool.is_own_thread

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def generated_tokens(self) -> int:
        """By all engines so far; while requests run, they are asked now and then."""
        if not self._open or time.monotonic() - self._asked_at >= SECONDS_BETWEEN_QUESTIONS:
            self._num_generated = sum(state.stats["generated_tokens"] for state in self._states.each())
            self._asked_at = time.monotonic()
        return self._num_generated

    def stats(self) -> dict[str, int]:
        """Of all engines together."""
        return self._states.sum(self.pool.queue.num_waiting, len(self._open)).stats

    def replica_stats(self) -> list[dict[str, int]]:
        return [state.stats for state in self._states.each()]

    def model_stats(self) -> list[dict[str, int]]:
        return self._states.sum(0, 0).models

    def reset_prefix_cache(self) -> None:
        """Later prompts find nothing of earlier ones, in any engine."""
        self.pool.forget_prefixes()
        for link in self.pool.links:
            with suppress(EngineLostError):
                link.reset_prefix_cache(self.pool.model)

    def load_weights(self, folder: str) -> None:
        """Gives every engine the weights of a folder (`remote/stored_weights.py`), all at the same time."""
        self.pool.forget_prefixes()
        with ThreadPoolExecutor(len(self.pool.links)) as threads:
            loads = [
                threads.submit(link.load_weights, self.pool.model, folder)
                for link in self.pool.links
                if link.error is None
            ]
        errors = [error for load in loads if (error := load.exception()) is not None]
        told = [error for error in errors if not isinstance(error, EngineLostError)]
        if told or len(errors) == len(loads):  # one that is gone needs none
            raise (told or errors or [EngineLostError("all engines' processes have ended")])[0]

    def stop(self) -> None:
        self.pool.stop()
