"""Which pace is taken for layers, with a stopwatch that only says what it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ramify.gpu.form_cache import FormCache
from ramify.gpu.paces import LayerShape, MeasuredPace
from ramify.gpu.packed_parts import DensePart
from ramify.gpu.product_forms import ALWAYS, NEVER, Pace, Vendor
from ramify.gpu.tuning import Launch
from ramify.models.decoder import Decoder
from ramify.models.families import architecture_from_config
from ramify.models.gguf_quants import FORMATS_BY_NAME
from ramify.models.quantization_config import Quantization
from tests.architectures import SMALL

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
SHAPE = LayerShape(architecture_from_config(LLAMA_8B), torch.bfloat16)


class Told:
    """Layers that are launched at a pace, and the seconds that each pace is said to take."""

    def __init__(self, seconds: Callable[[Pace], float]) -> None:
        self.seconds, self.launched = seconds, list[tuple[int, Pace]]()

    def launch(self, layers: int, pace: Pace) -> None:
        self.launched.append((layers, pace))

    def stopwatch(self, launches: Sequence[Launch]) -> list[float]:
        times = []
        for each in launches:
            each()
            times.append(self.seconds(self.launched[-1][1]))
        return times


def paces_with(cache: FormCache, told: Told, shape: LayerShape = SHAPE, *, unproven: bool = True) -> MeasuredPace:
    return MeasuredPace(shape, cache, told.stopwatch, unproven=unproven)


# Of 8B's weights (48, 32, 224 and 112 MiB) all stay, or those from 64 MiB on, or none.
PACES = [Pace(0, ALWAYS), Pace(0), *(Pace(1, size, early) for size in (ALWAYS, 64, NEVER) for early in (0, 1))]


@pytest.mark.parametrize("fastest", PACES, ids=str)
def test_the_fastest_is_taken_and_asked_for_once(tmp_path: Path, fastest: Pace) -> None:
    told = Told(lambda pace: 1.0 if pace == fastest else 2.0)
    paces = paces_with(FormCache({}, tmp_path), told)
    assert [paces.of(1, told.launch) for _ in range(2)] == [fastest] * 2
    assert {layers for layers, _ in told.launched} == {2}  # 436 MB each
    again = 4 if fastest.overlaps else 0  # with nothing asked for ahead, and with 8, 16 and 32 MiB
    assert len(told.launched) == 2 * (len(PACES) + again)  # once to compile
    never = Told(lambda _: pytest.fail("it was measured before"))
    assert paces_with(FormCache({}, tmp_path), never).of(1, never.launch) == fastest
    assert never.launched == []


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_engines_try_what_a_gpu_has_proven(rows: int, is_shared: bool) -> None:
    """Whatever else would be faster, and whatever a bench has stored."""
    cache = FormCache({}, None)
    told = Told(lambda pace: 4.0 - pace.overlaps - pace.reads_early - bool(pace.asks_ahead))
    found = paces_with(cache, told).of(rows, told.launch, is_shared=is_shared)
    assert not found.is_proven
    engine = Told(lambda pace: 2.0 - (pace == Pace(1)))
    paces = paces_with(cache, engine, unproven=False)
    assert paces.of(rows, engine.launch, is_shared=is_shared) == Pace(1)
    assert all(pace.is_proven for _, pace in engine.launched)
    assert bool(engine.launched) == (rows == 1)  # with several there is nothing to choose


@pytest.mark.parametrize("asked", [0, 8, 32])
@pytest.mark.parametrize("early", [0, 1])
def test_few_rows_overlap_and_may_read_early(early: int, asked: int) -> None:
    told = Told(lambda pace: 3.0 - (pace.reads_early == early) - (pace.asks_ahead == asked))
    paces = paces_with(FormCache({}, None), told)
    fastest = Pace(1, reads_early=early, asks_ahead=asked)
    assert [paces.of(rows, told.launch) for rows in (8, 5)] == [fastest] * 2  # of one padded size
    assert len(told.launched) == 2 * (2 + 4)


@pytest.mark.parametrize("rows", [9, 64])
def test_more_rows_do_not_read_early(rows: int) -> None:
    """With eight key-value heads, from nine rows on."""
    told = Told(lambda pace: 1.0 + pace.reads_early + abs(pace.asks_ahead - 16))
    assert paces_with(FormCache({}, None), told).of(rows, told.launch) == Pace(1, asks_ahead=16)
    assert len(told.launched) == 2 * 4


@pytest.mark.parametrize("rows", [65, 4096])
def test_many_rows_overlap_and_are_not_timed(rows: int) -> None:
    told = Told(lambda _: pytest.fail("there is nothing to measure"))
    assert paces_with(FormCache({}, None), told).of(rows, told.launch) == Pace(1)


@pytest.mark.parametrize("rows", [4, 256])
def test_rows_that_share_are_measured_for_themselves(rows: int) -> None:
    """Any number of them: matrix units are what they wait for. And they do not read early."""
    cache = FormCache({}, None)
    told = Told(lambda pace: 1.0 + abs(pace.asks_ahead - 16))
    paces = paces_with(cache, told)
    assert paces.of(rows, told.launch, is_shared=True) == Pace(1, asks_ahead=16)
    assert not any(pace.reads_early for _, pace in told.launched)
    other = Told(lambda pace: 1.0 + pace.asks_ahead)
    assert paces_with(cache, other).of(rows, other.launch) == Pace(1)


def test_sizes_that_part_no_weights_are_not_tried() -> None:
    small = replace(SHAPE.arch, hidden_size=1024, intermediate_size=3072, num_heads=16, head_dim=128)
    shape = LayerShape(small, torch.bfloat16)
    assert {pace.stays_from for pace in shape.paces(1)} == {ALWAYS, NEVER}
    # Nor more asked for than there is: gate and up are 12 MiB.
    assert [pace.asks_ahead for pace in shape.asking(Pace(1), 4)] == [8, 16]
    assert shape.asking(Pace(0), 4) == shape.asking(Pace(1), 65) == []


def test_packed_weights_have_no_programs_that_stay() -> None:
    quantization = Quantization("gptq", 4, 128)
    packed = LayerShape(replace(SHAPE.arch, quantization=quantization), torch.bfloat16)
    assert packed.paces(1) == [Pace(0), Pace(1), Pace(1, reads_early=1)]
    assert packed.num_tried == 5
    assert "GPTQ, 4 bits" in packed.name


def test_weights_of_a_quantised_folder_that_became_numbers_are_like_any_others() -> None:
    """With `dequantize` they may stay, and are not told of under the name of packed ones."""
    decoder = Decoder(replace(SMALL, quantization=Quantization("gptq", 4, 128)), torch.bfloat16, torch.device("cpu"))
    plain = LayerShape.of(decoder)
    assert plain == LayerShape(SMALL, torch.bfloat16)
    layer = decoder.layers[-1]
    layer.down.parts = {0: DensePart(FORMATS_BY_NAME["BF16"], layer.down.weight)}
    assert "GPTQ, 4 bits" in LayerShape.of(decoder).name


def test_weights_stay_from_a_size_on() -> None:
    weight = torch.empty(2**23, 4, dtype=torch.bfloat16)  # 64 MiB
    assert [Pace(1, size).stays(weight) for size in (ALWAYS, 64, 128, NEVER)] == [True, True, False, False]


def test_what_is_stored_under_its_name_and_is_no_pace_is_measured_anew() -> None:
    cache = FormCache({}, None)
    cache._forms[f"{SHAPE.name}, 1 rows"] = Vendor()
    told = Told(lambda pace: 1.0 + pace.overlaps + (pace.stays_from == ALWAYS))
    assert paces_with(cache, told).of(1, told.launch) == Pace(0)


def test_other_layers_are_measured_for_themselves() -> None:
    cache = FormCache({}, None)
    told = Told(lambda pace: 1.0 + pace.overlaps)
    paces_with(cache, told).of(1, told.launch)
    small = LayerShape(replace(SHAPE.arch, intermediate_size=3072, hidden_size=1024), torch.bfloat16)
    assert small.num_tried > SHAPE.num_tried
    other = Told(lambda pace: 2.0 - pace.overlaps + (pace.stays_from == ALWAYS) + pace.reads_early)
    assert paces_with(cache, other, small).of(1, other.launch) == Pace(1)
