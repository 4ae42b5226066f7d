"""A command's help: flags by panel, names never cut, at any width of the terminal."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from typer.core import TyperCommand

WIDEST = 110  # longer lines are hard to read


class Command(TyperCommand):
    """A command whose many flags are listed under the names of their panels.

    Names that leave no room beside them have a line of their own, above their text.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """An argument that is needed stands bare, as everywhere; brackets are for what may be left out."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                panels["Arguments"].append((parameter.metavar or record[0], record[1]))
            else:
                panels[getattr(parameter, "rich_help_panel", None) or "Options"].append(record)
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)
