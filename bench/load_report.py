"""What a load measured, as numbers: percentiles of latencies, rates, failures by kind; and as lines of a table."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from bench.load_answer import Record
from bench.load_processes import Loaded

PERCENTILES = (50, 90, 99)
Point = dict[str, Any]  # as the line of JSON has it


def percentiles(values: Iterable[float], wanted: Sequence[float] = PERCENTILES) -> list[float]:
    """Between two values the straight line, as numpy's; of no values there are none."""
    ordered = sorted(values)
    found = []
    for share in wanted if ordered else ():
        place = (len(ordered) - 1) * share / 100
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        found.append(ordered[below] + (ordered[above] - ordered[below]) * (place - below))
    return found


def milliseconds(seconds: Sequence[float]) -> dict[str, float] | None:
    """Percentiles and mean, or None where nothing could be measured."""
    if not seconds:
        return None
    named = {f"p{share}": value for share, value in zip(PERCENTILES, percentiles(seconds), strict=True)}
    named["mean"] = sum(seconds) / len(seconds)
    return {name: round(value * 1000, 2) for name, value in named.items()}


def point_of(load: dict[str, float], loaded: Loaded) -> Point:
    """One load's numbers. Failed requests are counted by kind, and are in no latency and no rate."""
    whole = [record for record in loaded.records if record.error is None]
    failed = [record for record in loaded.records if record.error is not None]
    tokens = None if any(record.output_tokens is None for record in whole) else _sum(whole, "output_tokens")
    began = min((record.began for record in loaded.records), default=0.0)
    seconds = max((record.ended for record in loaded.records), default=0.0) - began
    gaps = array("f")
    for record in whole:
        gaps.frombytes(record.gaps)
    events = sum(record.events for record in whole)
    point: Point = {
        **load,
        "seconds": round(seconds, 3),
        "requests": len(whole),
        "failed": len(failed),
        "unfinished": loaded.unfinished,
        "tok_s": round(tokens / seconds, 2) if tokens is not None and whole else None,
        "req_s": round(len(whole) / seconds, 3) if whole else 0.0,
        "prompt_tokens": _sum(whole, "prompt_tokens") if all(record.from_usage for record in whole) else None,
        "output_tokens": tokens,
        "counted_by": "usage" if all(record.from_usage for record in whole) else "events",
        "events_per_token": round(events / tokens, 3) if events and tokens else None,
        "ttft_ms": milliseconds([record.first - record.began for record in whole if record.first is not None]),
        "token_ms": milliseconds([r.seconds_per_token for r in whole if r.seconds_per_token is not None]),
        "event_ms": milliseconds(gaps),
        "e2e_ms": milliseconds([record.ended - record.began for record in whole]),
        "client_busy": round(loaded.busy, 3),
        "errors": dict(Counter(record.error for record in failed).most_common()),
        "said": _said(failed),
    }
    if "rate" in load:
        point["late_ms"] = milliseconds([record.late for record in loaded.records])
    if loaded.stopped:
        point["stopped"] = True
    return point


def _sum(records: Sequence[Record], name: str) -> int:
    return sum(getattr(record, name) or 0 for record in records)


def _said(failed: Sequence[Record]) -> dict[str, str]:
    """What was said first of each kind of failure."""
    said: dict[str, str] = {}
    for record in failed:
        said.setdefault(record.error or "", record.detail)
    return said


def load_name(load: dict[str, Any]) -> str:
    return f"{_load(load)} {'at a time' if 'concurrency' in load else 'a second'}"


def _load(load: dict[str, Any]) -> str:
    return f"{load['concurrency' if 'concurrency' in load else 'rate']:g}"


def table_head(load: dict[str, float]) -> str:
    """Within eighty columns."""
    groups = "".join(f"{title:>18}" for title in ("first token, ms", "per token, ms", "whole answer, s"))
    columns = "".join(f"{f'p{share}':>6}" for share in PERCENTILES) * 3
    return (
        f"{'':<25}{groups}\n{'at a time' if 'concurrency' in load else 'a second':<9}{'tok/s':>9}{'req/s':>7}{columns}"
    )


def table_row(point: Point) -> str:
    tokens = "-" if point["tok_s"] is None else _short(point["tok_s"])
    row = f"{_load(point):<9}{tokens:>9}{_short(point['req_s']):>7}"
    for name, unit in (("ttft_ms", 1), ("token_ms", 1), ("e2e_ms", 1000)):
        values = point[name]
        row += "".join(f"{_short(None if values is None else values[f'p{share}'] / unit):>6}" for share in PERCENTILES)
    return row


def remarks(point: Point) -> list[str]:
    """What a reader of the row must know beside it."""
    notes = []
    if point["events_per_token"] is not None:
        gaps = point["event_ms"] or {}
        times = ", ".join(f"p{share} {_short(gaps.get(f'p{share}'))}" for share in PERCENTILES)
        notes.append(f"per event, ms: {times}; {point['events_per_token']} events a token")
    notes += [f"{count} failed: {kind} ({point['said'][kind]})" for kind, count in point["errors"].items()]
    if point["unfinished"]:
        notes.append(f"{point['unfinished']} were under way when it was stopped, and are not counted")
    if point["counted_by"] == "events" and point["requests"]:
        known = "events were counted as tokens" if point["output_tokens"] is not None else "tokens are not known"
        notes.append(f"the server told no usage: {known}")
    late = point.get("late_ms")
    if late is not None and late["p99"] > 50:
        notes.append(f"the client itself was late: p99 {late['p99']:.0f} ms; more --processes help")
    if point["client_busy"] > 0.8:
        notes.append(f"the client took {point['client_busy']:.0%} of a core: more --processes would tell more")
    return notes


def _short(number: float | None) -> str:
    if number is None:
        return "-"
    if number >= 100_000:
        return f"{number / 1000:,.0f}k"
    return f"{number:.2f}" if number < 10 else f"{number:.1f}" if number < 100 else f"{number:.0f}"
