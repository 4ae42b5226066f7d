"""What a command tells on standard error: dim lines of progress, yellow warnings, and one line for an error.

Lines are wrapped for people alone: a message that is piped or searched through stays in one piece.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def say(message: str) -> None:
    _print(Text(message, style="dim"))


def say_warning(message: str) -> None:
    _print(Text(message, style="yellow"))


def say_error(message: str) -> None:
    _print(Text.assemble(("error: ", "bold red"), message))


def _print(text: Text) -> None:
    console = Console(stderr=True)
    console.print(text, soft_wrap=not console.is_terminal)
