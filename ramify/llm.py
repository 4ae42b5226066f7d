"""LLM: the engine driven from a plain Python call."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Unpack

import torch

from ramify import validation as check
from ramify.config import DEFAULT_MODEL, EngineConfig, EngineOptions
from ramify.drive.build import Engine, build_engine
from ramify.drive.intake import Intake, Prompt, as_prompts, one_for_each
from ramify.drive.loops import Calls
from ramify.drive.replacing import check_replaceable, replace_weights
from ramify.drive.scoring import scores, scoring_requests
from ramify.drive.sleep import Sleeper, WakeTag
from ramify.drive.tree import Tree
from ramify.engine.core import EngineCore
from ramify.engine.request import Request
from ramify.errors import InvalidInputError, UnsupportedAttributeError, UnsupportedError, WeightsError
from ramify.foreign.keywords import own_keywords, strict_keywords
from ramify.foreign.vllm import ATTRIBUTES, CHAT_KEYWORDS, GENERATE_KEYWORDS
from ramify.models.decoder import Decoder
from ramify.outputs import ContinuationLogprobs, RequestOutput, RequestOutputs
from ramify.replicas.doors import model_for_calls
from ramify.sampling_params import SamplingParams, SamplingStrategy
from ramify.text.codec import Message
from ramify.text.hugging_face_tokenizer import HuggingFaceTokenizer
from ramify.text.messages import as_conversations
from ramify.text.tools.call_reader import CallReader
from ramify.text.tools.calling import Calling

if TYPE_CHECKING:
    from ramify.replicas.replica_core import ReplicaCore  # brings msgspec


class LLM:
    """A model ready to sample from.

    `model` is a folder, a .gguf file, a hub id, or None for the embedded default; the options are the fields of
    ModelConfig, CacheConfig and SchedulerConfig, and an unknown one raises.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        say: Callable[[str], None] = lambda _: None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self.config = EngineConfig.from_options(model=model if model is not None else DEFAULT_MODEL, **options)
        self._engine: Engine[Intake] | None = None  # where it is in this process
        self._sleeper: Sleeper | None = None
        self._core: EngineCore | ReplicaCore
        if self.config.model_config.data_parallel_size > 1:
            self._replicas = model_for_calls(self.config, say)  # whose processes end with this
            self._core = self._replicas.core
            self._intake: Intake = self._replicas.intake
            self.architecture = self._replicas.prepared.files[0].architecture
        else:
            self._engine = build_engine(self.config, say)
            self._core, self._intake = self._engine.core, self._engine.intake
            [decoder] = self._engine.decoders
            self.architecture = decoder.shard.arch
            self._sleeper = Sleeper(self._engine.core, decoder, is_shared=self._engine.team is not None)
        self._codec = self._intake.codec
        self.tokenizer = self._codec.tokenizer
        self.max_model_len = self._core.capacity.max_model_len
        self.generation_defaults = self._intake.defaults
        self._calls = Calls(self._core)
        self._weights_are_whole = True

    @property
    def core(self) -> EngineCore:
        """The engine, where it is in this process."""
        return self._here("LLM.core").core

    def _here(self, what: str) -> Engine[Intake]:
        if self._engine is None:
            raise UnsupportedError(
                f"{what} needs the engine in this process, and with data_parallel_size "
                f"{self.config.model_config.data_parallel_size} engines are in processes of their own"
            )
        return self._engine

    @property
    def _decoder(self) -> Decoder:
        return self._here("the model's weights").decoders[0]

    def _sleeper_of(self, what: str) -> Sleeper:
        self._here(what)
        assert self._sleeper is not None, "made with the engine"
        return self._sleeper

    # -- generating ------------------------------------------------------------------------------------------

    @strict_keywords(GENERATE_KEYWORDS, "an option of generate")
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continues every prompt and returns the outputs in the prompts' order; lower priorities are served first.

        A bad parameter of any prompt raises before the first one starts. Ctrl-C aborts this call's requests and
        leaves the engine usable. Calls from several threads take turns.
        """
        listed = as_prompts(prompts)
        params = self._params_for(listed, sampling_params)
        priorities = one_for_each("priority", 0 if priority is None else priority, listed, int)
        requests = [
            self._intake.request(prompt, each, priority=value)
            for prompt, each, value in zip(listed, params, priorities, strict=True)
        ]
        return self._run(requests, use_tqdm=use_tqdm)

    @strict_keywords(CHAT_KEYWORDS, "an option of chat")
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or a list of them, rendered by the model's chat template or another.

        `tools` are offered to the model by that template, and calls that it writes are each output's `tool_calls`.
        `tool_choice` is "auto", "none", "required", or {"type": "function", "function": {"name": ...}}.
        """
        calling = Calling.of(self._codec, tools, tool_choice, parallel_tool_calls, chat_template)
        if calling is not None:
            chat_template_kwargs = calling.use.variables(chat_template_kwargs)
        conversations = as_conversations(messages)
        params = self._params_for(conversations, sampling_params)
        if calling is not None:
            params = [calling.params(each, self._codec) for each in params]

        def make() -> list[Request]:
            return [
                self._intake.chat_request(
                    conversation,
                    each,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    chat_template_kwargs=chat_template_kwargs,
                    chat_template=chat_template,
                    opening="" if calling is None else calling.opening,
                )
                for conversation, each in zip(conversations, params, strict=True)
            ]

        requests = make() if calling is None else calling.in_words_of_tools(make)
        outputs = self._run(requests, use_tqdm=use_tqdm)
        return outputs if calling is None else [CallReader(calling).read(output) for output in outputs]

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` draw with where none are given: the model's recommendation.

        It comes from the checkpoint's generation_config.json, or its GGUF metadata; with `generation_config="none"`
        it is SamplingParams().
        """
        return self.generation_defaults.params()

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: None = None,
        *,
        beam_width: int = 4,
        n: int | None = None,
        max_tokens: int | None = 16,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """The n (default: all) likeliest continuations a beam search finds; other options are SamplingParams fields."""
        if params is not None:
            raise InvalidInputError(
                "beam_search takes its options by name (beam_width, max_tokens, length_penalty ...), and returns what "
                "generate returns"
            )
        known = [option.name for option in fields(SamplingParams)]
        searched = SamplingParams(
            strategy=SamplingStrategy.BEAM_SEARCH,
            beam_width=beam_width,
            n=beam_width if n is None else n,
            max_tokens=max_tokens,
            **own_keywords(options, known, GENERATE_KEYWORDS, what="an option of beam_search"),
        )
        return self.generate(prompts, searched, use_tqdm=use_tqdm)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that a conversation becomes."""
        return self._codec.render_chat(
            messages, add_generation_prompt=add_generation_prompt, chat_template_kwargs=chat_template_kwargs
        )

    def stream_generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput]:
        """Outputs of one prompt as they come, as `sampling_params.output_kind` says.

        Other calls wait until the stream is read to its end or closed.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        for outputs in self._calls.steps([self._intake.request(prompt, params)], check=self._check_weights):
            yield from outputs

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput]:
        """Outputs of one conversation as they come, as `sampling_params.output_kind` says.

        Other calls wait until the stream is read to its end or closed.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        for outputs in self._calls.steps([self._intake.chat_request(messages, params)], check=self._check_weights):
            yield from outputs

    def logprobs(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        top_k: int = 0,
    ) -> list[ContinuationLogprobs]:
        """The model's own logprobs of given tokens, one continuation after each prompt, or many after one prompt.

        A continuation is token ids, or text, which is tokenised by itself. All are computed in batches, and what
        prompts begin with in common is computed once. With `top_k`, the likeliest tokens at every place are told too.
        """
        requests = scoring_requests(self._intake, prompts, continuations, top_k)
        return scores(self._run(requests, use_tqdm=False))

    def get_tokenizer(self) -> HuggingFaceTokenizer:
        """The model's tokenizer under the names that `transformers` gave its methods."""
        return HuggingFaceTokenizer(self._codec)

    def tree(self, max_nodes: int | None = None) -> Tree:
        """A tree of prefixes that the engine keeps in blocks, for searches that callers write themselves."""
        return Tree(
            self._here("LLM.tree").core,
            self._calls,
            self._intake,
            max_nodes=max_nodes,
            check_weights=self._check_weights,
        )

    # -- the engine's state ----------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Later prompts find nothing of earlier ones."""
        self._calls.between(self._core.reset_prefix_cache)

    def stats(self) -> dict[str, int]:
        """Counters since the start and the state of queue and cache; of several replicas, in sum."""
        return self._core.stats()

    def replica_stats(self) -> list[dict[str, int]]:
        """The same of each replica."""
        return [self.stats()] if isinstance(self._core, EngineCore) else self._core.replica_stats()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replaces all weights in place by a stream of (name, tensor), under the names of a Hugging Face checkpoint.

        Strict: every parameter exactly once, shapes as they are. Weights that are held quantised (a GGUF file's, on a
        CPU) are replaced only where the engine was made with dequantize=True. What earlier prompts left in the prefix
        cache was computed with the old weights, so it is forgotten, and nodes of trees are computed anew. If the stream
        breaks off, weights of two kinds are mixed: nothing is generated until another stream has filled them all.
        """
        self._calls.between(lambda: self._replace_weights(weights))

    def sleep(self, level: int = 1) -> None:
        """Gives the memory of weights and cache to others until `wake_up`.

        Level 1 keeps the weights in host memory (on a CPU they are there already and stay), level 2 forgets them: then
        `load_weights` must fill them all after `wake_up`. Prefixes, nodes of trees and captured graphs are made again
        when they are next needed.
        """
        sleeper = self._sleeper_of("LLM.sleep")
        if self._calls.between(lambda: sleeper.sleep(level)):
            self._weights_are_whole = False

    def wake_up(self, tags: Sequence[WakeTag] | None = None) -> None:
        """Takes the memory again: all, or "weights" or "kv_cache" alone; does nothing where nothing sleeps."""
        sleeper = self._sleeper_of("LLM.wake_up")
        self._calls.between(lambda: sleeper.wake_up(tags))

    # -- driving ---------------------------------------------------------------------------------------------

    def _replace_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._engine is None:
            self._replace_everywhere(weights)
            return
        self._sleeper_of("LLM.load_weights").check_awake("weights")
        check_replaceable(self._engine)
        self._weights_are_whole = False
        replace_weights(self._engine, weights)
        self._weights_are_whole = True

    def _replace_everywhere(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """In all replicas, which read them from files."""
        from ramify.remote.stored_weights import stored

        assert not isinstance(self._core, EngineCore), "engines elsewhere"
        with stored(weights) as folder:
            try:
                self._core.load_weights(folder)
            except InvalidInputError:
                raise  # nothing was replaced
            except BaseException:
                self._weights_are_whole = False
                raise
        self._weights_are_whole = True

    def _params_for(
        self, prompts: Sequence[Any], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        given = self.get_default_sampling_params() if given is None else given
        params = one_for_each("sampling_params", given, prompts, SamplingParams)
        for each in params:
            self._intake.check_params(each)
        return params

    def _run(self, requests: list[Request], *, use_tqdm: bool) -> list[RequestOutput]:
        check.boolean("use_tqdm", use_tqdm)
        return RequestOutputs(self._calls.run(requests, use_tqdm=use_tqdm, check=self._check_weights))

    def _check_weights(self) -> None:
        if self._sleeper is not None:
            self._sleeper.check_awake()
        if not self._weights_are_whole:
            raise WeightsError(
                "the weights are incomplete (the last load_weights broke off, or sleep forgot them): load them again"
            )

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Asked for what is not there: what vLLM's users look for is told where it is."""
            if name in ATTRIBUTES:
                raise UnsupportedAttributeError(f"LLM has no {name}: {ATTRIBUTES[name]}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
