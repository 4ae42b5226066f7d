"""Prometheus metrics: what the engines did and how long clients waited. Every application has a registry of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from ramify.engine.observations import SECONDS, TOKENS, Distribution, EngineState
from ramify.server.service import Service

# Counters and gauges of an engine's `stats()`: (its key, our name, what it says).
_COUNTERS = (
    ("steps", "ramify_steps", "Engine steps."),
    ("prompt_tokens_computed", "ramify_prompt_tokens_computed", "Prompt tokens that were computed."),
    ("prompt_tokens_cached", "ramify_prompt_tokens_cached", "Prompt tokens found in the prefix cache."),
    ("generated_tokens", "ramify_generated_tokens", "Tokens drawn, those of losers and aborted requests included."),
    ("drafted_tokens", "ramify_drafted_tokens", "Tokens that were drafted ahead (speculation)."),
    ("accepted_tokens", "ramify_accepted_tokens", "Drafted tokens that were then drawn."),
    ("preemptions", "ramify_preemptions", "Times a sequence gave up its blocks for others."),
)
_GAUGES = (
    ("running", "ramify_sequences_running", "Sequences in the running batch."),
    ("waiting", "ramify_sequences_waiting", "Sequences that wait for room."),
    ("blocks_total", "ramify_cache_blocks", "Blocks of the KV cache."),
    ("blocks_in_use", "ramify_cache_blocks_in_use", "Blocks that some sequence holds."),
    ("blocks_in_use_peak", "ramify_cache_blocks_in_use_peak", "Most blocks that were ever held at once."),
)


# Distributions of an engine's observations: (its field, our name, what it says, bounds).
_DISTRIBUTIONS = (
    ("first", "ramify_time_to_first_token_seconds", "From arrival to the first token. Seconds.", SECONDS),
    ("between", "ramify_inter_token_latency_seconds", "From one token of a sample to the next. Seconds.", SECONDS),
    ("queued", "ramify_queue_time_seconds", "From arrival to the first step. Seconds.", SECONDS),
    ("whole", "ramify_e2e_request_latency_seconds", "From arrival to the end. Seconds.", SECONDS),
    ("prompts", "ramify_request_prompt_tokens", "Tokens of prompts.", TOKENS),
    ("outputs", "ramify_request_generated_tokens", "Tokens drawn for a request, those of losers included.", TOKENS),
)
# The same of each replica, where there are several.
_REPLICA_GAUGES = (
    ("running", "ramify_replica_sequences_running", "Sequences in a replica's running batch."),
    ("waiting", "ramify_replica_sequences_waiting", "Sequences that wait for room in a replica."),
    ("blocks_total", "ramify_replica_cache_blocks", "Blocks of a replica's KV cache; 0: it is gone."),
    ("blocks_in_use", "ramify_replica_cache_blocks_in_use", "Blocks that some sequence holds in a replica."),
)
_OF_REPLICAS = (
    *_REPLICA_GAUGES,
    ("generated_tokens", "ramify_replica_generated_tokens", "Tokens drawn by a replica."),
    ("prompt_tokens_computed", "ramify_replica_prompt_tokens_computed", "Prompt tokens computed by a replica."),
    ("prompt_tokens_cached", "ramify_replica_prompt_tokens_cached", "Prompt tokens found in a replica's cache."),
)
_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # by which the library knows that there are several processes
States = list[tuple[str, EngineState]]  # of each model, by its name


class ServerMetrics:
    """Counts HTTP answers, and asks the engines for all else when metrics are read."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self._service = service
        self.answers = Counter(
            "ramify_http_requests",
            "HTTP requests, by route and status.",
            ["method", "route", "status"],
            registry=self.registry,
        )

    async def text(self) -> bytes:
        """Of all processes of the server, where there are several: these keep their counts in files of one folder."""
        answers = self.registry
        if _FOLDER in os.environ:
            answers = CollectorRegistry()
            MultiProcessCollector(answers)  # type: ignore[no-untyped-call]
        states = [(model.name, await model.engine.state()) for model in self._service.models.values()]
        engines = CollectorRegistry()
        engines.register(_Engines(states))
        return generate_latest(answers) + generate_latest(engines)


class _Engines:
    """What the engines told, as metrics."""

    def __init__(self, states: States) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        for field, name, what, bounds in _DISTRIBUTIONS:
            histogram = HistogramMetricFamily(name, what, labels=["model"])
            for model, state in self._states:
                values: Distribution = getattr(state.observations, field)
                below = accumulate(values.counts)
                buckets = [(str(float(bound)), float(next(below))) for bound in bounds]
                histogram.add_metric([model], [*buckets, ("+Inf", float(sum(values.counts)))], values.total)
            yield histogram
        ends = CounterMetricFamily(
            "ramify_requests",
            "Prompts that ended, by the reason of their first sample.",
            labels=["model", "finish_reason"],
        )
        for model, state in self._states:
            for reason, number in state.observations.ends.items():
                ends.add_metric([model, reason], number)
        yield ends
        for key, name, what in _COUNTERS:
            counter = CounterMetricFamily(name, what, labels=["model"])
            for model, state in self._states:
                counter.add_metric([model], state.stats[key])
            yield counter
        for key, name, what in _GAUGES:
            gauge = GaugeMetricFamily(name, what, labels=["model"])
            for model, state in self._states:
                gauge.add_metric([model], state.stats[key])
            yield gauge
        yield from self._of_replicas()
        unfinished = GaugeMetricFamily("ramify_requests_unfinished", "Prompts that run or wait.", labels=["model"])
        usage = GaugeMetricFamily("ramify_cache_usage_ratio", "Share of the KV cache in use.", labels=["model"])
        for model, state in self._states:
            unfinished.add_metric([model], state.num_unfinished)
            usage.add_metric([model], state.stats["blocks_in_use"] / state.stats["blocks_total"])
        yield unfinished
        yield usage

    def _of_replicas(self) -> Iterator[Metric]:
        """Beside the sums, what each of several engines tells."""
        for key, name, what in _OF_REPLICAS:
            kind = GaugeMetricFamily if (key, name, what) in _REPLICA_GAUGES else CounterMetricFamily
            family = kind(name, what, labels=["model", "replica"])
            for model, state in self._states:
                for number, stats in enumerate(state.replicas):
                    family.add_metric([model, str(number)], stats[key])
            if family.samples:
                yield family
