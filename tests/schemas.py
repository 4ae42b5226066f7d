"""JSON schemas at random: whatever they allow is finite, so that an output comes to its end."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]
NAMES = ("name", "age", "a b", 'qu"ote', "ünïcode", "list", "x", "y", "kind", "日本", "", "deep")
PATTERNS = ("^[a-z]{1,6}$", "^(ab|cd){1,3}$", "^[A-Z][a-z]{0,4} [0-9]{2}$", "^x?y?z?$", "^[^aeiou]{2,4}$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


def schemas(count: int, seed: int = 0) -> list[Schema]:
    return [_root(Random(seed * 1_000_003 + number)) for number in range(count)]


def _root(dice: Random) -> Schema:
    schema = dice.choice((_object, _object, _array, _any))(dice, 3)
    if dice.random() < 0.2:
        return {"$defs": {"part": _any(dice, 2)}, "type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 3}
    return schema


def _any(dice: Random, depth: int) -> Schema:
    simple: list[Callable[[Random, int], Schema]] = [_string, _integer, _number, _plain, _enum]
    nested: list[Callable[[Random, int], Schema]] = [_object, _array, _union, _pair]
    return dice.choice(simple if depth <= 0 else [*simple, *nested])(dice, depth - 1)


def _string(dice: Random, _depth: int) -> Schema:
    kind = dice.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": dice.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": dice.choice(FORMATS), "maxLength": 64}
    shortest = dice.randrange(4)
    return {"type": "string", "minLength": shortest, "maxLength": shortest + dice.randrange(1, 9)}


def _integer(dice: Random, _depth: int) -> Schema:
    low = dice.randrange(-500, 500)
    if dice.random() < 0.3:
        return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + dice.randrange(2, 300)}
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + dice.randrange(300)}
    if dice.random() < 0.2:
        schema = {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": dice.choice((2, 5, 7))}
    return schema


def _number(dice: Random, _depth: int) -> Schema:
    low = round(dice.uniform(-20, 20), 2)
    return {"type": "number", "minimum": low, "maximum": round(low + dice.uniform(0.5, 30), 2)}


def _plain(dice: Random, _depth: int) -> Schema:
    return {"type": dice.choice(("boolean", "null", ["boolean", "null"]))}


def _enum(dice: Random, _depth: int) -> Schema:
    values: list[Any] = ["red", "gr een", 1, -2.5, True, None, {"a": [1]}, [], "é\n"]
    if dice.random() < 0.3:
        return {"const": dice.choice(values)}
    return {"enum": dice.sample(values, dice.randrange(1, 5))}


def _object(dice: Random, depth: int) -> Schema:
    names = dice.sample(NAMES, dice.randrange(0, 5))
    schema: Schema = {"type": "object", "properties": {name: _any(dice, depth - 1) for name in names}}
    schema["required"] = dice.sample(names, dice.randrange(len(names) + 1))
    schema["additionalProperties"] = False
    return schema


def _array(dice: Random, depth: int) -> Schema:
    fewest = dice.randrange(3)
    return {
        "type": "array",
        "items": _any(dice, depth - 1),
        "minItems": fewest,
        "maxItems": fewest + dice.randrange(3),
    }


def _union(dice: Random, depth: int) -> Schema:
    return {"anyOf": [_any(dice, depth - 1) for _ in range(dice.randrange(1, 4))]}


def _pair(dice: Random, depth: int) -> Schema:
    parts = [_any(dice, depth - 1) for _ in range(2)]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": 2, "maxItems": 2}
