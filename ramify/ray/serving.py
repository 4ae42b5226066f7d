"""`application`: the HTTP server of `ramify serve` as a deployment of Ray Serve, with replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Unpack

from ramify import validation as check
from ramify.config import DEFAULT_MODEL, EngineOptions, MixtureConfig
from ramify.errors import InvalidInputError, UnsupportedError
from ramify.ray.cluster import ray_module
from ramify.ray.front import Asked, Front, Message
from ramify.ray.pool import check_options
from ramify.server.config import PairConfig, ServerConfig

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ramify.server.to_serve import ModelToServe

# Serve listens itself, and starts as many processes as it is told.
_SERVES_OWN = ("host", "port", "http_workers", "max_connections", "max_header_bytes", "log_interval")
_BY_SESSION = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
# Serve's own, by the path that can be imported without the engines that Serve has for it.
_BY_PREFIX = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
_PREFIX_OPTIONS = {"imbalanced_threshold": 16, "do_eviction": True}  # busier by so many requests: others take over
_LAST_SECONDS = 5.0  # after the grace period: for the last bytes on their way


def application(
    model: str | None = None,
    *,
    num_replicas: int = 1,
    num_cpus: float = 1,
    num_gpus: float = 0,
    routing: Literal["balanced", "session", "prefix"] = "balanced",
    pair: PairConfig | None = None,
    mixture: MixtureConfig | None = None,
    server: ServerConfig | None = None,
    deployment: Mapping[str, Any] | None = None,
    **options: Unpack[EngineOptions],
) -> Any:
    """What `ray.serve.run` takes: every replica one engine and all routes of `ramify serve`.

    `pair` and `mixture` serve two models as one, beside `model` if that is given. With routing="session", requests
    with the same header `x-session-id` go to the same replica, which has what they begin with in its cache; with
    "prefix", a front reads every request and those that open alike go to the same replica. `server` holds limits, key
    and names; addresses are Serve's. `deployment` are further options of Serve's own, such as autoscaling_config.
    `options` are those of `LLM`.
    """
    serve = ray_module("ray.serve")
    check.integer("num_replicas", num_replicas, 1)
    check.number("num_cpus", num_cpus, 0)
    check.number("num_gpus", num_gpus, 0)
    check.choice("routing", routing, ("balanced", "session", "prefix"))
    server = server or ServerConfig()
    unused = [field.name for field in fields(server) if getattr(server, field.name) != field.default]
    for name in unused:
        if name in _SERVES_OWN:
            raise InvalidInputError(f"{name} has no meaning in a deployment: Serve has options of its own for it")
    if mixture is not None and pair is None:
        raise InvalidInputError("mixture says how two models are mixed: pair must name them")
    check_options(model or DEFAULT_MODEL, options, how_many="num_replicas")
    settings: dict[str, Any] = {
        "name": "ramify",
        "num_replicas": num_replicas,
        "ray_actor_options": {"num_cpus": num_cpus, "num_gpus": num_gpus},
        "max_ongoing_requests": server.max_queue,  # who comes beyond it is answered by the replica, and not by Serve
        "graceful_shutdown_timeout_s": server.grace_period + _LAST_SECONDS,
    }
    arguments = model, pair, mixture, server, {"warmup": "full", **options}
    if routing == "session":
        settings["request_router_config"] = {"request_router_class": _BY_SESSION}
    elif routing == "prefix":
        _check_prefix_router()
        settings["name"] = "ramify-replicas"
        settings["request_router_config"] = {
            "request_router_class": _BY_PREFIX,
            "request_router_kwargs": _PREFIX_OPTIONS,
        }
        replicas = serve.deployment(Replica, **{**settings, **(deployment or {})}).bind(*arguments)
        front = serve.deployment(
            serve.ingress()(Front),
            name="ramify",
            ray_actor_options={"num_cpus": 0},
            max_ongoing_requests=server.max_queue * num_replicas,
            graceful_shutdown_timeout_s=server.grace_period + _LAST_SECONDS,
        )
        return front.bind(replicas, server.max_body_bytes)
    return serve.deployment(serve.ingress()(Replica), **{**settings, **(deployment or {})}).bind(*arguments)


def _check_prefix_router() -> None:
    module, _, name = _BY_PREFIX.rpartition(".")
    try:
        getattr(import_module(module), name)
    except (ImportError, AttributeError):
        raise UnsupportedError("routing must be 'balanced' or 'session': this Ray has no router by prefixes") from None


class Replica:
    """One of the processes that answer: the application and its engine."""

    def __init__(
        self,
        model: str | None,
        pair: PairConfig | None,
        mixture: MixtureConfig | None,
        server: ServerConfig,
        options: Mapping[str, Any],
    ) -> None:
        from ramify.server.app import app_of
        from ramify.server.load import load_models
        from ramify.server.service import Service

        self._service = Service(server)
        models = _models(model, pair, mixture or MixtureConfig(), server, options)
        self._service.open(load_models(models, server.engine_process, self._service.say))
        self._app = app_of(self._service)

    def __serve_build_asgi_app__(self) -> FastAPI:  # the name that Serve asks for
        return self._app

    async def answer(self, asked: Asked) -> AsyncIterator[Message]:
        """What the application sends for a request that a front has read."""
        told: asyncio.Queue[Message | None] = asyncio.Queue()
        body, is_gone = [asked.body], asyncio.Event()

        async def receive() -> Message:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            told.put_nowait(message)

        answering = asyncio.ensure_future(self._app(asked.scope, receive, send))
        answering.add_done_callback(lambda _: told.put_nowait(None))
        try:
            while (message := await told.get()) is not None:
                yield message
            await answering
        finally:
            is_gone.set()
            answering.cancel()

    def check_health(self) -> None:
        """Serve replaces a replica that raises here."""
        if (trouble := self._service.trouble) is not None:
            raise RuntimeError(trouble)


def _models(
    model: str | None, pair: PairConfig | None, mixture: MixtureConfig, server: ServerConfig, options: Mapping[str, Any]
) -> list[ModelToServe]:
    """As `ramify serve` has it: one model, or the mixture of two, or both."""
    from ramify.server.to_serve import model_to_serve, pair_to_serve

    models = []
    if model is not None or pair is None:
        models.append(model_to_serve(model or DEFAULT_MODEL, options, server.served_model_name))
    if pair is not None:
        models.append(pair_to_serve(pair, mixture, options, None if models else server.served_model_name))
    return models
