"""The engine: requests in, steps, outputs out. Knows no thread, no socket, no progress bar; drivers call `step`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import suppress

from ramify.engine.capacity import Capacity
from ramify.engine.demands import Demands
from ramify.engine.device import Device
from ramify.engine.kept import KeptPrefixes
from ramify.engine.launched import Launched
from ramify.engine.metrics import EngineMetrics, IterationStats, TrackCounts
from ramify.engine.open_requests import OpenRequests
from ramify.engine.planning import make_plan
from ramify.engine.recorder import Recorder
from ramify.engine.request import Request
from ramify.engine.running_ahead import schedule_ahead
from ramify.engine.schedule import Schedule
from ramify.engine.scheduler import Scheduler
from ramify.engine.search.child import Ledger
from ramify.engine.search.group import Group
from ramify.engine.search.logprob_rows import Decode
from ramify.engine.sequence import Sequence
from ramify.errors import InvalidInputError
from ramify.outputs import FinishReason, RequestOutput
from ramify.sampling_params import SamplingParams
from ramify.structured.matcher import Matcher
from ramify.structured_outputs import Structure
from ramify.text.stream import TextStream

CACHE_FULL = "the cache has no room for this request"

EncodeWords = Callable[[Items[str]], tuple[tuple[int, ...], ...]]
# A structure, the tokens that may end an output, and what stands before it already.
BeginMatcher = Callable[[Structure, Items[int], Items[int]], Matcher]


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        device: Device,
        *,
        seed: int,
        eos_token_ids: frozenset[int],
        make_text: Callable[[SamplingParams, Items[int]], TextStream],
        encode_words: EncodeWords | None = None,
        decode: Decode | None = None,
        begin_matcher: BeginMatcher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.device = device
        self.seed = seed
        self.eos_token_ids = eos_token_ids
        self.make_text = make_text
        self.encode_words = encode_words
        self.decode = decode
        self.begin_matcher = begin_matcher
        self.clock = clock
        self.kept = KeptPrefixes(scheduler.managers)
        self.metrics = EngineMetrics()
        self.requests = OpenRequests(scheduler, self.kept, clock)
        self._recorder = Recorder(self.requests)
        self._under_way: Launched | None = None
        self._num_arrived = 0
        # While an act changes requests, blocks and rows. Still true when the next begins: something broke that one off.
        self._is_torn = False

    @property
    def capacity(self) -> Capacity:
        """What it has room for."""
        scheduler = self.scheduler
        return Capacity(
            max_model_len=scheduler.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            enable_chunked_prefill=scheduler.enable_chunked_prefill,
            block_size=scheduler.managers[0].block_size,
            num_blocks=tuple(manager.num_blocks for manager in scheduler.managers),
            has_words=self.encode_words is not None,
            speculates=scheduler.speculation is not None,
        )

    # -- requests --------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raises InvalidInputError for a request that cannot be served; asks, and does nothing."""
        if request.request_id in self.requests.groups:
            raise InvalidInputError(f"request_id {request.request_id!r} is in use")
        self.capacity.check(request)

    def prepare(self, request: Request) -> None:
        """Builds a request's grammar, if it has one: from any thread, so that nobody waits for it between two steps."""
        if request.sampling_params.structured_outputs is not None:
            self._matcher(request, sorted({*self.eos_token_ids, *(request.sampling_params.stop_token_ids or ())}))

    def add_request(self, request: Request, ledger: Ledger | None = None) -> None:
        """Queues a request, or raises InvalidInputError if it can never be scheduled; nothing is kept then.

        Every token that one of its children takes is entered in the ledger, if there is one.
        """
        self._mend()
        self.check(request)
        params, number = request.sampling_params, self._num_arrived
        request.arrival_time = self.clock()
        seeds = (params.seed, request.seed, request_seed(self.seed, number))
        demands = self.demands_of(request, number=number, seed=next(seed for seed in seeds if seed is not None))
        request.root.matcher = self._matcher(request, sorted(demands.end_token_ids))
        text = self.make_text(params, request.prompt_token_ids)
        group = Group(request, demands, text, decode=self.decode, ledger=ledger)
        self._is_torn = True
        self.requests.groups[request.request_id] = group
        self._num_arrived += 1
        self.scheduler.add(request)
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.begin(request.request_id, demands)
        num_untold = request.num_untold
        if request.begins_with is not None:
            num_untold = max(num_untold, self.kept.begin(request.begins_with, request.root))
        group.prompt_reports += [None] * num_untold
        self._is_torn = False

    def demands_of(self, request: Request, *, number: int = 0, seed: int) -> Demands:
        """What it demands of this model and its tokenizer."""
        params = request.sampling_params
        return Demands(
            params,
            number=number,
            seed=seed,
            prompts=tuple(track.prompt_token_ids for track in request.root.tracks),
            eos_token_ids=self.eos_token_ids,
            bad_words=self._words(params.bad_words),
            breakers=frozenset(word[-1] for word in self._words([f"a{text}" for text in params.sequence_breakers])),
            longest_output=self.capacity.longest_output(request.root),
        )

    def _words(self, words: Items[str] | None) -> tuple[tuple[int, ...], ...]:
        """As token ids, in each of their spellings; a model without a tokenizer has none."""
        return self.encode_words(words) if words and self.encode_words else ()

    def _matcher(self, request: Request, ends: Items[int]) -> Matcher | None:
        structure = request.sampling_params.structure
        if structure is None:
            return None
        if self.begin_matcher is None:
            raise InvalidInputError("structured_outputs need a tokenizer, and this engine has none")
        return self.begin_matcher(structure, ends, request.begun)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request in whatever state it is and frees its blocks at once; None if it is not there any more."""
        self._mend()
        group = self.requests.groups.get(request_id)
        if group is None:
            return None
        self._is_torn = True
        output = self.requests.stop(group, FinishReason.ABORT)
        self._draw_if_nobody_is_left()
        self._is_torn = False
        return output

    def has_unfinished(self) -> bool:
        return bool(self.requests.groups)

    @property
    def last_step(self) -> IterationStats:
        """What the latest step did."""
        return self.requests.last_step

    # -- one step --------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Decide, compute, record. Returns the outputs that are due.

        Where the device can, the step after is decided and launched before this one is recorded, so that the host works
        while the device does. What that step computes for a sequence that turns out to have ended is dropped. Where
        grammars must know this step's tokens first, the device computes what that step draws from meanwhile.

        All or nothing: whatever breaks a step off, at whatever line, ends every request, and the engine is as new.
        """
        self._mend()
        self._is_torn = True
        try:
            self.requests.last_step = IterationStats(timestamp=self.clock())
            now, self._under_way = self._under_way or self._launch(self.scheduler.schedule()), None
            self._launch_ahead_of(now)
            outputs = self._record(now)
            in_use = sum(manager.num_in_use for manager in self.scheduler.managers)
            self.metrics = self.metrics.after(self.last_step, in_use)
        except BaseException:
            with suppress(Exception):  # the caller hears what broke the step; the next act tries this again
                self.reset()
            raise
        self._is_torn = False
        return outputs

    def _launch(self, schedule: Schedule) -> Launched:
        planned = make_plan(schedule, self.requests.groups, self.last_step, device_chooses=self.device.chooses)
        launched = Launched(schedule, *planned)
        if launched.awaits_tokens:
            launched.draw = self.device.begin(launched.plan)
        else:
            launched.ticket = self.device.launch(launched.plan)
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.note_launched(schedule, launched.plan.draws, launched.drawing)
        return launched

    def _launch_ahead_of(self, now: Launched) -> None:
        """Launches the step after this one, if it can be decided before this one is known."""
        ahead = schedule_ahead(now, self.scheduler, self.device, self.requests.groups)
        now.make_draws()  # whose masks were found meanwhile
        if ahead is not None and not ahead.is_empty:
            self._under_way = self._launch(ahead)

    def _record(self, now: Launched) -> list[RequestOutput]:
        """Waits for a step, and tells what it gave to all who need to know: the step under way, drafters, requests."""
        result = now.result()
        if self._under_way is not None:
            self._under_way.tell(now, result)
        if self.scheduler.speculation is not None:
            told = (now.schedule, now.plan.draws, now.drawing, result, self.clock())
            self.scheduler.speculation.note_step(*told)
        outputs = self._recorder.record(now, result)
        self._draw_if_nobody_is_left()
        if now.schedule.is_empty and self.scheduler.waiting and not self.scheduler.running:
            outputs.append(self._give_up(self.scheduler.waiting[0].sequences[0]))
        return outputs

    def _draw_if_nobody_is_left(self) -> None:
        """Nobody knows when the next step is."""
        if self._under_way is not None and not self.requests.groups:
            self._under_way.make_draws()

    def _give_up(self, sequence: Sequence) -> RequestOutput:
        """Ends a request that waits for blocks which nobody will free: nothing runs, and what is kept stays."""
        total = sum(manager.num_blocks for manager in self.scheduler.managers)
        error = f"{CACHE_FULL}: {self.kept.num_blocks} of {total} KV blocks are kept for nodes of trees"
        return self.requests.stop(self.requests.groups[sequence.request_id], FinishReason.ERROR, error)

    # -- state -----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drops every request and all that the caches hold.

        Asks nobody what state they are in, since what was broken off may have left them in any: queues, blocks and rows
        are made anew. Breaking it off too does no harm, for the next act begins with it.
        """
        self._is_torn = True
        self._under_way = None
        self.requests.groups = {}
        self.scheduler.reset()
        self.kept.forget()
        self.device.reset()
        self._is_torn = False

    def _mend(self) -> None:
        if self._is_torn:
            self.reset()
        self._is_torn = True
        self.kept.sweep()
        self._is_torn = False

    def reset_prefix_cache(self) -> None:
        """Later prompts find nothing of earlier ones; running requests go on undisturbed."""
        self._mend()
        self._is_torn = True
        for manager in self.scheduler.managers:
            manager.reset_prefix_cache()
        self._is_torn = False

    def release(self, names: Items[str]) -> None:
        """Frees what is kept under these names."""
        self._mend()
        self._is_torn = True
        self.kept.release(names)
        self._is_torn = False

    def release_all_kept(self) -> None:
        """What begins with a kept prefix from now on computes it anew."""
        self.release(self.kept.names())

    def stats(self) -> dict[str, int]:
        managers = self.scheduler.managers
        return {
            **self.metrics.as_dict(),
            "blocks_total": sum(manager.num_blocks for manager in managers),
            "blocks_in_use": sum(manager.num_in_use for manager in managers),
            "running": self.scheduler.num_running,
            "waiting": self.scheduler.num_waiting,
        }

    @property
    def is_own_thread(self) -> bool:
        """It has none: it runs in the thread of whoever steps it."""
        return False

    @property
    def generated_tokens(self) -> int:
        """Since the start."""
        return self.metrics.generated_tokens

    def model_stats(self) -> list[dict[str, int]]:
        """What was computed for each track of a sequence (a teacher's, a student's), and the cache that it is in.

        Tracks of one checkpoint share one cache, whose blocks are then told for both.
        """
        managers, tracks = self.scheduler.managers, self.metrics.tracks
        return [
            {
                "positions_computed": counts.num_positions,
                "prompt_tokens_computed": counts.num_prompt_tokens,
                "prompt_tokens_cached": counts.num_cached_tokens,
                "blocks_total": manager.num_blocks,
                "blocks_in_use": manager.num_in_use,
            }
            for role in (0, 1)
            for counts, manager in [(tracks.get(role, TrackCounts()), managers[min(role, len(managers) - 1)])]
        ]


def request_seed(engine_seed: int, arrival: int) -> int:
    """The seed of a request that brought none: a fixed function of the engine's seed and its place in the queue."""
    digest = hashlib.blake2b(f"{engine_seed}:{arrival}".encode(), digest_size=8).digest()
    return int.from_bytes(digest)
