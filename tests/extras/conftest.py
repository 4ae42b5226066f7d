"""A real Ray cluster on this machine: two CPUs, a small object store, no dashboard. Where none starts, tests skip.

No call of Ray may hang a test: whatever waits for the cluster runs inside `within`.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from ramify import ModelConfig
from ramify.models.loader import ModelLoader
from tests.conftest import CheckpointMaker

ROOT = Path(__file__).parents[2]
SECONDS_TO_START = 120.0
# Read when Ray is first imported, which is later.
os.environ |= {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(16),  # of this run's own cluster: nothing is read from or left at home
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what a process without GPUs sees of them is left as it is
    "RAY_memory_monitor_refresh_ms": "0",  # on a machine that others fill, Ray would end our actors for it
}
# The cluster lives as long as this program, and this program as long as its standard input.
CLUSTER = """
import sys, ray
found = ray.init(num_cpus=2, include_dashboard=False, object_store_memory=2**27, _temp_dir=sys.argv[1])
ray.get(ray.remote(lambda: 1).remote(), timeout=60)
print("address", found.address_info["address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""

Result = TypeVar("Result")


def within(seconds: float, act: Callable[[], Result]) -> Result:
    """What `act` returns or raises, or TimeoutError: a thread that nobody waits for is left behind then."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(act())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"not done within {seconds:g} s")
    return results[0]


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a cluster of one machine with two CPUs."""
    pytest.importorskip("ray", reason="Ray is not installed: make test-extras")
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
        )
        try:
            yield _address(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture(scope="session")
def driver(cluster: str) -> Iterator[str]:
    """The same with this process connected to it."""
    import ray

    within(60, lambda: ray.init(address=cluster, log_to_driver=False, logging_level="ERROR"))
    yield cluster
    within(60, ray.shutdown)


@pytest.fixture(scope="session")
def small_model(make_checkpoint: CheckpointMaker, default_gguf: Path) -> str:
    """A tiny random model with the default model's tokenizer."""
    tokenizer = ModelLoader(ModelConfig(model=str(default_gguf))).load_tokenizer()
    assert tokenizer is not None
    folder = make_checkpoint("llama", vocab_size=49_152, num_hidden_layers=1, max_position_embeddings=1024)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    return str(folder)


def _address(process: subprocess.Popen[str]) -> str:
    """What the program tells when its cluster has run a task; skips the test if it never does."""

    def told() -> str:
        assert process.stdout is not None
        return next((line for line in process.stdout if line.startswith("address ")), "")

    try:
        line = within(SECONDS_TO_START, told)
    except TimeoutError:
        process.kill()
        pytest.skip(f"Ray does not start here: nothing after {SECONDS_TO_START:g} s")
    if not line:
        _, said = process.communicate(timeout=30)
        pytest.skip(f"Ray does not start here: {said.strip().splitlines()[-1:]}")
    return line.split()[1]
