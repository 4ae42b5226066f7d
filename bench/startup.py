"""New process to first token, with the default model already in the cache.

`import torch` alone is most of any such process, so the time is compared with that, measured in the same run, in
turns. The best of all turns counts, by the clock and by processor time: what others do on a busy machine changes the
second little. The process takes the times of its stages; the rest is the interpreter starting and ending.

    python bench/startup.py [--repeats 7]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time

from ramify.models import embedded

CHILD = """
import time
stamps = [("start", time.perf_counter())]
def stamp(name):
    stamps.append((name, time.perf_counter()))
import torch
stamp("import torch")
from ramify import LLM, SamplingParams
stamp("import ramify")
import ramify.models.files as files
read = files.GGUFHeader.open
class Timed(files.GGUFHeader):
    @classmethod
    def open(cls, path):
        header = read(path)
        stamp("parse the file")
        return header
files.GGUFHeader = Timed
make = files.tokenizer_from_gguf
def timed_tokenizer(metadata):
    made = make(metadata)
    stamp("build the tokenizer")
    return made
files.tokenizer_from_gguf = timed_tokenizer
llm = LLM()
stamp("pack the weights and the rest of loading")
llm.generate("Once upon a time", SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
stamp("first token")
import json
print(json.dumps([[name, after - before] for (_, before), (name, after) in zip(stamps, stamps[1:])]))
"""


GOAL = 1.5  # times `import torch`


def run(code: str) -> tuple[tuple[float, float], str]:
    """By the clock and by processor time; and what was said."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    computed = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (seconds, computed), done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    embedded.fetch()
    run(CHILD)  # warms the page cache, as for a second start
    torch_runs, token_runs, stages = [], [], []
    for _ in range(repeats):  # interleaved, so that a noisy neighbour hits both alike
        torch_runs.append(run("import torch")[0])
        times, said = run(CHILD)
        token_runs.append(times)
        stages.append(json.loads(said.splitlines()[-1]))
    ratios = {}
    for index, clock in enumerate(("seconds", "processor seconds")):
        torch_time, first_token = min(each[index] for each in torch_runs), min(each[index] for each in token_runs)
        ratios[clock] = (torch_time, first_token)
        print(f"{f'import torch alone, {clock}':<50}{torch_time:8.2f}")
        ratio = f"{first_token / torch_time:.2f}x (goal: {GOAL}x)"
        print(f"{f'new process to first token, {clock}':<50}{first_token:8.2f}   {ratio}")
    breakdown = {}
    for index, (name, _) in enumerate(stages[0]):
        breakdown[name] = min(run_stages[index][1] for run_stages in stages)
        print(f"    {name:<46}{breakdown[name]:8.2f}")
    result = {
        "engine": "ramify",
        "workload": "start",
        **{
            clock.replace(" ", "_"): {
                "import_torch": round(torch_time, 3),
                "first_token": round(first_token, 3),
                "ratio": round(first_token / torch_time, 3),
            }
            for clock, (torch_time, first_token) in ratios.items()
        },
        "stages": {name: round(seconds, 3) for name, seconds in breakdown.items()},
        "repeats": repeats,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
