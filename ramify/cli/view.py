"""Continuations in a terminal: side by side where there is room, below each other where there is not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from rich.box import ROUNDED
from rich.console import Console, Group
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ramify.outputs import CompletionOutput, LogprobRow, RequestOutput

NARROWEST_PANEL = 28
BORDERS = 6  # of a panel's width: its corners, and a line and a space on both sides of the subtitle
SEPARATOR = " · "


def show_side_by_side(console: Console, outputs: Iterable[RequestOutput]) -> None:
    for output in outputs:
        if output.prompt is not None:
            console.print(Text(output.prompt, style="bold"))
        if output.error is not None:
            console.print(Text(f"error: {output.error}", style="bold red"))
        if output.prompt_logprobs is not None:
            told = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=False)
            console.print(_likelihoods((token, row) for token, row in told if row is not None))
        console.print(_grid(output.outputs, console.width))


def facts_that_fit(facts: Mapping[str, str], width: int) -> str:
    """Facts on one line, those that tell most first. One that there is no room for is left out whole."""
    shown = ""
    for fact in facts.values():
        longer = SEPARATOR.join(filter(None, (shown, fact)))
        if len(longer) <= width:
            shown = longer
    return shown


def _grid(completions: tuple[CompletionOutput, ...], width: int) -> Table | Group:
    columns = max(1, min(len(completions), width // NARROWEST_PANEL, 4))
    grid = Table.grid(expand=True, padding=(0, 0))
    for _ in range(columns):
        grid.add_column(ratio=1, overflow="fold")  # words longer than a line go on in the next
    panels = [_panel(completion, width // columns) for completion in completions]
    for start in range(0, len(panels), columns):
        grid.add_row(*panels[start : start + columns])
    return grid if panels else Group(Rule())


def _panel(completion: CompletionOutput, width: int) -> Panel:
    facts = {
        "score": "" if completion.score is None else f"score {completion.score:.2f}",
        "alpha": _mean_alpha(completion),
        "tokens": f"{len(completion.token_ids)} tokens",
        "logprob": f"logprob {completion.cumulative_logprob:.1f}",
        "end": completion.finish_reason or "",
    }
    text: Text | Group = Text(completion.text.strip("\n"))
    if completion.logprobs is not None:
        rows = zip(completion.token_ids, completion.logprobs, strict=True)
        text = Group(text, _likelihoods(rows, completion.processed_logprobs))
    return Panel(
        text,
        title=f"[bold]{completion.index}[/]",
        title_align="left",
        subtitle=Text(facts_that_fit(facts, width - BORDERS), style="dim"),
        subtitle_align="right",
        box=ROUNDED,
        padding=(0, 1),
    )


def _mean_alpha(completion: CompletionOutput) -> str:
    """The teacher's mean weight, of two models."""
    return f"α {fmean(report.alpha for report in completion.mixture):.2f}" if completion.mixture else ""


def _likelihoods(tokens: Iterable[tuple[int, LogprobRow]], processed: Sequence[LogprobRow] | None = None) -> Table:
    """A line per token: what it was, how likely (and how likely to be drawn, if told), what else was likely there."""
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    table.add_column(style="dim", overflow="ellipsis", no_wrap=True)
    for place, (token_id, row) in enumerate(tokens):
        others = [logprob for other_id, logprob in row.items() if other_id != token_id]
        chances = "  ".join(f"{_shown(other.decoded_token)} {math.exp(other.logprob):.0%}" for other in others)
        own = row[token_id]
        likely = f"{math.exp(own.logprob):.1%}"
        if processed is not None:
            likely = f"{likely} → {math.exp(processed[place][token_id].logprob):.1%}"
        table.add_row(_shown(own.decoded_token or str(token_id)), likely, chances)
    return table


def _shown(token: str | None) -> Text:
    """A token on one line: spaces and line breaks are drawn as signs."""
    return Text((token or "?").replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥"))
