"""Which form is taken, with a stopwatch that only says what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ramify.gpu import tuning
from ramify.gpu.form_cache import FormCache
from ramify.gpu.kernels.copied_product import CopiedTiles
from ramify.gpu.kernels.row_product import RowTiles
from ramify.gpu.kernels.row_stream import RowStream
from ramify.gpu.kernels.tile_stream import TileStream
from ramify.gpu.kernels.tiled_product import Tiles
from ramify.gpu.product_candidates import (
    MOST_CANDIDATES,
    ROW_STREAMS,
    ROW_TILES,
    TILE_STREAMS,
    Chip,
    candidates,
)
from ramify.gpu.product_forms import Form, FormsByRule, Pace, Product, Vendor
from ramify.gpu.tuning import GraphStopwatch, MeasuredForms, Trial

H200 = Chip(processors=132, shared_memory=227 * 1024)
HOPPER = Chip(processors=132, shared_memory=227 * 1024, is_hopper=True)
SMALL = Chip(processors=40, shared_memory=96 * 1024)
QKV = Product("read", 6144, 4096, torch.bfloat16)
PRODUCTS = [
    QKV,
    Product("added", 4096, 14336, torch.bfloat16),
    Product("gate_up", 28672, 4096, torch.bfloat16),
    Product("head", 128256, 4096, torch.bfloat16),
    Product("read", 96, 80, torch.float16),
    Product("gate_up", 200, 72, torch.float16),
]
ROWS = [1, 2, 3, 4, 8, 16, 24, 64, 128, 256, 512]


class Told:
    """Seconds by form; counts how often it was asked."""

    def __init__(self, seconds: Callable[[Form], float]) -> None:
        self.seconds, self.asked = seconds, 0

    def __call__(self, trial: Trial, forms: Sequence[Form]) -> list[float]:
        self.asked += 1
        for form in forms:
            trial(form)
        return [self.seconds(form) for form in forms]


def forms_with(cache: FormCache, stopwatch: Told, chip: Chip = H200) -> MeasuredForms:
    return MeasuredForms(QKV, chip, cache, lambda rows: lambda form: None, stopwatch)  # noqa: ARG005


def test_the_fastest_is_taken_and_asked_for_once(tmp_path: Path) -> None:
    favourite = candidates(QKV, 64, H200)[2]
    stopwatch = Told(lambda form: 1.0 if form == favourite else 2.0)
    forms = forms_with(FormCache({}, tmp_path), stopwatch)
    assert [forms.of(rows) for rows in (64, 57, 64)] == [favourite] * 3
    assert stopwatch.asked == 1  # 57 rows are padded to 64
    never = Told(lambda _: pytest.fail("it was measured before"))
    assert forms_with(FormCache({}, tmp_path), never).of(64) == favourite
    assert never.asked == 0


def test_what_is_known_is_not_guessed_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start asks for 33 sizes of every product: with the guesses for all of them it took a second longer."""
    known = forms_with(FormCache({}, tmp_path), Told(lambda _: 1.0)).of(48)
    monkeypatch.setattr(tuning, "candidates", lambda *_: pytest.fail("the form is known"))
    assert forms_with(FormCache({}, tmp_path), Told(lambda _: 1.0)).of(48) == known


def test_float32_has_one_form_whatever_a_file_says() -> None:
    cache, product = FormCache({}, None), Product("read", 6144, 4096, torch.float32)
    cache.keep(product, 64, Tiles(64, 64, 3, 4))
    never = Told(lambda _: pytest.fail("there is nothing to measure"))
    forms = MeasuredForms(product, H200, cache, lambda rows: lambda form: None, never)  # noqa: ARG005
    assert forms.of(64) == Vendor()


def test_forms_that_cannot_run_are_not_taken(tmp_path: Path) -> None:
    """A kernel that the chip refuses takes forever."""
    forms = forms_with(FormCache({}, tmp_path), Told(lambda form: 9.0 if isinstance(form, Vendor) else float("inf")))
    assert forms.of(32) == Vendor()


def test_many_rows_are_never_timed() -> None:
    stopwatch = Told(lambda _: 1.0)
    assert forms_with(FormCache({}, None), stopwatch).of(513) == Vendor()
    assert stopwatch.asked == 0


def test_a_stored_form_that_does_not_fit_is_measured_anew() -> None:
    cache = FormCache({}, None)
    cache.keep(QKV, 64, Tiles(256, 256, 8, 8))
    cache.keep(QKV, 1, Vendor())
    stopwatch = Told(lambda _: 1.0)
    forms = forms_with(cache, stopwatch)
    assert forms.of(64) in candidates(QKV, 64, H200)
    assert isinstance(forms.of(1), RowTiles)
    assert stopwatch.asked == 2


@pytest.mark.parametrize("chip", [H200, SMALL, HOPPER], ids=["large chip", "small chip", "Hopper"])
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_candidates_are_few_fit_and_include_the_vendors(product: Product, chip: Chip) -> None:
    for rows in ROWS:
        likely = candidates(product, rows, chip)
        most = max(len(ROW_TILES) + len(ROW_STREAMS), MOST_CANDIDATES + 1 + len(TILE_STREAMS) + 1)
        assert 2 <= len(likely) == len(set(likely)) <= most
        assert all(chip.holds(form, product, rows) for form in likely)
        assert (Vendor() in likely) == (rows > 1)
        for form in likely:
            if isinstance(form, Tiles):
                assert form.splits == 1 or product.role in ("read", "added")
                assert -(-product.columns // form.columns) >= form.splits


@pytest.mark.parametrize(("major", "is_hopper"), [(8, False), (9, True), (10, False)])
def test_only_hopper_has_what_forms_that_stay_are_written_for(
    monkeypatch: pytest.MonkeyPatch, major: int, is_hopper: bool
) -> None:
    """What comes after it has no `wgmma`: such a kernel would not compile there."""
    facts = SimpleNamespace(multi_processor_count=148, shared_memory_per_block_optin=227 * 1024, major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    chip = Chip.of(torch.device("cuda"))
    assert chip.is_hopper == is_hopper
    assert any(isinstance(form, TileStream) for form in candidates(QKV, 32, chip)) == is_hopper
    assert any(isinstance(form, RowStream) for form in candidates(QKV, 1, chip)) == is_hopper


def test_one_rows_forms_may_be_asked_for_by_kind() -> None:
    """On a chip that has none of one kind, or for numbers of four bytes, both are the other."""
    kinds = {stays: {type(form) for form in candidates(QKV, 1, HOPPER, stays)} for stays in (None, False, True)}
    assert kinds == {None: {RowTiles, RowStream}, False: {RowTiles}, True: {RowStream}}
    assert {type(form) for form in candidates(QKV, 1, H200, True)} == {RowTiles}
    wide = Product("read", 6144, 4096, torch.float32)
    assert {type(form) for form in candidates(wide, 1, HOPPER, True)} == {RowTiles}


def test_kinds_of_one_rows_forms_are_measured_apart(tmp_path: Path) -> None:
    stopwatch = Told(lambda form: 1.0 if isinstance(form, RowStream) else 2.0)
    forms = forms_with(FormCache({}, tmp_path), stopwatch, HOPPER)
    assert [type(forms.of(1, stays=stays)) for stays in (False, True, None)] == [RowTiles, RowStream, RowStream]
    assert stopwatch.asked == 3
    again = forms_with(FormCache({}, tmp_path), Told(lambda _: pytest.fail("it was measured before")), HOPPER)
    assert [type(again.of(1, stays=stays)) for stays in (False, True, None)] == [RowTiles, RowStream, RowStream]


@pytest.mark.parametrize(
    "form",
    [
        TileStream(64, 32, 4, 4, rows=64),
        TileStream(32, 128, 4, 4, rows=64),
        TileStream(64, 128, 4, 4, rows=16),
        TileStream(64, 128, 4, 4, splits=64, rows=64),
        TileStream(64, 128, 4, 2, rows=64),
        CopiedTiles(512, 64, 1, 8, rows=64),
        Pace(1),
        RowStream(8, 1024, 4, 4, 2),
    ],
    ids=str,
)
def test_what_no_chip_can_run_is_not_held(form: object) -> None:
    """A file may hold anything that is well formed."""
    assert not HOPPER.holds(form, QKV, 64)


def test_float32_is_the_vendors_but_for_one_row() -> None:
    product = Product("read", 6144, 4096, torch.float32)
    assert candidates(product, 64, H200) == [Vendor()]
    assert all(isinstance(form, RowTiles) for form in candidates(product, 1, H200))


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_the_rule_needs_no_measurement(product: Product) -> None:
    forms = FormsByRule(product, 96 * 1024, is_interpreted=False)
    assert isinstance(forms.of(1), RowTiles)
    assert isinstance(forms.of(2), Tiles)
    assert isinstance(forms.of(64), Tiles)
    assert forms.of(65) == Vendor()


def test_trials_of_a_second_gpu_are_captured_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own capturing stream belongs to whichever GPU captured first, and makes it the current one."""
    seen: list[object] = []
    current = [0]

    @contextmanager
    def device(asked: torch.device) -> Iterator[None]:
        before, current[0] = current[0], asked.index
        yield
        current[0] = before

    @contextmanager
    def graph(_graph: object, stream: object = None) -> Iterator[None]:
        seen.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(tuning, "capture_stream", lambda index: f"stream of GPU {index}", raising=False)
    for index in (0, 1):
        stopwatch = GraphStopwatch(torch.device("cuda", index))
        stopwatch._capture(lambda: seen.append(f"launched on GPU {current[0]}"))
    assert seen == ["stream of GPU 0", "launched on GPU 0", "stream of GPU 1", "launched on GPU 1"]
