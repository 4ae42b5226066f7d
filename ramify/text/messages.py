"""Checks of the messages of a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ramify.errors import InvalidInputError, UnsupportedError
from ramify.validation import shown

_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_RESULTS = ("tool", "function")  # a tool may have nothing to say
_MAX_DEPTH = 64
_SHOWN_CHARACTERS = 80


def as_conversations(messages: Any) -> list[Any]:
    """A list of conversations, from several or from one: a list of messages."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidInputError(
            f"messages must be a list of messages, or a list of such lists, not {type(messages).__name__}"
        )
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)


def validate_messages(messages: object) -> list[dict[str, Any]]:
    """The messages as plain data, each content a text or None; InvalidInputError names what is wrong.

    The text parts of one content are joined by line breaks. Only a message with `tool_calls`, or a tool's, may have
    none. Arguments of its calls that come as JSON text, as in OpenAI's protocol, become objects, which templates write.
    Other keys (name, tool_call_id) are passed on as they are, unless they are null, as clients write what is not there.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidInputError(f"messages must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise InvalidInputError("messages must not be empty")
    checked = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    _name_results(checked)
    return checked


def _name_results(messages: list[dict[str, Any]]) -> None:
    """Tells of a result which function it is of, where only its call says so: some templates write that."""
    names: dict[Any, Any] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            if isinstance(call, dict) and isinstance(call.get("id"), str) and isinstance(call.get("function"), dict):
                names[call["id"]] = call["function"].get("name")
        called = message.get("tool_call_id")
        if isinstance(called, str) and isinstance(names.get(called), str):
            message.setdefault("name", names[called])


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidInputError(f"{where} must be an object with role and content, not {type(message).__name__}")
    if "role" not in message:
        raise InvalidInputError(f"{where}.role is missing")
    role = message["role"]
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidInputError(f"{where}.role must be a word of letters, digits, _ and -, not {shown(role)}")
    if "content" not in message and not message.get("tool_calls"):
        raise InvalidInputError(f"{where}.content is missing")
    if message.get("content") is None and not message.get("tool_calls") and role not in _RESULTS:
        raise InvalidInputError(f"{where}.content is null, which only a message with tool_calls may have; send a text")
    checked: dict[str, Any] = {}
    for key, value in message.items():
        if not isinstance(key, str):
            raise InvalidInputError(f"{where} has a key that is no text: {shown(key)}")
        place = f"{where}.{key[:_SHOWN_CHARACTERS]}"
        if key == "content":
            checked[key] = _content(value, place)
        elif value is not None and (value or key != "tool_calls"):
            checked[key] = plain_data(value, place)
    calls = checked.get("tool_calls", [])
    if not isinstance(calls, list):
        raise InvalidInputError(f"{where}.tool_calls must be a list of calls, not {type(calls).__name__}")
    if calls:
        checked["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return checked


def _call(call: Any, where: str) -> Any:
    """A call with its arguments as an object; whatever else it is, the template may know."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": _arguments(function["arguments"], where)}}


def _arguments(text: str, where: str) -> dict[str, Any]:
    place = f"{where}.function.arguments"
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        raise InvalidInputError(f"{place} must be a JSON object as text, got {shown(text)}") from None
    if not isinstance(arguments, dict):
        raise InvalidInputError(f"{place} must be a JSON object as text, got {shown(text)}")
    return plain_data(arguments, place)  # type: ignore[no-any-return]


def _content(content: object, where: str) -> str | None:
    if content is None:
        return None
    if isinstance(content, str):
        return _plain_text(content, lambda: where)
    if not isinstance(content, list):
        raise InvalidInputError(f"{where} must be a text, null or a list of parts, not {type(content).__name__}")
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidInputError(f"{where} must be an object with a type, not {type(part).__name__}")
    if part.get("type") != "text":
        raise UnsupportedError(f"{where}.type {shown(part.get('type'))} is not supported; only 'text' is")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidInputError(f"{where}.text must be a text, not {type(text).__name__}")
    return _plain_text(text, lambda: f"{where}.text")


def _plain_text(text: str, place: Callable[[], str]) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{place()} has a lone surrogate at position {error.start}") from None
    # A subclass of str could have methods that a template may call.
    return str.__str__(text)


def plain_data(value: object, where: str) -> Any:
    """A copy made of JSON's types alone: templates must not get objects that have methods of their own."""
    return _Copier(where).copy(value)


class _Copier:
    """Copies one value. Where it is inside of it becomes text only when something is wrong: a name may be megabytes."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._path: list[str | int] = []

    def copy(self, value: object) -> Any:
        if len(self._path) > _MAX_DEPTH:
            raise InvalidInputError(f"{self._where} is nested more than {_MAX_DEPTH} levels deep")
        if value is None or type(value) in (bool, int, float):
            return value
        if isinstance(value, str):
            return _plain_text(value, self._place)
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    raise InvalidInputError(f"{self._place()} has a key that is no text: {shown(key)}")
            return {str.__str__(key): self._inner(key, inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._inner(index, inner) for index, inner in enumerate(value)]
        raise InvalidInputError(f"{self._place()} must be made of JSON types, not {type(value).__name__}")

    def _inner(self, step: str | int, value: object) -> Any:
        self._path.append(step)
        copied = self.copy(value)
        self._path.pop()
        return copied

    def _place(self) -> str:
        steps = (f"[{step}]" if isinstance(step, int) else f".{step[:_SHOWN_CHARACTERS]}" for step in self._path)
        return self._where + "".join(steps)
