"""An engine in a process of its own, so that engines can take turns; and how quiet the machine is meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

QUIET_SECONDS = 600  # how long to wait for a quiet machine
DISTURBED = 0.05  # share of the machine's time that others may take during a run
ATTEMPTS = 8  # at a run that others disturb


class Engine:
    """An adapter of bench/engines.py, asked for one run at a time. `trouble` says why it cannot go on, if it cannot."""

    def __init__(self, name: str, python: str, folder: str) -> None:
        self.name = name
        self.trouble: str | None = None
        self.ready_seconds: float | None = None
        self._python = python
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the engine
        self._process: subprocess.Popen[str] | None = None
        command = [python, str(Path(__file__).with_name("engines.py")), name, folder]
        try:
            # A process group of its own, so that an engine's helper processes are stopped and ended with it.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            self.trouble = f"{python} cannot be run: {error.strerror}"

    def wait_ready(self) -> bool:
        answer = self._answer()
        if answer is None:
            return False
        self.ready_seconds = answer["ready"]
        self._signal(signal.SIGSTOP)
        return True

    def run(self, workload: str, clock: str = "seconds") -> float | None:
        """Tokens per second, or None if the engine cannot. Between runs it is stopped: idle engines may still spin.

        The clock may be "processor_seconds", of the engine's main process.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(workload + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        if answer is not None and "cannot" in answer:
            self.trouble = answer["cannot"]
            return None
        return None if answer is None else answer["tokens"] / answer[clock]

    def run_quietly(self, workload: str) -> float | None:
        """As run, but begins on a quiet machine and repeats while others disturb it."""
        speed = None
        for _ in range(ATTEMPTS):
            wait_until_quiet()
            start, busy, own = time.perf_counter(), _busy_seconds(), self._cpu_seconds()
            speed = self.run(workload)
            if speed is None:
                return None
            others = (_busy_seconds() - busy) - (self._cpu_seconds() - own)
            share = others / (time.perf_counter() - start) / (os.cpu_count() or 1)
            if share <= DISTURBED:
                return speed
            print(f"{self.name} on {workload}: others took {share:.0%} of the machine, again", file=sys.stderr)
        return speed

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        self._errors.close()

    def _cpu_seconds(self) -> float:
        """Processor time of the engine and its helpers so far."""
        assert self._process is not None
        ticks = 0
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = file.read_text().rpartition(")")[2].split()  # after the name: state, parent, process group, …
                if int(fields[2]) == self._process.pid:
                    ticks += int(fields[11]) + int(fields[12])  # in user code, in the system
        return ticks / os.sysconf("SC_CLK_TCK")

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any] | None:
        """One line of JSON, or None if the process has ended; then `trouble` is the last thing that it said."""
        if self._process is None:
            return None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)  # type: ignore[no-any-return]
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").split("\n")
        last = next((text.strip() for text in reversed(said) if text.strip()), f"it ended with {self._process.wait()}")
        self.trouble = f"it is not installed for {self._python} ({last})" if "No module named" in last else last
        return None


def wait_until_quiet() -> None:
    """Waits until the machine has been idle for two seconds."""
    end = time.monotonic() + QUIET_SECONDS
    quiet = 0
    while quiet < 2 and time.monotonic() < end:
        busy = _busy_seconds()
        time.sleep(1)
        quiet = quiet + 1 if _busy_seconds() - busy < DISTURBED * (os.cpu_count() or 1) else 0


def _busy_seconds() -> float:
    """Processor time of all processes so far."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    user, nice, system = fields[:3]
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")
