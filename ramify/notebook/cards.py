"""Outputs side by side, a card each: what a notebook shows of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

from ramify.notebook.token_shades import legend, reach_of, shaded

if TYPE_CHECKING:
    from ramify.outputs import CompletionOutput, RequestOutput

MOST_CARDS = 64  # of one prompt
MOST_PROMPTS = 16
MOST_TOKENS = 20_000  # that are shaded in one cell; then texts are shown plain, so that a notebook stays quick
MOST_PROMPT = 600  # characters: its end is shown
ENDS = {"stop": "ended", "length": "max tokens", "abort": "stopped", "error": "failed"}

GRID = "display:grid;grid-template-columns:repeat(auto-fill,minmax(14em,1fr));gap:.7em;margin:.5em 0 1em"
CARD = "border:1px solid rgba(128,128,128,.4);border-radius:8px;padding:.5em .8em .6em;text-align:left"
TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.6"
SMALL = "font-size:.85em;opacity:.75"
# What else a card shows, below the facts; and the tokens' texts, if they are known.
Below = Callable[["CompletionOutput"], str]
Pieces = Callable[["CompletionOutput"], Sequence[str]]


def html_of_requests(
    requests: Sequence[RequestOutput], *, pieces_of: Pieces | None = None, below: Below | None = None
) -> str:
    """Prompt after prompt, with one scale for all of them."""
    shown = [output for request in requests[:MOST_PROMPTS] for output in request.outputs[:MOST_CARDS]]
    reach, left = reach_of(shown), MOST_TOKENS
    told = legend(shown, reach)
    parts = [f'<div style="{SMALL}">{told}</div>'] if told else []
    for request in requests[:MOST_PROMPTS]:
        cards = []
        for output in request.outputs[:MOST_CARDS]:
            left -= len(output.token_ids)
            if left >= 0:
                pieces = None if pieces_of is None else pieces_of(output)
                text = shaded(output, pieces, reach)
            else:
                text = escape(output.text)
            cards.append(_card(output, text, "" if below is None else below(output)))
        parts.append(f"<div>{_prompt(request)}<div style='{GRID}'>{''.join(cards)}</div></div>")
        parts += _more(len(request.outputs) - MOST_CARDS, "samples of this prompt")
    parts += _more(len(requests) - MOST_PROMPTS, "prompts")
    return f"<div>{''.join(parts)}</div>"


def html_of_completion(output: CompletionOutput) -> str:
    reach = reach_of([output])
    text = shaded(output, None, reach) if len(output.token_ids) <= MOST_TOKENS else escape(output.text)
    return f'<div><div style="{SMALL}">{legend([output], reach)}</div>{_card(output, text, "")}</div>'


def _prompt(request: RequestOutput) -> str:
    """Its end, which the samples go on from, and what went wrong."""
    if request.prompt is None:
        shown = f"<i>{len(request.prompt_token_ids)} prompt tokens</i>"
    else:
        cut = "…" if len(request.prompt) > MOST_PROMPT else ""
        shown = f'<b style="{TEXT}">{cut}{escape(request.prompt[-MOST_PROMPT:])}</b>'
    if request.error is not None:
        shown += f'<div style="color:#d03a1c">error: {escape(request.error)}</div>'
    return f'<div style="text-align:left">{shown}</div>'


def _card(output: CompletionOutput, text: str, below: str) -> str:
    count = len(output.token_ids)
    facts = [f"{count} tokens", f"logprob {output.cumulative_logprob:.1f}"]
    if count and math.isfinite(output.cumulative_logprob):
        facts.append(f"perplexity {math.exp(min(-output.cumulative_logprob / count, 700.0)):.1f}")
    if output.score is not None:
        facts.append(f"score {output.score:.2f}")
    end = "writing" if output.finish_reason is None else ENDS[output.finish_reason]
    if isinstance(output.stop_reason, str):
        end += f" at {output.stop_reason!r}"
    return (
        f'<div style="{CARD}"><div style="{SMALL}"><b>{output.index}</b> · {escape(end)}</div>'
        f'<div style="{TEXT}">{text}</div><div style="{SMALL}">{" · ".join(facts)}</div>{below}</div>'
    )


def _more(count: int, what: str) -> list[str]:
    return [f'<div style="{SMALL}">… and {count:,} more {what}</div>'] if count > 0 else []
