"""Which of the CPU's kernels a processor gets: the widest it has, or what the environment asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from ramify.cli import checkup
from ramify.cpu import instructions, library, prebuilt
from ramify.cpu.compiler import NoCompilerError
from ramify.cpu.instructions import AVX2, AVX512, AVX512_VNNI, COMMON, asked_for, fitting, processor_flags
from ramify.errors import InvalidInputError

EVERYTHING = AVX512_VNNI.needs


@pytest.fixture
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the system tells of its processor: everything, until a test writes something else."""
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nmodel name\t: A fast one\nflags\t\t: fpu sse2 {' '.join(EVERYTHING)}\n")
    monkeypatch.setattr(instructions, "CPU_INFO", path)
    monkeypatch.delenv(instructions.VARIABLE, raising=False)
    return path


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that would have been loaded, of an installation that carries all kernels; nothing can be compiled."""
    names: list[str] = []

    class Recorded:
        def __init__(self, path: Path, origin: str) -> None:
            names.append(path.name)
            if not path.read_bytes():
                raise NoCompilerError("the library cannot be loaded: file too short")
            self.origin = origin

    folder = tmp_path / "prebuilt"
    folder.mkdir()
    for each in COMMON:
        (folder / prebuilt.file_name(each)).write_bytes(b"a library")
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    monkeypatch.setattr(library, "Library", Recorded)
    monkeypatch.setenv("RAMIFY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")
    return names


def test_the_widest_set_that_a_processor_has_comes_first() -> None:
    assert fitting(EVERYTHING | {"sse2"}) == [AVX512_VNNI, AVX512, AVX2]
    assert fitting(AVX512.needs) == [AVX512, AVX2]
    assert fitting(AVX512.needs - {"avx512bw"}) == [AVX2]  # half of AVX-512 is none
    assert fitting({"sse2", "avx", "avx2"}) == []


def test_every_option_has_the_flag_that_says_it_can_be_run() -> None:
    """The compiler's names and the system's differ by an underscore."""
    for each in COMMON:
        options = {option.removeprefix("-m") for option in each.options}
        assert options == {flag.replace("_", "") for flag in each.needs}


@pytest.mark.usefixtures("processor")
def test_a_carried_library_needs_no_compiler(loaded: list[str]) -> None:
    assert library.load(print).origin == "prebuilt for AVX-512 with VNNI"
    assert loaded == ["kernels-avx512_vnni.so"]


@pytest.mark.usefixtures("loaded")
def test_a_processor_that_hides_avx512_gets_avx2(processor: Path) -> None:
    processor.write_text(f"flags : {' '.join(AVX2.needs)}\n")
    assert library.load(print).origin == "prebuilt for AVX2"
    processor.write_text("flags : sse2\n")
    with pytest.raises(NoCompilerError, match=r"no C\+\+ compiler"):
        library.load(print)


@pytest.mark.usefixtures("processor", "loaded")
def test_the_environment_may_ask_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(instructions.VARIABLE, "avx2")
    assert library.load(print).origin == "prebuilt for AVX2"
    finding = checkup._cpu_kernels(print)
    assert finding.state == "lacking"
    assert finding.found == "prebuilt for AVX2, as RAMIFY_CPU_KERNELS=avx2 asks"
    assert finding.advice == "unset RAMIFY_CPU_KERNELS: this processor has AVX-512 with VNNI"
    monkeypatch.setenv(instructions.VARIABLE, "native")  # compiled, whatever is carried
    with pytest.raises(NoCompilerError, match=r"no C\+\+ compiler"):
        library.load(print)
    monkeypatch.setenv(instructions.VARIABLE, "")
    assert asked_for() is None
    assert checkup._cpu_kernels(print).found == "prebuilt for AVX-512 with VNNI"


def test_what_the_processor_lacks_is_refused_before_it_ends_the_process(
    processor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor.write_text(f"flags : {' '.join(AVX2.needs)}\n")
    monkeypatch.setenv(instructions.VARIABLE, "avx512")
    with pytest.raises(InvalidInputError, match="lacks avx512bw, avx512dq, avx512f, avx512vl"):
        library.load(print)
    finding = checkup._cpu_kernels(print)
    assert finding.state == "broken"
    assert "this processor lacks avx512bw" in finding.found
    monkeypatch.setenv(instructions.VARIABLE, "sse9")
    with pytest.raises(InvalidInputError, match="one of avx512_vnni, avx512, avx2, native; got 'sse9'"):
        library.load(print)


@pytest.mark.usefixtures("processor")
def test_a_damaged_library_is_told_and_the_next_is_tried(loaded: list[str]) -> None:
    (prebuilt.FOLDER / "kernels-avx512_vnni.so").write_bytes(b"")
    said: list[str] = []
    assert library.load(said.append).origin == "prebuilt for AVX-512"
    assert loaded == ["kernels-avx512_vnni.so", "kernels-avx512.so"]
    assert said == [
        "The CPU's kernels of this installation cannot be used: the library cannot be loaded: file too short"
    ]


def test_a_system_that_does_not_tell_has_no_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "CPU_INFO", tmp_path / "missing")
    assert processor_flags() == frozenset()
    (tmp_path / "missing").write_text("Features : asimd\n")  # another kind of processor
    assert processor_flags() == frozenset()
