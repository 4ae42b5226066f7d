"""What a command tells on standard error: dim lines of progress, and one line for an error.

Long lines are left to the terminal: a message that is piped or searched through stays in one piece.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def say(message: str) -> None:
    Console(stderr=True).print(Text(message, style="dim"), soft_wrap=True)


def say_error(message: str) -> None:
    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
