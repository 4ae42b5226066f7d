"""lm-eval's model `ramify`: an engine in the same process, every request of a task in one batch.

    lm_eval run --model ramify …                                 where lm-eval finds models of other packages by itself
    python -m ramify.integrations.lm_eval run --model ramify …   with any version: the same command
    simple_evaluate(model=RamifyLM(llm=llm), …)                  with an engine that is there already

Its numbers are those of lm-eval's own model `hf`: the same tokens are scored after the same contexts, and what is too
long is cut at the same place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import MODEL_REGISTRY, register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from ramify import validation as check
from ramify.errors import InvalidInputError
from ramify.llm import LLM
from ramify.sampling_params import MAX_STOP_STRINGS, SamplingParams

NAME = "ramify"
AT_ONCE = 2_048  # requests that an engine gets at a time: enough for any batch, and a progress bar moves
# What tasks call the longest output, the first that is there counts; lm-eval's order.
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")

Scored = tuple[tuple[str, str] | None, list[int], list[int]]  # (context, continuation) as text, and as tokens


@dataclass(frozen=True, slots=True)
class Writing:
    """What a task says of the texts it wants: parameters of the draw, and where texts are cut."""

    params: SamplingParams
    longest: int
    until: tuple[str, ...]

    @classmethod
    def of(cls, asked: Mapping[str, Any], default_longest: int) -> Writing:
        """From `generation_kwargs`; a name that is none of SamplingParams' is refused by it."""
        given = dict(asked)
        until = given.pop("until", None) or []
        stops = tuple(each for each in ([until] if isinstance(until, str) else until) if each)
        lengths = [given.pop(name) for name in LENGTHS if given.get(name) is not None]
        longest = int(lengths[0]) if lengths else default_longest
        temperature = float(given.pop("temperature", 0.0))
        draws = given.pop("do_sample", None)
        if draws is False:
            temperature = 0.0
        params = SamplingParams(
            **{name: value for name, value in given.items() if name not in LENGTHS},
            temperature=temperature,
            max_tokens=longest,
            stop=stops[:MAX_STOP_STRINGS] or None,
        )
        return cls(params, longest, stops)

    def cut(self, text: str) -> str:
        for stop in self.until:
            text = text.split(stop, maxsplit=1)[0]
        return text


class RamifyLM(TemplateLM):  # type: ignore[misc]
    """`pretrained` is what `LLM` takes as its model (default: the embedded one), and so are all other options.

    With `llm`, that engine is used instead. `max_length` is the longest context and continuation (default: the
    engine's `max_model_len`). The engine makes batches by itself: `batch_size` changes nothing.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        llm: LLM | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        batch_size: int | str | None = None,  # noqa: ARG002
        max_batch_size: int | None = None,  # noqa: ARG002
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if llm is not None and (pretrained is not None or options):
            raise InvalidInputError(f"with llm, no other engine can be asked for: got {pretrained or sorted(options)}")
        if device is not None and (torch.cuda.is_available() or not device.startswith("cuda")):
            options["device"] = device  # lm-eval's command names the first GPU by itself
        self.llm = llm if llm is not None else LLM(pretrained, **options)
        self.tokenizer = self.llm.get_tokenizer()
        longest = self.llm.max_model_len
        self.max_length = longest if max_length is None else check.integer("max_length", max_length, 2, longest)
        self.max_gen_toks = check.integer("max_gen_toks", max_gen_toks, 1)
        self._adds_special_tokens = True if add_bos_token is None else check.boolean("add_bos_token", add_bos_token)
        self._prefix_token_id = prefix_token_id
        self._chat_template_args = dict(chat_template_args or {})

    # -- tokens ----------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        found = self.tokenizer.eos_token_id
        if found is None:
            raise InvalidInputError("the model names no end token: give prefix_token_id")
        return int(found)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        beginning = self.tokenizer.bos_token_id
        return self.eot_token_id if beginning is None else int(beginning)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        adds = self._adds_special_tokens if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            adds = False  # a chat template wrote it already
        return self.tokenizer.encode(string, add_special_tokens=adds)

    # -- chats -----------------------------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        """Part of the names of lm-eval's caches of requests."""
        return str(self.llm.config.model_config.model).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        rendered = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._chat_template_args,
        )
        return str(rendered)

    # -- scoring ---------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **__: Any
    ) -> list[tuple[float, bool]]:
        """Logprob of each continuation, and whether it is the greedy one."""
        asked = [self._fitted(context, continuation) for _, context, continuation in requests]
        scores: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, bool]] = {}
        # In the order of their tokens: those that begin alike are neighbours, and find that in the cache.
        distinct = sorted(set(asked))
        for some in _pieces(distinct, "Scoring", disable_tqdm):
            told = self.llm.logprobs([context for context, _ in some], [continuation for _, continuation in some])
            for key, each in zip(some, told, strict=True):
                scores[key] = (each.cumulative_logprob, each.is_greedy)
        answers = [scores[key] for key in asked]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _fitted(self, context: list[int], continuation: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What is too long loses its beginning; the last token is only asked about, and needs no room."""
        if not 0 < len(continuation) <= self.max_length:
            raise InvalidInputError(
                f"a continuation must have 1 to max_length = {self.max_length} tokens, got {len(continuation)}"
            )
        kept = context[-(self.max_length + 1 - len(continuation)) :]
        return tuple(kept), tuple(continuation)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Logprob of each whole text; one that is too long is read in windows, every token scored once."""
        texts = [request.args[0] for request in requests]
        windows = [
            [
                (None, *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for text in texts
        ]
        scores = iter(self._loglikelihood_tokens([each for own in windows for each in own], disable_tqdm))
        totals = [sum(next(scores)[0] for _ in own) for own in windows]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    # -- writing ---------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts that go on from contexts, greedy unless the task says otherwise, cut at the first `until`."""
        asked = [(str(request.args[0]), Writing.of(request.args[1], self.max_gen_toks)) for request in requests]
        prompts = []
        for context, writing in asked:
            room = self.max_length - writing.longest
            if room < 1:
                raise InvalidInputError(
                    f"a text of up to {writing.longest} tokens leaves no room for its context: max_length is "
                    f"{self.max_length}"
                )
            prompts.append(self.tok_encode(context)[-room:])
        texts: list[str] = []
        for some in _pieces(range(len(asked)), "Writing", disable_tqdm):
            outputs = self.llm.generate(
                [prompts[index] for index in some], [asked[index][1].params for index in some], use_tqdm=False
            )
            for index, output in zip(some, outputs, strict=True):
                if output.error is not None:
                    raise InvalidInputError(f"no text for request {index}: {output.error}")
                texts.append(asked[index][1].cut(output.outputs[0].text))
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts


def _pieces(items: Sequence[Any], what: str, is_quiet: bool) -> Iterator[Sequence[Any]]:
    starts: Iterable[int] = range(0, len(items), AT_ONCE)
    with tqdm(total=len(items), desc=f"{what} by Ramify", disable=is_quiet) as bar:
        for start in starts:
            some = items[start : start + AT_ONCE]
            yield some
            bar.update(len(some))


if NAME not in MODEL_REGISTRY:  # there already where lm-eval looks for models of other packages
    register_model(NAME)(RamifyLM)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
