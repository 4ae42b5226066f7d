"""What the parts of a tokenizer may cost: a tokenizer is a small program, and a stranger wrote it.

Nothing stops the backend once it runs. So every part is looked at when a tokenizer is loaded:

    bounded    text grows by at most `BOUNDED_GROWTH`, in time proportional to its length: it runs in this process
    unproven   regular expressions that are not known to take linear time, models and tables that may take quadratic
               time: it runs in a process of its own, which has a limit on time and memory (`encoding_process`)
    hopeless   more parts than any tokenizer has, or text that grows by more than `LARGEST_GROWTH`: it is refused

Growth counts bytes of UTF-8, which the parts multiply one after the other. Decoders run after every token, where no
other process can help, so they are bounded or refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from ramify.errors import FileFormatError, UnsupportedModelError
from ramify.text.split_patterns import LINEAR_PATTERNS

BOUNDED_GROWTH = 16.0
LARGEST_GROWTH = 1024.0
MOST_PARTS = 64
LONGEST_TOKEN = 4096  # characters; the longest of real vocabularies have some hundreds
MOST_ADDED_TOKENS = 2**16
_LONGEST_AFFIX = 64
_MOST_TEMPLATE_TOKENS = 256

# The most bytes that one byte can become. Normal forms: as the Unicode standard tells (UAX 15).
_NORMALIZERS = {
    **{"NFC": 3.0, "NFD": 3.0, "NFKC": 11.0, "NFKD": 11.0, "Lowercase": 1.5, "BertNormalizer": 5.0, "ByteLevel": 2.0},
    **{"Strip": 1.0, "StripAccents": 1.0, "Nmt": 1.0},
}
_PRE_TOKENIZERS = {
    **{"ByteLevel": 2.0, "Metaspace": 3.0, "Digits": 1.0, "Whitespace": 1.0, "WhitespaceSplit": 1.0},
    **{"BertPreTokenizer": 1.0, "Punctuation": 1.0, "CharDelimiterSplit": 1.0, "UnicodeScripts": 1.0},
}
_POST_PROCESSORS = {"ByteLevel": 1.0, "BertProcessing": 1.0, "RobertaProcessing": 1.0}
_DECODERS = {
    **{"ByteLevel": 3.0, "ByteFallback": 1.0, "Fuse": 1.0, "Strip": 1.0, "Metaspace": 1.0, "WordPiece": 2.0},
    **{"BPEDecoder": 1.0, "CTC": 1.0},
}


@dataclass(frozen=True, slots=True)
class Cost:
    """By how much a part makes text grow, and why that is not all there is to say."""

    growth: float = 1.0
    unproven: str = ""


def check_tokenizer(backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> str:
    """Why encoding is unproven; empty if it is bounded. FileFormatError or UnsupportedModelError if it is hopeless."""
    longest = max(map(len, vocabulary), default=0)
    if longest > LONGEST_TOKEN:
        raise FileFormatError(f"the tokenizer has a token of {longest} characters; at most {LONGEST_TOKEN} are allowed")
    added = backend.get_added_tokens_decoder().values()
    if len(added) > MOST_ADDED_TOKENS:
        raise FileFormatError(f"the tokenizer adds {len(added)} tokens; at most {MOST_ADDED_TOKENS} are allowed")
    _check_decoder(backend)
    costs = [_model(backend.model)]
    costs += map(_normalizer, _parts(backend.normalizer, "normalizers"))
    costs += map(_pre_tokenizer, _parts(backend.pre_tokenizer, "pretokenizers"))
    costs += map(_post_processor, _parts(backend.post_processor, "processors"))
    if any(token.lstrip or token.single_word for token in added):
        # Each time such a token is found, all of the text before it is searched.
        costs.append(Cost(unproven="an added token with lstrip or single_word"))
    growth = math.prod(cost.growth for cost in costs)
    if growth > LARGEST_GROWTH:
        raise FileFormatError(f"the tokenizer may make a text {growth:g} times as long; at most {LARGEST_GROWTH:g}")
    if growth > BOUNDED_GROWTH:
        costs.append(Cost(unproven=f"a text may become {growth:g} times as long"))
    return next((cost.unproven for cost in costs if cost.unproven), "")


def _check_decoder(backend: tokenizers.Tokenizer) -> None:
    growth = 1.0
    for part in _parts(backend.decoder, "decoders"):
        if part["type"] == "Replace":
            if not part["pattern"].get("String"):
                raise UnsupportedModelError("a decoder that replaces by a regular expression is not supported")
            growth *= _replacement(part).growth
        elif part["type"] in _DECODERS:
            growth *= _DECODERS[part["type"]]
        else:
            raise UnsupportedModelError(f"the decoder {part['type']} is not supported")
    if growth > BOUNDED_GROWTH:
        raise FileFormatError(f"the decoder may make a text {growth:g} times as long; at most {BOUNDED_GROWTH:g}")


def _parts(component: Any, inner: str) -> Iterator[dict[str, Any]]:
    """A component's description, or those of the parts that a sequence holds; the backend allows some 60 levels."""
    if component is None:
        return
    waiting = [json.loads(component.__getstate__())]
    num_parts = 0
    while waiting:
        part = waiting.pop()
        num_parts += 1
        if num_parts > MOST_PARTS:
            raise FileFormatError(f"the tokenizer has more than {MOST_PARTS} {inner}")
        if part["type"] == "Sequence":
            waiting.extend(reversed(part[inner]))
        else:
            yield part


def _model(model: Any) -> Cost:
    kind = type(model).__name__
    if kind == "WordLevel":
        return Cost()
    if kind != "BPE":
        return Cost(unproven=f"a {kind} model")
    affixes = (model.continuing_subword_prefix, model.end_of_word_suffix)
    if any(affix is not None and len(affix) > _LONGEST_AFFIX for affix in affixes):
        return Cost(unproven="a long prefix or suffix of the model's tokens")
    return Cost()


def _normalizer(part: Mapping[str, Any]) -> Cost:
    if part["type"] == "Replace":
        return _replacement(part)
    if part["type"] == "Prepend":  # to every text between two special tokens, so perhaps to a single character
        return Cost(1.0 + len(part["prepend"].encode()))
    return _known(part, _NORMALIZERS)


def _pre_tokenizer(part: Mapping[str, Any]) -> Cost:
    if part["type"] == "Split":
        pattern = part["pattern"].get("Regex")
        return Cost() if pattern is None or pattern in LINEAR_PATTERNS else Cost(unproven=_named(pattern))
    return _known(part, _PRE_TOKENIZERS)


def _post_processor(part: Mapping[str, Any]) -> Cost:
    if part["type"] == "TemplateProcessing":
        pieces = part["single"]
        copies = sum("Sequence" in piece for piece in pieces)
        tokens = max((len(token["ids"]) for token in part["special_tokens"].values()), default=0)
        if tokens * len(pieces) > _MOST_TEMPLATE_TOKENS:
            return Cost(float(max(copies, 1)), unproven="a post-processor that adds many tokens")
        return Cost(float(max(copies, 1)))
    return _known(part, _POST_PROCESSORS)


def _replacement(part: Mapping[str, Any]) -> Cost:
    pattern = part["pattern"].get("String")
    content = len(part["content"].encode())
    if pattern:
        return Cost(max(1.0, content / len(pattern.encode())))
    # An expression matches at least once a character, an empty text (at most) before each.
    return Cost(1.0 + content, unproven=_named(part["pattern"].get("Regex", "")))


def _known(part: Mapping[str, Any], growth: Mapping[str, float]) -> Cost:
    kind = part["type"]
    return Cost(growth[kind]) if kind in growth else Cost(unproven=f"the part {kind}")


def _named(pattern: str) -> str:
    return f"the regular expression {pattern[:40]!r}"
