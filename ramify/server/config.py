"""What a server is started with: ServerConfig (address, key, limits) and PairConfig (two models to mix)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ramify import validation as check
from ramify.config import setting
from ramify.device_names import check_devices
from ramify.errors import InvalidInputError
from ramify.sampling_params import MAX_SAMPLES
from ramify.text.tools.formats import FORMATS

# A scheme, a host, perhaps a port: what browsers send, to the letter, so no path and no slash at the end.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = setting("127.0.0.1", "address to listen at; 0.0.0.0 is everybody's")
    port: int = setting(8000, "port to listen at; 0 takes a free one")
    api_key: str | None = setting(None, "clients must send this key (default: $RAMIFY_API_KEY, else no key)")
    served_model_name: str | None = setting(None, "the name clients know the model by (default: its own)")
    max_samples: int = setting(128, "most samples of one HTTP request: prompts times n, best_of or beam_width")
    max_queue: int = setting(4096, "most prompts that run or wait; more are answered 429")
    max_queue_per_client: int | None = setting(None, "the same for one client address (default: no such limit)")
    max_body_bytes: int = setting(8 * 2**20, "largest request body")
    max_header_bytes: int = setting(16 * 2**10, "largest request line and headers")
    max_json_depth: int = setting(64, "deepest nesting of a request body")
    request_timeout: float = setting(600.0, "seconds from a request's arrival until it is ended with an error")
    grace_period: float = setting(10.0, "seconds that running requests get after SIGTERM or Ctrl-C")
    allow_chat_template: bool = setting(False, "let requests bring chat templates of their own")
    tool_call_parser: str | None = setting(
        None, "how the model writes calls of tools: hermes or llama3_json (default: as its chat template shows)"
    )
    max_connections: int | None = setting(
        None, "most connections at once; others get 503 (default: what the limit of open files leaves)"
    )
    allowed_origins: Sequence[str] | None = setting(
        None, "let pages of this origin (https://example.org, or * for all) use the server from browsers"
    )
    engine_process: bool | None = setting(
        None, "run the engine in a process of its own (default: on a GPU, where the server then never holds it up)"
    )
    http_workers: int = setting(
        1, "processes that speak HTTP and share the port; several need the engine in a process of its own"
    )
    log_requests: bool = setting(False, "a line for each request: counts, status and time, never its text")
    log_interval: float = setting(10.0, "seconds between lines on load and throughput, while there is any; 0 for none")

    def __post_init__(self) -> None:
        check.text("host", self.host)
        check.integer("port", self.port, 0, 65_535)
        if self.api_key is not None:
            check.text("api_key", self.api_key, 4_096)
            if self.api_key != self.api_key.strip() or not self.api_key.isprintable():  # and the key is not shown
                raise InvalidInputError(
                    "api_key must not begin or end with white space, nor hold what cannot be printed: no client could "
                    "send it (was it read from a file, with the line break at its end?)"
                )
        if self.served_model_name is not None:
            check.text("served_model_name", self.served_model_name, 256)
        check.integer("max_samples", self.max_samples, 1, MAX_SAMPLES)
        check.integer("max_queue", self.max_queue, 1)
        if self.max_queue_per_client is not None:
            check.integer("max_queue_per_client", self.max_queue_per_client, 1)
        check.integer("max_body_bytes", self.max_body_bytes, 1)
        check.integer("max_header_bytes", self.max_header_bytes, 1_024)
        check.integer("max_json_depth", self.max_json_depth, 4, 256)
        check.number("request_timeout", self.request_timeout, above=0)
        check.number("grace_period", self.grace_period, 0)
        check.boolean("allow_chat_template", self.allow_chat_template)
        if self.tool_call_parser is not None:
            check.choice("tool_call_parser", self.tool_call_parser, FORMATS)
        if self.max_connections is not None:
            check.integer("max_connections", self.max_connections, 1)
        for origin in self.allowed_origins or ():
            if origin != "*" and not _ORIGIN.fullmatch(check.text("allowed_origins", origin, 1_024)):
                raise check.refuse("allowed_origins", origin, "an origin such as https://example.org:8443, or *")
        if self.engine_process is not None:
            check.boolean("engine_process", self.engine_process)
        check.integer("http_workers", self.http_workers, 1, 64)
        if self.http_workers > 1 and self.engine_process is False:
            raise InvalidInputError(
                "http_workers must be 1 where the engine has no process of its own (engine_process)"
            )
        check.boolean("log_requests", self.log_requests)
        check.number("log_interval", self.log_interval, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairConfig:
    """Two models that are served as one: every token is drawn from their mixture."""

    teacher: str | None = setting(
        None, "mix this model (what --model takes) with --theta: every token is drawn from both"
    )
    theta: str | None = setting(None, "the student in that mixture; needs the same tokenizer")
    teacher_system_prompt: str | None = setting(None, "what opens the teacher's prompts, and only those")
    theta_system_prompt: str | None = setting(None, "what opens the student's prompts")
    devices: Sequence[str] | None = setting(
        None, "a device for each, twice: the teacher's, then the student's; cuda:0,cuda:1 share a model"
    )

    def __post_init__(self) -> None:
        if self.devices is not None:
            check_devices(self.devices)
        for name in ("teacher", "theta", "teacher_system_prompt", "theta_system_prompt"):
            if getattr(self, name) is not None:
                check.text(name, getattr(self, name))
        if (self.teacher is None) != (self.theta is None):
            raise InvalidInputError("teacher and theta must be given together: a mixture has two models")
        if self.teacher is None and (self.teacher_system_prompt or self.theta_system_prompt) is not None:
            raise InvalidInputError("system prompts go with teacher and theta")
        if self.teacher is None and self.devices is not None:
            raise InvalidInputError("devices are for two models: they go with teacher and theta (device is for one)")
