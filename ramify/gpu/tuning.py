"""The form of a product that is the fastest here, found by trying: a few likely ones are timed, once.

A trial launches what the decoder would launch: the products of all layers in turn, so that no weight is in the cache
when it is read, each with the kernel that adds up its parts. It is captured in a graph, as decodes are, and replayed
between two events. What was found is remembered (form_cache.py), so that the first run decides for all that follow.

Products are timed when a number of rows is first met, which is when its graphs are captured anyway. Kernels of all
candidates are compiled at the same time, in threads: the compiler leaves Python for most of its work.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from triton.runtime.errors import OutOfResources

from ramify.device.graphs import capture_stream, must_run_first, padded
from ramify.gpu.form_cache import FormCache, Named
from ramify.gpu.product_candidates import Chip, candidates
from ramify.gpu.product_forms import Form, Product, Vendor

MOST_ROWS = 512  # beyond, products are prompts', bound by the matrix units: cuBLAS's
REPLAYS = 5

Launch = Callable[[], None]
Trial = Callable[[Form], None]  # launches products in one form
Stopwatch = Callable[[Trial, Sequence[Form]], Sequence[float]]  # seconds of each form, infinite where it cannot run


class MeasuredForms:
    """The forms of one product, as measured."""

    def __init__(
        self,
        product: Product,
        chip: Chip,
        cache: FormCache,
        make_trial: Callable[[int], Trial],
        stopwatch: Stopwatch,
    ) -> None:
        self._product, self._chip, self._cache = product, chip, cache
        self._make_trial, self._stopwatch = make_trial, stopwatch
        self._known: dict[tuple[int, bool | None], Form] = {}

    def of(self, rows: int, *, stays: bool | None = None) -> Form:
        if rows > MOST_ROWS or (rows > 1 and self._product.dtype.itemsize != 2):  # of float32 there is one form
            return Vendor()
        key = (padded(rows), stays if rows == 1 else None)
        if key not in self._known:
            self._known[key] = self._find(*key)
        return self._known[key]

    def _find(self, rows: int, stays: bool | None) -> Form:
        what: Named = self._product
        if stays is not None:
            what = replace(self._product, note=" that stay" if stays else " that pass")
        found = self._cache.find(what, rows)
        # Numbers that were not measured here, whoever wrote them, must fit on the chip too.
        if found is not None and self._chip.holds(found, self._product, rows):
            return cast(Form, found)
        likely = candidates(self._product, rows, self._chip, stays)  # ten milliseconds: not where the answer is known
        must_run_first()
        times = self._stopwatch(self._make_trial(rows), likely)
        fastest = min(zip(times, range(len(likely)), strict=True))[1]
        return cast(Form, self._cache.keep(what, rows, likely[fastest]))


class GraphStopwatch:
    """Times on a GPU, each trial captured in a graph of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, trial: Trial, forms: Sequence[Form]) -> Sequence[float]:
        runs = self._run_all(trial, forms)
        return self.seconds(
            [partial(trial, form) if can_run else None for form, can_run in zip(forms, runs, strict=True)]
        )

    def seconds(self, launches: Sequence[Launch | None]) -> Sequence[float]:
        """Of each, infinite for None. All have run before."""
        graphs = [None if launch is None else self._capture(launch) for launch in launches]
        times: list[list[float]] = [[] for _ in launches]
        # In turns, so that a chip that grows warm or slow is so for all of them.
        for _ in range(1 + REPLAYS):
            for graph, own in zip(graphs, times, strict=True):
                own.append(float("inf") if graph is None else self._seconds(graph))
        return [statistics.median(own[1:]) for own in times]

    def _run_all(self, trial: Trial, forms: Sequence[Form]) -> Sequence[bool]:
        """Compiles what is not compiled yet; which forms the chip can run."""
        stream = torch.cuda.current_stream(self._device)

        def runs(form: Form) -> bool:
            torch.ones(1, device=self._device)  # makes the GPU's context this thread's: descriptors are made in it
            with torch.inference_mode(), torch.cuda.stream(stream):
                try:
                    trial(form)
                except OutOfResources:
                    return False
            return True

        with ThreadPoolExecutor(len(forms)) as threads:
            # cuBLAS would take memory of its own for every thread.
            compiled = [None if isinstance(form, Vendor) else threads.submit(runs, form) for form in forms]
            ran = [
                runs(form) if future is None else future.result() for form, future in zip(forms, compiled, strict=True)
            ]
        torch.cuda.synchronize(self._device)
        return ran

    def _capture(self, launch: Launch) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # torch's own stream is one of the first GPU that captured anything, and would make that the current one.
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, stream=capture_stream(torch.cuda.current_device())),
        ):
            launch()
        return graph

    def _seconds(self, graph: torch.cuda.CUDAGraph) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
