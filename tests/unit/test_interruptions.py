"""A call that is broken off, at whatever line, is broken off by what broke it, and leaves the engine as new."""

from __future__ import annotations

import linecache
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import ramify
from ramify import Request, SamplingParams
from ramify.config import MixtureConfig
from ramify.drive.loops import Calls
from ramify.drive.node import Node
from ramify.drive.tree import Tree
from ramify.engine.core import EngineCore
from ramify.engine.plan import Draw, StepResult
from ramify.sampling.mixing import Mixer
from ramify.sampling.pipeline import Sampler, Source
from ramify.text.stream import TextStream
from tests.fake import FakeDevice, fake_engine
from tests.unit.test_engine import check
from tests.unit.test_tree import tree_of

HOME = Path(ramify.__file__).parent
ROOMS = tuple(str(HOME / room) for room in ("engine", "device", "gpu", "drive", "text"))
Line = tuple[str, int]


class Letters:
    """A detokenizer: one letter a token."""

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id % 26)

    def flush(self) -> str:
        return ""

    def whole(self, token_ids: list[int]) -> str:
        return "".join(map(self.push, token_ids))

    def fork(self) -> Letters:
        return self


def requests(num_models: int = 1) -> list[Request]:
    """Forks, beams, siblings, stop strings, ranking, deltas and prompts that are scored."""
    long = list(range(1, 10))
    asked: list[tuple[list[int], dict[str, Any]]] = [
        (long, {"n": 2, "best_of": 3, "score": lambda output: -output.index, "seed": 1, "max_tokens": 6}),
        ([*long[:8], 20, 21], {"n": 2, "strategy": "beam_search", "max_tokens": 4}),
        ([3, 4], {"stop": ["xyz", "a", "e"], "seed": 3, "max_tokens": 7, "output_kind": "delta", "logprobs": 1}),
        ([5, 6, 7, 8, 9], {"prompt_logprobs": 1, "temperature": 0.0, "max_tokens": 2}),
        ([7], {"n": 2, "strategy": "diverse", "diversity_penalty": 1.0, "seed": 2, "max_tokens": 3}),
    ]
    if num_models == 2:
        asked = asked[::2]
    return [
        Request(
            str(number),
            None,
            prompt,
            SamplingParams(**params),
            other_prompts=[(1, [11, *prompt])] if num_models == 2 else [],
        )
        for number, (prompt, params) in enumerate(asked)
    ]


class Remembering:
    """A sampler that draws for the same tokens from the same logits only once: the same calls are made very often."""

    def __init__(self, sampler: Sampler, known: dict[Any, StepResult]) -> None:
        self._sampler, self._known = sampler, known

    def sample(self, sources: Sequence[Source], draws: Sequence[Draw]) -> StepResult:
        seen = [source.logits[source.rows].numpy().tobytes() for source in sources]
        asked = [(draw.request_id, draw.parent, draw.child, draw.position, tuple(draw.output)) for draw in draws]
        key = (tuple(seen), tuple(asked))
        if key not in self._known:
            self._known[key] = self._sampler.sample(sources, draws)
        return replace(self._known[key], prompts=[])


class World:
    """Too few blocks for all requests at once, and little room in a step."""

    def __init__(self, **options: Any) -> None:
        self.num_models = options.get("num_models", 1)
        self._options = {"num_blocks": 9, "block_size": 3, "max_num_seqs": 6, "max_num_batched_tokens": 12, **options}
        self._known: dict[Any, StepResult] = {}
        core = self.engine()
        self.truth = self.generate(Calls(core))
        assert core.stats()["preemptions"] > 0

    def engine(self) -> EngineCore:
        core = fake_engine(max_model_len=24, **self._options)
        core.make_text = lambda params, _prompt: TextStream(Letters(), params.stop or ())  # type: ignore[arg-type]
        assert isinstance(core.device, FakeDevice)
        core.device.sampler = Remembering(core.device.sampler, self._known)  # type: ignore[assignment]
        return core

    def generate(self, calls: Calls) -> list[list[tuple[int, ...]]]:
        outputs = calls.run(requests(self.num_models), use_tqdm=False)
        return [[completion.token_ids for completion in output.outputs] for output in outputs]

    def lines(self) -> Counter[Line]:
        """How often an undisturbed call comes by each line."""
        calls, passed = Calls(self.engine()), Counter[Line]()
        with Lines(lambda line: passed.update((line,))):
            self.generate(calls)
        return passed


@pytest.fixture(scope="module")
def worlds() -> dict[str, World]:
    return {
        "plain order": World(preemption_mode="swap", num_host_blocks=12),
        "step ahead": World(runs_ahead=True),
        "two models": World(num_models=2, mixer=Mixer(MixtureConfig()), num_blocks=11, runs_ahead=True),
    }


NAMES = ("plain order", "step ahead", "two models")


def assert_is_clean(core: EngineCore) -> None:
    assert not core.has_unfinished()
    stats = core.stats()
    assert (stats["running"], stats["waiting"], stats["blocks_in_use"]) == (0, 0, 0)
    assert isinstance(core.device, FakeDevice)
    core.device.plans.clear()
    check(core)


class Lines:
    """Calls `act` before every line of the engine, or before one line alone; what it raises is raised there."""

    def __init__(self, act: Callable[[Line], None], watched: Line | None = None) -> None:
        self._act, self._watched = act, watched
        self._known: dict[CodeType, bool] = {}
        self._before = sys.gettrace()

    def __enter__(self) -> Lines:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def begin_here(self) -> None:
        """From now on, in the functions that are under way too."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self._is_watched(frame.f_code):
                frame.f_trace = self._trace
            frame = frame.f_back
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        code = frame.f_code
        if event == "call":
            if code not in self._known:
                self._known[code] = self._is_watched(code)
            return self._trace if self._known[code] else None
        line = (code.co_filename, frame.f_lineno)
        # Leaving a lock's `with` is one instruction to signals, but a line of its own to a tracer.
        if event == "line" and "with self._turn" not in linecache.getline(*line):
            self._act(line)
        return self._trace

    def _is_watched(self, code: CodeType) -> bool:
        if self._watched is None:
            return code.co_filename.startswith(ROOMS)
        name, watched = self._watched
        return code.co_filename == name and any(number == watched for _, _, number in code.co_lines())


def interrupt(calls: Calls, world: World, line: Line, time_passed: int) -> None:
    left = time_passed

    def act(passed: Line) -> None:
        nonlocal left
        if passed == line:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    with Lines(act, line), pytest.raises(KeyboardInterrupt):
        world.generate(calls)


def hold(world: World, places: Iterable[tuple[Line, int]]) -> None:
    """Interrupts calls at these lines, when they are passed for the n-th time, and looks at what is left."""
    for line, time_passed in places:
        core = world.engine()
        calls = Calls(core)
        interrupt(calls, world, line, time_passed)
        assert_is_clean(core)
        assert world.generate(calls) == world.truth, line
        assert_is_clean(core)


@pytest.mark.parametrize("name", NAMES)
def test_ctrl_c_leaves_nothing_behind_wherever_it_comes(worlds: dict[str, World], name: str) -> None:
    # Every sixth line, when it is passed for the last time; most are passed in all worlds, so each takes its share.
    hold(worlds[name], islice(worlds[name].lines().items(), NAMES.index(name), None, 6 * len(NAMES)))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_ctrl_c_leaves_nothing_behind_at_any_line(worlds: dict[str, World], name: str) -> None:
    for line, times in worlds[name].lines().items():
        hold(worlds[name], [(line, time_passed) for time_passed in sorted({1, (times + 1) // 2, times})])


def interrupt_twice(core: EngineCore, calls: Calls, world: World, place: int) -> bool:
    """While a step is recorded, and again at the n-th line after that; returns whether there was such a line."""
    passed = -1

    def act(_line: Line) -> None:
        nonlocal passed
        passed += 1
        if passed == place:
            raise KeyboardInterrupt

    lines = Lines(act)

    def clock() -> float:
        if core.metrics.generated_tokens > 8 and sys._getframe(1).f_code.co_name == "record":
            lines.begin_here()
            raise KeyboardInterrupt
        return 0.0

    core.requests.clock = clock
    try:
        with pytest.raises(KeyboardInterrupt):
            world.generate(calls)
    finally:
        lines.__exit__()
        core.requests.clock = lambda: 0.0
    return passed >= place


def test_a_second_ctrl_c_in_the_cleaning_up_is_made_good_by_the_next_call(worlds: dict[str, World]) -> None:
    world = worlds["two models"]
    for place in count():
        core = world.engine()
        calls = Calls(core)
        if not interrupt_twice(core, calls, world, place):
            assert place > 20
            return
        assert world.generate(calls) == world.truth
        assert_is_clean(core)


def test_ctrl_c_in_a_tree_keeps_no_blocks_that_no_node_holds() -> None:
    """Nodes that nobody holds any more are given back at the beginning of the next act, in the midst of anything."""
    drawn = SamplingParams(n=2, max_tokens=2, seed=1, ignore_eos=True)

    def grown() -> tuple[EngineCore, Tree, Node]:
        core = fake_engine(num_blocks=16)
        tree = tree_of(core)
        root = tree.root([1, 2, 3, 4, 5])
        tree.sample(root, drawn)  # whose nodes nobody holds
        return core, tree, root

    rooms = [str(HOME / name) for name in ("engine/kept.py", "engine/blocks.py", "drive/tree.py")]
    passed = Counter[Line]()
    _, tree, root = grown()
    with Lines(lambda line: passed.update((line,) if line[0] in rooms else ())):
        nodes = tree.sample(root, drawn)  # held: what breaks a destructor off is shown by Python, and goes no further
    assert len(nodes[0]) == 2
    places = [(line, time_passed) for line, times in passed.items() for time_passed in {1, times}]
    assert len(places) > 150
    for line, time_passed in places[::2]:
        core, tree, root = grown()
        left = time_passed

        def act(passed: Line, line: Line = line) -> None:
            nonlocal left
            left -= passed == line
            if left == 0:
                left = -1
                raise KeyboardInterrupt

        with Lines(act, line), pytest.raises(KeyboardInterrupt):
            nodes = tree.sample(root, drawn)
        nodes = []
        assert len(tree.sample(root, drawn)[0]) == 2, line
        tree.close()
        core.release([])  # what was dropped is given back
        assert_is_clean(core)


class Alarm(BaseException):
    """What no code of ours knows."""


def test_real_signals_at_random_moments_leave_no_lock_taken(worlds: dict[str, World]) -> None:
    """The tracer stands before lines; a signal comes between instructions."""

    def ring(*_: object) -> None:
        raise Alarm

    world = worlds["step ahead"]
    core = world.engine()
    calls, numbers, num_alarms = Calls(core), random.Random(5), 0
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for _ in range(100):
            try:
                signal.setitimer(signal.ITIMER_REAL, numbers.uniform(1e-5, 0.02))
                world.generate(calls)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Alarm:
                num_alarms += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert num_alarms > 0
    assert world.generate(calls) == world.truth
    assert_is_clean(core)
