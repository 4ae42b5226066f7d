"""Several engines behind one queue: what the queue costs, and what a second engine brings.

    queue     the queue alone: requests of 16 ids put in, handed out in batches and ended (goal: 20,000 a second)
    pool      the same with all that stands around it in a front process: requests packed, sent to engines that do
              nothing in processes of their own, their answers read and made into outputs (goal: 20,000 a second)
    scaling   two replicas beside one engine, each on one core with 64 rows, where arithmetic binds and not memory
              (goal: 1.8 times)

Rates are told by the clock and by the front's own processor time: whoever else uses the machine lengthens the first.

    OMP_NUM_THREADS=1 python bench/replicas.py
    OMP_NUM_THREADS=1 python bench/replicas.py --only queue pool --requests 50000
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import commit, machine_name  # type: ignore[import-not-found]

from ramify import LLM, Request, SamplingParams
from ramify.drive.loops import Calls
from ramify.engine.observations import EngineState, Observations
from ramify.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from ramify.remote.frames import FrameReader, frame_of
from ramify.remote.link import Link
from ramify.remote.messages import (
    Add,
    Answer,
    Ask,
    Facts,
    Leave,
    Output,
    Ready,
    Told,
    encode,
    for_engine,
)
from ramify.remote.packing import capacity_of, output_message
from ramify.replicas.replica_core import ReplicaCore
from ramify.replicas.work_queue import Work, WorkQueue
from ramify.text.codec import TextCodec

PROMPT = 16
ROWS = 64
IDLE = Facts(
    max_model_len=2048,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    enable_chunked_prefill=True,
    block_size=16,
    num_blocks=(10_000,),
    has_words=False,
    speculates=False,
)
STATS = ("generated_tokens", "running", "waiting", "blocks_total", "blocks_in_use")


# -- engines that do nothing -----------------------------------------------------------------------------------------


def serve_idly(descriptor: int) -> None:
    """Answers every request at once with one token."""
    end = socket.socket(fileno=descriptor)
    end.sendall(frame_of(encode([Ready([IDLE])])))
    frames = FrameReader(end)
    while (contents := frames.read()) is not None:
        messages = [message for content in contents for message in for_engine(content)]
        if any(isinstance(message, Leave) for message in messages):
            return
        answers: list[Any] = [
            Answer(message.ticket, EngineState(dict.fromkeys(STATS, 0), 0, Observations()))
            for message in messages
            if isinstance(message, Ask)
        ]
        outputs = [_output(message.number) for message in messages if isinstance(message, Add)]
        if outputs:
            answers.append(Told(0, outputs=outputs))
        if answers:
            end.sendall(frame_of(encode(answers)))


def _output(number: int) -> Output:
    sample = CompletionOutput(0, "", (7,), -1.0, finish_reason=FinishReason.LENGTH)
    times = RequestMetrics(0.0, 0.0, 0.0, 0.0)
    return output_message(number, RequestOutput("", None, (), (sample,), finished=True, metrics=times), is_told=False)


def idle_links(count: int) -> list[Link]:
    links = []
    for _ in range(count):
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, str(Path(__file__)), "--idle-engine", str(theirs.fileno())]
            subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        links.append(Link(ours))
    return links


# -- what is measured ------------------------------------------------------------------------------------------------


def rates(count: int, wall: float, processor: float) -> dict[str, int]:
    return {"a_second": round(count / wall), "a_second_of_processor": round(count / processor)}


def measure_queue(count: int, num_engines: int) -> dict[str, Any]:
    works = [Work(f"request-{number}", prompt=PROMPT, longest=16) for number in range(count)]
    queue = WorkQueue(ROWS, num_engines)
    began, used = time.perf_counter(), time.process_time()
    for work in works:
        queue.add(work)
    handed = 0
    while pieces := queue.hand_out():
        handed += len(pieces)
        for piece in pieces:
            queue.ended(piece, 16)
    wall, processor = time.perf_counter() - began, time.process_time() - used
    assert handed == count
    return {"engines": num_engines, "requests": count, **rates(count, wall, processor)}


def measure_pool(count: int, num_engines: int) -> dict[str, Any]:
    links = idle_links(num_engines)
    facts = [link.wait_ready(print)[0] for link in links]
    core = ReplicaCore(links, 0, TextCodec(None), capacity_of(facts[0]), seed=0)
    for link, letters in zip(links, core.pool.letters, strict=True):
        link.start([letters])
    params = SamplingParams(max_tokens=16, detokenize=False)
    prompts = [[(number * 31 + place) % 30_000 + 1 for place in range(PROMPT)] for number in range(count)]
    requests = [Request(f"request-{number}", None, prompt, params) for number, prompt in enumerate(prompts)]
    began, used = time.perf_counter(), time.process_time()
    outputs = Calls(core).run(requests, use_tqdm=False)
    wall, processor = time.perf_counter() - began, time.process_time() - used
    assert all(output.outputs[0].token_ids == (7,) for output in outputs)
    core.stop()
    return {"engines": num_engines, "requests": count, **rates(count, wall, processor)}


def measure_scaling(rounds: int, max_tokens: int) -> dict[str, Any]:
    """The same requests through one engine and through two, in turns; the median of each."""
    options: dict[str, Any] = {"max_num_seqs": ROWS, "num_kv_blocks": 2048, "dequantize": True, "seed": 1}
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=3, temperature=1.0)
    prompts = [[(number * 131 + place * 7) % 40_000 + 100 for place in range(PROMPT)] for number in range(4 * ROWS)]
    cores = sorted(os.sched_getaffinity(0))
    seconds: dict[int, list[float]] = {1: [], 2: []}
    tokens: dict[int, Any] = {}
    engines = {count: LLM(data_parallel_size=count, **options) for count in (1, 2)}
    for _ in range(rounds):
        for count, llm in engines.items():
            if count == 1:
                os.sched_setaffinity(0, cores[:1])  # one core, as each replica has
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds[count].append(time.perf_counter() - began)
            os.sched_setaffinity(0, cores)
            tokens[count] = [output.outputs[0].token_ids for output in outputs]
    one, two = (statistics.median(seconds[count]) for count in (1, 2))
    same = sum(a == b for a, b in zip(tokens[1], tokens[2], strict=True))
    drawn = len(prompts) * max_tokens
    return {
        "tokens_a_second": {"one": round(drawn / one, 1), "two": round(drawn / two, 1)},
        "times": round(one / two, 2),
        "requests_with_the_same_tokens": f"{same} of {len(prompts)}",
        "seconds": {str(count): [round(each, 2) for each in measured] for count, measured in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("queue", "pool", "scaling"))
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--idle-engine", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.idle_engine is not None:
        serve_idly(given.idle_engine)
        return
    result: dict[str, Any] = {"bench": "replicas", "machine": machine_name(), "commit": commit()}
    for name in given.only or ("queue", "pool", "scaling"):
        if name == "queue":
            result[name] = [measure_queue(given.requests, count) for count in (given.engines, 8)]
        elif name == "pool":
            result[name] = measure_pool(given.requests, given.engines)
        else:
            result[name] = measure_scaling(given.rounds, given.max_tokens)
        print(name, json.dumps(result[name], indent=2))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
