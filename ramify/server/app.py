"""The application: routes, guards and the answer to every failure, put together."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse

from ramify.async_llm import AsyncLLM
from ramify.server import problems
from ramify.server.body import JsonRoute
from ramify.server.config import ServerConfig
from ramify.server.service import ServedModel, Service
from ramify.version import __version__


def create_app(llm: AsyncLLM, config: ServerConfig | None = None) -> FastAPI:
    """An application that serves a model that is there already."""
    config = config if config is not None else ServerConfig()
    service = Service(config)
    service.open([ServedModel.of(llm, config.served_model_name)])
    return app_of(service)


def app_of(service: Service) -> FastAPI:
    """An application over a service, which may be opened later: until then it answers 503."""
    app = FastAPI(title="Ramify", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    problems.install(app)
    router = APIRouter(route_class=JsonRoute)

    @router.get("/health")
    async def health() -> JSONResponse:
        """200 once the model is loaded and as long as the engine works; 503 before, after and in between."""
        return JSONResponse({"status": "ready"}) if service.is_ready else JSONResponse({"status": "not ready"}, 503)

    app.include_router(router)
    return app
