"""Pool: several engines as one. One thread owns the queue; all others only leave acts for it.

    any thread: submit, abort -- inbox --> pool's thread: queue --> pieces --> the engines' processes
    deliver, fail <---------------------- pool's thread <-- inbox -- readers of the links

So nothing is locked, and whatever breaks a caller's thread off, by Ctrl-C or otherwise, leaves the pool as it was.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

from ramify.drive.core_loop import fault_of
from ramify.engine.capacity import Capacity
from ramify.engine.core import request_seed
from ramify.engine.request import Request
from ramify.errors import EngineClosedError, EngineLostError, RamifyError
from ramify.outputs import RequestOutput
from ramify.remote.assembly import Assembly
from ramify.remote.correspondence import Correspondence
from ramify.remote.link import Link
from ramify.replicas.prefixes import chain_of
from ramify.replicas.task import Part, Task, may_split
from ramify.replicas.work_queue import Piece, Work, WorkQueue
from ramify.sampling_params import OutputKind
from ramify.text.codec import TextCodec

_log = logging.getLogger(__name__)
Act = Callable[[], None]


class Pool:
    """Requests come from `submit`; what becomes of them is told to `deliver` and `fail`, in the pool's thread."""

    def __init__(
        self,
        links: Sequence[Link],
        model: int,
        codec: TextCodec,
        capacity: Capacity,
        *,
        seed: int,
        deliver: Callable[[list[RequestOutput]], None],
        fail: Callable[[Request, RamifyError], None],
    ) -> None:
        self.links = links
        self.model = model
        self.capacity = capacity
        self.queue = WorkQueue(capacity.max_num_seqs, len(links), most_blocks=sum(capacity.num_blocks))
        self.letters = [
            Correspondence(
                link,
                model,
                codec,
                deliver=lambda outputs: self._inbox.put(partial(self._take, outputs)),
                fail=lambda assemblies, error: self._inbox.put(partial(self._fail, assemblies, error)),
                lose=partial(self._report_loss, index),
            )
            for index, link in enumerate(links)
        ]
        self._seed = seed
        self._deliver = deliver
        self._tell_failure = fail
        self._inbox: queue.SimpleQueue[Act | None] = queue.SimpleQueue()
        self._tasks: dict[str, Task] = {}
        self._parts: dict[str, Part] = {}  # those that an engine has, by their requests' ids
        self._due: list[RequestOutput] = []
        self._num_arrived = 0
        self._is_stopping = False
        self._mourners: list[Callable[[EngineLostError], None]] = []
        self._thread = threading.Thread(target=self._run, name="ramify-replicas", daemon=True)
        self._thread.start()

    # -- from any thread -----------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """In this order."""
        self._inbox.put(partial(self._add, requests))

    def abort(self, request_id: str) -> None:
        """Takes no lock, since Python may call it from a destructor at any moment."""
        self._inbox.put(partial(self._abort, request_id))

    def expect_no_more(self) -> None:
        """All requests of a call are there: the last of them are given out so that the engines end together."""
        self._inbox.put(self.queue.expect_no_more)

    def forget_prefixes(self) -> None:
        self._inbox.put(self.queue.forget_prefixes)

    def when_lost(self, listener: Callable[[EngineLostError], None]) -> None:
        """Calls it, in the pool's thread, when the last engine's process has ended before it was asked to."""
        self._mourners.append(listener)

    @property
    def num_there(self) -> int:
        """Engines that have not been lost."""
        return self.queue.num_there

    @property
    def is_own_thread(self) -> bool:
        """Whether the calling thread is one that others wait for."""
        return threading.current_thread() is self._thread or any(link.is_reader for link in self.links)

    def stop(self) -> None:
        """Ends the engines' processes, and requests with them."""
        self._is_stopping = True
        closers = [threading.Thread(target=link.close) for link in self.links]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        self._inbox.put(None)
        if not self.is_own_thread:
            self._thread.join()

    # -- the pool's thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        is_open = True
        while is_open:
            acts = [self._inbox.get()]
            while not self._inbox.empty():
                acts.append(self._inbox.get())
            try:
                for act in acts:
                    if act is not None:
                        act()
                self._hand_out()
                if self._due:
                    due, self._due = self._due, []
                    self._deliver(due)
            except Exception as error:  # whatever it was, nobody may wait for what will not come
                _log.exception("the pool of engines failed")
                self._fail_all(fault_of(error))
            is_open = None not in acts
        self._fail_all(EngineClosedError("the engine has been shut down"))

    def _add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if not self.num_there:
                self._tell_failure(request, EngineLostError("all engines' processes have ended"))
                continue
            if request.sampling_params.seed is None:
                request.seed = request_seed(self._seed, self._num_arrived)
            self._num_arrived += 1
            work = self._work(request)
            self._tasks[request.request_id] = Task(request, work)
            self.queue.add(work)

    def _work(self, request: Request) -> Work:
        params, tracks = request.sampling_params, request.root.tracks
        block_size = self.capacity.block_size
        return Work(
            request.request_id,
            priority=request.priority,
            prompt=sum(len(track.prompt_token_ids) for track in tracks),
            chain=chain_of(tracks[0].prompt_token_ids, block_size),
            block_size=block_size * len(tracks),  # what one model knows, the other does too
            left=params.num_children,
            longest=self.capacity.longest_output(request.root),
            may_split=may_split(params),
        )

    def _hand_out(self) -> None:
        used = set()
        for piece in self.queue.hand_out():
            task = self._tasks[piece.work.name]
            redone = next((part for part in task.parts if part.is_redone and part.piece.work is piece.work), None)
            part = task.part(piece) if redone is None else redone
            part.piece = piece
            self._parts[part.request.request_id] = part
            used.add(piece.engine)
            try:
                self.letters[piece.engine].send(part.request, part.earlier)
            except RamifyError as error:
                self._end(part)
                self._drop(task, error)
        for index in used:
            loss = self.links[index].error
            if loss is not None:  # gone since it was chosen: what it was sent just now is among its losses
                self.letters[index].lose(loss)

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            part = self._parts.get(output.request_id)
            if part is None:
                continue
            task = part.task
            if output.finished and output.error is not None and task.is_divided:
                self._stop_others(task)  # before it is taken: it may be the last, where the others still waited
            due = None if task.is_over else task.take(part, output)
            if output.finished:
                self._end(part)
            if due is not None:
                self._due.append(due)
                if due.finished:
                    self._forget(task)

    def _end(self, part: Part) -> None:
        """An engine has nothing more to do with it."""
        self._parts.pop(part.request.request_id, None)
        self.queue.ended(part.piece, part.num_drawn)

    def _abort(self, request_id: str) -> None:
        task = self._tasks.get(request_id)
        if task is None:
            return
        self._stop_others(task)
        if not any(part.request.request_id in self._parts for part in task.parts):
            self._due.append(task.aborted())
            self._forget(task)

    def _stop_others(self, task: Task) -> None:
        """Ends what still runs or waits of it; its parts tell when they have ended."""
        for work in [task.work, *(part.piece.work for part in task.parts if part.is_redone)]:
            task.give_up(self.queue.remove(work))
        for part in task.parts:
            if part.request.request_id in self._parts:
                self.letters[part.piece.engine].abort(part.request.request_id)

    def _forget(self, task: Task) -> None:
        task.is_over = True
        self._tasks.pop(task.request.request_id, None)

    def _drop(self, task: Task, error: RamifyError) -> None:
        """Fails a request; what its parts still tell is not heard."""
        if task.is_over:
            return
        self._stop_others(task)
        self._forget(task)
        self._tell_failure(task.request, error)

    def _fail(self, assemblies: list[Assembly], error: RamifyError) -> None:
        for assembly in assemblies:
            part = self._parts.get(assembly.request.request_id)
            if part is not None:
                self._end(part)
                self._drop(part.task, error)

    def _fail_all(self, error: RamifyError) -> None:
        for task in list(self._tasks.values()):
            self._drop(task, error)

    # -- engines that are gone -----------------------------------------------------------------------------------------

    def _report_loss(self, index: int, assemblies: list[Assembly], error: EngineLostError) -> None:
        self._inbox.put(partial(self._lose, index, assemblies, error))

    def _lose(self, index: int, assemblies: list[Assembly], error: EngineLostError) -> None:
        was_there = self.queue.engines[index].is_there
        self.queue.lost(index)
        for assembly in assemblies:
            part = self._parts.pop(assembly.request.request_id, None)
            if part is None or part.task.is_over:
                continue
            reason = self._why_not_again(part, error)
            if self._is_stopping:
                self._drop(part.task, EngineClosedError("the engine has been shut down"))
            elif reason is not None:
                self._drop(part.task, EngineLostError(reason))
            else:
                self._give_back(part, assembly)
        if not was_there or self._is_stopping:
            return
        left = self.num_there
        if left:
            _log.error("replica %d: %s; %d of %d go on", index, error, left, len(self.links))
            return
        self._fail_all(error)
        for mourner in self._mourners:
            mourner(error)

    def _why_not_again(self, part: Part, error: EngineLostError) -> str | None:
        """Why a part is not given to another engine; None: it is."""
        if not self.num_there:
            return str(error)
        if part.is_redone:
            return f"two engines have ended while they served this request, the second so: {error}"
        if part.output is not None and part.request.sampling_params.output_kind is OutputKind.GROWTH:
            return f"the engine that this search was watched in is gone, and it cannot be shown twice: {error}"
        return None

    def _give_back(self, part: Part, assembly: Assembly) -> None:
        """Once: to the place that it had in the queue."""
        piece, before = part.piece, part.piece.work
        part.is_redone, part.earlier = True, assembly
        work = Work(
            before.name,
            priority=before.priority,
            prompt=before.prompt,
            chain=before.chain,
            block_size=before.block_size,
            left=piece.count,
            longest=before.longest,
            first=piece.first,
            number=before.number,
        )
        part.piece = Piece(work, piece.engine, piece.first, piece.count, 0)
        self.queue.add(work)
