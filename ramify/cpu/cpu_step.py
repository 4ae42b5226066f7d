"""The device step on a CPU: beside kernels of our own, torch's operators of small steps stay on the calling thread.

torch's threads keep spinning for some milliseconds after every operator that they shared. While they do, they take the
cores from the kernels' own threads, which costs more than a second thread brings to a sampler of few rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from ramify.config import LogprobsMode
from ramify.cpu.library import Library
from ramify.device.layers import Layers
from ramify.device.step import DeviceStep
from ramify.engine.plan import Plan, Ticket
from ramify.sampling.mixing import Mixer

MANY_DRAWS = 16  # from here on, two threads draw faster by more than they take


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
        super().__init__(
            layers,
            max_num_seqs=max_num_seqs,
            logprobs_mode=logprobs_mode,
            mixer=mixer,
            batch_invariant=batch_invariant,
        )
        self._library = library

    def launch(self, plan: Plan) -> Ticket:
        num_draws = len(plan.draws) + (0 if plan.onward is None else len(plan.onward.members))
        # A sum of torch's takes its order from the number of threads: invariant, that is always one.
        pays = not self._batch_invariant and (num_draws >= MANY_DRAWS or bool(plan.prompt_reports))
        if self._library is None or pays:
            return super().launch(plan)
        with self._library.torch_on_one_thread():
            result = super().launch(plan)()
        return lambda: result
