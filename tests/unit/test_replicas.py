"""Several engines give what one gives, request for request, also when one of them ends on the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify import CompletionOutput, EngineLostError, FinishReason, Request, RequestOutput, SamplingParams
from ramify.config import EngineConfig, MixtureConfig, ModelConfig
from ramify.drive.build import build_engine
from ramify.drive.loops import Calls
from ramify.engine.core import EngineCore
from ramify.errors import InvalidInputError, UnsupportedError, WeightsError
from ramify.remote import stored_weights
from ramify.remote.messages import OneModel
from ramify.replicas import shares
from ramify.replicas.replica_core import ReplicaCore
from ramify.replicas.replica_engine import ReplicaEngine
from ramify.replicas.shares import core_shares
from ramify.replicas.states import NOW
from ramify.replicas.task import Task
from ramify.replicas.work_queue import Piece, Work
from ramify.sampling.mixing import Mixer
from ramify.server.load import load_models
from ramify.server.to_serve import ModelToServe
from tests.fake import fake_engine, letters, logits_after
from tests.remote import end, replicated
from tests.unit.test_remote import Gate, even

CODEC = letters()


def core(**options: Any) -> EngineCore:
    made = fake_engine(**options)
    made.make_text, made.decode, made.encode_words = CODEC.make_stream, CODEC.decode_token, CODEC.encode_words
    return made


ASKED: list[dict[str, Any]] = [
    {"n": 7, "seed": 5},
    {},
    {"n": 5, "logprobs": 2},
    {"best_of": 6, "n": 2},
    {"best_of": 5, "score": even, "stop": ["ab"]},
    {"best_of": 3, "score": "mean_logprob", "n": 3, "strategy": "best_of_n"},
    {"strategy": "beam_search", "beam_width": 4, "n": 3},
    {"strategy": "diverse", "n": 3, "diversity_penalty": 2.0},
    {"strategy": "without_replacement", "n": 3},
    {"strategy": "arithmetic", "n": 4, "seed": 3},
    {"n": 4, "prompt_logprobs": 2},
    {"n": 3, "child": 2, "seed": 9},
    {"n": 2, "stop_token_ids": list(range(40, 90)), "frequency_penalty": 0.5, "top_p": 0.9},
    {"prompt_logprobs": 1, "max_tokens": 0},
]


def requests(**more: Any) -> list[Request]:
    others = more.pop("others", ())
    return [
        Request(f"asked-{number}", None, [5, 6, 7, 8, 9, 4 + number % 3], SamplingParams(**asked), other_prompts=others)
        for number, asked in enumerate({"max_tokens": 9, **each, **more} for each in ASKED)
        if not (others and "prompt_logprobs" in asked)
    ]


def plain(output: RequestOutput) -> RequestOutput:
    """Without what depends on when and where it was computed."""
    return replace(output, metrics=None, num_cached_tokens=0)


def finished(driven: EngineCore | ReplicaCore, asked: list[Request]) -> list[RequestOutput]:
    return [plain(output) for output in Calls(driven).run(asked, use_tqdm=False)]


def test_outputs_are_those_of_one_engine() -> None:
    num_engines = 3
    wanted = finished(core(), requests())
    with replicated([core() for _ in range(num_engines)], CODEC, ReplicaCore) as (engines, _):
        assert finished(engines, requests()) == wanted
        counts = engines.replica_stats()
        assert len(counts) == num_engines
        assert all(count["generated_tokens"] for count in counts), "everybody had something to do"
        total = engines.stats()
        assert total["generated_tokens"] == sum(each["generated_tokens"] for each in counts)
        assert (total["running"], total["waiting"]) == (0, 0)
        again = finished(engines, [Request("again", None, [5, 6, 7], SamplingParams(n=2))])
        assert again[0].outputs, "one call after the other"


def test_outputs_of_two_models_are_those_of_one_engine() -> None:
    options: dict[str, Any] = {"num_models": 2, "mixer": Mixer(MixtureConfig(), frozenset())}
    others = [(1, [9, 8, 7])]
    wanted = finished(core(**options), requests(others=others))
    assert wanted[0].outputs[0].mixture
    with replicated([core(**options) for _ in range(2)], CODEC, ReplicaCore) as (engines, _):
        assert finished(engines, requests(others=others)) == wanted
        teacher, theta = engines.model_stats()
        assert teacher["positions_computed"]
        assert theta["positions_computed"]


def test_parts_of_a_request_are_not_taken_for_others() -> None:
    """They went by names that callers give too: both waited for ever."""

    def asked() -> list[Request]:
        divided = Request("job", None, [5, 6, 7], SamplingParams(n=12, max_tokens=40, seed=1))
        params = SamplingParams(max_tokens=20, seed=3)
        return [divided, *(Request(f"job/{first}", None, [8, 9], params) for first in range(12))]

    for chosen in ([0, 1], [0, 7], [0, *range(1, 13)]):
        wanted = finished(core(), [asked()[index] for index in chosen])
        with replicated([core(), core()], CODEC, ReplicaCore) as (engines, _):
            assert finished(engines, [asked()[index] for index in chosen]) == wanted


@pytest.mark.parametrize("steps", [1, 5])
def test_what_an_engine_took_with_it_is_drawn_elsewhere(steps: int) -> None:
    wanted = finished(core(), requests())
    cores = [core(), core()]
    gate = Gate(cores[1])
    with replicated(cores, CODEC, ReplicaCore) as (engines, (_, server)):
        gate.let(steps)
        threading.Timer(0.05, end, [server]).start()
        assert finished(engines, requests()) == wanted, "nothing lost, nothing twice"
        gate.let(1000)
        assert engines.pool.num_there == 1
        first, second = engines.replica_stats()
        assert first["running"] == 0 < first["blocks_total"]
        assert not any(second[name] for name in NOW), "it has nothing now; what it did is counted"
        assert finished(engines, [Request("after", None, [5, 6], SamplingParams())])[0].error is None


def test_a_request_that_takes_two_engines_with_it_fails_and_the_others_go_on() -> None:
    cores = [core() for _ in range(3)]
    gates = [Gate(each) for each in cores]
    with replicated(cores, CODEC, ReplicaCore) as (engines, servers):
        asked = [Request(f"{number}", None, [5, number + 1], SamplingParams(max_tokens=4)) for number in range(3)]
        outputs: list[list[RequestOutput]] = []
        call = threading.Thread(target=lambda: outputs.append(Calls(engines).run(asked, use_tqdm=False)))
        call.start()

        def holder(name: str) -> int | None:
            part = engines.pool._parts.get(name)
            return None if part is None else part.piece.engine

        wait(lambda: holder("0") is not None)
        first = holder("0")
        assert first is not None
        end(servers[first])
        wait(lambda: holder("0") not in (None, first))
        second = holder("0")
        assert second is not None
        end(servers[second])
        for gate in gates:
            gate.let(1000)
        call.join(30)
        [[failed, *others]] = outputs
        assert "two engines have ended" in (failed.error or "")
        assert failed.outputs[0].finish_reason is FinishReason.ERROR
        assert [output.error for output in others] == [None, None]
        [last] = [index for index in range(3) if index not in (first, second)]
        end(servers[last])
        with pytest.raises(EngineLostError, match="ended"):
            Calls(engines).run([Request("late", None, [5], SamplingParams())], use_tqdm=False)


def test_given_tokens_are_scored_by_any_of_them() -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=2, detokenize=False)

    def asked(others: list[tuple[int, list[int]]]) -> list[Request]:
        return [
            Request(f"{n}", None, [n, 6, 7, 8], params, other_prompts=others, next_token_id=9, num_told=3)
            for n in (3, 4, 5)
        ]

    two: dict[str, Any] = {"num_models": 2, "mixer": Mixer(MixtureConfig(), frozenset())}
    for options, others in (({}, []), (two, [(1, [2, 1, 7, 8])])):
        wanted = finished(core(**options), asked(others))
        assert wanted[0].scored is not None
        with replicated([core(**options), core(**options)], CODEC, ReplicaCore) as (engines, _):
            assert finished(engines, asked(others)) == wanted


def wait(true: Callable[[], bool]) -> None:
    """For other threads; what never comes fails by its time."""
    for _ in range(30_000):
        if true():
            return
        threading.Event().wait(0.001)
    raise AssertionError("waited in vain")


# -- streams ---------------------------------------------------------------------------------------------------------


def run(engine: ReplicaEngine, asked: list[Request]) -> list[list[RequestOutput]]:
    async def read(request: Request) -> list[RequestOutput]:
        return [output async for output in engine.submit(request)]

    async def all_of_them() -> list[list[RequestOutput]]:
        return await asyncio.wait_for(asyncio.gather(*(read(request) for request in asked)), 60)

    return asyncio.run(all_of_them())


def streamed(kind: str) -> list[Request]:
    def fits(asked: dict[str, Any]) -> bool:
        try:
            SamplingParams(**asked, output_kind=kind)
        except ValueError:
            return False
        return True

    return [
        Request(f"asked-{number}", None, [5, 6, 7, number + 1], SamplingParams(**asked, output_kind=kind))
        for number, asked in enumerate({"max_tokens": 9, "seed": 7, **each} for each in ASKED if "strategy" not in each)
        if fits(asked)
    ]


def whole(outputs: list[RequestOutput], kind: str) -> dict[int, tuple[int, ...]]:
    """Tokens of every child, from all outputs of a stream."""
    children: dict[int, tuple[int, ...]] = {}
    for output in outputs:
        for sample in output.outputs:
            told = sample.token_ids
            children[sample.index] = children.get(sample.index, ()) + told if kind == "delta" else told
    return children


@pytest.mark.parametrize("kind", ["delta", "cumulative"])
@pytest.mark.parametrize("is_ended", [False, True], ids=["", "one ends"])
def test_streams_are_those_of_one_engine(kind: str, *, is_ended: bool) -> None:
    with replicated([core()], CODEC, ReplicaEngine) as (engine, _):
        wanted = [whole(outputs, kind) for outputs in run(engine, streamed(kind))]
    cores = [core(), core()]
    gate = Gate(cores[1])
    with replicated(cores, CODEC, ReplicaEngine) as (engine, (_, server)):
        gate.let(4 if is_ended else 1000)
        if is_ended:
            threading.Timer(0.1, end, [server]).start()
        told = run(engine, streamed(kind))
        gate.let(1000)
    assert [whole(outputs, kind) for outputs in told] == wanted
    for outputs in told:
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    if is_ended and kind == "cumulative":
        lengths = [[sum(len(s.token_ids) for s in output.outputs) for output in outputs] for outputs in told]
        assert all(each == sorted(each) for each in lengths), "nobody sees a stream grow shorter"


def test_a_stream_that_would_go_on_differently_is_ended_with_the_reason() -> None:
    cores = [core(), core(seed=1)]
    cores[0].device.layers[0].logits_of = lambda seen: logits_after(seen, 5)  # type: ignore[attr-defined]
    gates = [Gate(each) for each in cores]
    asked = Request("asked", None, [5, 6], SamplingParams(max_tokens=20, seed=1, output_kind="delta"))
    with replicated(cores, CODEC, ReplicaEngine) as (engine, (server, _)):

        async def read() -> None:
            stream = engine.submit(asked)
            gates[0].let(3)
            await anext(stream)
            end(server)
            gates[1].let(1000)
            async for _ in stream:
                pass

        with pytest.raises(EngineLostError, match="draws it differently"):
            asyncio.run(asyncio.wait_for(read(), 60))
        gates[0].let(1000)


def test_a_request_is_aborted_in_all_its_parts() -> None:
    cores = [core(), core()]
    gates = [Gate(each) for each in cores]
    with replicated(cores, CODEC, ReplicaEngine) as (engine, _):

        async def read() -> tuple[RequestOutput, RequestOutput]:
            divided = engine.submit(Request("divided", None, [5], SamplingParams(n=4, max_tokens=90, seed=1)))
            many = [engine.submit(Request(f"{i}", None, [6], SamplingParams(max_tokens=90))) for i in range(60)]
            late = engine.submit(Request("late", None, [7], SamplingParams()))
            for gate in gates:
                gate.let(3)
            wait(lambda: engine.pool.queue.num_waiting > 0)
            for stream in (divided, late, *many):
                engine.abort(stream.request.request_id)
            for gate in gates:
                gate.let(1000)
            return await divided.final(), await late.final()

        divided, late = asyncio.run(asyncio.wait_for(read(), 60))
        assert {sample.finish_reason for sample in divided.outputs} == {FinishReason.ABORT}
        assert [sample.finish_reason for sample in late.outputs] == [FinishReason.ABORT]
        wait(lambda: not engine.num_unfinished and not engine.pool._parts)
        assert all(each.children == each.load == 0 for each in engine.pool.queue.engines)


def test_a_delta_is_not_told_again_when_the_rest_is_aborted() -> None:
    """Where no engine had any of it, its end held the last delta of every sample a second time."""
    params = SamplingParams(n=4, output_kind="delta", logprobs=0, seed=1)
    request = Request("asked", None, [5], params)
    work = Work("asked", left=4)
    task = Task(request, work)
    part = task.part(Piece(work, 0, 0, 2, 1))
    ended = [
        CompletionOutput(i, "ab", (1, 2), -1.0, logprobs=[{}, {}], finish_reason=FinishReason.STOP) for i in (0, 1)
    ]
    assert task.take(part, RequestOutput(part.request.request_id, None, (5,), tuple(ended), finished=True)) is not None
    last = task.aborted()
    assert last.finished
    assert [(each.index, each.text, each.token_ids, len(each.logprobs or ())) for each in last.outputs] == [
        (0, "", (), 0),
        (1, "", (), 0),
    ]
    assert {each.finish_reason for each in last.outputs} == {FinishReason.STOP}


def test_a_fault_in_one_part_ends_the_others() -> None:
    cores = [core(), core()]
    cores[0].device.poison(lambda seen: len(seen) > 4)  # type: ignore[attr-defined]
    with replicated(cores, CODEC, ReplicaCore) as (engines, _):
        asked = [Request("divided", None, [5, 6], SamplingParams(n=6, max_tokens=20, seed=1))]
        [output] = finished(engines, asked)
        assert output.error
        assert FinishReason.ERROR in {sample.finish_reason for sample in output.outputs}
        assert FinishReason.ABORT not in {sample.finish_reason for sample in output.outputs}


def test_a_fault_in_one_part_ends_those_that_wait() -> None:
    """When those had not been given to an engine, nobody was left to tell of the end: the caller waited for ever."""
    cores = [core(max_num_seqs=4) for _ in range(2)]
    gates = [Gate(each) for each in cores]
    for each in cores:
        each.device.poison(lambda seen: seen[:2] == [5, 6])  # type: ignore[attr-defined]
    with replicated(cores, CODEC, ReplicaEngine) as (engine, _):

        async def read() -> RequestOutput:
            others = [engine.submit(Request(f"{i}", None, [9, i], SamplingParams(max_tokens=90))) for i in range(11)]
            divided = engine.submit(Request("divided", None, [5, 6, 7], SamplingParams(n=40, max_tokens=40, seed=1)))
            wait(lambda: any(name.startswith("divided/") for name in engine.pool._parts))
            assert engine.pool.queue.num_waiting, "the other engine is full"
            [part] = [part for name, part in engine.pool._parts.items() if name.startswith("divided/")]
            gates[part.piece.engine].let(1000)
            output = await asyncio.wait_for(divided.final(), 20)
            for gate in gates:
                gate.let(1000)
            for other in others:
                await other.final()
            return output

        output = asyncio.run(asyncio.wait_for(read(), 30))
        assert output.error
        assert {sample.finish_reason for sample in output.outputs} == {FinishReason.ERROR}


def test_a_score_function_that_calls_its_own_engines_is_refused() -> None:
    with replicated([core(), core()], CODEC, ReplicaCore) as (engines, _):
        calls = Calls(engines)

        def score(_output: Any) -> float:
            calls.run([Request("inner", None, [5], SamplingParams())], use_tqdm=False)
            return 0.0

        for best_of in (1, 4):  # ranked where one engine's outputs are read, and where those of several are joined
            params = SamplingParams(best_of=best_of, strategy="best_of_n", score=score)
            [output] = calls.run([Request(f"outer-{best_of}", None, [5], params)], use_tqdm=False)
            assert "score functions must not call the engine they run in" in (output.error or "")


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_cannot_cross_is_refused_by_name() -> None:
    with replicated([core(), core()], CODEC, ReplicaCore) as (engines, _):
        asked = Request("asked", None, [5], SamplingParams(logits_processors=[lambda _tokens, logits: logits]))
        with pytest.raises(UnsupportedError, match="logits_processors cannot be used with data_parallel_size"):
            engines.add_request(asked)
        with pytest.raises(InvalidInputError, match="must fit"):
            engines.add_request(Request("asked", None, [5] * 200, SamplingParams()))
        assert not engines.has_unfinished()
        engines.reset_prefix_cache()


def test_cores_are_shared_out_side_by_side() -> None:
    shares = core_shares(2, 4, [3, 0, 1, 2])
    assert [(share.threads, sorted(share.cores)) for share in shares] == [(2, [0, 1]), (2, [2, 3])]
    assert [(share.threads, len(share.cores)) for share in core_shares(3, 1, range(2))] == [(1, 0)] * 3
    assert [len(share.cores) for share in core_shares(3, 7, range(7))] == [2, 2, 3]
    assert [len(share.cores) for share in core_shares(2, 2, ())] == [0, 0]


def test_gpus_are_taken_from_the_first_on_and_no_more_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "resolve_device", lambda _name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert [share.device for share in shares.shares_of(ModelConfig(data_parallel_size=2))] == ["cuda:0", "cuda:1"]
    with pytest.raises(InvalidInputError, match=r"at most the number of GPUs \(3\), got 4"):
        shares.shares_of(ModelConfig(data_parallel_size=4))
    with pytest.raises(InvalidInputError, match=r"device must be 'auto', 'cuda' or 'cpu' .*'cuda:1'"):
        shares.shares_of(ModelConfig(data_parallel_size=2, device="cuda:1"))


def test_a_server_and_an_engine_in_this_process_refuse_what_they_cannot_be() -> None:
    served = ModelToServe("several", OneModel({"model": "nowhere", "data_parallel_size": 2}))
    with pytest.raises(InvalidInputError, match="data_parallel_size must be 1 without processes"):
        load_models([served], engine_process=False, say=print)
    with pytest.raises(UnsupportedError, match="data_parallel_size must be 1 here, got 2"):
        build_engine(EngineConfig.from_options(data_parallel_size=2), print)


def test_weights_in_files_keep_their_order_and_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_weights, "SHARD_BYTES", 100)  # several files
    joined = torch.arange(60.0).reshape(6, 10)
    given = [
        ("model.embed", joined[:3]),
        ("model.norm", joined[3].bfloat16()),
        ("lm_head", joined.T),
        ("a", joined[:3]),
    ]
    with stored_weights.stored(given) as folder:
        read = list(stored_weights.read_stored(folder))
    assert [name for name, _ in read] == [name for name, _ in given]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(given, read, strict=True))
    assert not Path(folder).exists()
    with pytest.raises(WeightsError, match="a was given twice"), stored_weights.stored([given[-1]] * 2):
        pass
