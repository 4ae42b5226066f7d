"""New process to first tokens on a GPU, with Triton's cache empty, then as that run left it, then with every graph.

    python bench/gpu_startup.py [--shape 1.5B]

Goals for the 1.5B shape: 20 s with a cold cache, 10 s with a warm one, also with `warmup="full"`. Random weights; eight
prompts and then one, so that graphs of several sizes are captured. The last line is JSON.
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

CHILD = """
import time
stamps = [("start", time.perf_counter())]
def stamp(name):
    stamps.append((name, time.perf_counter()))
import json, sys
from pathlib import Path
import torch
stamp("import torch")
sys.path.insert(0, sys.argv[1])
from gpu import engine
from ramify import SamplingParams
stamp("import ramify")
llm = engine(sys.argv[2], Path(sys.argv[3]), warmup=sys.argv[4])
torch.cuda.synchronize()
stamp("weights, cache, buffers")
llm.generate([[5, 6, 7]] * 8, SamplingParams(max_tokens=1), use_tqdm=False)
stamp("first tokens")
llm.generate([[5, 6, 7]] * 8, SamplingParams(max_tokens=8), use_tqdm=False)
llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8), use_tqdm=False)
stamp("two graphs")
print(json.dumps([[name, after - before] for (_, before), (name, after) in zip(stamps, stamps[1:])]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="1.5B")
    shape = parser.parse_args().shape
    result: dict[str, object] = {"engine": "ramify", "workload": "start on a GPU", "shape": shape}
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as folder:
        states = {
            "cold": "lazy",
            "warm": "lazy",
            "full, cold": "full",
            "full": "full",
        }  # the last two find more kernels
        for state, warmup in states.items():
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", CHILD, str(Path(__file__).parent), shape, folder, warmup],
                env={**os.environ, "TRITON_CACHE_DIR": cache},
                capture_output=True,
                text=True,
                check=False,
            )
            whole = time.perf_counter() - start
            if done.returncode:
                raise SystemExit(done.stderr)
            stages = dict(json.loads(done.stdout.splitlines()[-1]))
            first = sum(seconds for name, seconds in stages.items() if name != "two graphs")
            print(f"{state}: first tokens after {first:.1f} s, the process took {whole:.1f} s")
            for name, seconds in stages.items():
                print(f"    {name:<28}{seconds:8.2f} s")
            result[state] = {"first_tokens": round(first, 2), **{name: round(took, 2) for name, took in stages.items()}}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
