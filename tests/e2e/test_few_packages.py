"""The core imports and runs where torch, triton, numpy, safetensors, tokenizers, jinja2 and tqdm are all there is.

In a process of its own whose imports of any other third-party package fail, as on an image that has little more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import CheckpointMaker

FEW_PACKAGES = """
import sys

PACKAGES = {"torch", "triton", "numpy", "safetensors", "tokenizers", "jinja2", "tqdm"}
THEIR_OWN = {"functorch", "torchgen", "typing_extensions", "sympy", "mpmath", "networkx", "filelock", "fsspec"}
THEIR_OWN |= {"markupsafe"}  # jinja2's
refused = []

class Refuse:
    @staticmethod
    def find_spec(name, path=None, target=None):
        top = name.partition(".")[0]
        standard = top in sys.stdlib_module_names or top.startswith("_sysconfigdata")
        if standard or top in PACKAGES | THEIR_OWN or top == "ramify":
            return None
        refused.append(top)
        raise ModuleNotFoundError(f"No module named {name!r} (refused)", name=name)

sys.meta_path.insert(0, Refuse)
"""

IMPORT_ALL = """
import importlib, pkgutil
import ramify

# The command line, the server, engines in other processes and machines, data for distillation, others' programs.
AROUND = ("cli", "server", "remote", "replicas", "ray", "distill", "integrations")
AROUND = tuple(f"ramify.{name}" for name in AROUND)
# Programs of processes, started where grammars are asked for.
PROGRAMS = ("ramify.structured.grammar_child", "ramify.structured.mask_worker")
for module in pkgutil.walk_packages(ramify.__path__, "ramify."):
    if not module.name.startswith(AROUND) and module.name not in PROGRAMS:
        importlib.import_module(module.name)
for name in ramify.__all__:
    getattr(ramify, name)
print("imported")
"""

GENERATE = """
from ramify import LLM, OptimalSampling, SamplingParams

llm = LLM(sys.argv[1], max_model_len=64, num_kv_blocks=64)
params = SamplingParams(n=2, seed=1, max_tokens=5, top_p=0.9, logprobs=2)
for output in llm.generate([[1, 2, 3], [4]], params, use_tqdm=True):
    assert output.error is None
    assert [len(completion.token_ids) for completion in output.outputs] == [5, 5]
pair = OptimalSampling(sys.argv[1], sys.argv[1], max_model_len=64, num_kv_blocks=64)
assert pair.generate([[1, 2, 3]], [[4]], n=2, max_tokens=4).num_tokens == [4, 4]
print("generated")
"""

CHAT = """
from ramify import LLM, SamplingParams

llm = LLM(sys.argv[1], device="cpu")
params = SamplingParams(temperature=0, max_tokens=3)
outputs = llm.chat([{"role": "user", "content": "Say hello."}], params, use_tqdm=False)
assert outputs[0].outputs[0].text
print("answered")
"""


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", FEW_PACKAGES + code, *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_other_packages_are_refused() -> None:
    """Shows that the tests below could fail."""
    assert "refused" in run("try:\n    import hypothesis\nexcept ModuleNotFoundError as error:\n    print(error)")


def test_every_module_of_the_core_loads() -> None:
    assert run(IMPORT_ALL) == "imported"


def test_a_folder_without_tokenizer_generates(make_checkpoint: CheckpointMaker) -> None:
    assert run(GENERATE, str(make_checkpoint("qwen3"))) == "generated"


def test_the_default_model_answers_in_its_template(default_gguf: Path) -> None:
    assert run(CHAT, str(default_gguf)) == "answered"
