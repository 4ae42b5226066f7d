"""One adapter per engine: makes it once, runs workloads, returns the tokens generated. Each has its own process.

    python bench/engines.py ENGINE MODEL_FOLDER

reads one workload's name per line from standard input and answers each with one line of JSON: tokens and seconds, or
why it cannot run. So a driver can let engines take turns: on a shared machine only what runs side by side can be
compared.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)

from workloads import CPU_WORKLOADS, Workload  # type: ignore[import-not-found]  # noqa: E402

sys.path[:] = [path for path in sys.path if path != HERE]  # engines look for a package `kernels`; ours is not it

Run = Callable[[Workload], int]
MAX_MODEL_LEN = 2048


def ramify(folder: str) -> Run:
    from ramify import LLM, SamplingParams

    llm = LLM(folder, load_format="dummy", max_model_len=MAX_MODEL_LEN)

    def run(workload: Workload) -> int:
        llm.reset_prefix_cache()
        params = SamplingParams(
            n=workload.n,
            max_tokens=workload.output,
            temperature=workload.temperature,
            ignore_eos=True,
            detokenize=False,
        )
        outputs = llm.generate(workload.prompts(), params, use_tqdm=False)
        return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)

    return run


def transformers(folder: str) -> Run:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def run(workload: Workload) -> int:
        """Prompts of one length at a time: padding a mixture would not be the same work."""
        total = 0
        for prompt in workload.prompts():
            with torch.inference_mode():
                output = model.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    do_sample=True,
                    top_k=0,
                    temperature=workload.temperature,
                    max_new_tokens=workload.output,
                    num_return_sequences=workload.n,
                    pad_token_id=0,
                )
            total += output.shape[0] * (output.shape[1] - len(prompt))
        return total

    return run


def vllm(folder: str) -> Run:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN)

    def run(workload: Workload) -> int:
        llm.reset_prefix_cache()
        params = SamplingParams(
            n=workload.n,
            max_tokens=workload.output,
            temperature=workload.temperature,
            ignore_eos=True,
            detokenize=False,
        )
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in workload.prompts()]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)

    return run


def llama_cpp(file: str) -> Run:
    """A GGUF file instead of a folder: the default model with weights of four bits, one sequence at a time."""
    import llama_cpp  # type: ignore[import-not-found]

    model = llama_cpp.Llama(file, n_ctx=MAX_MODEL_LEN, n_threads=os.cpu_count(), verbose=False)

    def run(workload: Workload) -> int:
        if workload.num_prompts * workload.n > 1:
            raise NotImplementedError("its Python package samples one sequence at a time")
        model.reset()
        model._ctx.kv_cache_clear()  # else the prompt would be cached
        total = 0
        controls = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        for _ in model.generate(workload.prompts()[0], temp=workload.temperature, **controls):
            total += 1
            if total == workload.output:
                break
        return total

    return run


ENGINES = {"ramify": ramify, "transformers": transformers, "vllm": vllm, "llama.cpp": llama_cpp}


def main() -> None:
    engine, folder = sys.argv[1:3]
    answers = os.fdopen(os.dup(1), "w")  # engines print whatever they like, so answers have their own channel
    os.dup2(2, 1)
    start = time.perf_counter()
    run = ENGINES[engine](folder)
    print(json.dumps({"ready": time.perf_counter() - start}), file=answers, flush=True)
    for line in sys.stdin:
        workload = CPU_WORKLOADS[line.strip()]
        start = time.perf_counter()
        try:
            tokens = run(workload)
        except NotImplementedError as error:
            print(json.dumps({"cannot": str(error)}), file=answers, flush=True)
            continue
        print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - start}), file=answers, flush=True)


if __name__ == "__main__":
    main()
