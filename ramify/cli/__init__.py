"""The command `ramify`. Whatever is heavy is imported by the command that needs it."""

from ramify.cli.commands import main

__all__ = ["main"]
