"""What clients and load balancers ask for before anything else, or by habit: answered, or refused by name."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ramify.server.body import JsonRoute
from ramify.server.failures import Failure
from ramify.server.openapi import failures
from ramify.server.replies import Health, Version
from ramify.server.service import Service
from ramify.version import __version__

_NO_VECTORS = "models generate text here, and make no vectors and no scores of texts"
_TEXT_ALONE = "models take text and write text"
_CHAT = "/v1/chat/completions is served"
_NOTHING_KEPT = "nothing is kept here"
# Routes of OpenAI's protocol and of vLLM's server that are not here, and why.
ABSENT = {
    **dict.fromkeys(("/v1/embeddings", "/pooling", "/classify", "/v1/classify"), _NO_VECTORS),
    **dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), _NO_VECTORS),
    **dict.fromkeys(("/v1/responses", "/v1/messages", "/v1/edits", "/invocations"), _CHAT),
    **dict.fromkeys(("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"), _TEXT_ALONE),
    **dict.fromkeys(("/v1/images/generations", "/v1/images/edits", "/v1/images/variations"), _TEXT_ALONE),
    **dict.fromkeys(("/v1/files", "/v1/batches", "/v1/assistants", "/v1/threads", "/v1/vector_stores"), _NOTHING_KEPT),
    "/v1/moderations": "nothing judges texts here",
    "/v1/fine_tuning/jobs": "nothing is trained here",
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "adapters are not served: merge them"),
}


def probe_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["state"])

    @router.get(
        "/health",
        response_model=Health,
        responses={503: {"model": Health, "description": "Not ready, or not any more."}},
    )
    async def health() -> JSONResponse:
        """200 once the model is loaded and warm and as long as the engine works; 503 before, after and in between."""
        reason = service.trouble
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": reason}, 503)

    for path, methods in (("/health", ["HEAD"]), ("/ping", ["GET", "HEAD", "POST"])):
        router.add_api_route(path, health, methods=methods, include_in_schema=False)

    @router.get("/version", response_model=Version, responses=failures(401))
    async def version() -> dict[str, str]:
        """Which Ramify this is."""
        return {"version": __version__}

    async def absent(http: Request) -> Response:
        path = http.scope["path"]
        raise Failure(404, f"{path} is not served: {ABSENT[path]}", code="not_supported")

    for path in ABSENT:
        router.add_api_route(path, absent, methods=["GET", "POST"], include_in_schema=False)
    return router
