"""Where the CPU's kernels come from, and what happens where they cannot be had."""

from __future__ import annotations

import os
import platform
import shutil
import time
from pathlib import Path

import pytest

from ramify import LLM, SamplingParams
from ramify.cpu import compiler
from ramify.cpu.compiler import NoCompilerError, compiled
from ramify.cpu.instructions import NATIVE, PLAIN, InstructionSet
from ramify.cpu.library import Library, load
from tests.conftest import CheckpointMaker
from tests.native import needs_compiler

pytestmark = needs_compiler


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, so that nothing is there yet; what is compiled for it need not be fast."""
    monkeypatch.setattr(compiler, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in compiler.FLAGS))
    monkeypatch.setenv("RAMIFY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_compiled_once_then_found_without_a_compiler(cache: Path, mask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    before = os.umask(mask)
    try:
        with compiled(said.append) as first:
            assert Library(first, "").tile_columns > 0
    finally:
        os.umask(before)
    assert said == ["Compiling the CPU's kernels, once"]
    assert [path.name for path in cache.iterdir()] == [first.name]  # nothing else is left lying about
    assert cache.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("PATH", "")
    assert load(said.append).tile_columns > 0
    assert len(said) == 1


def test_what_old_versions_left_is_removed(cache: Path) -> None:
    cache.mkdir(parents=True, mode=0o700)
    for name, days in (("kernels-old.so", 100), ("kernels-new.so", 1), ("something else", 100)):
        (cache / name).write_text("")
        os.utime(cache / name, (time.time() - days * 86_400,) * 2)
    with compiled(lambda _: None) as path:
        assert {each.name for each in cache.iterdir()} == {path.name, "kernels-new.so", "something else"}


def test_another_processor_or_source_is_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = sorted(Path(compiler.__file__).parent.glob("*.cpp"))
    names = {
        compiler._digest(sources, NATIVE),
        compiler._digest(sources, PLAIN),
        compiler._digest(sources[1:], NATIVE),
    }
    monkeypatch.setattr(compiler, "_processor", lambda: "another")
    assert len({*names, compiler._digest(sources, NATIVE)}) == 4


@pytest.mark.usefixtures("cache")
def test_without_a_compiler_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoCompilerError, match=r"no C\+\+ compiler \(g\+\+\)"):
        load(lambda _: None)


def test_an_engine_without_a_compiler_says_so_and_gives_the_same(
    cache: Path, monkeypatch: pytest.MonkeyPatch, make_checkpoint: CheckpointMaker
) -> None:
    folder = str(make_checkpoint("llama"))
    params = SamplingParams(n=3, seed=5, max_tokens=12)
    with_kernels = LLM(folder, device="cpu").generate([[1, 2, 3]], params, use_tqdm=False)
    monkeypatch.setenv("PATH", "")
    shutil.rmtree(cache)
    said: list[str] = []
    without = LLM(folder, device="cpu", say=said.append).generate([[1, 2, 3]], params, use_tqdm=False)
    assert any("on torch's operators: no C++ compiler" in line for line in said)
    assert [completion.token_ids for completion in without[0].outputs] == [
        completion.token_ids for completion in with_kernels[0].outputs
    ]


def test_what_a_broken_compiler_says_is_told(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'fatal error: no such thing' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(NoCompilerError, match="ended with 3 and said: fatal error: no such thing"):
        load(lambda _: None)
    assert list(cache.iterdir()) == []


def test_nothing_is_loaded_that_others_may_have_written(cache: Path, tmp_path: Path) -> None:
    load(lambda _: None)
    cache.chmod(0o770)
    with pytest.raises(NoCompilerError, match=r"others may write to .*: remove it"):
        load(lambda _: None)
    cache.chmod(0o700)
    cache.rename(tmp_path / "elsewhere")
    cache.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NoCompilerError, match="no cache to keep them in"):
        load(lambda _: None)


def test_a_folder_of_another_user_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True, mode=0o700)
    if os.getuid() == 0:
        os.chown(cache, 12_345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12_345)
    with pytest.raises(NoCompilerError, match="belongs to another user: set RAMIFY_CACHE"):
        load(lambda _: None)


def test_a_cache_that_cannot_be_made_is_no_reason_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAMIFY_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(NoCompilerError, match="no cache to keep them in"):
        load(lambda _: None)


def test_a_user_without_a_home_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(compiler, "cache_folder", homeless)
    with pytest.raises(NoCompilerError, match="Could not determine home"):
        load(lambda _: None)


def test_a_library_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    (tmp_path / "kernels.so").write_bytes(b"not a library")
    with pytest.raises(NoCompilerError, match="cannot be loaded"):
        Library(tmp_path / "kernels.so", "")


@pytest.mark.parametrize("options", [("-mavx",), ("-mavx2", "-mfma", "-mf16c", "-mavx512f")], ids=" ".join)
@pytest.mark.usefixtures("cache")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are options of x86-64")
def test_processors_between_the_common_ones_have_kernels_too(options: tuple[str, ...]) -> None:
    """Xeon Phi has AVX-512 without its later parts: there nothing could be compiled, and torch's operators served."""
    with compiled(lambda _: None, InstructionSet("between", "a processor between", options)) as path:
        assert path.stat().st_size > 0
