"""A conversation: its turns, what of them fits a model's context, and what a file of it looks like."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ramify.errors import InvalidInputError
from ramify.files.disk import write_new

Messages = list[dict[str, str]]
SHARE_OF_ANSWER = 4  # an answer gets at least a quarter of the context, if it may be that long


@dataclass
class Conversation:
    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)  # questions with their answers

    def messages(self, question: str | None = None, *, start: int = 0) -> Messages:
        """What the model is shown: the system's message, the turns from `start` on, the question."""
        said = [("system", self.system)] if self.system else []
        for asked, answered in self.turns[start:]:
            said += [("user", asked), ("assistant", answered)]
        if question is not None:
            said.append(("user", question))
        return [{"role": role, "content": content or ""} for role, content in said]

    def make_room(
        self, question: str, count_tokens: Callable[[Messages], int], *, context: int, longest: int | None
    ) -> tuple[int, int]:
        """Drops the oldest turns until question and answer fit; returns how many, and the room for the answer.

        A question that would not fit even alone is refused, and then nothing is dropped.
        """
        wanted = max(1, min(longest or context, context // SHARE_OF_ANSWER))
        for start in range(len(self.turns) + 1):
            taken = count_tokens(self.messages(question, start=start))
            if context - taken >= wanted or (start == len(self.turns) and taken < context):
                del self.turns[:start]
                return start, context - taken
        raise InvalidInputError(
            f"this message needs {taken} tokens, and the context has {context} for messages and answer: shorten it"
        )

    def save(self, path: Path, model: str) -> None:
        """As JSON, in the shape that servers take, or as Markdown, by the file's name; nothing is overwritten."""
        match path.suffix:
            case ".json":
                content = json.dumps({"model": model, "messages": self.messages()}, ensure_ascii=False, indent=1)
            case ".md":
                parts = (f"**{message['role']}**\n\n{message['content']}" for message in self.messages())
                content = "\n\n".join((f"# A conversation with {model}", *parts))
            case _:
                raise InvalidInputError(f"the file's name must end in .json or .md, got {str(path)!r}")
        write_new(path, content + "\n")
