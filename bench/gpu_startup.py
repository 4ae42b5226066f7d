"""New process to first tokens on a GPU, with Triton's cache empty, then as that run left it, then with every graph.

    python bench/gpu_startup.py [--shape 1.5B] [--states cold warm "full, cold" full]

Goals for the 1.5B shape: 20 s with a cold cache, 10 s with a warm one, also with `warmup="full"`. Random weights; eight
prompts and then one, so that graphs of several sizes are captured. Tells of each start how long its stages took, what
it said when, and how many graphs of each kind it made. Where TRITON_CACHE_DIR is set, that cache is used, as it is. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STATES = {"cold": "lazy", "warm": "lazy", "full, cold": "full", "full": "full"}  # the last two find more kernels
CHILD = """
import time
stamps = [("start", time.perf_counter())]
def stamp(name):
    stamps.append((name, time.perf_counter()))
import json, logging, sys
from pathlib import Path
import torch
stamp("import torch")
sys.path.insert(0, sys.argv[1])
from gpu import engine
from ramify import SamplingParams
stamp("import ramify")
said = []
def say(text):
    said.append([time.perf_counter() - stamps[0][1], text])
class Listener(logging.Handler):
    def emit(self, record):
        say(record.getMessage())
logging.getLogger("ramify").addHandler(Listener())
logging.getLogger("ramify").setLevel(logging.INFO)
llm = engine(sys.argv[2], Path(sys.argv[3]), warmup=sys.argv[4], say=say)
torch.cuda.synchronize()
stamp("weights, cache, buffers, graphs")
llm.generate([[5, 6, 7]] * 8, SamplingParams(max_tokens=1), use_tqdm=False)
stamp("first tokens")
llm.generate([[5, 6, 7]] * 8, SamplingParams(max_tokens=8), use_tqdm=False)
llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8), use_tqdm=False)
stamp("two graphs")
print(json.dumps({
    "stages": {name: after - before for (_, before), (name, after) in zip(stamps, stamps[1:])},
    "said": said,
    "graphs": {kind: [made.number, round(made.seconds, 2)] for kind, made in llm.core.device.graphs.made.items()},
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="1.5B")
    parser.add_argument("--states", nargs="+", default=list(STATES), choices=STATES)
    options = parser.parse_args()
    result: dict[str, object] = {"engine": "ramify", "workload": "start on a GPU", "shape": options.shape}
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as folder:
        for state in options.states:
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", CHILD, str(Path(__file__).parent), options.shape, folder, STATES[state]],
                env={"TRITON_CACHE_DIR": cache, **os.environ},
                capture_output=True,
                text=True,
                check=False,
            )
            whole = time.perf_counter() - start
            if done.returncode:
                raise SystemExit(done.stderr)
            told = json.loads(done.stdout.splitlines()[-1])
            stages = told["stages"]
            first = sum(seconds for name, seconds in stages.items() if name != "two graphs")
            print(f"{state}: first tokens after {first:.1f} s, the process took {whole:.1f} s")
            for name, seconds in stages.items():
                print(f"    {name:<32}{seconds:8.2f} s")
            for seconds, text in told["said"]:
                print(f"        after {seconds:6.2f} s  {text}")
            rounded = {name: round(took, 2) for name, took in stages.items()}
            result[state] = {"first_tokens": round(first, 2), **rounded, "graphs": told["graphs"]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
