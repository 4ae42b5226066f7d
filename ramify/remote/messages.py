"""Messages between an engine's process and those that use it: plain data, written in MessagePack by msgspec.

    front process                                 engine's process
      Add, Abort, Ask, Leave   -- one frame -->     between two steps
      Told, Failed, Answer ... <-- one frame --     after a step, all that concerns this connection

A frame holds a list of messages. A connection names its requests by numbers of its own; `model` is the place of a model
among those that the engine's process was told to load. Columns of numbers travel as bytes in the machine's own order:
both ends are on one machine. Nothing that is read can name code: what a frame may hold is declared here, and whatever
else comes ends the connection.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from ramify.engine.observations import EngineState
from ramify.errors import ProtocolError
from ramify.outputs import (
    ContinuationLogprobs,
    FinishReason,
    Inclusion,
    Kept,
    MixtureReport,
    PairLogprobs,
    Standing,
)

T = TypeVar("T")
Reason = FinishReason
StopReason = int | str | None
Row = int  # place in the columns of a Told


class Message(msgspec.Struct, array_like=True, tag=True):
    """Written as an array: its name, then its fields."""


class Part(msgspec.Struct, array_like=True):
    """Inside a message: an array of its fields."""


# -- what the engine's process is started with ---------------------------------------------------------------------


class OneModel(Message):
    """`options` are those of EngineConfig.from_options."""

    options: dict[str, Any]


class TwoModels(Message):
    teacher: dict[str, Any]
    theta: dict[str, Any]
    mixture: dict[str, Any]
    system_prompts: tuple[str | None, str | None]
    enable_chat_template: bool = False
    are_apart: bool = False  # each on its own device, or on several


class Build(Message):
    """The first message of all."""

    models: list[OneModel | TwoModels]


# -- from the front to the engine ------------------------------------------------------------------------------------


class Add(Message):
    """A request. `params` are the fields of SamplingParams that are not at their defaults."""

    model: int
    number: int
    token_ids: bytes
    params: dict[str, Any]
    priority: int = 0
    other_prompts: list[tuple[int, bytes]] = []
    is_told: bool = False  # every token is told in the step that drew it; else an output comes when it is due
    seed: int | None = None  # where `params` name none: of a front that gives requests to several engines
    next_token_id: int | None = None  # of a request that asks about given tokens, as in Request
    num_told: int | None = None


class Abort(Message):
    model: int
    number: int


class Ask(Message):
    """Answered at once, also in the middle of a step."""

    model: int
    ticket: int


class ResetPrefixCache(Message):
    """Answered between two steps, when it is done."""

    model: int
    ticket: int


class LoadWeights(Message):
    """Others in their place, from files that a front has written. Answered, or refused, when it is done."""

    model: int
    ticket: int
    folder: str


class Leave(Message):
    """The front wants nothing more: its requests are aborted, their outputs sent, the connection closed."""


# -- from the engine to the front ------------------------------------------------------------------------------------


class Said(Message):
    """A line of the engine's log, or (without a logger) what loading tells the caller."""

    logger: str | None
    level: int
    text: str


class Facts(Part):
    """What a front must know of a model to make requests for it: the fields of Capacity."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    block_size: int
    num_blocks: tuple[int, ...]
    has_words: bool
    speculates: bool


class Ready(Message):
    """All models are loaded."""

    models: list[Facts]


class NotLoaded(Message):
    """No model is loaded, and the process ends; `kind` is the name of the exception."""

    kind: str
    text: str


class Report(Part):
    """A TokenReport; the columns hold 64-bit integers and floats."""

    logprob: float
    rank: int
    top_token_ids: bytes
    top_logprobs: bytes
    processed: Report | None = None
    kept: Kept | None = None


class Begun(Part):
    """A told request has drawn its first token."""

    number: int
    num_cached_tokens: int
    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None


class Sample(Part):
    """A CompletionOutput without its text."""

    index: int
    token_ids: bytes
    cumulative_logprob: float
    reports: list[Report] | None
    finish_reason: Reason | None
    stop_reason: StopReason
    score: float | None
    mixture: list[MixtureReport] | None
    inclusion: Inclusion | None
    kept: list[Kept] | None


class Grown(Part):
    """A GrownToken without its text."""

    child: int
    parent: int
    position: int
    token_id: int
    logprob: float
    report: Report | None
    mixture: MixtureReport | None
    finish_reason: Reason | None
    stop_reason: StopReason


class Growth(Part):
    tokens: list[Grown]
    standings: list[Standing]


PromptRow = list[tuple[int, float, int]]  # token id, logprob, rank


class Output(Part):
    """A RequestOutput without texts. Of a told request it is the end, and says only who ended without a token."""

    number: int
    finished: bool
    samples: list[Sample]
    num_cached_tokens: int
    times: tuple[float, float | None, float | None, float | None]
    error: str | None
    ends: list[tuple[int, Reason, StopReason]] = []
    prompt_rows: list[PromptRow | None] | None = None
    growth: list[Growth] = []
    scored: ContinuationLogprobs | None = None  # of given tokens, by one model or by two
    compared: PairLogprobs | None = None


class Told(Message):
    """What a step did for this connection: tokens of told requests in columns, and outputs that are due."""

    model: int
    numbers: bytes = b""  # whose request
    children: bytes = b""
    token_ids: bytes = b""
    logprobs: bytes = b""
    reports: list[tuple[Row, Report]] = []
    mixtures: list[tuple[Row, MixtureReport]] = []
    ends: list[tuple[Row, Reason, StopReason]] = []
    begun: list[Begun] = []
    outputs: list[Output] = []


class Failed(Message):
    """These requests have ended with an error."""

    model: int
    numbers: list[int]
    kind: str
    text: str


class Soundness(Message):
    """Whether the last step did not fail; told whenever that changes."""

    model: int
    is_sound: bool


class Answer(Message):
    ticket: int
    state: EngineState


class Refused(Message):
    """What was asked under this ticket cannot be done; `kind` is the name of the exception."""

    ticket: int
    kind: str
    text: str


ToEngine = Add | Abort | Ask | ResetPrefixCache | LoadWeights | Leave
ToFront = Said | Ready | NotLoaded | Told | Failed | Soundness | Answer | Refused


def _plain(value: object) -> object:
    """Numbers of numpy, which devices may leave in their results, and callers' own kinds of numbers, as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a {type(value).__name__} is no part of a message")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_to_engine = msgspec.msgpack.Decoder(list[ToEngine])
_to_front = msgspec.msgpack.Decoder(list[ToFront])
_build = msgspec.msgpack.Decoder(Build)


def encode(messages: Message | list[Any]) -> bytes:
    return _encoder.encode(messages)


def encoded(message: Message) -> msgspec.Raw:
    """A message that can stand in the list of a frame, and whose size is known."""
    return msgspec.Raw(_encoder.encode(message))


def for_engine(content: bytes) -> list[ToEngine]:
    return _decoded(_to_engine, content)


def for_front(content: bytes) -> list[ToFront]:
    return _decoded(_to_front, content)


def build_of(content: bytes) -> Build:
    return _decoded(_build, content)


def _decoded(decoder: msgspec.msgpack.Decoder[T], content: bytes) -> T:
    try:
        return decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a message cannot be read: {error}") from None


# -- columns -----------------------------------------------------------------------------------------------------------


def integers(values: Iterable[int]) -> bytes:
    return array("q", values).tobytes()


def floats(values: Iterable[float]) -> bytes:
    return array("d", values).tobytes()


def integers_of(column: bytes) -> list[int]:
    return _column("q", column).tolist()


def floats_of(column: bytes) -> list[float]:
    return _column("d", column).tolist()


def _column(kind: Literal["q", "d"], column: bytes) -> array[Any]:
    values = array(kind)
    try:
        values.frombytes(column)
    except ValueError:
        raise ProtocolError(f"a column of {len(column)} bytes does not hold whole numbers") from None
    return values
