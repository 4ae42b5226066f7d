"""ToolDeltas: one choice of a streamed chat with tools, as the deltas of OpenAI's protocol."""

from __future__ import annotations

from typing import Any

from ramify.text.tools.calling import Calling, new_call_id
from ramify.text.tools.events import ArgumentsGrown, CallClosed, CallOpened, Content


class ToolDeltas:
    """A call's first piece has its id and its name; further ones have its index and what its arguments grew by."""

    def __init__(self, calling: Calling) -> None:
        self._parser = calling.parser()
        self.has_calls = False  # whether one is whole

    def delta(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """What more text of the answer adds to the message; nothing as long as it may be part of a tag."""
        events = self._parser.feed(text)
        if is_last:
            events += self._parser.finish()
        content: list[str] = []
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            match event:
                case Content(piece):
                    content.append(piece)
                case CallOpened(index, name):
                    function = {"name": name, "arguments": ""}
                    calls[index] = {"index": index, "id": new_call_id(), "type": "function", "function": function}
                case ArgumentsGrown(index, piece):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += piece
                case CallClosed():
                    self.has_calls = True
        return {
            **({"content": "".join(content)} if content else {}),
            **({"tool_calls": list(calls.values())} if calls else {}),
        }
