"""Strangers' metadata: JSON values that do not belong, put in every place of a sound file.

`replacements` names each place and each foreign value; `random_alteration` draws a few changes of a whole document, the
same ones for the same generator. `use` is what a user does with a model: load it, and generate a little.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ramify import LLM, SamplingParams
from ramify.errors import RamifyError

# Written as JSON, since Python itself neither reads nor writes an integer of 5,000 digits.
FOREIGN = {
    "null": "null",
    "true": "true",
    "zero": "0",
    "one": "1",
    "minus one": "-1",
    "half": "0.5",
    "tiny": "1e-320",
    "huge": "1e300",
    "infinite": "Infinity",
    "minus infinite": "-Infinity",
    "nan": "NaN",
    "2^31": str(2**31),
    "2^63": str(2**63),
    "2^64": str(2**64),
    "minus 2^63": str(-(2**63)),
    "4,000 digits": "9" * 4000,
    "5,000 digits": "9" * 5000,
    "empty text": '""',
    "text": '"x"',
    "digits": '"64"',
    "long text": json.dumps("x" * 50_000),
    "surrogate": r'"\ud800"',
    "empty list": "[]",
    "list": "[1]",
    "list of texts": '["x"]',
    "nested list": "[" * 60 + "]" * 60,
    "deep list": "[" * 5000 + "]" * 5000,
    "empty object": "{}",
    "object": '{"a": 1}',
    "deep object": '{"a":' * 5000 + "1" + "}" * 5000,
}
# A text that no document holds, which stands for a foreign value until the document is written.
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


def with_value(document: dict[str, Any], path: tuple[str, ...], value: str) -> str:
    """The document as JSON, with the JSON text `value` at `path`; objects on the way are made if need be."""
    copy: dict[str, Any] = json.loads(json.dumps(document))
    parent = copy
    for name in path[:-1]:
        if not isinstance(parent.get(name), dict):
            parent[name] = {}
        parent = parent[name]
    parent[path[-1]] = _MARK
    return json.dumps(copy, ensure_ascii=False).replace(f'"{_MARK}"', value)


def random_alteration(document: dict[str, Any], generator: random.Random) -> tuple[str, str]:
    """(what was done, the altered document as JSON): one to three values replaced, taken out, moved or repeated."""
    copy: Any = json.loads(json.dumps(document))
    foreign: list[str] = []
    done = []
    for _ in range(generator.choice((1, 1, 2, 3))):
        places = list(_places(copy))
        if not places:
            break
        parent, key = generator.choice(places)
        act = generator.choice(("replace", "replace", "replace", "drop", "move", "repeat"))
        done.append(f"{act} {key!r}")
        if act == "replace":
            name = generator.choice(list(FOREIGN))
            done[-1] += f" by {name}"
            parent[key] = f"{_MARK}{len(foreign)}{_MARK}"
            foreign.append(FOREIGN[name])
        elif act == "drop":
            del parent[key]
        elif act == "move":
            other, other_key = generator.choice(places)
            parent[key], other[other_key] = (json.loads(json.dumps(each)) for each in (other[other_key], parent[key]))
        else:
            parent[key] = [parent[key]] * generator.choice((2, 50))
    text = json.dumps(copy, ensure_ascii=False)
    for index, value in enumerate(foreign):
        text = text.replace(f'"{_MARK}{index}{_MARK}"', value)
    return ", ".join(done), text


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (parent, key) below a value; of a long object or list the first few."""
    if not isinstance(value, dict | list):
        return
    for key in list(value if isinstance(value, dict) else range(len(value)))[:40]:
        yield value, key
        yield from _places(value[key])


def use(model: Path, **options: Any) -> str:
    """Loads a model and generates two tokens: "worked", or "refused" with an error of ours. All else is raised."""
    try:
        llm = LLM(str(model), num_kv_blocks=32, **options)
        params = SamplingParams(max_tokens=3, min_tokens=2, seed=1)
        prompts: list[Any] = [[1, 2, 3]]
        if llm.tokenizer is not None:
            prompts.append("hello 12 wörld")
            params = replace(params, bad_words=["he llo"])
        for output in llm.generate(prompts, params, use_tqdm=False):
            assert output.finished
            assert output.error is not None or len(output.outputs[0].token_ids) >= 2
    except RamifyError as error:
        check_message(error)
        return "refused"
    return "worked"


def check_message(error: RamifyError) -> None:
    assert str(error), "an error without a message"
    assert len(str(error)) < 1000, "a message as long as what it refuses"
