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


def ramify(folder: str, **options: Any) -> Run:
    """Of a folder random weights, of a GGUF file its own."""
    from ramify import LLM, SamplingParams

    load_format: Any = "gguf" if folder.endswith(".gguf") else "dummy"
    llm = LLM(folder, load_format=load_format, max_model_len=MAX_MODEL_LEN, generation_config="none", **options)

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


def ramify_int8(file: str) -> Run:
    return ramify(file, int8_activations=True)


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
    """A GGUF file instead of a folder. All sequences of a workload are decoded in one batch, prompts once each."""
    import llama_cpp as llama  # type: ignore[import-not-found]

    threads, most = len(os.sched_getaffinity(0)), max(each.num_prompts * each.n for each in CPU_WORKLOADS.values())
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
    options = llama.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_seq_max, options.kv_unified = 24_576, 2048, most, True
    options.n_threads = options.n_threads_batch = threads
    context = llama.llama_init_from_model(model, options)
    batch = llama.llama_batch_init(2048, 0, 1)
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_temp(1.0))
    llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_dist(1))

    def decode(rows: list[tuple[int, int, int, bool]]) -> None:
        """Rows of (token, position, sequence, whether its logits are wanted)."""
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, sequence, wanted
        if llama.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")

    def run(workload: Workload) -> int:
        memory = llama.llama_get_memory(context)
        llama.llama_memory_clear(memory, True)  # else the prompt would be cached
        tokens, positions = [], []
        for index, prompt in enumerate(workload.prompts()):
            first = index * workload.n
            decode([(token, at, first, at == len(prompt) - 1) for at, token in enumerate(prompt)])
            for child in range(workload.n):
                if child:
                    llama.llama_memory_seq_cp(memory, first, first + child, -1, -1)
                tokens.append(llama.llama_sampler_sample(chain, context, -1))
                positions.append(len(prompt))
        for _ in range(workload.output - 1):
            decode([(token, at, seq, True) for seq, (token, at) in enumerate(zip(tokens, positions, strict=True))])
            tokens = [llama.llama_sampler_sample(chain, context, seq) for seq in range(len(tokens))]
            positions = [at + 1 for at in positions]
        return int(workload.num_tokens)

    return run


ENGINES: dict[str, Callable[[str], Run]] = {
    "ramify": ramify,
    "ramify int8": ramify_int8,
    "transformers": transformers,
    "vllm": vllm,
    "llama.cpp": llama_cpp,
}


def main() -> None:
    engine, folder = sys.argv[1:3]
    answers = os.fdopen(os.dup(1), "w")  # engines print whatever they like, so answers have their own channel
    os.dup2(2, 1)
    start = time.perf_counter()
    run = ENGINES[engine](folder)
    print(json.dumps({"ready": time.perf_counter() - start}), file=answers, flush=True)
    for line in sys.stdin:
        workload = CPU_WORKLOADS[line.strip()]
        start, began = time.perf_counter(), time.process_time()
        try:
            tokens = run(workload)
        except NotImplementedError as error:
            print(json.dumps({"cannot": str(error)}), file=answers, flush=True)
            continue
        took = {"seconds": time.perf_counter() - start, "processor_seconds": time.process_time() - began}
        print(json.dumps({"tokens": tokens, **took}), file=answers, flush=True)


if __name__ == "__main__":
    main()
