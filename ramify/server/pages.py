"""The playground's static files. They hold no data, so they need no key, and they load nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Response

from ramify.server.failures import Failure

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_INDEX = "index.html"
_METHODS = ["GET", "HEAD"]


class Playground:
    """The page and what belongs to it, read once. Only names that were read then are ever served."""

    def __init__(self) -> None:
        folder = files("ramify") / "playground"
        self._files = {
            file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _KINDS
        }

    @property
    def paths(self) -> frozenset[str]:
        return frozenset({"/", *(f"/playground/{name}" for name in self._files if name != _INDEX)})

    def routes(self) -> APIRouter:
        router = APIRouter(include_in_schema=False)

        @router.api_route("/", methods=_METHODS)
        async def page() -> Response:
            return self._file(_INDEX)

        @router.api_route("/playground/{name}", methods=_METHODS)
        async def part(name: str) -> Response:
            if name == _INDEX or name not in self._files:
                raise Failure(404, "there is no such file", code="unknown_url")
            return self._file(name)

        return router

    def _file(self, name: str) -> Response:
        kind = _KINDS[name.rpartition(".")[2]]
        return Response(self._files[name], media_type=kind, headers=_HEADERS)
