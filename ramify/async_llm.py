"""AsyncLLM: one model behind an AsyncEngine, for callers in an event loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from ramify.config import DEFAULT_MODEL, EngineConfig, EngineOptions
from ramify.drive.async_engine import AsyncEngine
from ramify.drive.build import build_engine
from ramify.drive.intake import Prompt
from ramify.drive.mailroom import RequestStream
from ramify.drive.placing import has_own_process
from ramify.drive.streaming_engine import StreamingEngine
from ramify.engine.request import Request
from ramify.errors import RamifyError
from ramify.foreign.keywords import strict_keywords
from ramify.foreign.vllm import CHAT_KEYWORDS, GENERATE_KEYWORDS
from ramify.replicas.doors import model_for_streams
from ramify.sampling_params import OutputKind, SamplingParams
from ramify.text.codec import Message
from ramify.text.hugging_face_tokenizer import HuggingFaceTokenizer
from ramify.text.tools.call_reader import CallReader
from ramify.text.tools.calling import Calling

if TYPE_CHECKING:
    from ramify.replicas.replica_engine import ReplicaEngine  # brings msgspec
    from ramify.replicas.start import Replicas


class AsyncLLM:
    """A model ready to sample from, many requests at a time. Takes the options of `LLM`.

    With `engine_process=True` the engine runs in a process of its own (None: if it is on a GPU), and texts are made in
    this one. Outputs are the same; `logits_processors` are refused, and a `score` function runs here. With
    `data_parallel_size` above 1 each of the engines has a process in any case.

    async with AsyncLLM() as llm:
        async for output in llm.generate("Once upon a time", SamplingParams(output_kind="delta")):
            print(output.outputs[0].text, end="")
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        say: Callable[[str], None] = lambda _: None,
        engine_process: bool | None = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        self.config = EngineConfig.from_options(model=model if model is not None else DEFAULT_MODEL, **options)
        self.engine: StreamingEngine
        self._replicas: Replicas[ReplicaEngine] | None = None
        if self.config.model_config.data_parallel_size > 1:
            self._replicas = model_for_streams(self.config, say)
            self.engine, self.intake = self._replicas.engine, self._replicas.intake
            self.architecture = self._replicas.prepared.files[0].architecture
            self.max_model_len = self._replicas.engine.capacity.max_model_len
        elif has_own_process(engine_process, self.config):
            try:
                from ramify.remote.messages import OneModel
                from ramify.remote.packing import options_of
                from ramify.remote.start import start, wanted_of
            except ModuleNotFoundError as error:
                raise RamifyError(
                    f'an engine in a process of its own needs {error.name}: pip install ".[server]" in a checkout'
                ) from None

            [joined] = start([wanted_of(OneModel(options_of(self.config)), say)], say)
            self.engine = joined.engine
            self.architecture = joined.prepared.files[0].architecture
            self.max_model_len = joined.engine.capacity.max_model_len
            self.intake = joined.prepared.intake(joined.engine.check)
        else:
            built = build_engine(self.config, say)
            self.engine = AsyncEngine(built.core)
            self.architecture = built.decoders[0].shard.arch
            self.max_model_len = built.max_model_len
            self.intake = built.intake
        self.codec = self.intake.codec
        self.tokenizer = self.codec.tokenizer
        self.generation_defaults = self.intake.defaults
        # Without it, an AsyncLLM dropped without shutdown would keep its thread and memory for ever.
        self._finalizer = weakref.finalize(self, self.engine.stop)

    @strict_keywords(GENERATE_KEYWORDS, "an option of generate")
    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> RequestStream:
        """Begins at once and returns the stream of outputs, of the kind that `sampling_params.output_kind` names.

        A bad prompt or parameter raises here. A slow reader gets several tokens in one output. Closing the stream
        (`aclose`, cancellation, or just dropping it) aborts the request.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return self.engine.submit(self.intake.request(prompt, params, request_id, priority=priority))

    @strict_keywords(CHAT_KEYWORDS, "an option of chat")
    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> RequestStream:
        """As `generate`, for a conversation, which the model's chat template, or another, turns into a prompt.

        With `tools`, as `LLM.chat` has them, a sample that has ended has its `tool_calls`.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        calling = Calling.of(self.codec, tools, tool_choice, parallel_tool_calls, chat_template)
        if calling is not None:
            chat_template_kwargs = calling.use.variables(chat_template_kwargs)
            self.intake.check_params(params)
            params = calling.params(params, self.codec)

        def make() -> Request:
            return self.intake.chat_request(
                messages,
                params,
                request_id,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                opening="" if calling is None else calling.opening,
                priority=priority,
            )

        request = make() if calling is None else calling.in_words_of_tools(make)
        stream = self.engine.submit(request)
        if calling is not None:
            stream.change(CallReader(calling, is_delta=params.output_kind == OutputKind.DELTA).read)
        return stream

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` draw with where none are given: the model's recommendation, as in `LLM`."""
        return self.generation_defaults.params()

    async def get_tokenizer(self) -> HuggingFaceTokenizer:
        """The model's tokenizer under the names that `transformers` gave its methods."""
        return HuggingFaceTokenizer(self.codec)

    def abort(self, request_id: str) -> None:
        """Ends a request; its reader gets what there is, with finish_reason "abort"."""
        self.engine.abort(request_id)

    def stats(self) -> dict[str, int]:
        """Counters since the start and the state of queue and cache; of several replicas, in sum."""
        return self.engine.stats()

    def replica_stats(self) -> list[dict[str, int]]:
        """The same of each replica."""
        return self._replicas.engine.replica_stats() if self._replicas is not None else [self.engine.stats()]

    async def shutdown(self, grace_seconds: float = 0.0) -> None:
        """Refuses new requests, lets running ones go on for the grace time, aborts the rest, ends the thread."""
        await self.engine.shutdown(grace_seconds)
        self._finalizer.detach()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.shutdown()
