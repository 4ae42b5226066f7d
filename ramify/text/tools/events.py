"""What a parser of tool calls tells, in order, and all of it put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallOpened:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsGrown:
    """A piece of the call's arguments, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallClosed:
    """The call is whole. One that was opened and never closed was broken: its text comes as Content."""

    index: int


Event = Content | CallOpened | ArgumentsGrown | CallClosed


class ToolParser(Protocol):
    """Reads one answer in pieces, cut anywhere: what it tells in sum is the same for every cut."""

    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """What was held back, now that nothing more comes."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: its text beside the calls, and the calls that are whole, as (name, arguments)."""

    content: str
    calls: tuple[tuple[str, str], ...]


def answer_of(events: Iterable[Event]) -> Answer:
    content: list[str] = []
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    closed: list[int] = []
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case CallOpened(index, name):
                names[index], arguments[index] = name, []
            case ArgumentsGrown(index, text):
                arguments[index].append(text)
            case CallClosed(index):
                closed.append(index)
    return Answer("".join(content), tuple((names[index], "".join(arguments[index])) for index in closed))


def read_whole(parser: ToolParser, text: str) -> Answer:
    return answer_of([*parser.feed(text), *parser.finish()])
