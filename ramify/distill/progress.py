"""Progress by tokens: a bar in a terminal, elsewhere a plain line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

from ramify.distill.tally import percent

SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_REFRESHES = 0.2


class Progress:
    """How far a run is, and how fast.

    The whole is what all problems may take at most, `tokens_of_problem` each. Every token counts as it is drawn, and a
    problem that ends sooner counts in full: the share only grows, and ends at 1.
    """

    def __init__(
        self,
        label: str,
        *,
        problems: int,
        done: int,
        tokens_of_problem: int,
        count_tokens: Callable[[], int],
        visible: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label = label
        self._problems = problems
        self._done = done
        self._whole = problems * tokens_of_problem
        self._of_problem = tokens_of_problem
        self._count_tokens = count_tokens
        self._first = count_tokens()
        self._ended_tokens = 0  # of the problems that ended here
        self._samples = self._accepted = 0
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._start = self._shown = clock()
        self._visible = visible
        self._bar: tqdm | None = None
        if visible and self._stream.isatty():
            self._bar = tqdm(
                total=self._whole,
                initial=done * tokens_of_problem,
                file=self._stream,
                bar_format="{percentage:3.0f}%|{bar}| {desc}",
                dynamic_ncols=True,
            )
            self._show()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._show()
            self._bar.close()

    def ended(self, *, tokens: int, samples: int = 0, accepted: int = 0) -> None:
        """One more problem is done, in so many tokens."""
        self._done += 1
        self._ended_tokens += tokens
        self._samples += samples
        self._accepted += accepted

    def tick(self) -> None:
        """To be called after every step: shows how things stand if it is time to."""
        if not self._visible:
            return
        pause = SECONDS_BETWEEN_LINES if self._bar is None else SECONDS_BETWEEN_REFRESHES
        now = self._clock()
        if now - self._shown >= pause:
            self._shown = now
            self._show()

    def share(self) -> float:
        drawn = self._count_tokens() - self._first
        counted = self._done * self._of_problem + max(drawn - self._ended_tokens, 0)
        return min(counted / self._whole, 1.0) if self._whole else 1.0

    def describe(self) -> str:
        drawn = self._count_tokens() - self._first
        speed = drawn / max(self._clock() - self._start, 1e-9)
        told = f"{self._label}: {self._done} of {self._problems} problems, {drawn:,} tokens ({speed:,.0f}/s)"
        return f"{told}, {percent(self._accepted, self._samples)} accepted" if self._samples else told

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.n = round(self.share() * self._whole)
            self._bar.set_description_str(self.describe(), refresh=True)
        elif self._visible:
            try:
                print(f"{self.share():.0%}, {self.describe()}", file=self._stream, flush=True)
            except OSError:  # nobody reads it any more, or its disk is full: the run goes on
                self._visible = False
