"""The device step on a CPU: beside kernels of our own, torch's operators stay on the thread that calls them.

The sampler has kernels too, and gives its rows to several threads (sampler_operators.py). Logprobs of prompts alone are
left to torch's threads: they are long, and nothing else waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from ramify.config import LogprobsMode
from ramify.cpu.library import Library
from ramify.cpu.mixer import CpuMixer
from ramify.cpu.sampler_operators import CpuOperators
from ramify.device.layers import Layers
from ramify.device.step import DeviceStep
from ramify.engine.plan import Plan, Ticket
from ramify.sampling.mixing import Mixer


class CpuStep(DeviceStep):
    def __init__(
        self,
        layers: Sequence[Layers],
        library: Library | None,
        *,
        max_num_seqs: int,
        logprobs_mode: LogprobsMode = "raw",
        mixer: Mixer | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """The library of the layers' kernels; None: they run on torch's operators."""
        operators = None if library is None else CpuOperators(library)
        super().__init__(
            layers,
            max_num_seqs=max_num_seqs,
            logprobs_mode=logprobs_mode,
            mixer=mixer if mixer is None or operators is None else CpuMixer(mixer, operators),
            batch_invariant=batch_invariant,
        )
        self._library = library
        if operators is not None:
            self.sampler.operators = operators

    def launch(self, plan: Plan) -> Ticket:
        # A sum of torch's takes its order from the number of threads: invariant, that is always one.
        if self._library is None or (plan.prompt_reports and not self._batch_invariant):
            return super().launch(plan)
        with self._library.torch_on_one_thread():
            result = super().launch(plan)()
        return lambda: result
