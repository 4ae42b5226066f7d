"""What a command tells on standard error: dim lines of progress, yellow warnings, and one line for an error.

Lines are wrapped for people alone: a message that is piped or searched through stays in one piece.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ramify.cli.streams import discard_messages


def say(message: str) -> None:
    _print(Text(message, style="dim"))


def say_warning(message: str) -> None:
    _print(Text(message, style="yellow"))


def say_error(message: str) -> None:
    _print(Text.assemble(("error: ", "bold red"), message))


class _StandardError(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the program, and give up standard output too."""
        raise BrokenPipeError


def _print(text: Text) -> None:
    console = _StandardError(stderr=True)
    try:
        console.print(text, soft_wrap=not console.is_terminal)
    except OSError:  # its reader is gone, or its disk is full: what goes to standard output is not lost for that
        discard_messages()
