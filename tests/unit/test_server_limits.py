"""Limits of a server, counted over its processes: exact at every moment, and free again whatever ends a process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter

import pytest

from ramify.server import limits as limits_module
from ramify.server.limits import Limits

MOST, MOST_OF_ONE = 20, 6


def test_random_acts_of_three_processes_are_counted_as_by_one() -> None:
    chance = random.Random(5)
    first = Limits.create(by_client=True, num_processes=3)
    each = [first, *(Limits(first.file, by_client=True, num_processes=3, column=column) for column in (1, 2))]
    held: list[tuple[int, int, str]] = []
    refused: Counter[str | None] = Counter()
    for _ in range(3_000):
        column, count, client = chance.randrange(3), chance.randint(1, 4), f"10.0.0.{chance.randrange(8)}"
        taken = sum(prompts for _, prompts, _ in held)
        of_client = sum(prompts for _, prompts, whose in held if whose == client)
        if chance.random() < 0.55:
            wanted = "queue" if taken + count > MOST else "client" if of_client + count > MOST_OF_ONE else None
            assert each[column].take(count, client, MOST, MOST_OF_ONE) == wanted
            refused[wanted] += 1
            if wanted is None:
                held.append((column, count, client))
        elif held:
            column, count, client = held.pop(chance.randrange(len(held)))
            each[column].give_back(count, client)
        elif chance.random() < 0.1:
            each[0].give_back_all(chance.randrange(3))
        if chance.random() < 0.01:  # a process crashes: another takes back what it held
            gone = chance.randrange(3)
            each[(gone + 1) % 3].give_back_all(gone)
            held = [entry for entry in held if entry[0] != gone]
        assert each[chance.randrange(3)].num_prompts == sum(prompts for _, prompts, _ in held)
    assert min(refused[None], refused["queue"], refused["client"]) > 20
    for column, count, client in held:
        each[column].give_back(count, client)
    assert [limits.num_prompts for limits in each] == [0, 0, 0]
    assert each[0].num_prompts_of("10.0.0.1") == 0
    os.close(first.file)


def test_connections_are_counted_over_processes() -> None:
    one = Limits.create(by_client=False, num_processes=2)
    other = Limits(one.file, by_client=False, num_processes=2, column=1)
    assert [one.connect(3), other.connect(3), other.connect(3), one.connect(3), other.connect(3)] == [True] * 3 + [
        False
    ] * 2
    other.disconnect()
    assert one.num_connections == 2
    assert one.connect(3)
    one.give_back_all(1)
    assert [one.num_connections, other.num_connections] == [2, 2]
    os.close(one.file)


def test_more_clients_than_there_are_rows_wait_as_for_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "_MOST_CLIENTS", 2)
    limits = Limits.create(by_client=True)
    assert [limits.take(1, name, 99, 5) for name in "abac"] == [None, None, None, "queue"]
    limits.give_back(1, "b")
    assert limits.take(1, "c", 99, 5) is None
    assert [limits.num_prompts_of(name) for name in "abc"] == [2, 0, 1]


CHILD = """
import sys
from ramify.server.limits import Limits
file, column, most, turns = map(int, sys.argv[1:])
limits = Limits(file, by_client=True, num_processes=2, column=column)
largest = taken = 0
while taken < turns:  # however long the other one keeps the place
    if limits.take(1, "somebody", most, most) is None:
        taken += 1
        largest = max(largest, limits.num_prompts)
        limits.give_back(1, "somebody")
print(largest, flush=True)
input()
for _ in range(3):
    limits.take(1, "somebody", 99, 99)  # and ends with them in its hands
"""


def test_processes_that_race_for_one_place_never_both_get_it() -> None:
    ours = Limits.create(by_client=True, num_processes=2)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(ours.file), str(column), "1", "1000"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(ours.file,),
        )
        for column in (0, 1)
    ]
    told = [child.stdout.readline() for child in children if child.stdout is not None]
    for child in children:
        child.communicate("\n", timeout=60)
    assert told == ["1\n", "1\n"]
    assert ours.num_prompts == 6
    ours.give_back_all(1)
    assert [ours.num_prompts, ours.num_prompts_of("somebody")] == [3, 3]
    ours.give_back_all(0)
    assert [ours.num_prompts, ours.num_prompts_of("somebody")] == [0, 0]
    os.close(ours.file)
