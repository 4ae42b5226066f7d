"""A node of a tree: a prefix that the engine keeps for as long as somebody holds the node."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

from ramify.outputs import CompletionOutput, FinishReason


class NodeHome(Protocol):
    """What a node knows of its tree."""

    @property
    def nodes(self) -> weakref.WeakSet[Node]:
        """Those that are alive."""

    def new_id(self) -> int: ...

    def text_after(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> str: ...

    def drop(self, name: str) -> None:
        """Nobody holds what is kept under this name any more; may be called from anywhere."""


class Node:
    """A prefix: its tokens, its parent's id, and how it came to be. Made by a tree.

    `output` is what `sample` drew (None for roots and given continuations), `logprob` the sum of its own tokens'
    logprobs after its parent, `total_logprob` that of all tokens after the root. A node `has_ended` if the model's own
    end is its last token: nothing follows it.
    """

    __slots__ = (
        "__weakref__",
        "_home",
        "_name",
        "_release",
        "depth",
        "has_ended",
        "id",
        "logprob",
        "num_own",
        "num_sampled",
        "output",
        "parent_id",
        "root_length",
        "token_ids",
        "token_logprobs",
        "total_logprob",
    )

    def __init__(
        self,
        home: NodeHome,
        parent: Node | None,
        token_ids: Sequence[int],
        token_logprobs: Sequence[float] = (),
        *,
        name: str | None = None,
        output: CompletionOutput | None = None,
        logprob: float | None = None,
    ) -> None:
        self._home = home
        self._release: weakref.finalize[..., Node] | None = None
        self.id = home.new_id()
        self.parent_id = None if parent is None else parent.id
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.token_ids = tuple(token_ids)
        self.root_length: int = len(self.token_ids) if parent is None else parent.root_length
        self.num_own = len(self.token_ids) - (0 if parent is None else len(parent.token_ids))
        self.token_logprobs = tuple(token_logprobs)
        self.logprob: float = sum(token_logprobs) if logprob is None else logprob
        self.total_logprob: float = self.logprob + (0.0 if parent is None else parent.total_logprob)
        self.output = output
        self.has_ended = output is not None and output.finish_reason is FinishReason.STOP and output.stop_reason is None
        self.num_sampled = 0  # calls of `sample`: each draws anew
        self._name: str | None = None
        self.keep(name)

    def __repr__(self) -> str:
        return f"Node({self.id}, {len(self.token_ids)} tokens, {self.text!r})"

    @property
    def own_token_ids(self) -> tuple[int, ...]:
        """Those that its parent has not."""
        return self.token_ids[len(self.token_ids) - self.num_own :]

    @property
    def new_token_ids(self) -> tuple[int, ...]:
        """All after the root."""
        return self.token_ids[self.root_length :]

    @property
    def text(self) -> str:
        """Of all tokens after the root."""
        return self._home.text_after(self.token_ids[: self.root_length], self.new_token_ids)

    @property
    def is_released(self) -> bool:
        return self not in self._home.nodes

    @property
    def kept_as(self) -> str | None:
        """The name under which the engine keeps its tokens, if it does not have to compute them anew."""
        return self._name

    def belongs_to(self, home: NodeHome) -> bool:
        return self._home is home

    def keep(self, name: str | None) -> None:
        """The engine keeps its tokens under this name for as long as somebody holds the node."""
        if self._release is not None:
            self._release()
        self._name, self._release = name, None
        if name is not None:
            self._release = weakref.finalize(self, self._home.drop, name)
            self._release.atexit = False
