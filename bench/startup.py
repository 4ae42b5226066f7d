"""New process to first token, with the default model already in the cache.

`import torch` alone is most of any such process, so the time is compared with that, measured in the same run. The
process takes the times of its stages; the rest is the interpreter starting and ending.

    python bench/startup.py [--repeats 7]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
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
from ramify.config import ModelConfig
from ramify.llm import LLM
from ramify.sampling_params import SamplingParams
stamp("import ramify")
import ramify.models.loader as loader
read = loader.GGUFCheckpoint
class Timed(read):
    def __init__(self, path):
        super().__init__(path)
        stamp("parse the file")
loader.GGUFCheckpoint = Timed
make = loader.tokenizer_from_gguf
def timed_tokenizer(metadata):
    made = make(metadata)
    stamp("build the tokenizer")
    return made
loader.tokenizer_from_gguf = timed_tokenizer
llm = LLM()
stamp("pack the weights and the rest of loading")
llm.generate("Once upon a time", SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
stamp("first token")
import json
print(json.dumps([[name, after - before] for (_, before), (name, after) in zip(stamps, stamps[1:])]))
"""


def run(code: str) -> tuple[float, str]:
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return time.perf_counter() - start, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    embedded.fetch()
    run(CHILD)  # warms the page cache, as for a second start
    torch_times, first_token_times, stages = [], [], []
    for _ in range(repeats):  # interleaved, so that a noisy neighbour hits both alike
        torch_times.append(run("import torch")[0])
        seconds, output = run(CHILD)
        first_token_times.append(seconds)
        stages.append(json.loads(output.splitlines()[-1]))
    torch_time, first_token = statistics.median(torch_times), statistics.median(first_token_times)
    print(f"{'import torch alone':<40}{torch_time:8.2f} s")
    print(f"{'new process to first token':<40}{first_token:8.2f} s   {first_token / torch_time:.2f}x (goal: 3x, 5 s)")
    breakdown = {}
    for index, (name, _) in enumerate(stages[0]):
        breakdown[name] = statistics.median(run_stages[index][1] for run_stages in stages)
        print(f"    {name:<36}{breakdown[name]:8.2f} s")
    result = {
        "engine": "ramify",
        "workload": "start",
        "seconds": round(first_token, 3),
        "import_torch_seconds": round(torch_time, 3),
        "ratio": round(first_token / torch_time, 3),
        "stages": {name: round(seconds, 3) for name, seconds in breakdown.items()},
        "repeats": repeats,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
