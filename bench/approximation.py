"""How far int8 activations take a model from itself, beside llama.cpp: KL divergence after 200 pieces of text.

    python bench/approximation.py [--model FILE.gguf] [--pieces 200] [--llama-cpp-python PATH]

The exact model is the dequantised one: float32 activations, weights as the `gguf` package reads them. After each piece,
64 tokens of this project's own pages, the distribution of the next token is compared with the exact one over the whole
vocabulary: KL(exact || other) in nats. llama.cpp (llama-cpp-python) reads the same file with its defaults, in the
interpreter that has it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch

from ramify import LLM, SamplingParams
from ramify.models import embedded

PIECE = 64
LLAMA_CPP = """
import json, sys
import llama_cpp
import numpy as np
file, out = sys.argv[1:3]
pieces = json.load(sys.stdin)
model = llama_cpp.Llama(file, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
rows = []
for piece in pieces:
    model.reset()
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(model._ctx.ctx), True)
    model.eval(piece)
    logits = llama_cpp.llama_get_logits_ith(model._ctx.ctx, -1)
    rows.append(np.ctypeslib.as_array(logits, shape=(model.n_vocab(),)).copy())
np.save(out, np.stack(rows))
"""


def pieces_of(llm: LLM, count: int) -> list[list[int]]:
    pages = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
    text = "\n".join(page.read_text() for page in pages)
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    return [ids[start : start + PIECE] for start in range(0, len(ids) - PIECE, PIECE)][:count]


def logits_of(llm: LLM, pieces: list[list[int]]) -> torch.Tensor:
    """(pieces, vocabulary): what the model says after each."""
    found: list[torch.Tensor] = []

    def keep(_: list[int], logits: torch.Tensor) -> torch.Tensor:
        found.append(logits.clone())
        return logits

    params = SamplingParams(max_tokens=1, temperature=0, logits_processors=[keep])
    for piece in pieces:  # one after the other: the order of what is found is theirs
        llm.generate([piece], params, use_tqdm=False)
    return torch.stack(found)


def of_llama_cpp(python: str, file: str, pieces: list[list[int]]) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "logits.npy")
        subprocess.run([python, "-c", LLAMA_CPP, file, str(out)], input=json.dumps(pieces), text=True, check=True)
        return torch.from_numpy(np.load(out))


def compared(exact: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    true, found = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    divergences = (true.exp() * (true - found)).sum(-1)
    return {
        "mean_kl": float(divergences.mean()),
        "median_kl": float(divergences.median()),
        "largest_kl": float(divergences.max()),
        "same_likeliest_token": float((true.argmax(-1) == found.argmax(-1)).double().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", metavar="FILE", help="a GGUF file (default: the embedded model)")
    parser.add_argument("--pieces", metavar="N", type=int, default=200)
    parser.add_argument("--llama-cpp-python", metavar="PATH", help="the interpreter of an environment that has it")
    options = parser.parse_args()
    file = options.model or str(embedded.fetch())
    exact_model = LLM(file, device="cpu", dequantize=True, generation_config="none")
    pieces = pieces_of(exact_model, options.pieces)
    exact = logits_of(exact_model, pieces)
    del exact_model
    others = {
        "weights quantised (default)": logits_of(LLM(file, device="cpu", generation_config="none"), pieces),
        "int8_activations": logits_of(LLM(file, device="cpu", generation_config="none", int8_activations=True), pieces),
    }
    if options.llama_cpp_python:
        others["llama.cpp"] = of_llama_cpp(options.llama_cpp_python, file, pieces)
    results = {name: compared(exact, logits) for name, logits in others.items()}
    print(f"{len(pieces)} pieces of {PIECE} tokens, KL to the exact model in nats")
    print(f"{'':<30}{'mean':>10}{'median':>10}{'largest':>10}   same likeliest token")
    for name, each in results.items():
        numbers = f"{each['mean_kl']:10.5f}{each['median_kl']:10.5f}{each['largest_kl']:10.5f}"
        print(f"{name:<30}{numbers}{each['same_likeliest_token']:9.1%}")
    print(json.dumps({"pieces": len(pieces), "kl": results}))


if __name__ == "__main__":
    main()
