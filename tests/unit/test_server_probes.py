"""Routes that clients ask for before anything else, or by habit."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from ramify.server.app import app_of
from ramify.server.config import ServerConfig
from ramify.server.probes import ABSENT
from ramify.server.service import Service
from ramify.version import __version__


def ask(method: str, path: str, api_key: str | None = None) -> httpx.Response:
    async def go() -> httpx.Response:
        app = app_of(Service(ServerConfig(api_key=api_key)))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            return await client.request(method, path)

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/health"), ("HEAD", "/health"), ("GET", "/ping"), ("POST", "/ping")]
)
def test_whether_it_is_ready_may_be_asked_in_every_usual_way_without_a_key(method: str, path: str) -> None:
    assert ask(method, path, "sesame").status_code == 503, "nothing is loaded"


def test_the_version_is_told() -> None:
    assert ask("GET", "/version").json() == {"version": __version__}
    assert ask("GET", "/version", "sesame").status_code == 401


def test_a_slash_after_models_names_no_model() -> None:
    assert ask("GET", "/v1/models/").json() == ask("GET", "/v1/models").json()


@pytest.mark.parametrize("path", ["/", "/playground/app.js", "/v1/models", "/v1/models/"])
def test_head_is_answered_as_get_would_be(path: str) -> None:
    """Monitors and clients ask so whether anybody is there; 405 looked like a server that is not right."""
    assert ask("HEAD", path).status_code == ask("GET", path).status_code != 405


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "/v1/chat/completions is one"),
        ("/v1/v1/completions", "/v1/completions is one"),
        ("/v1", "/docs lists the routes, and OpenAI's begin with /v1"),
        ("/embeddings", "/docs lists the routes, and OpenAI's begin with /v1"),
    ],
)
def test_a_wrong_address_is_told_with_the_route_that_was_meant(path: str, hint: str) -> None:
    """Most are of clients that were given an address without /v1, or with one too many."""
    reply = ask("POST", path)
    assert reply.status_code == 404
    assert reply.json()["error"]["message"] == f"there is no route {path}: {hint}"
    assert reply.json()["error"]["code"] == "unknown_url"


def test_a_method_that_a_route_does_not_take_is_told_with_those_it_takes() -> None:
    reply = ask("GET", "/v1/chat/completions")
    assert reply.status_code == 405
    assert reply.headers["allow"] == "POST"
    assert reply.json()["error"]["message"] == "/v1/chat/completions does not take GET, but POST"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/score", "/v1/audio/speech"])
def test_what_is_not_served_is_refused_by_name(path: str) -> None:
    reply = ask("POST", path)
    assert reply.status_code == 404
    error = reply.json()["error"]
    assert error["message"] == f"{path} is not served: {ABSENT[path]}"
    assert (error["type"], error["code"]) == ("not_found_error", "not_supported")
