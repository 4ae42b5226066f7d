"""ToolUse: which tools a request offers and which of them must be called, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ramify import validation as check
from ramify.errors import InvalidInputError
from ramify.text.messages import plain_data

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`tools` are what the template gets. One of the `forced` functions must be called; none: as the model likes."""

    tools: tuple[dict[str, Any], ...]
    functions: Mapping[str, dict[str, Any]]  # by name
    forced: tuple[str, ...] = ()
    most_calls: int | None = None

    @classmethod
    def of(
        cls,
        tools: object,
        tool_choice: object = None,
        parallel_tool_calls: object = None,
        *,
        is_openai: bool = True,
    ) -> ToolUse | None:
        """None where no tool is to be called; InvalidInputError names what is wrong.

        Unless they are `is_openai`, tools may have any shape that a template understands; one that is no function of
        OpenAI's shape has no name here.
        """
        listed = _list_of(tools, is_openai=is_openai)
        functions = _by_name(listed)
        forced = _forced(tool_choice, list(functions), has_tools=bool(listed))
        if parallel_tool_calls is not None:
            check.boolean("parallel_tool_calls", parallel_tool_calls)
        if not listed or tool_choice == "none":
            return None
        most_calls = 1 if parallel_tool_calls is False else None
        return cls(tuple(listed), functions, forced, most_calls)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.functions)

    @property
    def strict(self) -> tuple[str, ...]:
        """The functions whose arguments must fit their schema, however they come to be called."""
        return tuple(name for name, function in self.functions.items() if function.get("strict") is True)

    def schemas(self) -> dict[str, dict[str, Any]]:
        """Of the arguments of each function, as far as it is strict."""
        strict = self.strict
        return {
            name: _parameters(function) if name in strict else {"type": "object"}
            for name, function in self.functions.items()
        }

    def variables(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """What the template gets, beside what the caller gives it."""
        if given is not None and "tools" in given:
            raise InvalidInputError("chat_template_kwargs must not name 'tools': they have a place of their own")
        return {**(given or {}), "tools": list(self.tools)}

    def schema(self, arguments: str) -> dict[str, Any]:
        """The JSON schema of one call of a forced function, whose arguments go by that name."""
        calls = []
        for index, name in enumerate(self.forced):
            place = "#" if len(self.forced) == 1 else f"#/anyOf/{index}"
            parameters = _moved(_parameters(self.functions[name]), f"{place}/properties/{arguments}")
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": name}, arguments: parameters},
                    "required": ["name", arguments],
                    "additionalProperties": False,
                }
            )
        return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """Its schema; a function without one takes no arguments."""
    given = function.get("parameters")
    return dict(given) if given else {"type": "object", "properties": {}, "additionalProperties": False}


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to its own parts still find them when it stands at another place."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + part[1:]
        if key == "$ref" and isinstance(part, str) and part.startswith("#")
        else _moved(part, place)
        for key, part in schema.items()
    }


def _list_of(tools: object, *, is_openai: bool) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise check.refuse("tools", tools, "a list of tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidInputError(f"tools must be at most {MAX_TOOLS}, got {len(tools)}")
    return [_tool(tool, f"tools[{index}]", is_openai=is_openai) for index, tool in enumerate(tools)]


def _tool(given: object, where: str, *, is_openai: bool) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise check.refuse(where, given, "an object with type and function")
    tool: dict[str, Any] = plain_data(given, where)
    if not is_openai and "function" not in tool:
        return tool
    if tool.get("type", "function" if not is_openai else None) != "function":
        raise check.refuse(f"{where}.type", tool.get("type"), "'function'")
    _refuse_others(tool, ("type", "function"), where)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise check.refuse(f"{where}.function", function, "an object with a name")
    _refuse_others(function, _FIELDS, f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise check.refuse(f"{where}.function.name", name, "1 to 128 letters, digits, _, - and .")
    for field, kind, what in (
        ("description", str, "a text"),
        ("parameters", dict, "a JSON schema, which is an object"),
        ("strict", bool, "true or false"),
    ):
        value = function.get(field)
        if value is not None and not isinstance(value, kind):
            raise check.refuse(f"{where}.function.{field}", value, what)
    return tool


def _refuse_others(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for field in given:
        if field not in known:
            raise InvalidInputError(f"{where}.{field[:80]} is not known; there are: {', '.join(known)}")


def _by_name(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    functions: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            continue
        if name in functions:
            raise InvalidInputError(f"tools[{index}] has the name {name!r}, which another tool has already")
        functions[name] = function
    return functions


def _forced(choice: object, names: Sequence[str], *, has_tools: bool) -> tuple[str, ...]:
    match choice:
        case None | "none" | "auto":
            return ()
        case "required" if names:
            return tuple(names)
        case "required" if has_tools:
            raise InvalidInputError("tool_choice is 'required', which needs tools that have names")
        case "required":
            raise InvalidInputError("tool_choice is 'required', which needs tools")
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in names:
                known = ", ".join(map(repr, names)) or "none"
                raise InvalidInputError(f"tool_choice names {check.shown(name)}, which is not among the tools: {known}")
            return (name,)
        case _:
            allowed = "'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"
            raise check.refuse("tool_choice", choice, allowed)
