"""Messages typed in a terminal: edited, remembered for the session, pasted with all their lines."""

from __future__ import annotations

import os
import sys

from ramify.cli.standard_input import text_alone

BOLD, PLAIN = "\033[1m", "\033[0m"


class LineEditor:
    """Reads messages from standard input, by readline where a person types.

    Nothing typed is written to a file: what people say to a model is theirs.
    """

    def __init__(self, prompt: str) -> None:
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._prompts = ("", "")
        if self.is_interactive:
            self._prompts = (_bold(prompt, edits=_enable_editing()), "." * (len(prompt) - 1) + " ")

    def read(self) -> str | None:
        """The next message, None at the end of the input. A line that ends in a backslash goes on in the next."""
        lines: list[str] = []
        try:
            while True:
                with text_alone():
                    line = input(self._prompts[bool(lines)])
                if not (self.is_interactive and line.endswith("\\")):
                    return "\n".join([*lines, line])
                lines.append(line[:-1])
        except EOFError:
            return "\n".join(lines) if lines else None


def _enable_editing() -> bool:
    """Whether there is a line editor; importing it is what makes `input` use it."""
    try:
        import readline
    except ImportError:  # not on this system
        return False
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")  # a paste of many lines is one message
    return True


def _bold(prompt: str, *, edits: bool) -> str:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return prompt
    # An editor must know which characters take no room, else long lines are drawn in the wrong place.
    return f"\001{BOLD}\002{prompt}\001{PLAIN}\002" if edits else f"{BOLD}{prompt}{PLAIN}"
