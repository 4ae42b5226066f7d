"""Grammars: what callers ask for to matchers, for one model's tokenizer."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramify.errors import InvalidInputError, UnsupportedError
from ramify.process.bounded import BoundedProcess, FailedError, OutOfMemoryError, OutOfTimeError
from ramify.structured.faults import TOO_LARGE, TOO_LONG, fault_of
from ramify.structured.lark import lark_of
from ramify.structured.limited_strings import LimitedStrings
from ramify.structured.mask_threads import MaskThreads
from ramify.structured.matcher import Beginning, Ends, LocalMatcher, Matcher
from ramify.structured.plain_tokens import NEUTRAL, PlainTokens
from ramify.structured.roots import Roots
from ramify.structured.string_limits import StringLimits, limits_of
from ramify.structured_outputs import Structure
from ramify.text.codec import TextCodec
from ramify.text.token_text import spelled_bytes
from ramify.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ramify.structured.mask_workers import MaskWorkers

SECONDS = 1  # of the processor's time to build a grammar
MEMORY_BYTES = 2 * 2**30
BYTES_PER_SECOND = 2**18
MOST_KEPT = 32  # grammars; each of their roots takes some 40 MB at the very most
MOST_MORE_ROOTS = 96  # beyond one for each grammar


@dataclass(slots=True)
class _Grammar:
    roots: Roots
    limits: StringLimits | None = None
    key: int | None = None  # by which workers know it
    known_by: MaskWorkers | None = None  # these workers
    lock: threading.Lock = field(default_factory=threading.Lock)
    strings_roots: Roots | None = None  # over the second vocabulary, of `PlainTokens`
    strings: Callable[[], LimitedStrings] | None = None

    def __len__(self) -> int:
        return len(self.roots) + (0 if self.strings_roots is None else len(self.strings_roots) - 1)

    def shrink(self) -> int:
        return self.roots.shrink() + (0 if self.strings_roots is None else self.strings_roots.shrink())


class Grammars:
    """Builds each grammar once, and keeps the latest. Safe to call from several threads.

    A grammar is tried in a process with limits before it is built here, so that none takes long or much memory here.
    Nothing of it is started, and llguidance not imported, before somebody asks for a grammar.
    """

    def __init__(self, codec: TextCodec, threads: MaskThreads | None = None) -> None:
        self._tokenizer = codec.tokenizer
        self._built: OrderedDict[Structure, _Grammar] = OrderedDict()
        self._threads = MaskThreads() if threads is None else threads
        self._num_workers = 0
        self._workers: MaskWorkers | None = None
        self._lock = threading.Lock()

    def check(self, structure: Structure) -> None:
        """Raises InvalidInputError if outputs cannot have this structure."""
        self._grammar(structure)

    def begin(self, structure: Structure, ends: Sequence[int], begun: Sequence[int] = ()) -> Matcher:
        """A matcher for an output that may end with these tokens; `begun` is what stands there already."""
        if not ends:
            raise UnsupportedError(
                "structured_outputs need a token that ends an output, and this model names none: give stop_token_ids"
            )
        grammar, num_tokens, before = self._grammar(structure), len(self._tokens) - 1, tuple(begun)
        its_ends = Ends.of(ends, num_tokens)
        workers = None if before else self._running_workers()
        if workers is not None:
            with grammar.lock:
                if grammar.key is None or grammar.known_by is not workers:
                    grammar.key = workers.know(lark_of(structure), grammar.limits)
                    grammar.known_by = workers
                key = grammar.key
            if not workers.is_lost:
                return workers.begin(key, its_ends)
        beginning = Beginning(grammar.roots.deal, num_tokens, its_ends, self._threads, before, grammar.strings)
        matcher = LocalMatcher(beginning)
        if matcher.state.is_error():
            raise InvalidInputError("structured_outputs do not allow what stands before the output")
        self._bound_roots()
        return matcher

    def use_workers(self, count: int) -> None:
        """From now on masks are found by so many processes, if there is more than one; they start when first needed."""
        self._num_workers = count if count > 1 else 0

    def _running_workers(self) -> MaskWorkers | None:
        if not self._num_workers:
            return None
        with self._lock:
            if self._workers is not None and self._workers.is_torn:
                self._workers.close()
                self._workers = None
            if self._workers is None:
                from ramify.structured.mask_workers import MaskWorkers

                try:
                    self._workers = MaskWorkers(self._tokens, self._special, self._num_workers)
                except OSError:  # no more processes, or no such memory
                    self._num_workers = 0
                    return None
            if self._workers.is_lost:
                self._num_workers = 0
                return None
            return self._workers

    def _bound_roots(self) -> None:
        with self._lock:
            num_more = sum(map(len, self._built.values())) - len(self._built)
            for grammar in self._built.values():  # the longest unused first
                if num_more <= MOST_MORE_ROOTS:
                    break
                num_more -= grammar.shrink()

    # -- building --------------------------------------------------------------------------------------------

    def _grammar(self, structure: Structure) -> _Grammar:
        with self._lock:
            found = self._built.get(structure)
            if found is not None:
                self._built.move_to_end(structure)
                return found
        self._require()
        said = self._tried(structure)
        if said:
            where = f"structured_outputs[{structure.kind!r}]"
            raise InvalidInputError(f"{where} cannot be followed: {fault_of(structure, said, self._tried)}")
        from ramify.structured.grammar_child import build

        lark, most = lark_of(structure), self._threads.count
        built = _Grammar(Roots(partial(build, self._vocabulary, lark), most))
        limits = built.limits = limits_of(structure.source, NEUTRAL) if structure.kind == "json" else None
        if limits is not None and not self._num_workers:
            plain = self._plain
            built.strings_roots = Roots(partial(build, plain.tokenizer, lark), most)
            built.strings = partial(LimitedStrings, built.strings_roots.deal, limits, plain)
        with self._lock:
            self._built[structure] = built
            while len(self._built) > MOST_KEPT:
                _, oldest = self._built.popitem(last=False)
                if oldest.key is not None and oldest.known_by is not None:
                    oldest.known_by.forget(oldest.key)
        return built

    def _tried(self, structure: Structure) -> str:
        """What is wrong with it; empty if nothing is."""
        try:
            lark = lark_of(structure)
        except Exception as error:  # llguidance's own reader of GBNF raises ValueError and others
            return str(error) or type(error).__name__
        try:
            return self._process.ask(lark.encode()).decode(errors="replace")
        except FailedError as error:
            return str(error)
        except OutOfTimeError:
            return TOO_LONG
        except OutOfMemoryError:
            return TOO_LARGE

    # -- the tokenizer ---------------------------------------------------------------------------------------

    def _require(self) -> Tokenizer:
        if self._tokenizer is None:
            raise UnsupportedError("structured_outputs need a tokenizer, and this model has none")
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            raise UnsupportedError(
                f'structured_outputs need {error.name}: pip install ".[structured]" in a checkout'
            ) from None
        return self._tokenizer

    @cached_property
    def _tokens(self) -> list[bytes]:
        """What each token spells, and one more: the end as llguidance sees it. Matchers have ends of their own."""
        tokens = spelled_bytes(self._require())
        if tokens is None:
            raise UnsupportedError("structured_outputs need a tokenizer whose tokens spell bytes or pieces of text")
        return [*tokens, b"<end>"]

    @cached_property
    def _special(self) -> list[int]:
        """Tokens that are no part of a text, that end the last."""
        tokenizer = self._require()
        return [*sorted(tokenizer.special_token_ids | tokenizer.eos_token_ids), len(self._tokens) - 1]

    @cached_property
    def _vocabulary(self) -> Any:
        from ramify.structured.grammar_child import Vocabulary

        return Vocabulary(self._tokens, self._special).tokenizer()

    @cached_property
    def _plain(self) -> PlainTokens:
        return PlainTokens(self._tokens, self._special)

    @cached_property
    def _process(self) -> BoundedProcess:
        from ramify.structured.grammar_child import packed

        return BoundedProcess(
            Path(__file__).with_name("grammar_child.py"),
            packed(self._tokens, self._special),
            seconds=SECONDS,
            memory_bytes=MEMORY_BYTES,
            bytes_per_second=BYTES_PER_SECOND,
        )
