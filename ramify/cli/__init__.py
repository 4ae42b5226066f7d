"""The command `ramify`. Whatever is heavy is imported by the command that needs it."""

import os
import sys

from ramify.cli.interruptions import INTERRUPTED, end_at_once_while_importing, end_well_by_sigterm


def main() -> None:
    """Ctrl-C is no error: not while the commands are imported either, which takes a moment on a cold disk."""
    # Read when torch is imported: threads that wait for its next operator sleep, and leave the cores to others.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    end_at_once_while_importing()
    if sys.argv[1:2] == ["serve"]:
        end_well_by_sigterm()
    try:
        from ramify.cli.commands import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


__all__ = ["main"]
