"""Prompts for two models, the teacher's and the student's, and the requests made from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ramify.drive.intake import Intake, Prompt, plain, text_beside
from ramify.engine.request import Request
from ramify.errors import InvalidInputError
from ramify.sampling_params import SamplingParams
from ramify.structured.grammars import Grammars
from ramify.text.codec import Message, TextCodec


class Rendered(NamedTuple):
    """A prompt as a model sees it; the text is None if token ids were given."""

    text: str | None
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Side:
    """How one model's prompts are made: with its own system prompt and, if wanted, its own chat template."""

    codec: TextCodec
    system_prompt: str | None = None
    enable_chat_template: bool = False

    def render(self, prompt: str) -> tuple[str, list[int]]:
        """The text and tokens that a plain prompt becomes."""
        if self.enable_chat_template:
            return self.render_chat([{"role": "user", "content": prompt}])
        text = prompt if self.system_prompt is None else f"{self.system_prompt}\n\n{prompt}"
        return text, self.codec.encode(text, add_special_tokens=True)

    def render_chat(self, messages: Sequence[Message], **options: Any) -> tuple[str, list[int]]:
        """The text and tokens of a conversation; one without a system message gets the system prompt."""
        opened = list(messages)
        if self.system_prompt is not None and not (opened and opened[0].get("role") == "system"):
            opened.insert(0, {"role": "system", "content": self.system_prompt})
        text = self.codec.render_chat(opened, **options)
        return text, self.codec.encode(text, add_special_tokens=False)

    def check_ids(self, name: str) -> None:
        if self.system_prompt is not None or self.enable_chat_template:
            raise InvalidInputError(
                f"{name} was given as token ids, to which no system prompt and no chat template can be applied: give "
                f"text, or apply them yourself"
            )


class PairIntake(Intake):
    """Makes requests for two models: `prompt` is the teacher's, `theta_prompt` the student's (default: the same)."""

    def __init__(
        self,
        teacher: Side,
        theta: Side,
        *,
        codec: TextCodec,
        theta_model: int,
        vocab_size: int,
        max_logprobs: int,
        check_request: Callable[[Request], None],
        grammars: Grammars | None = None,
    ) -> None:
        super().__init__(
            codec,
            vocab_size=vocab_size,
            max_logprobs=max_logprobs,
            check_request=check_request,
            grammars=grammars,
        )
        self.teacher = teacher
        self.theta = theta
        self._theta_model = theta_model

    def render(self, prompt: Prompt, theta_prompt: Prompt | None = None) -> tuple[Rendered, Rendered]:
        """What each model will see, as (teacher's, student's)."""
        given = prompt if theta_prompt is None else theta_prompt
        return self._render(self.teacher, prompt, "prompt"), self._render(self.theta, given, "theta_prompt")

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        theta_prompt: Prompt | None = None,
        add_special_tokens: bool = True,
        priority: int = 0,
    ) -> Request:
        if not add_special_tokens:
            raise InvalidInputError("add_special_tokens must be True for two models: give token ids instead")
        teacher, theta = self.render(prompt, theta_prompt)
        return self._make_pair(params, request_id, priority, teacher, theta)

    def chat_request(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        theta_messages: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        opening: str = "",
        priority: int = 0,
    ) -> Request:
        """From one conversation, or one for each model, rendered by each model's own chat template."""
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
            "chat_template": chat_template,
            "opening": opening,
        }
        teacher = Rendered(*self.teacher.render_chat(messages, **options))
        theta = Rendered(*self.theta.render_chat(messages if theta_messages is None else theta_messages, **options))
        return self._make_pair(params, request_id, priority, teacher, theta)

    def comparison(self, prompts: tuple[list[int], list[int]], continuation: list[int], top_k: int) -> Request:
        """Asks what both models say of a continuation's tokens, each after its own prompt."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=top_k, detokenize=False)
        teacher, theta = prompts
        other = [(self._theta_model, theta)]
        return self._make(
            params,
            None,
            0,
            text=None,
            token_ids=teacher,
            other_prompts=other,
            continuation=continuation,
        )

    def check_params(self, params: SamplingParams) -> None:
        super().check_params(params)
        if params.prompt_logprobs is not None:
            raise InvalidInputError("prompt_logprobs must be None for two models: their prompts are not mixed")
        if params.dynatemp_range:
            raise InvalidInputError("dynatemp_range must be 0 for two models: both have one temperature")

    def _render(self, side: Side, prompt: Prompt, name: str) -> Rendered:
        given = plain(prompt)
        if isinstance(given, str):
            text, token_ids = side.render(given)
            return Rendered(text, self._checked(token_ids, name))
        side.check_ids(name)
        return Rendered(text_beside(prompt), self._checked(given, name))

    def _make_pair(
        self, params: SamplingParams, request_id: str | None, priority: int, teacher: Rendered, theta: Rendered
    ) -> Request:
        other = [(self._theta_model, theta.token_ids)]
        return self._make(
            params, request_id, priority, text=teacher.text, token_ids=teacher.token_ids, other_prompts=other
        )
