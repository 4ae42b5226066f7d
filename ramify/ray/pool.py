"""Pool: how many engines work on a cluster, and what each of them takes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ramify import validation as check
from ramify.config import EngineConfig
from ramify.errors import InvalidInputError
from ramify.ray.cluster import ray_module

_BATCHES_OF_A_TASK = 4  # that Ray Data has an asynchronous stage work on at a time
_TASKS_AT_ONCE = 2  # of one actor: its engine is never without work while results are handed over
_SEQUENCES = 256  # an engine's own default of max_num_seqs


def check_options(model: str, options: Mapping[str, Any], *, how_many: str) -> None:
    """A mistake shows before anything starts; `how_many` is what says how many engines there are."""
    config = EngineConfig.from_options(model=model, **options)
    if config.model_config.data_parallel_size > 1:
        raise InvalidInputError(
            f"data_parallel_size must be 1 on a cluster, got {config.model_config.data_parallel_size}: {how_many} says "
            f"how many engines there are"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One engine an actor. By default an engine for each GPU of the cluster or, without any, one for each machine."""

    num_engines: int | None = None
    num_cpus: float | None = None  # of an engine: 1 beside a GPU, else all of a machine but one for Ray's own tasks
    num_gpus: float | None = None  # of an engine: tensor_parallel_size where the cluster has GPUs, else none
    batch_size: int | None = None  # rows that are handed over together; by default what keeps an engine full

    def __post_init__(self) -> None:
        if self.num_engines is not None:
            check.integer("num_engines", self.num_engines, 1)
        if self.num_cpus is not None:
            check.number("num_cpus", self.num_cpus, above=0)
        if self.num_gpus is not None:
            check.number("num_gpus", self.num_gpus, 0)
        if self.batch_size is not None:
            check.integer("batch_size", self.batch_size, 1)

    def rows_at_a_time(self, options: Mapping[str, Any], n: int) -> int:
        """All batches on their way to an engine hold about twice the sequences that it runs at a time."""
        if self.batch_size is not None:
            return self.batch_size
        sequences = int(options.get("max_num_seqs", _SEQUENCES))
        return max(1, 2 * sequences // (n * _BATCHES_OF_A_TASK * _TASKS_AT_ONCE))

    def settled(self, options: Mapping[str, Any]) -> Pool:
        """With what was left open decided by what the cluster has."""
        ray = ray_module()
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        gpus = sum(machine.get("GPU", 0) for machine in machines)
        ranks = options.get("tensor_parallel_size", 1)
        num_gpus = self.num_gpus if self.num_gpus is not None else (ranks if gpus else 0)
        least = min((machine["CPU"] for machine in machines), default=1)
        num_cpus = self.num_cpus if self.num_cpus is not None else 1 if num_gpus else max(least - 1, 1)
        by_default = int(gpus // num_gpus) if num_gpus else len(machines)
        return Pool(
            num_engines=self.num_engines or max(by_default, 1),
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            batch_size=self.batch_size,
        )

    def stage(
        self, dataset: Any, actor: type, arguments: Mapping[str, Any], *, options: Mapping[str, Any], n: int
    ) -> Any:
        """The dataset with a stage of engines: `actor`, made with these arguments, gets and returns Arrow tables."""
        data = ray_module("ray.data")
        if not ray_module().is_initialized():
            ray_module().init(log_to_driver=False)
        pool = self.settled(options)
        return dataset.map_batches(
            actor,
            fn_constructor_kwargs=dict(arguments),
            batch_size=pool.rows_at_a_time(options, n),
            batch_format="pyarrow",
            num_cpus=pool.num_cpus,
            num_gpus=pool.num_gpus,
            compute=data.ActorPoolStrategy(
                size=pool.num_engines,
                max_tasks_in_flight_per_actor=2 * _TASKS_AT_ONCE,
                max_concurrent_calls_per_actor=_TASKS_AT_ONCE,
            ),
        )
