"""`ramify serve` as a process, for tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.serving import ENGINE_PROCESS

OWN = ["--engine-process"] if ENGINE_PROCESS else []


class Process:
    def __init__(self, *arguments: str, **environment: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", "from ramify.cli import main; main()", "serve", *OWN, "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "200", **environment},
        )
        self.said: list[str] = []

    def url(self) -> str:
        """Where it serves, as it says itself once the model is there."""
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.said.append(line)
            found = re.search(r"at (http://\S+)", line)
            if found:
                return found[1]
        raise AssertionError(f"it never served: {''.join(self.said)}")

    def end(self, *signals: int) -> tuple[int, str]:
        """Sends signals; returns the exit status and what it said since it served."""
        for number in signals:
            self.popen.send_signal(number)
            time.sleep(0.2)
        _, said = self.popen.communicate(timeout=60)
        return self.popen.returncode, said


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[Process]:
    made = Process(*arguments, **environment)
    try:
        yield made
    finally:
        made.popen.kill()
        made.popen.communicate()
