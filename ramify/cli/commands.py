"""`ramify`: every command in one place, each in a file of its own."""

from __future__ import annotations

import errno
import sys
from typing import Annotated

import typer

from ramify.cli import models
from ramify.cli.bench import SCRIPT, bench
from ramify.cli.chat import chat
from ramify.cli.distill import distill
from ramify.cli.doctor import doctor
from ramify.cli.generate import generate
from ramify.cli.help import WIDEST, Command
from ramify.cli.messages import say_error
from ramify.cli.serve import serve
from ramify.cli.streams import discard_output, flush_messages, prepare_streams
from ramify.errors import EngineLostError, RamifyError
from ramify.version import __version__

app = typer.Typer(
    name="ramify",
    help="Sample from language models: one prompt, many continuations.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of flags where they lack room
    context_settings={"max_content_width": WIDEST},
)
for command in (generate, chat, serve, distill, doctor):
    app.command(cls=Command)(command)
if SCRIPT.exists():  # it reads its own arguments, --help among them
    takes_anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(add_help_option=False, context_settings=takes_anything)(bench)
app.add_typer(models.app, name="models")


def main() -> None:
    """The command's entry point: an error of ours is one line."""
    prepare_streams()
    try:
        try:
            app(prog_name="ramify")
        finally:
            flush_messages()
            sys.stdout.flush()  # what cannot be written is told below, not by Python as it ends
    except RamifyError as error:
        say_error(str(error))
        sys.exit(1 if isinstance(error, EngineLostError) else 2)
    except BrokenPipeError:  # whoever read it has had enough
        discard_output()
        sys.exit(1)
    except PermissionError as error:  # of a file or folder that a flag names, or the cache
        if error.filename is None:
            raise
        say_error(f"{error.filename}: {error.strerror}")
        sys.exit(2)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        discard_output()
        say_error("standard output cannot be written: the disk is full")
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ramify {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True),
    ] = False,
) -> None: ...
