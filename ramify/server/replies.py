"""What clients get, as the OpenAPI document describes it; `choices.py` makes it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptDetails(Reply):
    cached_tokens: int = Field(description="Prompt tokens that were not computed, because a prefix was known.")


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int = Field(description="Tokens of the returned choices.")
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionLogprobs(Reply):
    """One entry per token; with echo, of the prompt too, whose first token has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(Reply):
    token_id: int
    token: str | None
    logprob: float
    rank: int


class Mixture(Reply):
    """How two models were mixed, one number per token of the choice or chunk."""

    alpha: list[float] = Field(description="The teacher's weight.")
    log_z: list[float] = Field(description="The logarithm of the mixture's normaliser.")
    kl_theta: list[float] = Field(description="Divergence of the mixture from the student.")
    kl_teacher: list[float] = Field(description="Divergence of the mixture from the teacher.")
    ess_theta: list[float] = Field(description="Effective sample size, as a share, of the student.")
    ess_teacher: list[float] = Field(description="The same of the teacher.")
    logprob_theta: list[float] = Field(description="The student's logprob of the token.")
    logprob_teacher: list[float] = Field(description="The teacher's logprob of the token.")
    is_clamped: list[bool] = Field(description="Whether alpha_min or alpha_max held the weight.")


class Inclusion(Reply):
    """How a sequence that was drawn without replacement came to be among the samples."""

    logprob: float = Field(description="Of the whole sequence, by what it was drawn from.")
    threshold: float = Field(description="The largest key that is not among the samples.")
    weight: float = Field(description="Summed over the samples, weight times f is an unbiased estimate of f's mean.")


class Choice(Reply):
    index: int = Field(description="Prompt by prompt: prompt number times n, plus the sample's number or rank.")
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = Field(None, description="The stop id or text that ended it; null for EOS.")
    score: float | None = Field(None, description="What ranked it: best_of, beams and without replacement only.")
    inclusion: Inclusion | None = Field(None, description="With strategy without_replacement only.")
    token_ids: list[int] | None = Field(None, description="With return_token_ids.")
    mixture: Mixture | None = Field(None, description="Of a mixture of two models only: always there.")
    processed_logprobs: list[float] | None = Field(
        None,
        description="With logprobs, where the server tells both kinds (`--logprobs-mode both`): of each token, by the "
        "distribution that it was drawn from.",
    )


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = Field(None, description="With return_token_ids; not of a mixture.")
    prompt_logprobs: list[list[PromptToken] | None] | None = Field(None, description="With prompt_logprobs.")


class Completion(Reply):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(Reply):
    name: str
    arguments: str = Field(description="A JSON object, as text.")


class ToolCall(Reply):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Reply):
    role: Literal["assistant"]
    content: str | None = Field(description="Null where there is nothing beside tool calls.")
    refusal: None = None
    tool_calls: list[ToolCall] | None = Field(None, description="The tools that the model calls, if it calls any.")


class ChatChoice(Choice):
    finish_reason: Literal["stop", "length", "tool_calls"] | None  # type: ignore[assignment]
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = Field(None, description="With return_token_ids; not of a mixture.")


class MixedModels(Reply):
    teacher: str
    theta: str = Field(description="The student.")


class DefaultSamplingParams(Reply):
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    source: str | None = Field(description="Who recommends them; null: nobody, and they change nothing.")


class ModelCard(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = Field(description="Longest prompt and output together, in tokens.")
    default_sampling_params: DefaultSamplingParams = Field(
        description="What a request draws with where it does not say; a beam search takes none of them."
    )
    mixture: MixedModels | None = Field(None, description="Of two models mixed into one: which.")


class ModelList(Reply):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeReply(Reply):
    tokens: list[int]
    token_strs: list[str] = Field(description="Each token's own text.")
    count: int
    max_model_len: int


class DetokenizeReply(Reply):
    prompt: str


class TokenizerInfo(Reply):
    tokenizer_class: str
    vocab_size: int
    model_max_length: int = Field(description="Longest prompt and output together, in tokens.")
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None = Field(description="In Jinja's language, as the model brings it.")


class Version(Reply):
    version: str


class Health(Reply):
    status: Literal["ready", "not ready"]
    reason: str | None = Field(None, description="Why not, and how far loading is.")
