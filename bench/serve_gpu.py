"""The server under load on a GPU, beside LLM.generate on the same work: streams, many samples, whole answers.

    python bench/serve_gpu.py                                # SmolLM2-360M's shape, random weights, 1, 2 and 4 workers
    python bench/serve_gpu.py --workers 2 --processes 6 --save results.jsonl
    python bench/serve_gpu.py --rehearse                     # a tiny model and few requests: whether it runs at all

For each number of HTTP processes a server is started as a user starts it, and asked by clients in processes of their
own: at once when it is ready (`first`, with nothing warmed up by requests), then 64 and 256 streams, 32 requests of 8
samples, streamed, and 256 whole answers at a time. Prompts of 128 tokens, answers of 128. Before that, the clients'
own ceiling is measured, on a stub that answers at once. Every load is a line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.load_client import Job
from bench.load_connection import Target
from bench.load_processes import Clients, take_all_files
from bench.load_report import point_of, remarks, table_head, table_row
from bench.load_server import Python, UnmeasurableError, ramify_serve, served_models, target_of
from bench.load_stub import stubs
from bench.load_work import Work
from bench.machine import commit, machine_name

SHAPE: dict[str, Any] = {  # SmolLM2-360M
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 960,
    "intermediate_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "vocab_size": 49_152,
    "max_position_embeddings": 8_192,
    "rope_theta": 100_000,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2}
BLOCKS = 8_192  # of the KV cache, more than 256 sequences need
# In the same load on the same machine; LLM.generate is ours, before the engine had a process of its own.
VLLM = {"first": 8_784, "64 streams": 14_557, "256 streams": 10_719, "32 x 8 streams": 19_696, "256 whole": 26_753}


class Load(NamedTuple):
    name: str
    concurrency: int
    requests: int
    n: int = 1
    stream: bool = True


LOADS = (
    Load("first", 128, 128),
    Load("64 streams", 64, 384),
    Load("256 streams", 256, 1_024),
    Load("32 x 8 streams", 32, 160, n=8),
    Load("256 whole", 256, 1_536, stream=False),
)


def write_model(folder: Path, *, tiny: bool) -> None:
    """A folder with a shape and a tokenizer, so that answers have texts; its weights will be random ones."""
    facts = {**SHAPE, **(TINY if tiny else {})}
    (folder / "config.json").write_text(json.dumps(facts))
    letters = [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]  # a byte each, as GPT-2 has them
    tokens = [chr(letter) for letter in letters]
    tokens += [f"\u0120word{number}" for number in range(facts["vocab_size"] - len(tokens))]
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def work_of(load: Load, turn: str, length: int) -> Work:
    return Work(
        model=None,
        prompt=(length, length),
        output=(length, length),
        stream=load.stream,
        n=load.n,
        vocabulary=SHAPE["vocab_size"] - 1,
        fields={"temperature": 1.0, "ignore_eos": True},
        turn=turn,
    )


def scaled(load: Load, share: float) -> Load:
    return load._replace(concurrency=max(2, int(load.concurrency * share)), requests=max(4, int(load.requests * share)))


def job_of(target: Target, load: Load, work: Work) -> Job:
    return Job(target=target, work=work, concurrency=load.concurrency, requests=load.requests, timeout=120)


class Bench(NamedTuple):
    flags: list[str]
    length: int  # of prompts and of answers
    loads: list[Load]


def measure_server(folder: Path, workers: int, clients: Clients, bench: Bench) -> Iterator[dict[str, Any]]:
    began = time.perf_counter()
    flags = [*bench.flags, *(["--http-workers", str(workers)] if workers else [])]
    with ramify_serve(str(folder), flags) as url:
        target = target_of(url, None)
        served_models(target, url, 600)
        ready = time.perf_counter() - began
        for number, load in enumerate(bench.loads):
            loaded = clients.run(job_of(target, load, work_of(load, f"{workers}.{number}", bench.length)))
            point = point_of({"concurrency": load.concurrency}, loaded)
            yield {"workload": f"serve {load.name}", "http_workers": workers, "ready_s": round(ready, 1), **point}


def measure_python(folder: Path, loads: list[Load], options: dict[str, Any], length: int) -> Iterator[dict[str, Any]]:
    """`LLM.generate` on the same work, as many sequences at a time as the server has, after one run for the kernels."""
    for load in loads[1:]:
        python = Python(str(folder), load.concurrency, load.n, **options)
        python.tokens_per_second(work_of(load, "warm", length), load.requests // 4)
        speed = python.tokens_per_second(work_of(load, "python", length), load.requests)
        del python
        gc.collect()
        yield {"workload": f"generate {load.name}", "tok_s": round(speed, 1)}


def measure_ceiling(clients: Clients, processes: int, load: Load, length: int) -> dict[str, Any]:
    with stubs(processes) as targets:
        work = work_of(load, "ceiling", length)
        job = Job(target=targets[0], work=work, concurrency=load.concurrency, seconds=2.0, keeps_pace=True)
        point = point_of({"concurrency": load.concurrency}, clients.run(job, targets))
    return {"workload": "ceiling of the client", **{name: point[name] for name in ("concurrency", "tok_s", "req_s")}}


def shown(line: dict[str, Any], *, beside_rival: bool) -> str:
    if "seconds" not in line:
        return f"{line['workload']:<32}{line['tok_s'] or 0:>10,.0f} tok/s"
    name = line["workload"].removeprefix("serve ")
    head = f"{line['workload']}, {line['http_workers']} workers, ready after {line['ready_s']} s"
    rival = f" (vLLM's server {VLLM[name]:,}: {(line['tok_s'] or 0) / VLLM[name]:.2f})" if beside_rival else ""
    notes = [*remarks(line), *(f"{kind}: {said}" for kind, said in line["said"].items())]
    return "\n".join([f"{head}{rival}", table_row(line), *(f"  {note}" for note in notes)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 2, 4], help="HTTP processes to try; 0: as it is started"
    )
    parser.add_argument("--processes", type=int, default=6, help="processes of the client")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model, a tenth of the requests")
    parser.add_argument("--no-python", action="store_true", help="without LLM.generate")
    parser.add_argument("--python-only", action="store_true", help="LLM.generate alone: also warms the kernels' cache")
    parser.add_argument("--save", type=Path, help="append the lines to this file")
    given = parser.parse_args()
    take_all_files()
    loads = [scaled(load, 0.1) if given.rehearse else load for load in LOADS]
    length = 16 if given.rehearse else 128
    options: dict[str, Any] = {"load_format": "dummy", "max_model_len": 2 * length + 32, "num_kv_blocks": BLOCKS}
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    bench = Bench(flags, length, loads)
    about = {"engine": "ramify", "machine": machine_name(), "commit": commit()}

    def tell(line: dict[str, Any]) -> None:
        print(shown(line, beside_rival=not given.rehearse), flush=True)
        text = json.dumps({**about, **line})
        print(text, flush=True)
        if given.save is not None:
            with given.save.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, tiny=given.rehearse)
        try:
            if not given.python_only:
                with Clients(given.processes) as clients:
                    tell(measure_ceiling(clients, given.processes, loads[1], length))
                    print(table_head({"concurrency": 1}), flush=True)
                    for workers in given.workers:
                        for line in measure_server(folder, workers, clients, bench):
                            tell(line)
            if not given.no_python:
                for line in measure_python(folder, loads, options, length):
                    tell(line)
        except UnmeasurableError as error:
            print(error, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
