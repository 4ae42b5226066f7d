"""Prometheus metrics: what the engines did and how long clients waited. Every application has a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from ramify.engine.metrics import IterationStats
from ramify.outputs import RequestOutput
from ramify.server.service import ServedModel, Service

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 4, 16, 64, 256, 1_024, 4_096, 16_384, 65_536)
# Counters and gauges of an engine's `stats()`: (its key, our name, what it says).
_COUNTERS = (
    ("steps", "ramify_steps", "Engine steps."),
    ("prompt_tokens_computed", "ramify_prompt_tokens_computed", "Prompt tokens that were computed."),
    ("prompt_tokens_cached", "ramify_prompt_tokens_cached", "Prompt tokens found in the prefix cache."),
    ("generated_tokens", "ramify_generated_tokens", "Tokens drawn, those of losers and aborted requests included."),
    ("preemptions", "ramify_preemptions", "Times a sequence gave up its blocks for others."),
)
_GAUGES = (
    ("running", "ramify_sequences_running", "Sequences in the running batch."),
    ("waiting", "ramify_sequences_waiting", "Sequences that wait for room."),
    ("blocks_total", "ramify_cache_blocks", "Blocks of the KV cache."),
    ("blocks_in_use", "ramify_cache_blocks_in_use", "Blocks that some sequence holds."),
    ("blocks_in_use_peak", "ramify_cache_blocks_in_use_peak", "Most blocks that were ever held at once."),
)


class ServerMetrics:
    """Counts HTTP answers, listens to the engines, and asks them for their state when metrics are read."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self._service = service
        self.answers = Counter(
            "ramify_http_requests",
            "HTTP requests, by route and status.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self._first = self._seconds("ramify_time_to_first_token_seconds", "From arrival to the first token.")
        self._between = self._seconds("ramify_inter_token_latency_seconds", "From one token of a sample to the next.")
        self._queued = self._seconds("ramify_queue_time_seconds", "From arrival to the first step.")
        self._whole = self._seconds("ramify_e2e_request_latency_seconds", "From arrival to the end.")
        self._prompts = Histogram(
            "ramify_request_prompt_tokens",
            "Tokens of prompts.",
            ["model"],
            buckets=_TOKENS,
            registry=self.registry,
        )
        self._outputs = Histogram(
            "ramify_request_generated_tokens",
            "Tokens of returned samples, all of a request.",
            ["model"],
            buckets=_TOKENS,
            registry=self.registry,
        )
        self._ends = Counter(
            "ramify_requests",
            "Prompts that ended, by the reason of their first sample.",
            ["model", "finish_reason"],
            registry=self.registry,
        )
        self.registry.register(self)

    def _seconds(self, name: str, what: str) -> Histogram:
        return Histogram(name, f"{what} Seconds.", ["model"], buckets=_SECONDS, registry=self.registry)

    def listen_to(self, model: ServedModel) -> None:
        model.engine.observe(_Listener(self, model.name))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        states = [(model, model.engine.stats()) for model in self._service.models.values()]
        for key, name, what in _COUNTERS:
            counter = CounterMetricFamily(name, what, labels=["model"])
            for model, state in states:
                counter.add_metric([model.name], state[key])
            yield counter
        for key, name, what in _GAUGES:
            gauge = GaugeMetricFamily(name, what, labels=["model"])
            for model, state in states:
                gauge.add_metric([model.name], state[key])
            yield gauge
        unfinished = GaugeMetricFamily("ramify_requests_unfinished", "Prompts that run or wait.", labels=["model"])
        usage = GaugeMetricFamily("ramify_cache_usage_ratio", "Share of the KV cache in use.", labels=["model"])
        for model, state in states:
            unfinished.add_metric([model.name], model.engine.num_unfinished)
            usage.add_metric([model.name], state["blocks_in_use"] / state["blocks_total"])
        yield unfinished
        yield usage


class _Listener:
    """Hears what one model's engine reports, in the engine's thread."""

    def __init__(self, metrics: ServerMetrics, name: str) -> None:
        self._first = metrics._first.labels(name)
        self._between = metrics._between.labels(name)
        self._queued = metrics._queued.labels(name)
        self._whole = metrics._whole.labels(name)
        self._prompts = metrics._prompts.labels(name)
        self._outputs = metrics._outputs.labels(name)
        self._ends = metrics._ends
        self._name = name

    def stepped(self, step: IterationStats) -> None:
        for histogram, values in (
            (self._queued, step.queue_times),
            (self._first, step.time_to_first_tokens),
            (self._between, step.inter_token_latencies),
        ):
            for value in values:
                histogram.observe(value)

    def ended(self, output: RequestOutput) -> None:
        reason = next((sample.finish_reason for sample in output.outputs if sample.finish_reason is not None), None)
        self._ends.labels(self._name, "abort" if reason is None else reason.value).inc()
        self._prompts.observe(len(output.prompt_token_ids))
        self._outputs.observe(sum(len(sample.token_ids) for sample in output.outputs))
        if output.metrics is not None and output.metrics.finished_time is not None:
            self._whole.observe(output.metrics.finished_time - output.metrics.arrival_time)
