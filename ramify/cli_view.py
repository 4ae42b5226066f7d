"""Continuations in a terminal: side by side where there is room, below each other where there is not."""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import ROUNDED
from rich.console import Console, Group
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ramify.outputs import CompletionOutput, RequestOutput

NARROWEST_PANEL = 28


def show_side_by_side(console: Console, outputs: Iterable[RequestOutput]) -> None:
    for output in outputs:
        if output.prompt is not None:
            console.print(Text(output.prompt, style="bold"))
        if output.error is not None:
            console.print(Text(f"error: {output.error}", style="bold red"))
        console.print(_grid(output.outputs, console.width))


def _grid(completions: tuple[CompletionOutput, ...], width: int) -> Table | Group:
    columns = max(1, min(len(completions), width // NARROWEST_PANEL, 4))
    grid = Table.grid(expand=True, padding=(0, 0))
    for _ in range(columns):
        grid.add_column(ratio=1)
    panels = [_panel(completion) for completion in completions]
    for start in range(0, len(panels), columns):
        grid.add_row(*panels[start : start + columns])
    return grid if panels else Group(Rule())


def _panel(completion: CompletionOutput) -> Panel:
    reason = "" if completion.finish_reason is None else completion.finish_reason.value
    facts = [f"{len(completion.token_ids)} tokens", f"logprob {completion.cumulative_logprob:.1f}", reason]
    if completion.score is not None:
        facts.insert(0, f"score {completion.score:.2f}")
    return Panel(
        Text(completion.text.strip("\n")),
        title=f"[bold]{completion.index}[/]",
        title_align="left",
        subtitle=f"[dim]{' · '.join(fact for fact in facts if fact)}[/]",
        subtitle_align="right",
        box=ROUNDED,
        padding=(0, 1),
    )
