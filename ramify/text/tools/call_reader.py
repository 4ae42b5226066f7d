"""CallReader: the outputs of one request, with the calls of each sample that has ended."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from ramify.outputs import CompletionOutput, RequestOutput, ToolCall
from ramify.text.tools.calling import Calling


class CallReader:
    """Where outputs are deltas, it remembers what came before."""

    def __init__(self, calling: Calling, *, is_delta: bool = False) -> None:
        self._calling = calling
        self._is_delta = is_delta
        self._texts: defaultdict[int, list[str]] = defaultdict(list)  # by sample
        self._calls: dict[tuple[int, str], tuple[ToolCall, ...]] = {}  # a sample that is told again has the same ids

    def read(self, output: RequestOutput) -> RequestOutput:
        if not self._calling.is_readable:
            return output
        return replace(output, outputs=tuple(map(self._with_calls, output.outputs)))

    def _with_calls(self, sample: CompletionOutput) -> CompletionOutput:
        pieces = self._texts[sample.index] if self._is_delta else []
        pieces.append(sample.text)
        if sample.finish_reason is None:
            return sample
        which = sample.index, "".join(pieces)
        if which not in self._calls:
            _, self._calls[which] = self._calling.answer(which[1])
        return replace(sample, tool_calls=self._calls[which])
