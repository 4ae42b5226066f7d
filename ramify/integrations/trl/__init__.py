"""TRL's trainers with samples from Ramify.

    Rollouts                       the `rollout_func` of GRPOTrainer                             rollouts.py
    RolloutWorker, WeightTransfer  what its asynchronous GRPO trainer asks of an engine          asynchronous.py

docs/training.md shows both.
"""

from ramify.integrations.trl.asynchronous import RolloutWorker, WeightTransfer
from ramify.integrations.trl.draws import Drawn, draw
from ramify.integrations.trl.policy import policy_weights
from ramify.integrations.trl.rollouts import Rollouts

__all__ = ["Drawn", "RolloutWorker", "Rollouts", "WeightTransfer", "draw", "policy_weights"]
