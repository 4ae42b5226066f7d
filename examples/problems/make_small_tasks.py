"""Writes small_tasks.jsonl: tasks with known answers that a model of 135M parameters can sometimes do.

    python examples/problems/make_small_tasks.py

Three kinds in turn: a sum or a difference, a date to be rewritten, a fact to be found in a sentence. The numbers
and names are drawn with a fixed seed, so the file is always the same.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path

SEED = 2024
TASKS = 90
FIRST_DAY = date(1950, 1, 1)
DAYS = 27_000

NAMES = ("Amina", "Boris", "Chen", "Dalia", "Emeka", "Freya", "Goran", "Hana", "Ivo", "Jana")
THINGS = ("apples", "books", "candles", "eggs", "keys", "lamps", "pens", "plates", "shirts", "stamps")
CITIES = ("Athens", "Bergen", "Cairo", "Dublin", "Havana", "Kyoto", "Lima", "Nairobi", "Oslo", "Prague")


def sum_or_difference(draw: random.Random) -> tuple[str, str]:
    large, small = draw.randint(11, 89), draw.randint(2, 9)
    if draw.random() < 0.5:
        return f"What is {large} + {small}?", str(large + small)
    return f"What is {large} - {small}?", str(large - small)


def date_to_rewrite(draw: random.Random) -> tuple[str, str]:
    day = FIRST_DAY + timedelta(days=draw.randrange(DAYS))
    return f"Write the date {day:%B} {day.day}, {day.year} as YYYY-MM-DD.", day.isoformat()


def fact_to_find(draw: random.Random) -> tuple[str, str]:
    name, thing, city = (draw.choice(words) for words in (NAMES, THINGS, CITIES))
    count, price = draw.randint(3, 40), draw.randint(41, 99)
    told = f"{name} bought {count} {thing} in {city} for {price} coins."
    asked, answer = draw.choice(
        (
            (f"Who bought the {thing}?", name),
            (f"What did {name} buy?", thing),
            (f"Where did {name} buy the {thing}?", city),
            (f"How many {thing} did {name} buy?", str(count)),
            (f"How many coins did {name} pay?", str(price)),
        )
    )
    return f"{told} {asked}", answer


KINDS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (sum_or_difference, date_to_rewrite, fact_to_find)


def made(count: int, seed: int) -> list[dict[str, str]]:
    """The tasks, no question twice."""
    draw = random.Random(seed)
    tasks: dict[str, str] = {}
    while len(tasks) < count:
        question, answer = KINDS[len(tasks) % len(KINDS)](draw)
        tasks.setdefault(question, answer)
    return [{"question": question, "answer": answer} for question, answer in tasks.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=TASKS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("small_tasks.jsonl"))
    options = parser.parse_args()
    lines = [json.dumps(task) + "\n" for task in made(options.tasks, options.seed)]
    options.out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
