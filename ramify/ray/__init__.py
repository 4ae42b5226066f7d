"""Ramify on a Ray cluster: rows of a dataset through many engines, and the HTTP server with replicas.

    ramify.ray.generate(dataset, SamplingParams(n=4))   rows in, n rows of each out
    ramify.ray.distill(dataset, recipe)                 the same for problems of `ramify distill`
    ramify.ray.application(model)                       an application for `ray.serve.run`

Ray comes with the extra `ray`, and is imported when one of them is called.
"""

from __future__ import annotations

from ramify.ray.pool import Pool
from ramify.ray.problems import distill
from ramify.ray.prompts import generate, row_seed
from ramify.ray.serving import application

__all__ = ["Pool", "application", "distill", "generate", "row_seed"]
