"""Document 4 lists classes and methods: each exists under its name, with the arguments that the document gives it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import ramify

DOCUMENT = Path(__file__).parents[1] / "documents" / "4-parallel-sampling-module.md"


class Listed(NamedTuple):
    owner: str
    method: str
    arguments: list[str]


def listed_classes() -> dict[str, list[Listed]]:
    text = DOCUMENT.read_text(encoding="utf-8")
    classes = {}
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        name = section.split("`")[1]
        methods = re.findall(r"^- `(\w+)\((.*)\)`$", section, flags=re.MULTILINE)
        classes[name] = [Listed(name, method, arguments.split(", ")) for method, arguments in methods]
        stated = re.search(r"\*\*Methods\*\* \((\d+)\)", section)
        assert len(methods) == (int(stated[1]) if stated else 0), f"{name}: not all methods were read"
    return classes


CLASSES = listed_classes()
METHODS = [listed for methods in CLASSES.values() for listed in methods]


def test_the_document_was_read_whole() -> None:
    stated = re.search(r"## Classes \((\d+)\)", DOCUMENT.read_text(encoding="utf-8"))
    assert stated
    assert len(CLASSES) == int(stated[1]) == 11
    assert len(METHODS) == 35


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_is_exported(name: str) -> None:
    assert inspect.isclass(getattr(ramify, name))
    assert name in ramify.__all__


@pytest.mark.parametrize("listed", METHODS, ids=[f"{listed.owner}.{listed.method}" for listed in METHODS])
def test_every_method_takes_what_the_document_says(listed: Listed) -> None:
    method = inspect.getattr_static(getattr(ramify, listed.owner), listed.method)
    function = method.fget if isinstance(method, property) else method
    assert inspect.isfunction(function)
    parameters = inspect.signature(function).parameters
    assert list(parameters)[: len(listed.arguments)] == listed.arguments
    # What we add must be optional, or the document's own calls would not work.
    added = list(parameters.values())[len(listed.arguments) :]
    assert all(parameter.default is not inspect.Parameter.empty for parameter in added)
