"""Rows in, n rows of each out: what was in a row stays there, and columns are added."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ramify.errors import InvalidInputError
from ramify.ray.cluster import ray_module

Entry = dict[str, Any]
Result = TypeVar("Result")
# How columns are named in Arrow; a type in brackets is a list of it.
Fields = Mapping[str, str]


def arrow_type(name: str) -> Any:
    """`int`, `float`, `text`, `bool`, `[…]`, or `alternatives`: the likeliest tokens at one place."""
    arrow = ray_module("pyarrow")
    if name.startswith("["):
        return arrow.list_(arrow_type(name[1:-1]))
    if name == "alternatives":
        fields = {"token_id": "int", "logprob": "float", "rank": "int", "decoded_token": "text"}
        return arrow.list_(arrow.struct([(field, arrow_type(kind)) for field, kind in fields.items()]))
    return {"int": arrow.int64(), "float": arrow.float64(), "text": arrow.string(), "bool": arrow.bool_()}[name]


def check_columns(names: Iterable[str], needed: Sequence[str], fields: Fields) -> None:
    """The dataset has what the stage reads, and none of what it writes."""
    names = list(names)
    for name in needed:
        if name not in names:
            raise InvalidInputError(
                f"the rows have no column {name!r}: there is {', '.join(map(repr, names)) or 'none'}"
            )
    taken = [name for name in names if name in fields]
    if taken:
        raise InvalidInputError(
            f"the rows have columns that the stage writes itself ({', '.join(taken)}): rename_columns gives them other "
            f"names"
        )


def extended(table: Any, entries_of_rows: Sequence[Sequence[Entry]], fields: Fields) -> Any:
    """Each row as often as it has entries, with an entry's values in the columns of `fields`."""
    arrow = ray_module("pyarrow")
    places = [place for place, entries in enumerate(entries_of_rows) for _ in entries]
    made = table.take(arrow.array(places, arrow.int64()))
    flat = [entry for entries in entries_of_rows for entry in entries]
    for name, kind in fields.items():
        made = made.append_column(name, arrow.array([entry.get(name) for entry in flat], arrow_type(kind)))
    return made


async def all_of(works: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Their results in order; the first that raises ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
