"""Deep Q-learning: the learner that `DQN` builds."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from tidemill.algorithms.adam import Adam
from tidemill.algorithms.random_state import random_state, set_random_state
from tidemill.algorithms.value_formulas import (
    Floats,
    bootstrap_values,
    differentiate_cross_entropy,
    differentiate_huber,
    n_step_returns,
    project,
)
from tidemill.api.algorithm import Algorithm, Sample
from tidemill.core.errors import RunError, SchemaError
from tidemill.core.schema import Array, Arrays
from tidemill.nets.q_function import QFunction
from tidemill.nets.q_policy import QPolicy, softmax

if TYPE_CHECKING:
    from tidemill.algorithms.dqn import DQN


class DQNLearner(Algorithm):
    """Trains a `QPolicy` in place, on batches that a replay draws (see
    `ReplayBuffer.take`). Deterministic given seed, samples and one thread."""

    policy: QPolicy

    def __init__(self, config: "DQN", policy: QPolicy, seed: int) -> None:
        self.policy, self._config = policy, config
        self._rng = np.random.default_rng(seed)
        self._updates = 0
        self._online, self._target = QFunction(policy.shape, policy.flat), policy.twin()
        self._gradient = np.zeros_like(policy.flat)
        # what the network has told of the batch's observations, [B, A, Z]
        self._values: Floats = self._gradient[:0]
        self._adam = Adam(policy.flat, self._gradient, config.adam_epsilon)
        self._explore()

    def update(self, samples: Sequence[Sample], progress: float) -> dict[str, float]:
        """See `Algorithm.update`. Raises `RunError` when loss or gradient are not finite;
        the weights stay as they were."""
        (sample,) = samples
        batch = {name: array[0] for name, array in sample.items()}
        rows, share = len(batch["weight"]), batch["weight"] / np.float32(len(batch["weight"]))
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is looked for below
            losses, slope, error, value = self._differentiate(batch)
            of_values = np.zeros_like(self._values)
            of_values[np.arange(rows), batch["action"]] = slope.reshape(rows, -1) * share[:, None]
            self._online.backward(of_values, self._gradient)
        loss = float(share @ losses)
        rate = self._config.learning_rate * (
            1 - progress if self._config.learning_rate_schedule == "linear" else 1
        )
        norm = self._adam.descend(rate, 1.0, self._config.max_gradient_norm, loss)
        if not isfinite(norm + loss):
            raise RunError(
                f"DQN left out a step that would have spoilt the weights: the loss is {loss}, the gradient's "
                f"norm {norm}. Look for NaN or huge "
                "numbers in observations and rewards (tidemill check-env), then lower learning_rate"
            )
        if "priority" in sample:
            sample["priority"][0] = error
        self._updates += 1
        if self._updates % self._config.target_every == 0:
            self._move_target()
        self._explore()
        return {
            "loss/value": loss,
            "q/mean": float(np.add.reduce(value)) / rows,
            "error/mean": float(np.add.reduce(error)) / rows,
            "gradient_norm": norm,
            "learning_rate": rate,
            "epsilon": float(self.policy.epsilon),
            "rows": float(rows),
        }

    def _differentiate(self, batch: Arrays) -> tuple[Floats, Floats, Floats, Floats]:
        """Return (loss [B], its derivative with respect to what the network tells of the
        action [B] or [B, atoms], how far off that was [B], the expected return [B] of
        it). The network has told its values of the batch's observations last."""
        config, policy = self._config, self.policy
        returns, discount = n_step_returns(batch["rewards"], batch["steps"], batch["done"], config.gamma)
        seen, then, rows = policy.inputs(batch), policy.inputs(batch, "next.obs"), np.arange(len(returns))
        self._target.draw_noise(self._rng)
        told = self._target.forward(then)
        expected = policy.expected(told)
        self._online.draw_noise(self._rng)  # the weights are others than at the last update, too
        chooser = policy.expected(self._online.forward(then)) if config.double else expected
        if policy.mask is not None:
            forbidden = np.logical_not(batch[f"next.{policy.mask.name}"])
            chooser = np.where(forbidden, -np.inf, chooser)
        if config.double and policy.shape.noise:
            self._online.draw_noise(self._rng)
        if policy.shape.atoms == 1:
            goal = returns + discount * bootstrap_values(expected, chooser)
            self._values = self._online.forward(seen)
            value: Floats = self._values[rows, batch["action"], 0].copy()
            loss, slope = differentiate_huber(value - goal)
            return loss, slope, np.abs(value - goal), value
        best = chooser.argmax(1)
        goals = project(softmax(told[rows, best]), returns, discount, policy.support)
        self._values = self._online.forward(seen)
        logits = self._values[rows, batch["action"]]
        loss, slope = differentiate_cross_entropy(logits, goals)
        return loss, slope, loss, softmax(logits) @ policy.support

    def _move_target(self) -> None:
        target, rate = self._target.flat, np.float32(self._config.target_rate)
        if rate == 1:
            target[:] = self.policy.flat
        else:
            way = np.subtract(self.policy.flat, target, out=self._gradient)  # which nobody needs any more
            way *= rate
            target += way

    def _explore(self) -> None:
        """Set the policy's ε, from how many updates are done."""
        config, done = self._config, self._updates
        if self.policy.shape.noise:
            self.policy.epsilon[...] = config.epsilon_start if done == 0 else 0
        else:
            share = min(done / config.epsilon_updates, 1)
            self.policy.epsilon[...] = (
                config.epsilon_start + (config.epsilon_end - config.epsilon_start) * share
            )

    def state(self) -> Arrays:
        """Return copies of the target network, Adam's moments and step, the number of
        updates, and the noise's random stream."""
        adam = {f"adam.{name}": array for name, array in self._adam.state().items()}
        return {
            "target": self._target.flat.copy(),
            "updates": np.array(self._updates),
            "random": random_state(self._rng),
            **adam,
        }

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take back what `state` returned; continues exactly as the learner that it came
        from would have."""
        own = {name: array.shape for name, array in self.state().items()}
        if own != {name: array.shape for name, array in state.items()}:
            raise SchemaError(
                "this learner state is not one of DQN with this network; resume with the algorithm and "
                "network that saved it"
            )
        self._target.flat[:] = state["target"]
        self._updates = int(state["updates"])
        set_random_state(self._rng, state["random"])
        self._adam.load_state(
            {name.removeprefix("adam."): array for name, array in state.items() if name.startswith("adam.")}
        )
        self._explore()
