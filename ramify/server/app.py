"""The application: routes, guards and the answer to every failure, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse

from ramify.server.body import JsonRoute
from ramify.server.chat import chat_routes
from ramify.server.completions import completion_routes
from ramify.server.config import ServerConfig
from ramify.server.failures import handle_failures
from ramify.server.growth import growth_routes
from ramify.server.guard import Guard
from ramify.server.metrics import ServerMetrics
from ramify.server.openapi import DESCRIPTION, failures
from ramify.server.pages import Playground
from ramify.server.probes import probe_routes
from ramify.server.records import Recorder
from ramify.server.reference import reference_page
from ramify.server.service import ServedModel, Service
from ramify.server.tokens import model_routes
from ramify.version import __version__

if TYPE_CHECKING:
    from ramify.async_llm import AsyncLLM  # brings torch, which a server that still loads its model need not wait for

# Without a key a client may ask whether the server is alive, and load the playground, which then asks for the key.
OPEN_PATHS = frozenset({"/health", "/ping"})


def create_app(llm: AsyncLLM, config: ServerConfig | None = None) -> FastAPI:
    """An application that serves a model already loaded."""
    config = config if config is not None else ServerConfig()
    service = Service(config)
    service.open([ServedModel.of(llm, config.served_model_name)])
    return app_of(service)


def app_of(service: Service) -> FastAPI:
    """An application over a service, which may be opened later: until then it answers 503."""
    app = FastAPI(
        title="Ramify",
        version=__version__,
        description=DESCRIPTION,
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere
        redoc_url=None,
    )
    metrics = ServerMetrics(service)
    app.state.service = service
    handle_failures(app)
    app.include_router(completion_routes(service))
    app.include_router(chat_routes(service))
    app.include_router(growth_routes(service))
    app.include_router(model_routes(service))
    playground = Playground()
    app.include_router(playground.routes())
    app.include_router(probe_routes(service))
    app.include_router(_metrics_routes(metrics))

    @app.get("/docs", include_in_schema=False)
    async def reference() -> HTMLResponse:
        return HTMLResponse(reference_page(app.openapi()))

    # The last one added is the outermost: a page of another origin may read refusals too, and asks first without a key.
    config = service.config
    app.add_middleware(
        Guard,
        api_key=config.api_key,
        open_paths=OPEN_PATHS | playground.paths,
        max_header_bytes=config.max_header_bytes,
    )
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "WWW-Authenticate"],
        )
    app.add_middleware(
        Recorder,
        count=lambda method, route, status: metrics.answers.labels(method, route, str(status)).inc(),
        log_requests=config.log_requests,
    )
    return app


def _metrics_routes(metrics: ServerMetrics) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["state"])

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}, **failures(401)})
    async def show_metrics() -> Response:
        """Counters, gauges and histograms in Prometheus' text format."""
        return Response(await metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
