"""The host side needs no torch, and every public name has a home."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest

import ramify
import ramify.engine.search
import ramify.files
import ramify.foreign
import ramify.text

ROOMS = (ramify.engine, ramify.engine.search, ramify.files, ramify.foreign, ramify.text)
HOST_MODULES = (
    *("ramify", "ramify.config", "ramify.errors", "ramify.outputs", "ramify.sampling_params", "ramify.validation"),
    *(f"{room.__name__}.{module.name}" for room in ROOMS for module in pkgutil.iter_modules(room.__path__)),
    *("ramify.documents.managers", "ramify.documents.manual"),  # not those that run a model
    *("ramify.device.reads", "ramify.device.seats", "ramify.gpu.kernels.work_list"),
    *(f"ramify.remote.{name}" for name in ("child", "connection", "engine_process", "host", "link", "remote_engine")),
    *("ramify.drive.async_engine", "ramify.drive.intake", "ramify.drive.merging", "ramify.drive.prepare"),
    *(
        "ramify.models.files",
        "ramify.remote.start",
        "ramify.server.run",
        "ramify.server.worker",
        "ramify.server.workers",
    ),
)

IMPORT_WITHOUT_TORCH = """
import json, sys
from importlib import import_module

sys.modules["torch"] = None  # from now on `import torch` raises ModuleNotFoundError
errors = {}
for name in json.loads(sys.argv[1]):
    try:
        import_module(name)
    except Exception as error:
        errors[name] = f"{type(error).__name__}: {error}"
print(json.dumps(errors))
"""


def import_without_torch(*modules: str) -> dict[str, str]:
    """Imports modules where there is no torch; returns the error of each that failed."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT_TORCH, json.dumps(modules)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    errors: dict[str, str] = json.loads(done.stdout)
    return errors


def test_every_module_of_the_host_side_loads_where_there_is_no_torch() -> None:
    assert import_without_torch(*HOST_MODULES) == {}


def test_a_module_of_the_device_side_does_not_load_where_there_is_no_torch() -> None:
    # Shows that the test above could fail.
    errors = import_without_torch("ramify.models.decoder")
    assert list(errors) == ["ramify.models.decoder"]
    assert "torch" in errors["ramify.models.decoder"]


def test_the_modules_of_the_rooms_were_found() -> None:
    assert {"ramify.engine.core", "ramify.engine.search.group", "ramify.text.stream"} <= set(HOST_MODULES)


@pytest.mark.parametrize("name", ramify.__all__)
def test_every_public_name_resolves_to_what_its_home_defines(name: str) -> None:
    value = getattr(ramify, name)
    if name != "__version__":
        home = ramify._HOME_OF[name]
        assert value is getattr(import_module(home), name)
        assert value.__module__ == home, "a name's home is where it is defined"


def test_the_public_names_are_those_that_have_a_home() -> None:
    assert sorted(set(ramify.__all__)) == sorted(ramify.__all__), "a name is listed twice"
    assert set(ramify.__all__) == {*ramify._HOME_OF, "__version__"}
    assert dir(ramify) == sorted(ramify.__all__)
    assert sum(map(len, ramify._HOMES.values())) == len(ramify._HOME_OF), "a name has two homes"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'ramify' has no attribute 'LMM'"):
        _ = ramify.LMM


def test_the_core_and_the_command_line_load_without_the_servers_packages() -> None:
    program = """
import sys
for name in ("fastapi", "starlette", "uvicorn", "prometheus_client", "msgspec"):
    sys.modules[name] = None
sys.modules["pydantic"] = None
import ramify.async_llm, ramify.llm
try:
    ramify.async_llm.AsyncLLM(engine_process=True)
except ramify.RamifyError as error:
    assert "needs msgspec" in str(error)
del sys.modules["pydantic"]  # typer may use it
import ramify.cli
sys.argv = ["ramify", "serve"]
ramify.cli.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert 'pip install ".[server]"' in " ".join(done.stderr.split())
    assert len(done.stderr.strip().splitlines()) <= 2, done.stderr


# What callers may rely on; a name may be added, and none may go.
PUBLIC_NAMES = """
    LLM AsyncEngine AsyncLLM BeamSearchManager BeamState BestOfNFilter CacheConfig CacheExhaustedError
    ChatTemplateError CompletionOutput DiverseSamplingManager EngineBusyError EngineClosedError EngineConfig EngineCore
    EngineFaultError FileFormatError FinishReason GrownToken GrowthStep IllegalMoveError InvalidInputError
    IterationStats Logprob MixtureConfig MixtureReport ModelConfig ModelError ModelLoader ModelNotFoundError
    OptimalOutputs OptimalSampling OutputKind ParallelSamplingManager ParentRequest RamifyError Request
    RequestMetrics RequestOutput RequestStream SamplingParams SamplingStrategy SamplingType SchedulerConfig Sequence
    SequenceData SequenceStatus Standing UnsupportedError UnsupportedModelError WeightsError __version__
    get_model_and_tokenizer
"""


def test_no_public_name_is_lost() -> None:
    assert set(PUBLIC_NAMES.split()) <= set(ramify.__all__)
