"""A page that shows the OpenAPI document to people: made here, with nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { border-top: 1px solid #8884; padding-top: 1rem; } code { font-size: 0.9em; }
table { border-collapse: collapse; width: 100%; display: block; overflow-x: auto; }
td, th { text-align: left; vertical-align: top; padding: 0.25rem 0.75rem 0.25rem 0; border-bottom: 1px solid #8883; }
.method { text-transform: uppercase; color: #0a7; font-weight: 600; margin-right: 0.5em; }
"""


def reference_page(document: dict[str, Any]) -> str:
    return "".join(_page(document))


def _page(document: dict[str, Any]) -> Iterator[str]:
    info = document["info"]
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])} API</title>"
    yield f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style>"
    yield f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>"
    for paragraph in info["description"].strip().split("\n\n"):
        yield f"<p>{_prose(paragraph)}</p>"
    yield "<p>The same for programs: <a href=openapi.json>openapi.json</a>.</p>"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield from _operation(document, path, method, operation)
    yield "</html>"


def _operation(document: dict[str, Any], path: str, method: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"<h2><span class=method>{escape(method)}</span><code>{escape(path)}</code></h2>"
    yield f"<p>{_prose(operation.get('description', ''))}</p>"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        yield from _table(document, "Body", _resolved(document, body))
    for status, response in operation["responses"].items():
        schema = response.get("content", {}).get("application/json", {}).get("schema", {})
        if status == "200" and "$ref" in schema:
            yield from _table(document, "Reply", _resolved(document, schema))
    yield "<p>" + "<br>".join(
        f"<b>{escape(status)}</b> {_prose(response.get('description', ''))}"
        for status, response in operation["responses"].items()
    )
    yield "</p>"


def _table(document: dict[str, Any], title: str, schema: dict[str, Any]) -> Iterator[str]:
    required = set(schema.get("required", ()))
    yield f"<table><tr><th>{title}<th>type<th>"
    for name, field in schema.get("properties", {}).items():
        mark = " (required)" if title == "Body" and name in required else ""
        says = _prose(field.get("description", ""))
        yield f"<tr><td><code>{escape(name)}</code>{mark}<td>{escape(_kind(document, field))}<td>{says}"
    yield "</table>"


def _kind(document: dict[str, Any], schema: dict[str, Any]) -> str:
    """A type in few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return " | ".join(map(repr, schema["enum"]))
    if "anyOf" in schema:
        return " | ".join(kind for each in schema["anyOf"] if (kind := _kind(document, each)) != "null")
    if schema.get("type") == "array":
        return f"list of {_kind(document, schema.get('items', {}))}"
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    span = f" {'' if low is None else low}..{'' if high is None else high}" if (low, high) != (None, None) else ""
    return f"{schema.get('type', 'any')}{span}"


def _resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in schema:
        return schema
    resolved: dict[str, Any] = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]]
    return resolved


def _prose(text: str) -> str:
    """Text with `code` in it."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))
