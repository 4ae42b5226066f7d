"""A real wheel with kernels: where it runs, what its libraries compute, and that nothing is compiled beside them."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ramify.cpu.instructions import AVX2, COMMON, InstructionSet, fitting, processor_flags
from ramify.cpu.library import Library
from ramify.cpu.prebuilt import file_name
from tests.conftest import CheckpointMaker
from tests.equivalence.test_cpu_kernels import test_products_and_their_endings as products_and_their_endings
from tests.equivalence.test_int8_activations import test_products_of_integers as products_of_integers

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools.build_meta import build_wheel; build_wheel('dist', {'--build-option': ['--kernels']})"
GENERATE = """
import sys
from ramify import LLM, SamplingParams
from ramify.cpu.library import load

said = []
llm = LLM(sys.argv[1], device="cpu", say=said.append)
[output] = llm.generate([[1, 2, 3]], SamplingParams(n=3, seed=5, max_tokens=12), use_tqdm=False)
assert not any("torch's operators" in line or "Compiling" in line for line in said), said
print(load(print).origin, [completion.token_ids for completion in output.outputs])
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        (sys.platform, platform.machine()) != ("linux", "x86_64") or shutil.which("g++") is None,
        reason="such wheels are made by g++ on Linux and x86-64",
    ),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "ramify", tree / "ramify", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    (tree / "dist").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    [made] = (tree / "dist").glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip would have put into site-packages."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(installed: Path, cache: Path, *arguments: str, **variables: str) -> str:
    """A program on this wheel, with no compiler and nothing compiled before."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "PATH": "", "RAMIFY_CACHE": str(cache), **variables}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cache, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_auditwheel_finds_that_it_runs_where_it_says(wheel: Path) -> None:
    pytest.importorskip("auditwheel")
    done = subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "check_wheel.py"), str(wheel)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "3 libraries, glibc 2." in done.stdout


@pytest.mark.parametrize("instructions", COMMON, ids=lambda each: each.name)
def test_each_library_computes_what_it_should(installed: Path, instructions: InstructionSet) -> None:
    if not instructions.needs <= processor_flags():
        pytest.skip(f"this machine cannot run {instructions.title}")
    library = Library(installed / "ramify" / "cpu" / "prebuilt" / file_name(instructions), instructions.title)
    products_and_their_endings(library=library)
    products_of_integers(library=library)


def test_it_generates_and_compiles_nothing(installed: Path, tmp_path: Path, make_checkpoint: CheckpointMaker) -> None:
    fits = fitting(processor_flags())
    if not fits:
        pytest.skip("this machine has no AVX2")
    model = str(make_checkpoint("llama"))
    widest, narrow = (
        run(installed, tmp_path, "-c", GENERATE, model, RAMIFY_CPU_KERNELS=name) for name in ("", AVX2.name)
    )
    assert widest.startswith(f"prebuilt for {fits[0].title} [")
    assert narrow.startswith("prebuilt for AVX2 [")
    assert widest.partition("[")[2] == narrow.partition("[")[2]  # the same tokens
    assert not (tmp_path / "native").exists()
    told = run(installed, tmp_path, "-c", "from ramify.cli import main; main()", "doctor", "--json")
    findings = {each["topic"]: each for each in json.loads(told)["findings"]}
    assert findings["CPU kernels"]["found"] == f"prebuilt for {fits[0].title}"
