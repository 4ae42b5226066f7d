"""`generate` over a Ray dataset: prompts in the rows, one engine an actor, n rows of each out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal, Unpack

from ramify import validation as check
from ramify.config import DEFAULT_MODEL, EngineOptions
from ramify.errors import InvalidInputError
from ramify.outputs import CompletionOutput, LogprobRow, RequestOutput
from ramify.ray.pool import Pool, check_options
from ramify.ray.row_journal import RowJournal, row_name
from ramify.ray.rows import Entry, all_of, check_columns, extended
from ramify.sampling_params import OutputKind, SamplingParams, SamplingStrategy

FIELDS = {
    "sample": "int",
    "text": "text",
    "token_ids": "[int]",
    "cumulative_logprob": "float",
    "finish_reason": "text",
    "stop_reason": "text",
    "score": "float",
    "error": "text",
}
LOGPROBS = {"logprobs": "[alternatives]"}
PROMPT_LOGPROBS = {"prompt_logprobs": "[alternatives]"}
INCLUSION = {"inclusion_logprob": "float", "inclusion_threshold": "float"}


def generate(
    dataset: Any,
    sampling_params: SamplingParams | None = None,
    *,
    model: str | None = None,
    prompt: str = "prompt",
    key: str | None = None,
    journal: str | None = None,
    on_refused: Literal["stop", "skip"] = "stop",
    pool: Pool | None = None,
    **options: Unpack[EngineOptions],
) -> Any:
    """A dataset with n rows for each row of `dataset`: its columns, and those of a sample (docs/ray.md).

    The column `prompt` holds text, token ids or a conversation's messages. A row's samples depend on no other row and
    on no machine: without a seed in `sampling_params` each row has one made from the engine's seed, its prompt and, if
    `key` names a column, that. With `journal`, a folder that all machines see, a job that was stopped goes on. A prompt
    that the model cannot take stops the job, or with on_refused="skip" becomes one row with its `error`. `options` are
    those of `LLM`.
    """
    check.choice("on_refused", on_refused, ("stop", "skip"))
    if sampling_params is not None and not isinstance(sampling_params, SamplingParams):
        raise check.refuse("sampling_params", sampling_params, "SamplingParams")
    if sampling_params is not None and sampling_params.output_kind is not OutputKind.FINAL_ONLY:
        raise InvalidInputError("output_kind must be 'final_only': a row is written when it is done")
    check_options(model or DEFAULT_MODEL, options, how_many="Pool(num_engines=…)")
    fields = _fields(sampling_params)
    names = dataset.columns(fetch_if_missing=False)
    if names is not None:
        check_columns(names, [prompt, *([key] if key else [])], fields)
    if journal is not None:
        _settings(model, sampling_params, options)  # refused here if it cannot be written down
    arguments = {
        "model": model,
        "params": sampling_params,
        "options": dict(options),
        "prompt": prompt,
        "key": key,
        "journal": journal,
        "on_refused": on_refused,
    }
    n = 1 if sampling_params is None else sampling_params.num_children
    return (pool or Pool()).stage(dataset, GenerateStage, arguments, options=options, n=n)


def row_seed(seed: int, prompt: Any, key: Any = None) -> int:
    """The seed of a row that was given none: of the engine's seed (default 0), the prompt and the row's key."""
    content = json.dumps([seed, prompt, key], sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big")


class GenerateStage:
    """One engine, and the rows of all batches that Ray Data hands over at a time together in it."""

    def __init__(
        self,
        *,
        model: str | None,
        params: SamplingParams | None,
        options: Mapping[str, Any],
        prompt: str,
        key: str | None,
        journal: str | None,
        on_refused: str,
    ) -> None:
        from ramify.async_llm import AsyncLLM

        self._llm = AsyncLLM(model, **options)
        self._params = self._llm.get_default_sampling_params() if params is None else params
        self._fields = _fields(params)
        self._settings = _settings(model, params, options) if journal is not None else None
        self._seed = int(options.get("seed", 0))
        self._prompt, self._key = prompt, key
        self._journal = None if journal is None else RowJournal(journal)
        self._skips = on_refused == "skip"

    async def __call__(self, table: Any) -> Any:
        check_columns(table.column_names, [self._prompt, *([self._key] if self._key else [])], self._fields)
        prompts = table.column(self._prompt).to_pylist()
        keys = table.column(self._key).to_pylist() if self._key else [None] * len(prompts)
        made = await all_of([self._samples(prompt, key) for prompt, key in zip(prompts, keys, strict=True)])
        return extended(table, made, self._fields)

    async def _samples(self, prompt: Any, key: Any) -> list[Entry]:
        try:
            name = "" if self._journal is None else row_name(self._settings, prompt, key)
            if self._journal is not None and (found := self._journal.find(name)) is not None:
                return found
            stream = self._submitted(prompt, self._params_of(prompt, key))
        except InvalidInputError as error:
            if not self._skips:
                raise
            return [{"error": str(error)}]
        output = await stream.final()
        entries = [_entry(output, sample) for sample in output.outputs]
        if self._journal is not None and output.error is None:
            self._journal.append(name, entries)
        return entries

    def _submitted(self, prompt: Any, params: SamplingParams) -> Any:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
            return self._llm.chat(prompt, params)
        return self._llm.generate(prompt, params)

    def _params_of(self, prompt: Any, key: Any) -> SamplingParams:
        params = self._params
        if params.seed is not None or params.resolved_strategy is SamplingStrategy.BEAM_SEARCH:
            return params
        return params.clone(seed=row_seed(self._seed, prompt, key))


def _fields(params: SamplingParams | None) -> dict[str, str]:
    """The columns of a sample: some of them where they were asked for."""
    if params is None:
        return FIELDS
    return {
        **FIELDS,
        **(LOGPROBS if params.logprobs is not None else {}),
        **(PROMPT_LOGPROBS if params.prompt_logprobs is not None else {}),
        **(INCLUSION if params.resolved_strategy is SamplingStrategy.WITHOUT_REPLACEMENT else {}),
    }


def _settings(model: str | None, params: SamplingParams | None, options: Mapping[str, Any]) -> list[Any]:
    """What decides the samples of a row beside the row itself; functions cannot be told from others of their name."""
    told = None if params is None else asdict(params)
    if told is not None and (callable(told["score"]) or told["logits_processors"]):
        raise InvalidInputError(
            "journal cannot be used with functions in sampling_params: it could not tell them apart"
        )
    settings = [model or DEFAULT_MODEL, told, dict(options)]
    row_name(settings)
    return settings


def _entry(output: RequestOutput, sample: CompletionOutput) -> Entry:
    entry: Entry = {
        "sample": sample.index,
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "cumulative_logprob": sample.cumulative_logprob,
        "finish_reason": None if sample.finish_reason is None else str(sample.finish_reason),
        "stop_reason": None if sample.stop_reason is None else str(sample.stop_reason),
        "score": sample.score,
        "error": output.error,
    }
    if sample.logprobs is not None:
        entry["logprobs"] = [_alternatives(row) for row in sample.logprobs]
    if output.prompt_logprobs is not None:
        entry["prompt_logprobs"] = [None if row is None else _alternatives(row) for row in output.prompt_logprobs]
    if sample.inclusion is not None:
        entry["inclusion_logprob"], entry["inclusion_threshold"] = sample.inclusion
    return entry


def _alternatives(row: LogprobRow) -> list[Entry]:
    return [{"token_id": token_id, **asdict(alternative)} for token_id, alternative in row.items()]
