"""Two tracks in one engine, on a fake device with exact logits: whatever the schedule, q* of the right two contexts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramify import InvalidInputError, Request, SamplingParams
from ramify.config import MixtureConfig
from ramify.engine.core import EngineCore
from ramify.engine.demands import Demands
from ramify.engine.plan import NOT_FINITE, Draw
from ramify.outputs import FinishReason, MixtureReport, RequestOutput
from ramify.sampling.mixing import Mixer
from ramify.sampling.piece import NOTHING_IN_COMMON
from ramify.sampling.pipeline import Sampler, Source
from tests.fake import VOCAB, FakeDevice, fake_engine, logits_after
from tests.unit.test_engine import check, run_all

EOS = 0
Token = tuple[int, MixtureReport]


@dataclass(frozen=True)
class Asked:
    teacher: list[int]
    theta: list[int]
    params: SamplingParams

    def request(self, name: str, *, models: int = 2) -> Request:
        return Request(name, None, self.teacher, self.params, other_prompts=[(models - 1, self.theta)])


def by_hand(asked: Asked, *, models: int = 2, config: MixtureConfig | None = None) -> list[list[Token]]:
    """The truth: every child by itself, each token from the two whole contexts, no engine at all."""
    params = asked.params
    prompts, ends = (asked.teacher, asked.theta), frozenset({EOS})
    demands = Demands(params, seed=params.seed or 0, eos_token_ids=ends, prompts=prompts)
    sampler = Sampler(mixer=Mixer(config if config is not None else MixtureConfig()))
    children = []
    for child in range(params.n):
        output: list[int] = []
        told: list[Token] = []
        while len(output) < (params.max_tokens or 0) and output[-1:] != [EOS]:
            sources = [
                Source(logits_after([*prompt, *output], model)[None], [0])
                for model, prompt in ((0, asked.teacher), (models - 1, asked.theta))
            ]
            draw = Draw("x", child, child, len(output), (), demands, list(output))
            result = sampler.sample(sources, [draw])
            output.append(result.token_ids[0])
            told.append((output[-1], result.mixtures[0]))
        children.append(told)
    return children


def told_by(output: RequestOutput) -> list[list[Token]]:
    assert all(
        completion.mixture is not None and len(completion.mixture) == len(completion.token_ids)
        for completion in output.outputs
    )
    return [list(zip(completion.token_ids, completion.mixture or (), strict=True)) for completion in output.outputs]


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    def prompt() -> list[int]:
        start = draw(st.sampled_from([[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4], [9]]))
        return start + draw(st.lists(st.integers(1, 2), max_size=9))

    n = draw(st.integers(1, 4))
    options: dict[str, Any] = {
        "n": n,
        "max_tokens": draw(st.integers(1, 8)),
        "seed": draw(st.integers(0, 3)),
        "temperature": 0.0 if n == 1 and draw(st.booleans()) else draw(st.sampled_from([1.0, 0.7])),
    }
    if draw(st.booleans()):
        options |= {"top_k": 20, "repetition_penalty": 1.3, "presence_penalty": 0.5}
    return Asked(prompt(), prompt(), SamplingParams(**options))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Asked], int, dict[str, Any]]:
    asked = draw(st.lists(requests(), min_size=1, max_size=5))
    block_size = draw(st.integers(1, 5))
    models = draw(st.sampled_from([1, 2]))  # one checkpoint for both sides, or two
    needed = 0
    for each in asked:
        length = each.params.max_tokens or 0
        tracks = [-(-(len(prompt) + length) // block_size) + 1 for prompt in (each.teacher, each.theta)]
        needed = max(needed, sum(tracks) if models == 1 else max(tracks))
    swaps = draw(st.booleans())
    options = {
        "block_size": block_size,
        "num_blocks": needed + draw(st.sampled_from([0, 1, 3, 60])),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.sampled_from([2, 3, 7, 64])),
        "enable_prefix_caching": draw(st.booleans()),
        "preemption_mode": "swap" if swaps else "recompute",
        "num_host_blocks": draw(st.sampled_from([2, 40])) if swaps else 0,
        "runs_ahead": draw(st.booleans()),
    }
    return asked, models, options


World = tuple[list[Asked], int, dict[str, Any]]


def run_schedule(world: World) -> None:
    asked, models, options = world
    engine = fake_engine(num_models=models, mixer=Mixer(MixtureConfig()), **options)
    for number, each in enumerate(asked):
        engine.add_request(each.request(str(number), models=models))
    outputs = run_both(engine)
    for number, each in enumerate(asked):
        assert told_by(outputs[str(number)]) == by_hand(each, models=models)
    assert engine.stats()["blocks_in_use"] == 0


@given(worlds())
@settings(max_examples=20)
def test_every_schedule_draws_from_the_mixture_of_the_right_contexts(world: World) -> None:
    run_schedule(world)


@pytest.mark.long
@given(worlds())
@settings(max_examples=100)
def test_many_schedules_do(world: World) -> None:
    run_schedule(world)


def run_both(engine: EngineCore) -> dict[str, RequestOutput]:
    """Like run_all, for plans that hold two chunks a sequence."""
    finished: dict[str, RequestOutput] = {}
    device = engine.device
    assert isinstance(device, FakeDevice)
    for _ in range(10_000):
        if not engine.has_unfinished():
            return finished
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        for manager in engine.scheduler.managers:
            manager.check()
        assert engine.scheduler.num_running <= engine.scheduler.max_num_seqs
        assert all(device.num_tokens(plan) <= engine.scheduler.max_num_batched_tokens for plan in device.plans)
        device.plans.clear()
    raise AssertionError("the engine does not come to an end")


def small(**options: Any) -> EngineCore:
    return fake_engine(num_models=2, mixer=Mixer(MixtureConfig(**options)), max_num_batched_tokens=256)


def test_each_generated_token_costs_one_new_position_per_model() -> None:
    engine = small()
    asked = Asked([1, 2, 3, 4, 5], [6, 7], SamplingParams(n=3, max_tokens=10, ignore_eos=True, seed=1))
    engine.add_request(asked.request("a"))
    outputs = run_both(engine)["a"].outputs
    assert [len(completion.token_ids) for completion in outputs] == [10, 10, 10]
    for role, prompt in enumerate((asked.teacher, asked.theta)):
        counts = engine.metrics.tracks[role]
        assert counts.num_prompt_tokens == len(prompt), "once for all three"
        # The last token of each is drawn and never computed: nothing follows it.
        assert counts.num_positions == len(prompt) + 3 * (10 - 1)


def test_prefix_hits_count_for_each_model() -> None:
    engine = small()
    for name in ("first", "second"):
        engine.add_request(Asked([*range(1, 13)], [*range(20, 26)], SamplingParams(max_tokens=1)).request(name))
        run_both(engine)
    # A hit leaves the last position to compute: 8 of 12 and 4 of 6 lie in whole blocks before it.
    assert [engine.metrics.tracks[role].num_cached_tokens for role in (0, 1)] == [8, 4]
    assert [engine.metrics.tracks[role].num_prompt_tokens for role in (0, 1)] == [12 + 4, 6 + 2]


@pytest.mark.parametrize("broken", [(1, 2, 3), (7, 8)], ids=["teacher", "theta"])
def test_nan_from_either_model_ends_that_request_alone(broken: tuple[int, ...]) -> None:
    engine = small()
    assert isinstance(engine.device, FakeDevice)
    engine.device.poison(lambda tokens: tuple(tokens[: len(broken)]) == broken and len(tokens) > len(broken) + 1)
    params = SamplingParams(max_tokens=6, seed=0, ignore_eos=True)
    bad, good = Asked([1, 2, 3], [7, 8], params), Asked([1, 2, 4], [8, 8], params)
    engine.add_request(bad.request("bad"))
    engine.add_request(good.request("good"))
    outputs = run_both(engine)
    assert outputs["bad"].error == NOT_FINITE
    assert outputs["bad"].outputs[0].finish_reason is FinishReason.ERROR
    assert len(outputs["bad"].outputs[0].token_ids) == 2, "what came before the fault is kept"
    assert told_by(outputs["good"])[0] == by_hand(Asked(good.teacher, good.theta, params))[0][:6]


def test_nan_counts_even_where_the_other_model_alone_decides() -> None:
    engine = small(alpha_method="fixed", alpha=1.0)
    assert isinstance(engine.device, FakeDevice)
    engine.device.poison(lambda tokens: tokens[0] == 7)
    engine.add_request(Asked([1, 2, 3], [7, 8], SamplingParams(max_tokens=3)).request("bad"))
    assert run_both(engine)["bad"].error == NOT_FINITE


def test_a_request_that_both_tracks_together_cannot_fit_is_refused() -> None:
    """Two tracks of one checkpoint draw on one cache: each alone would fit."""
    engine = fake_engine(num_models=1, mixer=Mixer(MixtureConfig()), num_blocks=5, block_size=4)
    with pytest.raises(InvalidInputError, match="10 and 5 tokens plus an output of up to 3 needs 6 KV blocks"):
        engine.add_request(Asked([1] * 10, [2] * 5, SamplingParams(max_tokens=3)).request("large", models=1))
    assert engine.stats()["waiting"] == 0


@pytest.mark.parametrize(("alpha", "role"), [(1.0, 0), (0.0, 1)], ids=["teacher", "theta"])
@pytest.mark.parametrize("options", [{}, {"top_k": 8, "min_p": 0.01}, {"repetition_penalty": 1.4}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_at_the_ends_of_alpha_the_tokens_are_those_of_one_model(
    alpha: float, role: int, options: dict[str, Any], temperature: float
) -> None:
    """Token for token under a seed; the fake model's second side is read through the first's place."""
    asked = Asked([1, 2, 3, 4], [9, 9], SamplingParams(max_tokens=12, seed=5, temperature=temperature, **options))
    engine = small(alpha_method="fixed", alpha=alpha)
    engine.add_request(asked.request("a"))
    mixed = run_both(engine)["a"].outputs[0]
    prompt = (asked.teacher, asked.theta)[role]
    demands = Demands(asked.params, seed=5, eos_token_ids=frozenset({EOS}), prompts=(prompt,))
    expected: list[int] = []
    while len(expected) < 12 and expected[-1:] != [EOS]:
        draw = Draw("x", 0, 0, len(expected), (), demands, list(expected))
        logits = logits_after([*prompt, *expected], role)[None]
        expected += Sampler().sample([Source(logits, [0])], [draw]).token_ids
    assert list(mixed.token_ids) == expected
    assert mixed.mixture is not None
    assert {report.alpha for report in mixed.mixture} == {alpha}


def test_beams_of_a_mixture_carry_how_they_were_mixed() -> None:
    engine = small()
    params = SamplingParams(strategy="beam_search", beam_width=3, n=3, max_tokens=5)
    engine.add_request(Asked([1, 2, 3], [4], params).request("a"))
    for output in run_both(engine)["a"].outputs:
        assert output.mixture is not None
        assert len(output.mixture) == len(output.token_ids)
        total = 0.0
        for place, (token, report) in enumerate(zip(output.token_ids, output.mixture, strict=True)):
            seen = list(output.token_ids[:place])
            teacher = logits_after([1, 2, 3, *seen], 0).log_softmax(-1)[token].item()
            theta = logits_after([4, *seen], 1).log_softmax(-1)[token].item()
            assert (report.logprob_teacher, report.logprob_theta) == pytest.approx((teacher, theta), abs=1e-5)
            total += report.alpha * teacher + (1 - report.alpha) * theta - report.log_z
        assert output.cumulative_logprob == pytest.approx(total, abs=1e-4)


def test_what_is_told_of_a_token_adds_up() -> None:
    """log q = (1 - alpha) log theta + alpha log teacher - log Z; at the symmetric point both divergences are -log Z."""
    engine = small()
    engine.add_request(
        Asked([1, 2, 3], [4], SamplingParams(n=2, max_tokens=20, temperature=0.8, seed=3, logprobs=0)).request("a")
    )
    alphas = []
    for output in run_both(engine)["a"].outputs:
        assert output.mixture is not None
        assert output.logprobs is not None
        alphas += [report.alpha for report in output.mixture]
        for token, report, row in zip(output.token_ids, output.mixture, output.logprobs, strict=True):
            expected = report.alpha * report.logprob_teacher + (1 - report.alpha) * report.logprob_theta - report.log_z
            assert row[token].logprob == pytest.approx(expected, abs=1e-5)
            assert report.kl_theta == pytest.approx(report.kl_teacher, abs=1e-4)
            assert report.kl_theta == pytest.approx(-report.log_z, abs=1e-4)
            assert not report.is_clamped
    assert len(set(alphas)) > 30, "found anew for every token"


def test_abort_in_the_middle_frees_both_sides() -> None:
    engine = small()
    engine.add_request(Asked([1] * 9, [2] * 5, SamplingParams(n=4, max_tokens=50, ignore_eos=True)).request("a"))
    for _ in range(3):
        engine.step()
    assert all(manager.num_in_use for manager in engine.scheduler.managers)
    output = engine.abort("a")
    assert output is not None
    assert all(
        completion.mixture is not None and len(completion.mixture) == len(completion.token_ids)
        for completion in output.outputs
    )
    assert not any(manager.num_in_use for manager in engine.scheduler.managers)


def test_one_model_has_no_mixture_to_tell_of() -> None:
    engine = fake_engine()
    engine.add_request(Request("a", None, [1, 2], SamplingParams(max_tokens=2)))
    assert run_all(engine)["a"].outputs[0].mixture is None
    check(engine)


def test_models_with_nothing_in_common_end_that_request_alone() -> None:
    """A processor sees each side's own prompt: here it leaves each model another half of the vocabulary."""

    def split(token_ids: list[int], logits: Tensor) -> Tensor:
        half = logits.shape[0] // 2
        logits[: half if token_ids[0] == 1 else None] = -torch.inf
        if token_ids[0] != 1:
            logits[:half] = 0.0
        return logits

    engine = small()
    params = SamplingParams(max_tokens=3, seed=0)
    engine.add_request(Asked([1, 2], [7, 8], SamplingParams(max_tokens=3, logits_processors=[split])).request("bad"))
    engine.add_request(Asked([1, 2], [7, 8], params).request("good"))
    outputs = run_both(engine)
    assert outputs["bad"].error == NOTHING_IN_COMMON
    assert outputs["bad"].outputs[0].finish_reason is FinishReason.ERROR
    assert told_by(outputs["good"]) == by_hand(Asked([1, 2], [7, 8], params))


def test_a_student_alone_that_its_teachers_support_leaves_nothing_ends_that_request_alone() -> None:
    """It drew token 0, which was forbidden, with a logprob that was no number."""

    def forbid(token_ids: list[int], logits: Tensor) -> Tensor:
        if token_ids[0] != 1:
            logits[[30, 31]] = -torch.inf
        return logits

    mixer = Mixer(MixtureConfig(alpha_method="fixed", alpha=0.0, teacher_top_k=2))
    engine = fake_engine(num_models=2, mixer=mixer)
    assert isinstance(engine.device, FakeDevice)
    likeliest = torch.zeros(VOCAB).index_fill(0, torch.tensor([30, 31]), 20.0)
    engine.device.layers[0].logits_of = lambda _seen: likeliest
    params = SamplingParams(max_tokens=3, seed=0)
    engine.add_request(Asked([1, 2], [7, 8], SamplingParams(max_tokens=3, logits_processors=[forbid])).request("bad"))
    engine.add_request(Asked([1, 2], [7, 8], params).request("good"))
    outputs = run_both(engine)
    assert outputs["bad"].error == NOTHING_IN_COMMON
    assert outputs["bad"].outputs[0].token_ids == ()
    assert set(outputs["good"].outputs[0].token_ids) <= {30, 31}


def test_the_other_ways_to_draw_act_on_the_mixture() -> None:
    """Rules, codes and mirostat's limit as by hand; and sequences without replacement, all different."""
    asked = [
        Asked([1, 2, 3], [9], SamplingParams(seed=1, n=3, max_tokens=4, strategy="arithmetic")),
        Asked([7], [1, 2], SamplingParams(seed=2, max_tokens=5, mirostat_tau=2.0)),
        Asked(
            [5, 6], [8], SamplingParams(seed=3, max_tokens=5, typical_p=0.8, xtc_probability=0.5, dry_multiplier=1.0)
        ),
        Asked([5, 6], [8], SamplingParams(seed=3, n=4, max_tokens=3, strategy="without_replacement")),
    ]
    engine = fake_engine(num_models=2, mixer=Mixer(MixtureConfig()))
    for number, each in enumerate(asked):
        engine.add_request(each.request(str(number)))
    finished = run_both(engine)
    for number, each in enumerate(asked[:3]):
        assert told_by(finished[str(number)]) == by_hand(each)
    distinct = finished["3"].outputs
    assert len({completion.token_ids for completion in distinct}) == 4
    for completion in distinct:
        assert completion.inclusion is not None
        assert completion.inclusion.logprob == pytest.approx(completion.cumulative_logprob, abs=1e-4)
