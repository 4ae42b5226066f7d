"""The options of the load test, checked before anything starts."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from bench.load_work import Work


class Options(msgspec.Struct, frozen=True, kw_only=True):
    url: str | None
    model: str | None
    api_key: str | None
    wait: float
    label: str | None
    loads: list[dict[str, float]]
    requests: int | None
    seconds: float | None
    warmup: int | None
    repeats: int
    work: Work
    timeout: float
    processes: int
    ceiling_seconds: float
    compare: bool
    quiet: bool
    save: Path | None
    chart: Path | None
    beside: list[Path]
    serve_flags: list[str]

    def settings(self) -> dict[str, Any]:
        """What a reader needs to know to compare results."""
        work = msgspec.to_builtins(self.work)
        names = ("prompt", "output", "chat", "stream", "n", "shared", "groups", "vocabulary", "fields", "seed")
        return {
            **{name: work[name] for name in names},
            "requests": self.requests,
            "seconds": self.seconds,
            "repeats": self.repeats,
            "processes": self.processes,
        }


def parse(arguments: Sequence[str], description: str) -> Options:
    """Ends the program with a message where something is wrong."""
    own, flags = list(arguments), []
    if "--" in own:
        at = own.index("--")
        own, flags = own[:at], own[at + 1 :]
    parser = _parser(description)
    given = parser.parse_args(own)

    def refuse(message: str) -> NoReturn:
        parser.error(message)

    if flags and given.url is not None:
        refuse("flags after -- are for the server that is started here, and --url names one that runs")
    if given.chat and given.token_ids is not None:
        refuse("--token-ids and --chat exclude each other: messages are text")
    if given.beside and given.chart is None:
        refuse("--beside needs --chart")
    if given.rate and given.compare:
        refuse("--compare needs --concurrency: LLM.generate knows no arrivals")
    if given.seconds is not None and given.compare:
        refuse("--compare needs --requests: LLM.generate ends when its work is done")
    fields: dict[str, Any] = {"temperature": 1.0}
    if given.ignore_eos:
        fields["ignore_eos"] = True
    fields |= dict(given.field)
    for name in ("prompt", "messages", "model", "stream", "stream_options", "n", "max_tokens"):
        if name in fields:
            refuse(f"--field {name}: that field is the load test's own")
    for path in (given.save, given.chart):
        if path is not None and not path.parent.is_dir():
            refuse(f"{path} cannot be written: there is no folder {path.parent}")
    compare = given.compare
    if compare is None:
        compare = given.url is None and not given.rate and given.seconds is None and not flags
    elif compare and given.url is not None:
        refuse("--compare runs LLM.generate beside the server that is started here; --url names another")
    loads: list[dict[str, float]] = [{"rate": rate} for rate in given.rate or ()]
    loads = loads or [{"concurrency": concurrency} for concurrency in given.concurrency or (32,)]
    return Options(
        url=given.url,
        model=given.model,
        api_key=given.api_key or os.environ.get("OPENAI_API_KEY") or None,
        wait=given.wait,
        label=given.label,
        loads=loads,
        requests=given.requests,
        seconds=given.seconds,
        warmup=given.warmup,
        repeats=given.repeats,
        work=Work(
            model=None,
            prompt=given.prompt,
            output=given.output,
            chat=given.chat,
            stream=given.stream,
            n=given.n,
            shared=given.shared,
            groups=given.groups,
            vocabulary=given.token_ids,
            fields=fields,
            seed=given.seed,
        ),
        timeout=given.timeout,
        processes=given.processes,
        ceiling_seconds=given.ceiling_seconds,
        compare=compare,
        quiet=given.quiet,
        save=given.save,
        chart=given.chart,
        beside=given.beside,
        serve_flags=flags,
    )


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] [-- flags]",
    )
    switch = argparse.BooleanOptionalAction
    server = parser.add_argument_group("server")
    server.add_argument("--url", help="of a server that runs; default: `ramify serve` is started")
    server.add_argument("--model", help="its name at the server; or what the started server loads")
    server.add_argument("--api-key", help="default: $OPENAI_API_KEY")
    server.add_argument("--wait", type=_number(0), default=0.0, metavar="SECONDS", help="for a server to be ready")
    load = parser.add_argument_group("load")
    kind = load.add_mutually_exclusive_group()
    kind.add_argument("--concurrency", type=_whole(1), nargs="+", metavar="C", help="requests at a time (default: 32)")
    kind.add_argument(
        "--rate", type=_number(0, above=True), nargs="+", metavar="R", help="or Poisson arrivals a second"
    )
    load.add_argument("--requests", type=_whole(1), help="of each load (default: 32, or twice the concurrency)")
    load.add_argument("--seconds", type=_number(0, above=True), help="begin no more requests after these")
    load.add_argument("--warmup", type=_whole(0), help="requests before each load (default: its concurrency, or 4)")
    load.add_argument("--repeats", type=_whole(1), default=1, help="the best run of each load counts (default: 1)")
    load.add_argument("--timeout", type=_number(0, above=True), default=600.0, help="seconds a request may take (600)")
    work = parser.add_argument_group("requests")
    work.add_argument("--prompt", type=_span, default=(24, 24), metavar="N[:M]", help="words, or ids (default: 24)")
    work.add_argument("--output", type=_span, default=(64, 64), metavar="N[:M]", help="tokens an answer (default: 64)")
    work.add_argument("--n", type=_whole(1), default=1, help="answers to each request (default: 1)")
    work.add_argument("--stream", action=switch, default=True, help="default: yes")
    work.add_argument("--chat", action="store_true", help="/v1/chat/completions instead of /v1/completions")
    work.add_argument("--shared", type=_share, default=0.0, help="share of a prompt that its group has in common (0)")
    work.add_argument("--groups", type=_whole(1), default=1, help="of requests that share (default: 1)")
    work.add_argument("--token-ids", type=_whole(1), metavar="N", help="prompts are ids below N instead of words")
    work.add_argument("--ignore-eos", action=switch, default=True, help="ask for answers of full length (default: yes)")
    work.add_argument(
        "--field", type=_field, action="append", default=[], metavar="NAME=JSON", help="sent with every request"
    )
    work.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals (default: 0)")
    client = parser.add_argument_group("client")
    cores = max(1, (os.cpu_count() or 1) // 4)
    client.add_argument("--processes", type=_whole(1), default=cores, help=f"of the client (default here: {cores})")
    client.add_argument(
        "--ceiling-seconds", type=_number(0), default=1.0, help="to measure the client itself; 0: do not (default: 1)"
    )
    client.add_argument("--compare", action=switch, help="with LLM.generate (default: where the server is started)")
    client.add_argument("--quiet", action="store_true", help="begin turns only while nobody else computes here (Linux)")
    results = parser.add_argument_group("results")
    results.add_argument("--label", help="the server's name in results and chart")
    results.add_argument("--save", type=Path, metavar="FILE", help="append the line of JSON to this file")
    results.add_argument("--chart", type=Path, metavar="FILE", help="write latency over throughput into this HTML file")
    results.add_argument(
        "--beside", type=Path, nargs="+", default=[], metavar="FILE", help="saved results that the chart shows too"
    )
    return parser


def _whole(least: int) -> Any:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is no whole number from {least} up")
        return value

    return read


def _number(least: float, *, above: bool = False) -> Any:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (least < value < float("inf") or (value == least and not above)):
            raise argparse.ArgumentTypeError(f"{text} is no number {'above' if above else 'from'} {least:g}")
        return value

    return read


def _share(text: str) -> float:
    value: float = _number(0)(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text} is no share: from 0 to 1")
    return value


def _span(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    try:
        span = int(low), int(high if colon else low)
    except ValueError:
        span = 0, 0
    if not 1 <= span[0] <= span[1]:
        raise argparse.ArgumentTypeError(f"{text} is no length: 64 is one, and 50:200 is a range")
    return span


def _field(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text} is no field: top_k=20 is one")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        raise argparse.ArgumentTypeError(f"{value} is no JSON; text needs quotes, as in '{name}=\"{value}\"'") from None
