"""Records what llama.cpp's own samplers do to random rows, for `test_llama_cpp_controls.py`.

Run by hand where llama-cpp-python is installed, with any GGUF file for its vocabulary:

    python tests/equivalence/record_llama_cpp.py MODEL.gguf > tests/equivalence/llama_cpp_controls.json
"""

from __future__ import annotations

import ctypes
import importlib
import json
import random
import sys
from typing import Any

SIZE = 32
ROWS = 12


class Recorder:
    def __init__(self, path: str) -> None:
        self.package: Any = importlib.import_module("llama_cpp")
        self.api: Any = self.package.llama_cpp
        self.model = self.package.Llama(path, vocab_only=True, verbose=False)
        self.numbers = random.Random(5)

    def row(self) -> list[float]:
        return [round(self.numbers.gauss(0, 2.5), 3) for _ in range(SIZE)]

    def applied(self, sampler: Any, logits: list[float]) -> tuple[dict[int, float], int]:
        """The logits that a sampler leaves, and the token that it chose, if it chooses."""
        data = (self.api.llama_token_data * SIZE)(*[(token, logit, 0.0) for token, logit in enumerate(logits)])
        tokens = self.api.llama_token_data_array(data, SIZE, -1, False)
        self.api.llama_sampler_apply(sampler, ctypes.byref(tokens))
        left = {tokens.data[place].id: tokens.data[place].logit for place in range(tokens.size)}
        return left, tokens.data[tokens.selected].id if tokens.selected >= 0 else -1

    def xtc(self) -> dict[str, Any]:
        logits, threshold = self.row(), self.numbers.choice([0.02, 0.1, 0.2, 0.4])
        left, _ = self.applied(self.api.llama_sampler_init_xtc(1.0, threshold, 1, 0), logits)
        return {"logits": logits, "threshold": threshold, "kept": sorted(left)}

    def dry(self) -> dict[str, Any]:
        logits = self.row()
        seen = [self.numbers.randrange(3) for _ in range(self.numbers.randint(4, 40))]
        options = {
            "dry_multiplier": self.numbers.choice([0.5, 2.0]),
            "dry_base": self.numbers.choice([1.25, 1.75]),
            "dry_allowed_length": self.numbers.choice([1, 2, 4]),
            "dry_penalty_last_n": self.numbers.choice([8, 20, 64]),
        }
        vocabulary = self.api.llama_model_get_vocab(self.model.model)
        sampler = self.api.llama_sampler_init_dry(vocabulary, *options.values(), None, 0)
        for token in seen:
            self.api.llama_sampler_accept(sampler, token)
        left, _ = self.applied(sampler, logits)
        return {"logits": logits, "seen": seen, **options, "left": [left[token] for token in range(SIZE)]}

    def mirostat(self) -> dict[str, Any]:
        tau, eta = self.numbers.choice([1.0, 2.0, 3.0]), self.numbers.choice([0.1, 0.5])
        sampler = self.api.llama_sampler_init_mirostat_v2(self.numbers.getrandbits(31), tau, eta)
        steps = []
        for _ in range(8):
            logits = self.row()
            left, chosen = self.applied(sampler, logits)
            steps.append({"logits": logits, "kept": sorted(left), "chosen": chosen})
        return {"tau": tau, "eta": eta, "steps": steps}


def main() -> None:
    recorder = Recorder(sys.argv[1])
    found = {name: [getattr(recorder, name)() for _ in range(ROWS)] for name in ("xtc", "dry", "mirostat")}
    source = f"llama-cpp-python {recorder.package.__version__}, by record_llama_cpp.py"
    json.dump({"source": source, **found}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
