"""`ramify doctor`: what was found on this machine, what will be used, what is missing and what to do about it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ramify.cli.checkup import Finding, State, findings, what_will_be_used
from ramify.cli.messages import say

MARKS: dict[State, tuple[str, str]] = {"good": ("ok", "green"), "lacking": ("--", "yellow"), "broken": ("!!", "red")}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with all findings.")] = False,
) -> None:
    """Look at this machine: what will be used, and what is missing.

    Each thing that is missing comes with what to do about it. The status is 0 if models can run, and 1 if
    something must be mended first.
    """
    console = Console()
    found: list[Finding] = []
    for finding in findings(say):
        found.append(finding)
        if not as_json:
            _print(console, finding)
    is_broken = any(each.state == "broken" for each in found)
    used = None if is_broken else what_will_be_used()
    if as_json:
        print(json.dumps({"findings": [asdict(each) for each in found], "will_use": used}))
    else:
        _print_ending(console, found, used)
    if is_broken:
        raise typer.Exit(1)


def _print_ending(console: Console, found: list[Finding], used: str | None) -> None:
    lacking = sum(each.state == "lacking" for each in found)
    ending = "Nothing runs until what is marked !! is mended." if used is None else f"Models run on {used}."
    console.print(Text(f"\n{ending}", style="bold"), soft_wrap=not console.is_terminal)
    if lacking:
        console.print(f"What is marked -- ({lacking}) is not needed for that, but would be better to have.")


def _print(console: Console, finding: Finding) -> None:
    mark, colour = MARKS[finding.state]
    line = Text.assemble((f"{mark} ", colour), (f"{finding.topic}: ", "bold"), finding.found)
    if finding.advice is not None:
        line.append(f"\n   -> {finding.advice}")
    console.print(line, soft_wrap=not console.is_terminal)
