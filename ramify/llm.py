"""LLM: the engine driven from a plain Python call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, TypedDict, Unpack

import torch
from tqdm import tqdm

from ramify import validation as check
from ramify.attention.grouped import GroupedAttention
from ramify.config import DEFAULT_MODEL, EngineConfig, EngineOptions
from ramify.core import Device, EngineCore
from ramify.errors import InvalidInputError, WeightsError
from ramify.kv.blocks import BlockManager
from ramify.kv.pool import KVPool
from ramify.kv.sizing import num_blocks, num_host_blocks
from ramify.models.decoder import Decoder
from ramify.models.loader import ModelLoader
from ramify.models.weights import fill
from ramify.outputs import RequestOutput
from ramify.request import Request
from ramify.runner import Runner
from ramify.sampling_params import SamplingParams, SamplingStrategy
from ramify.scheduler import Scheduler
from ramify.step import DeviceStep
from ramify.text.chat_template import ChatTemplate
from ramify.text.detokenizer import IncrementalDetokenizer
from ramify.text.stream import TextStream
from ramify.text.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    prompt: str


class TokenPrompt(TypedDict):
    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | TextPrompt | TokenPrompt
Message = Mapping[str, Any]


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
        loader = ModelLoader(self.config, say)
        decoder, self.tokenizer = loader.load_model_and_tokenizer()
        self.architecture = decoder.arch
        self._decoder = decoder
        self._weights_are_whole = True
        self.max_model_len = self.config.model_config.resolve_max_model_len(decoder.arch.max_position_embeddings)
        self._chat_template = _chat_template(self.tokenizer)
        cache, limits = self.config.cache_config, self.config.scheduler_config
        max_num_batched_tokens = limits.resolve_max_num_batched_tokens(on_gpu=decoder.device.type == "cuda")
        blocks = num_blocks(
            cache,
            decoder,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        host_blocks = num_host_blocks(cache, decoder) if limits.preemption_mode == "swap" else 0
        pool = KVPool(
            decoder.arch, blocks, cache.block_size, decoder.dtype, decoder.device, num_host_blocks=host_blocks
        )
        eos_token_ids = decoder.arch.eos_token_ids | (
            frozenset() if self.tokenizer is None else self.tokenizer.eos_token_ids
        )
        self.core = EngineCore(
            Scheduler(
                [
                    BlockManager(
                        blocks,
                        cache.block_size,
                        enable_prefix_caching=cache.enable_prefix_caching,
                        num_host_blocks=host_blocks,
                    )
                ],
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                enable_chunked_prefill=limits.enable_chunked_prefill,
                max_model_len=self.max_model_len,
                preemption_mode=limits.preemption_mode,
            ),
            _device(decoder, pool, self.config, self.max_model_len),
            seed=self.config.model_config.seed,
            eos_token_ids=eos_token_ids,
            make_text=self._make_text,
            encode_words=None if self.tokenizer is None else self._encode_words,
            decode=None if self.tokenizer is None else self._decode_token,
        )
        self._request_numbers = count()

    # -- generating ------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Continues every prompt and returns the outputs in the prompts' order; lower priorities are served first.

        A bad parameter of any prompt raises before the first one starts. Ctrl-C aborts this call's requests and
        leaves the engine usable.
        """
        listed = _as_list(prompts)
        params = self._params_for(listed, sampling_params)
        requests = [self._request(prompt, each) for prompt, each in zip(listed, params, strict=True)]
        priorities = [priority] * len(requests) if isinstance(priority, int) else list(priority)
        if len(priorities) != len(requests):
            raise InvalidInputError(
                f"priority must be one, or one per prompt: got {len(priorities)} for {len(requests)} prompts"
            )
        for request, value in zip(requests, priorities, strict=True):
            request.priority = check.integer("priority", value)
        return self._run(requests, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or a list of them, rendered by the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        prompts = [
            self.render_chat(
                conversation,  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        params = self._params_for(prompts, sampling_params)
        requests = [
            self._request_of_ids(self._encode(text, add_special_tokens=False), each, text)
            for text, each in zip(prompts, params, strict=True)
        ]
        return self._run(requests, use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        beam_width: int = 4,
        n: int | None = None,
        max_tokens: int | None = 16,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """The n (default: all) likeliest continuations a beam search finds; other options are SamplingParams fields."""
        params = SamplingParams(
            strategy=SamplingStrategy.BEAM_SEARCH,
            beam_width=beam_width,
            n=beam_width if n is None else n,
            max_tokens=max_tokens,
            **options,
        )
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that a conversation becomes."""
        if self._chat_template is None:
            raise InvalidInputError("this model has no chat template; use generate with a prompt of your own")
        extra = dict(chat_template_kwargs or {})
        for name in ("messages", "add_generation_prompt"):
            if name in extra:
                raise InvalidInputError(f"chat_template_kwargs must not name {name!r}: it has a place of its own")
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt, **extra)

    def stream_chat(self, messages: Sequence[Message], sampling_params: SamplingParams) -> Generator[RequestOutput]:
        """Outputs of one conversation as they come, as `sampling_params.output_kind` says."""
        text = self.render_chat(messages)
        ids = self._encode(text, add_special_tokens=False)
        yield from self._steps([self._request_of_ids(ids, sampling_params, text)])

    # -- the engine's state ----------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Later prompts find nothing of earlier ones."""
        self.core.reset_prefix_cache()

    def stats(self) -> dict[str, int]:
        """Counters since the start and the state of queue and cache."""
        return self.core.stats()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replaces all weights in place by a stream of (name, tensor), under the names of a Hugging Face checkpoint.

        Strict: every parameter exactly once, shapes as they are. What earlier prompts left in the prefix cache was
        computed with the old weights, so it is forgotten. If the stream breaks off, weights of two kinds are mixed:
        nothing is generated until another stream has filled them all.
        """
        if self.core.has_unfinished():
            raise InvalidInputError("weights can be replaced between calls only: requests are running")
        self._weights_are_whole = False
        self.reset_prefix_cache()
        fill(self._decoder, weights)
        self._weights_are_whole = True

    # -- requests --------------------------------------------------------------------------------------------

    def _params_for(
        self, prompts: Sequence[Any], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            params = [given if given is not None else SamplingParams()] * len(prompts)
        else:
            params = list(given)
        if len(params) != len(prompts):
            raise InvalidInputError(
                f"sampling_params must be one, or one per prompt: got {len(params)} for {len(prompts)} prompts"
            )
        for each in params:
            if not isinstance(each, SamplingParams):
                raise check.refuse("sampling_params", each, "SamplingParams")
            each.check_against(
                vocab_size=self.architecture.vocab_size,
                max_logprobs=self.config.model_config.max_logprobs,
            )
        return params

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        if isinstance(prompt, Mapping):
            fields: Mapping[str, Any] = prompt
            if set(fields) == {"prompt"}:
                return self._request(fields["prompt"], params)
            if set(fields) == {"prompt_token_ids"}:
                return self._request_of_ids(fields["prompt_token_ids"], params, None)
            raise InvalidInputError(
                f"a prompt given as a dict must have the one key prompt or prompt_token_ids, got {sorted(prompt)}"
            )
        if isinstance(prompt, str):
            return self._request_of_ids(self._encode(prompt, add_special_tokens=True), params, prompt)
        return self._request_of_ids(prompt, params, None)

    def _request_of_ids(self, token_ids: object, params: SamplingParams, text: str | None) -> Request:
        ids = check.token_ids("prompt_token_ids", token_ids, 2**31, self.architecture.vocab_size)
        if not ids:
            raise InvalidInputError("prompt must not be empty: it has no tokens")
        request = Request(f"request-{next(self._request_numbers)}", text, ids, params)
        self.core.check(request)
        return request

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise InvalidInputError("this model has no tokenizer: give prompts as token ids")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as tokens, at the beginning of a text and after a space."""
        spellings = [spelling for word in words for spelling in (word, f" {word.lstrip()}")]
        encoded = [tuple(self._encode(spelling, add_special_tokens=False)) for spelling in spellings]
        return tuple(dict.fromkeys(item for item in encoded if item))

    def _decode_token(self, token_id: int) -> str:
        assert self.tokenizer is not None, "asked for only where there is one"
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def _make_text(self, params: SamplingParams) -> TextStream:
        detokenizer = None
        if self.tokenizer is not None and params.detokenize:
            detokenizer = IncrementalDetokenizer(self.tokenizer, skip_special_tokens=params.skip_special_tokens)
        return TextStream(detokenizer, params.stop_strings, include_stop=params.include_stop_str_in_output)

    # -- driving ---------------------------------------------------------------------------------------------

    def _run(self, requests: list[Request], *, use_tqdm: bool) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        with (
            _without_collecting_what_is_there(),
            tqdm(total=len(requests), desc="Prompts", unit="prompt", disable=not use_tqdm) as bar,
        ):
            before = self.core.metrics.generated_tokens
            for output in self._steps(requests):
                if output.finished:
                    finished[output.request_id] = output
                    tokens = self.core.metrics.generated_tokens - before
                    elapsed = bar.format_dict["elapsed"]
                    bar.set_postfix_str(f"{tokens / max(elapsed, 1e-9):.0f} tokens/s", refresh=False)
                    bar.update()
        return [finished[request.request_id] for request in requests]

    def _steps(self, requests: list[Request]) -> Iterator[RequestOutput]:
        """Adds requests, steps until they have ended, yields their outputs; whatever stops it aborts them."""
        if not self._weights_are_whole:
            raise WeightsError("the last load_weights broke off, so the weights are incomplete: load them again")
        try:
            for request in requests:
                self.core.add_request(request)
            while self.core.has_unfinished():
                yield from self.core.step()
        finally:
            for request in requests:
                self.core.abort(request.request_id)


@contextmanager
def _without_collecting_what_is_there() -> Iterator[None]:
    """Python's collector looks through all objects again and again while tokens are drawn: not through the old ones."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or many: a string, a dict or a list of integers is one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Iterable):
        raise check.refuse("prompts", prompts, "text, token ids, or a list of these")
    listed = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]
    return listed


def _device(decoder: Decoder, pool: KVPool, config: EngineConfig, max_model_len: int) -> Device:
    """What runs plans where the model is: graphs on a GPU, grouped attention on a CPU."""
    mode = config.model_config.logprobs_mode
    if decoder.device.type == "cpu":
        return DeviceStep(Runner(decoder, pool, GroupedAttention()), mode)
    from ramify.cuda.step import CudaStep  # needs Triton, which only a GPU needs

    return CudaStep(
        decoder,
        pool,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_model_len=max_model_len,
        logprobs_mode=mode,
        use_graphs=not config.model_config.enforce_eager,
    )


def _chat_template(tokenizer: Tokenizer | None) -> ChatTemplate | None:
    if tokenizer is None or tokenizer.chat_template is None:
        return None
    return ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
