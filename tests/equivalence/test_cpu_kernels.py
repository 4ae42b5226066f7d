"""The CPU's own kernels against torch: for the machine's vectors, and for the narrower ones of other machines."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify import LLM, ModelConfig, SamplingParams
from ramify.cpu import cores
from ramify.cpu.cpu_layers import CpuLayers
from ramify.cpu.library import Library
from ramify.cpu.panels import Ending, PanelPacking, Product
from ramify.device.layers import Batch, Layers, TorchLayers
from ramify.device.pool import KVPool
from ramify.device.reads import SharingRule, slots_between
from ramify.engine.plan import Chunk, SharedPrefix
from ramify.engine.sharing import best_sharing
from ramify.models.decoder import Decoder
from ramify.models.linear import Linear
from ramify.models.loader import ModelLoader
from ramify.models.stored import StoredTensor
from tests.attention_truth import NONE_SHARED, reads_of
from tests.conftest import CheckpointMaker
from tests.native import EVERY_SET, library_for, needs_compiler

pytestmark = needs_compiler


@pytest.fixture(scope="module", params=EVERY_SET, ids=lambda instructions: instructions.name)
def library(request: pytest.FixtureRequest) -> Library:
    return library_for(request.param)


# -- products ------------------------------------------------------------------------------------------------


def _linear(outputs: int, depth: int, *, bias: bool, seed: int) -> Linear:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, depth, generator=generator) / depth**0.5
    return Linear(weight, torch.randn(outputs, generator=generator) if bias else None)


def _product(library: Library, linear: Linear, *, gated: bool = False) -> Product:
    """Of a dense weight, packed as it is; a gated one is two parts, gate and up."""
    halves = linear.weight.chunk(2) if gated else (linear.weight,)
    for index, half in enumerate(halves):
        linear.put(index * len(half), StoredTensor.of(half), PanelPacking(library))
    return Product(library, linear, gated=gated)


@given(
    rows=st.sampled_from([1, 2, 5, 6, 7, 8, 13, 96, 200]),
    depth=st.sampled_from([1, 3, 64, 511, 512, 513, 1100]),
    outputs=st.sampled_from([1, 15, 16, 64, 65, 130]),
    bias=st.booleans(),
    ending=st.sampled_from(list(Ending)),
    threads=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_products_and_their_endings(
    library: Library, *, rows: int, depth: int, outputs: int, bias: bool, ending: Ending, threads: int, seed: int
) -> None:
    gated = ending is Ending.GATED
    linear = _linear(outputs * (2 if gated else 1), depth, bias=bias, seed=seed)
    torch.manual_seed(seed + 1001)  # not the weight's numbers again
    x, out = torch.randn(rows, depth), torch.randn(rows, outputs)
    exact = x.double() @ linear.weight.double().t()
    if linear.bias is not None:
        exact += linear.bias.double()
    if gated:
        gate, up = exact.chunk(2, dim=-1)
        exact = F.silu(gate) * up
    elif ending is Ending.ADD:
        exact += out.double()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        _product(library, linear, gated=gated).multiply(x, out, ending)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_the_rows_beside_it(library: Library) -> None:
    packed = _product(library, _linear(100, 700, bias=True, seed=1))
    x = torch.randn(300, 700)
    together = torch.empty(300, 100)
    packed.multiply(x, together)
    for count in (1, 4, 9, 192):
        some = torch.empty(count, 100)
        packed.multiply(x[:count].contiguous(), some)
        assert torch.equal(some, together[:count])


def test_weights_that_are_packed_again_are_used(library: Library) -> None:
    linear = _linear(70, 40, bias=True, seed=2)
    product, x, out = _product(library, linear), torch.randn(3, 40), torch.empty(3, 70)
    product.multiply(x, out)
    linear.put(0, StoredTensor.of(torch.ones(70, 40)), PanelPacking(library))
    assert linear.bias is not None
    linear.bias.zero_()
    product.multiply(x, out)
    torch.testing.assert_close(out, x.sum(1, keepdim=True).expand(3, 70), atol=1e-5, rtol=1e-5)


def test_a_weight_that_is_a_view_is_packed_as_it_reads(library: Library) -> None:
    weight = torch.randn(300, 400).t()
    x, out = torch.randn(2, 300), torch.empty(2, 400)
    _product(library, Linear(weight)).multiply(x, out)
    torch.testing.assert_close(out, x @ weight.t(), atol=1e-4, rtol=1e-4)


def test_silu_at_the_ends_of_the_numbers(library: Library) -> None:
    """A product of depth one hands its input through to the gate."""
    x = torch.cat([torch.linspace(-130, 130, 5001), torch.tensor([0.0, 1e-30, -1e-30, 1e30, -1e30, torch.nan])])[
        :, None
    ]
    out = torch.empty(len(x), 1)
    _product(library, Linear(torch.tensor([[1.0], [0.5]])), gated=True).multiply(x, out, Ending.GATED)
    exact = (F.silu(x.double()) * 0.5 * x.double()).float()
    near = x.abs() < 8
    torch.testing.assert_close(out[near], exact[near], atol=1e-36, rtol=1e-6)
    # The exponent is rounded once: where the gate is nearly shut, its last digits go.
    torch.testing.assert_close(out, exact, atol=1e-34, rtol=2e-5, equal_nan=True)


# -- a whole decoder -----------------------------------------------------------------------------------------

MODELS: dict[str, tuple[str, dict[str, int | bool]]] = {
    "llama": ("llama", {}),
    "heads of 64 by threes": ("llama", {"head_dim": 64, "hidden_size": 96, "num_attention_heads": 6}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "heads of 24": ("llama", {"head_dim": 24, "num_key_value_heads": 1}),
    "heads of 256": ("llama", {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 128}),
}


def _step(numbers: random.Random, block_size: int) -> list[Chunk]:
    """Chunks of tracks that share beginnings at random: decodes, prompts from nothing, prompts half-way."""
    free = list(range(300))
    numbers.shuffle(free)
    chunks = []
    for _ in range(numbers.randint(1, 3)):
        common = [free.pop() for _ in range(numbers.choice([0, 2, 6]))]
        for _ in range(numbers.choice([1, 3, 9])):
            past = len(common) * block_size + numbers.choice([0, 1, block_size, 70])
            count = numbers.choice([1, 1, 1, 3, 40])
            own = -(-(past + count) // block_size) - len(common)
            if own > len(free):
                break
            table = (*common, *(free.pop() for _ in range(own)))
            chunks.append(Chunk([numbers.randrange(320) for _ in range(count)], past, table))
    numbers.shuffle(chunks)
    return chunks


@pytest.mark.parametrize("model", MODELS)
def test_a_step_of_any_shape(model: str, library: Library, make_checkpoint: CheckpointMaker) -> None:
    """Hidden states, logits and what is kept in the pool, with and without shared prefixes, of all rows and of some."""
    family, changes = MODELS[model]
    folder = make_checkpoint(family, **changes)
    decoder, in_panels = _decoder(folder), _decoder(folder, PanelPacking(library))
    for seed in range(12):
        numbers = random.Random(seed)
        block_size = numbers.choice([1, 4, 16])
        chunks = tuple(_step(numbers, block_size))
        tables = [chunk.block_table[: chunk.start // block_size] for chunk in chunks]
        shared = tuple(SharedPrefix(prefix.num_blocks, prefix.rows) for prefix in best_sharing(tables))
        shared = shared if numbers.random() < 0.7 else ()
        rows = sum(len(chunk.token_ids) for chunk in chunks)
        wanted = sorted(numbers.sample(range(rows), numbers.choice([0, 1, rows // 2, rows])))
        results = []
        for on_kernels in (False, True):
            pool = KVPool(decoder.arch, 300, block_size, torch.float32, torch.device("cpu"))
            pool.kv.normal_(generator=torch.Generator().manual_seed(seed))
            layers: Layers = TorchLayers(decoder, pool, NONE_SHARED)
            if on_kernels:
                layers = CpuLayers(library, in_panels, pool, SharingRule(fewest_positions=8))
            hidden = _forward(layers, chunks, shared, wanted)
            results.append((hidden.clone(), layers.logits(hidden), _written(pool, chunks)))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, atol=3e-5, rtol=1e-4)


def _forward(
    layers: Layers, chunks: Sequence[Chunk], shared: Sequence[SharedPrefix], wanted: list[int]
) -> torch.Tensor:
    size = layers.pool.block_size
    reads = reads_of(chunks, shared, size, layers.sharing)
    slots = [slots_between(chunk.block_table, chunk.start, chunk.end, size) for chunk in chunks]
    batch = Batch(
        torch.tensor([token for chunk in chunks for token in chunk.token_ids]),
        torch.tensor([position for chunk in chunks for position in range(chunk.start, chunk.end)]),
        torch.from_numpy(np.concatenate(slots)),
    )
    with torch.inference_mode():
        layers.prepare(reads)
        return layers.forward(batch, None if len(wanted) == reads.size else torch.tensor(wanted, dtype=torch.int64))


def _decoder(folder: Path, packing: PanelPacking | None = None) -> Decoder:
    return ModelLoader(ModelConfig(model=str(folder))).load_model("cpu", packing)


def _written(pool: KVPool, chunks: tuple[Chunk, ...]) -> torch.Tensor:
    return torch.cat(
        [pool.blocks[:, list(chunk.block_table)].flatten(1, 2)[:, chunk.start : chunk.end] for chunk in chunks], 1
    )


def test_what_nobody_wrote_is_not_read(library: Library, make_checkpoint: CheckpointMaker) -> None:
    """A fault may leave NaN in a freed block, or a neighbour's row be NaN: others do not notice."""
    decoder = _decoder(make_checkpoint("llama"), PanelPacking(library))
    pool = KVPool(decoder.arch, 8, 16, torch.float32, torch.device("cpu"))
    pool.kv.fill_(torch.nan)
    layers = CpuLayers(library, decoder, pool)
    prompts = (Chunk([1] * 17, 0, (0, 1)), Chunk([2, 3], 0, (2,)))
    assert _forward(layers, prompts, (), [16, 18]).isfinite().all()
    pool.kv[:, 2 * 16] = torch.nan  # the second's first position
    hidden = _forward(layers, (Chunk([5], 17, (0, 1)), Chunk([6], 2, (2,))), (), [0, 1])
    assert hidden[0].isfinite().all()
    assert hidden[1].isnan().all()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_an_engine_draws_what_it_draws_on_torchs_operators(family: str, make_checkpoint: CheckpointMaker) -> None:
    """Chunked prompts, shared prefixes, prefix hits, a cache of a few blocks and prompt logprobs, seeded."""
    folder = str(make_checkpoint(family))
    numbers = random.Random(3)
    common = [numbers.randrange(320) for _ in range(80)]
    prompts = [common + [numbers.randrange(320) for _ in range(numbers.choice([0, 3, 50]))] for _ in range(5)]
    params = SamplingParams(n=4, seed=11, max_tokens=20, logprobs=2)
    told = []
    for eager in (False, True):
        llm = LLM(
            folder, device="cpu", enforce_eager=eager, max_num_batched_tokens=64, num_kv_blocks=40, max_model_len=256
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        outputs += llm.generate(prompts[:2], SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
        told.append(outputs)
    for one, other in zip(*told, strict=True):
        assert [completion.token_ids for completion in one.outputs] == [
            completion.token_ids for completion in other.outputs
        ]
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)


def test_numbers_do_not_depend_on_the_batch(make_checkpoint: CheckpointMaker) -> None:
    """Alone, among others, with prompts in other pieces, on more threads: the same bits if nothing is shared."""
    folder = str(make_checkpoint("llama", head_dim=64))
    numbers = random.Random(8)
    prompts = [[numbers.randrange(320) for _ in range(numbers.randint(2, 150))] for _ in range(12)]
    params = SamplingParams(seed=2, max_tokens=30, logprobs=3, ignore_eos=True)

    def drawn(prompts: list[list[int]], at_once: int | None = None) -> list[tuple[tuple[int, ...], float | None]]:
        llm = LLM(folder, device="cpu", enable_prefix_caching=False, max_model_len=256, max_num_batched_tokens=at_once)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob) for output in outputs]

    alone = [drawn([prompt])[0] for prompt in prompts]
    assert drawn(prompts) == alone
    assert drawn(prompts, at_once=97) == alone
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert drawn(prompts) == alone
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_a_program_makes_torchs_default_is_its_own_matter(
    dtype: torch.dtype, make_checkpoint: CheckpointMaker
) -> None:
    """Kernels write float32: in memory of bfloat16, half as large, they wrote over what lies behind it."""
    folder = str(make_checkpoint("llama"))
    params = [
        SamplingParams(n=4, seed=11, max_tokens=20, logprobs=2),
        SamplingParams(n=2, seed=11, max_tokens=20, top_p=0.8, repetition_penalty=1.1),
        SamplingParams(max_tokens=1, prompt_logprobs=1),
    ]

    def drawn() -> list[list[tuple[tuple[int, ...], float | None]]]:
        outputs = LLM(folder, device="cpu", max_model_len=256).generate([[1, 2, 3] * 20] * 3, params, use_tqdm=False)
        return [[(each.token_ids, each.cumulative_logprob) for each in output.outputs] for output in outputs]

    expected = drawn()
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        assert drawn() == expected
    finally:
        torch.set_default_dtype(before)


def test_memory_for_kernels_is_the_hosts(library: Library) -> None:
    """The address of a tensor elsewhere, here of one that has no memory, is none for a kernel."""
    linear, x, ids = _linear(70, 40, bias=True, seed=2), torch.randn(3, 40), torch.tensor([3, 69])
    out = torch.empty(3, 70)
    with torch.device("meta"):
        product = _product(library, linear)
        product.multiply(x, out)
        rows = linear.parts[0].rows(ids)
    torch.testing.assert_close(out, F.linear(x, linear.weight, linear.bias), atol=1e-5, rtol=1e-5)
    assert torch.equal(rows, linear.weight[ids])


# -- threads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [2, 3, 5, 70])
def test_every_panel_is_taken_once(library: Library, threads: int) -> None:
    """By stretches of as many as there are threads, which may be more than panels or than there are stretches."""
    for outputs in (1, 64, 65, 700, 6400):
        product = _product(library, _linear(outputs, 16, bias=False, seed=outputs))
        x, alone, shared = torch.randn(2, 16), torch.zeros(2, outputs), torch.zeros(2, outputs)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            product.multiply(x, alone, Ending.ADD)
            torch.set_num_threads(threads)
            product.multiply(x, shared, Ending.ADD)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(alone, shared)


def _on_threads(library: Library, count: int) -> None:
    """Calls of all sizes, one after the other, on more threads than there may be cores."""
    product = _product(library, _linear(300, 64, bias=False, seed=count))
    x = torch.randn(40, 64)
    expected = torch.empty(40, 300)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        product.multiply(x, expected)
        torch.set_num_threads(4)
        for index in range(count):
            rows = 1 + index % 40
            out = torch.empty(rows, 300)
            product.multiply(x[:rows], out)
            assert torch.equal(out, expected[:rows])
    finally:
        torch.set_num_threads(before)


def test_threads_take_every_chunk_once_however_calls_follow_each_other(library: Library) -> None:
    _on_threads(library, 400)


def test_calls_from_several_threads_do_not_meet(library: Library) -> None:
    """Helpers serve one call at a time; the others run alone, with the same numbers."""
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(_on_threads, library, 150) for _ in range(3)]:
            done.result()


def test_a_forked_process_has_helpers_of_its_own() -> None:
    """It has none of its parent's threads: who waited for them would wait for ever."""
    program = (
        "import os, sys, torch\n"
        "from ramify.cpu.library import load\n"
        "from tests.equivalence.test_cpu_kernels import _on_threads\n"
        "library = load(print)\n"
        "_on_threads(library, 20)\n"
        "child = os.fork()\n"
        "_on_threads(library, 20)\n"
        "if child == 0:\n"
        "    os._exit(0)\n"
        "sys.exit(os.waitpid(child, 0)[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == 0


def test_torchs_operators_of_small_steps_stay_on_their_thread(library: Library) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with library.torch_on_one_thread():
            assert torch.get_num_threads() == 1
            assert library.threads == min([3, *cores._quota()])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
