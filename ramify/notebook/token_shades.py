"""Tokens in running text as HTML, shaded by how surprising they were or by which of two models they lean to.

Styles stand in the elements themselves, without script or sheet, and colours are transparent over whatever the page
has: so they look the same in a dark notebook, and wherever notebooks are shown. All text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ramify.outputs import CompletionOutput, LogprobRow, MixtureReport

DECADES = 3  # a token of one in a thousand, or less, has the full colour
SURPRISE, STUDENT, TEACHER = "244,118,74", "76,125,232", "224,90,160"
MOST_ALTERNATIVES = 8
REACHES = (0.05, 0.1, 0.2, 0.3)  # how far from the middle a scale of alpha may go; the least that holds all, or 1/2
HALF = "\N{REPLACEMENT CHARACTER}"  # how a token is spelled that is not a whole character
LOOK_AHEAD = 16  # characters: what a few tokens in the middle of a character may come to


def shaded(output: CompletionOutput, pieces: Sequence[str] | None, reach: float) -> str:
    """The text of an output, its tokens shaded where it tells what they were and how likely, or how they were mixed.

    `pieces` are the tokens' texts if somebody knows them; else its logprobs tell.
    """
    if pieces is None:
        if output.logprobs is None:
            return escape(output.text)
        rows = zip(output.token_ids, output.logprobs, strict=True)
        pieces = [row[token_id].decoded_token or "" for token_id, row in rows]
    shown, written = [], 0
    for place, (piece, is_text) in enumerate(_in_text(pieces, output.text)):
        row = None if output.logprobs is None else output.logprobs[place]
        mixed = None if output.mixture is None else output.mixture[place]
        shown.append(_token(piece, output.token_ids[place], row, mixed, reach=reach, is_text=is_text))
        written += len(piece) if is_text else 0
    return "".join(shown) + escape(output.text[written:])  # nothing is left out, whatever the tokens are called


def reach_of(outputs: Sequence[CompletionOutput]) -> float:
    """How far from the middle the scale of alpha goes, one for all outputs that stand side by side."""
    farthest = max((abs(report.alpha - 0.5) for output in outputs for report in output.mixture or ()), default=0.0)
    return next((reach for reach in REACHES if farthest <= reach), 0.5)


def legend(outputs: Sequence[CompletionOutput], reach: float) -> str:
    """What the shades mean, or how to get them; nothing for no outputs."""
    if any(output.mixture for output in outputs):
        low, high = f"α = {0.5 - reach:.2g}, student", f"teacher, α = {0.5 + reach:.2g}"
        scale = f"rgba({STUDENT},.75),transparent,rgba({TEACHER},.75)"
    elif any(output.logprobs is not None for output in outputs):
        low, high, scale = "certain", "one in a thousand, or less", f"transparent,rgba({SURPRISE},.85)"
    else:
        return "SamplingParams(logprobs=3) shades tokens by their probability" if outputs else ""
    bar = f"display:inline-block;width:9em;height:.7em;border-radius:.4em;background:linear-gradient(90deg,{scale})"
    return f'{low} <span style="{bar}"></span> {high}'


def percent(logprob: float) -> str:
    value = math.exp(logprob) * 100
    return f"{value:.0f} %" if value >= 10 else f"{value:.2g} %" if value >= 0.01 else "< 0.01 %"


def _in_text(pieces: Sequence[str], text: str) -> Iterator[tuple[str, bool]]:
    """Of each token what it adds to the text; joined, those that are text are the text, as far as they go.

    A token that adds nothing (an end of text, what a stop string cut off) comes as it is spelled.
    """
    at = 0
    for place, piece in enumerate(pieces):
        rest = text[at : at + len(piece) + LOOK_AHEAD]
        added = None
        if rest.startswith(piece):
            added = piece
        elif HALF in piece:  # several tokens make a character: it belongs to the last of them
            following = next(iter(pieces[place + 1 : place + 2]), "")
            if HALF in following:
                added = ""
            else:
                found = rest.find(following) if following else -1
                added = rest[:found] if found > 0 else rest
        elif rest and piece.lstrip() and rest.startswith(piece.lstrip()):  # a text may begin without its first space
            added = piece.lstrip()
        elif rest and piece.startswith(rest):  # a stop string began in this token
            added = rest
        at += len(added or "")
        yield (piece, False) if added is None else (added, True)


def _token(
    piece: str, token_id: int, row: LogprobRow | None, mixed: MixtureReport | None, *, reach: float, is_text: bool
) -> str:
    told = [repr(piece)[1:-1] or "(no text)", f"id {token_id}"]
    colour = ""
    if row is not None:
        own = row[token_id]
        told.append(f"{percent(own.logprob)}, rank {own.rank}")
        others = [other for other_id, other in row.items() if other_id != token_id][:MOST_ALTERNATIVES]
        told += [f"  {repr(other.decoded_token or '')[1:-1]} {percent(other.logprob)}" for other in others]
        colour = f"rgba({SURPRISE},{0.85 * _surprise(own.logprob):.2f})"
    if mixed is not None:
        told.append(f"α {mixed.alpha:.3f}, KL {mixed.kl_theta:.3g} / {mixed.kl_teacher:.3g}")
        lean = mixed.alpha - 0.5
        colour = f"rgba({TEACHER if lean > 0 else STUDENT},{0.75 * min(1.0, abs(lean) / reach):.2f})"
    title = escape("\n".join(told)).replace("\n", "&#10;")
    if not is_text:
        pill = "font-size:.75em;opacity:.7;border:1px solid rgba(128,128,128,.5);border-radius:.9em;padding:0 .5em"
        spelled = escape(_visible(piece)) or "·"
        return f'<span title="{title}" style="{pill};background:{colour or "none"}">{spelled}</span>'
    # A space before a word stays clear: shaded, it would hang at the end of the line before.
    gap = " " if piece.startswith(" ") else ""
    style = f"background:{colour or 'none'};border-radius:3px"
    return f'{gap}<span title="{title}" style="{style}">{escape(piece[len(gap) :])}</span>'


def _visible(piece: str) -> str:
    return piece.replace("\n", "↵").replace("\t", "⇥")


def _surprise(logprob: float) -> float:
    """0 for what is certain, 1 for what is rarer than the scale goes, or could not be drawn at all."""
    if math.isnan(logprob):
        return 1.0
    return min(1.0, max(0.0, -logprob / math.log(10) / DECADES))
