"""docs/security.md names a test for every promise, and the tests are there; two promises are proven here."""

from __future__ import annotations

import ast
import hmac
import re
from pathlib import Path

import pytest

from ramify.errors import InvalidInputError
from ramify.server.config import ServerConfig
from ramify.server.guard import Guard

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
# Modules and functions that make objects, or run code, out of what they read.
UNPICKLING = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "multiprocessing"}
RUNNING = {"eval", "exec", "compile", "__import__"}


def _imports_and_calls(path: Path) -> tuple[set[str], set[str]]:
    imported, called = set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Call):
            called.add(ast.unparse(node.func))
    return imported, called


def test_every_promise_names_tests_that_exist() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(rows) > 40
    assert [row for row in rows if "::test_" not in row.split(" | ")[-1]] == []
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)
    assert len(named) == PAGE.count("::test_")
    for file in {file for file, _ in named}:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert {name for path, name in named if path == file} <= there, file


def test_nothing_unpickles_or_runs_what_it_reads() -> None:
    for path in sorted((ROOT / "ramify").rglob("*.py")):
        imported, called = _imports_and_calls(path)
        assert not imported & UNPICKLING, path
        assert not called & (RUNNING | {"torch.load", "np.load", "numpy.load"}), path


def test_keys_are_compared_as_digests_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    honest = hmac.compare_digest

    def watched(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return honest(one, other)

    monkeypatch.setattr("ramify.server.guard.hmac.compare_digest", watched)
    guard = Guard(None, api_key="sesame", open_paths=frozenset(), max_header_bytes=1024)  # type: ignore[arg-type]
    keys = {"": False, "s": False, "sesame": True, "sesame" * 1000: False, "sesamf": False}
    for key, is_right in keys.items():
        scope = {"type": "http", "headers": [(b"authorization", f"Bearer {key}".encode())]}
        assert guard._has_key(scope) is is_right
    assert len(compared) == len(keys)
    assert {len(each) for pair in compared for each in pair} == {32}


@pytest.mark.parametrize("key", ["voilà", "日本…", "two words", "a"])
def test_a_key_of_any_letters_opens(key: str) -> None:
    """The last byte of some letters is a space in Latin 1, as which headers are read: it was taken off."""
    guard = Guard(None, api_key=key, open_paths=frozenset(), max_header_bytes=1024)  # type: ignore[arg-type]
    for sent in (f"Bearer {key}", f"bearer  {key} "):
        assert guard._has_key({"type": "http", "headers": [(b"authorization", sent.encode())]})


@pytest.mark.parametrize("key", [" key", "key\n", "a\nb", "key\x00"])
def test_a_key_that_no_client_could_send_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(InvalidInputError, match="api_key must not begin or end") as refused:
        ServerConfig(api_key=key)
    assert "key\n" not in str(refused.value)
