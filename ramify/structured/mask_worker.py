"""A process that finds masks: it keeps the matchers of some outputs, and writes their masks where all can read them.

Frames come on its input. What begins, forks or ends outputs has no answer; a step's masks, and what may follow tokens
that are only presumed, have one each.
"""

from __future__ import annotations

import json
import signal
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from ramify.process.bounded_child import LENGTH, read_frame
from ramify.structured.grammar_child import Vocabulary, build
from ramify.structured.limited_strings import LimitedStrings
from ramify.structured.mask_frames import FAULT, MASK, NO_WAY, NOTHING, STEP, Setup, shared
from ramify.structured.mask_threads import Mask, MaskThreads
from ramify.structured.matcher import Beginning, Ends, GrammarFaultError, LocalMatcher
from ramify.structured.plain_tokens import PlainTokens
from ramify.structured.roots import Roots
from ramify.structured.string_limits import StringLimits


class _Grammar(NamedTuple):
    roots: Roots
    strings: Any  # makes LimitedStrings, or None


class Worker:
    def __init__(self, setup: Setup) -> None:
        self._tokens, self._special = setup.tokens, setup.special_token_ids
        self._progress, self._areas = shared(setup.file, setup.shape)
        self._place = setup.place
        self._grammars: dict[int, Future[_Grammar]] = {}
        self._matchers: dict[int, LocalMatcher] = {}
        self._threads = MaskThreads(1)
        self._builder = ThreadPoolExecutor(1)  # steps of others go on while a grammar is built
        self._vocabulary = Vocabulary(self._tokens, self._special).tokenizer()
        self._progress[self._place] = 1  # and one more for every grammar that is built

    @cached_property
    def _plain(self) -> PlainTokens:
        return PlainTokens(self._tokens, self._special)

    def step(self, area: int, rows: list[list[int]]) -> dict[int, str]:
        """rows: of each output its number, the token that it has got, if there is one, and its row."""
        matchers, places = [], []
        for number, token_id, row in rows:
            matcher = self._matchers[number]
            if token_id != NOTHING:
                matcher.take(token_id)
            matchers.append(matcher)
            places.append(row)
        return LocalMatcher.find_all(matchers, places, self._areas[area])

    # -- requests --------------------------------------------------------------------------------------------

    def know(self, key: int, lark: str, limits: list[Any] | None) -> None:
        """limits: as `StringLimits.spelled` spells them."""
        self._grammars[key] = self._builder.submit(
            self._build, lark, None if limits is None else StringLimits.read(limits)
        )

    def _build(self, lark: str, limits: StringLimits | None) -> _Grammar:
        roots, strings = Roots(partial(build, self._vocabulary, lark), 1), None
        if limits is not None:
            plain = self._plain
            strings = partial(LimitedStrings, Roots(partial(build, plain.tokenizer, lark), 1).deal, limits, plain)
        self._progress[self._place] += 1
        return _Grammar(roots, strings)

    def forget(self, key: int) -> None:
        """Outputs that have begun go on."""
        self._grammars.pop(key, None)

    def begin(self, number: int, key: int, ends: list[int]) -> None:
        grammar, num_tokens = self._grammars[key].result(), len(self._tokens) - 1
        its_ends = Ends.of(frozenset(ends), num_tokens)
        beginning = Beginning(grammar.roots.deal, num_tokens, its_ends, self._threads, strings=grammar.strings)
        self._matchers[number] = LocalMatcher(beginning)

    def take(self, number: int, token_ids: list[int]) -> None:
        for token_id in token_ids:
            self._matchers[number].take(token_id)

    def fork(self, number: int, copy: int) -> None:
        self._matchers[copy] = self._matchers[number].fork()

    def free(self, numbers: list[int]) -> None:
        for number in numbers:
            self._matchers.pop(number, None)

    def presume(self, number: int, token_ids: list[int]) -> bytes:
        """An answer: the mask, nothing if the grammar does not go that way, or what is wrong."""
        try:
            mask: Mask | None = self._matchers[number].presume(token_ids)
        except GrammarFaultError as fault:
            return FAULT + str(fault).encode()
        return NO_WAY if mask is None else MASK + mask.tobytes()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(source)
    if first is None:
        return
    worker = Worker(Setup.read(first))
    while (frame := read_frame(source)) is not None:
        if frame[0] == STEP:
            numbers = np.frombuffer(frame, np.int32, offset=4)
            faults = worker.step(frame[1], numbers.reshape(-1, 3).tolist())
            answer = json.dumps(list(faults.items())).encode() if faults else b""
        else:
            name, *arguments = json.loads(frame[1:])
            answer = getattr(worker, name)(*arguments)
        if answer is not None:
            sink.write(LENGTH.pack(len(answer)) + answer)
            sink.flush()


if __name__ == "__main__":
    main()
