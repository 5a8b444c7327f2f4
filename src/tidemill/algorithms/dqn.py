"""Deep Q-learning (DQN) in numpy, with the improvements that Rainbow combines: its
configuration and its learner."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from math import isfinite
from operator import is_
from typing import Any, ClassVar

import numpy as np

from tidemill.algorithms.action_value_formulas import (
    Floats,
    approach,
    bootstrap_values,
    differentiate_cross_entropy,
    differentiate_huber,
    n_step_returns,
    project,
)
from tidemill.algorithms.adam import AdamSettings, adam, spoilt
from tidemill.algorithms.learner_state import (
    check_learner_state,
    prefixed,
    random_state,
    set_random_state,
    state_numbers,
    unprefixed,
)
from tidemill.algorithms.native_dqn import NativeDQN
from tidemill.api.algorithm import Algorithm, Sample, TracedArray
from tidemill.api.policy import Policy, PolicyConfig
from tidemill.api.schedule import LinearSchedule, number
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Array, Arrays
from tidemill.nets.q_network import QNetwork, QPolicy, softmax
from tidemill.nets.weights import views

EXPLORATION = LinearSchedule(1.0, 0.05, to_step=40_000)
IN_STEPS = "env steps are counted in place of updates: write"
SCHEDULED = f"{IN_STEPS} epsilon = LinearSchedule(1, 0.05, to_step=40_000)"

# Where numpy warns of neither. It takes 0.8 % of a native update, `np.errstate` some 5 %.
_SILENT = Context()
_SILENT.run(np.seterr, over="ignore", invalid="ignore")


@dataclass(frozen=True, kw_only=True)
class DQN(AdamSettings):
    """DQN does deep Q-learning (Mnih et al. 2015, "Human-level control through deep
    reinforcement learning"), with what Hessel et al. 2018, "Rainbow", added to it: double
    Q-learning here; n-step returns by `Replay(steps=n)`; priorities by
    `PrioritisedReplay`; duelling, noisy and distributional networks by `QNetwork`.
    """

    ranges: ClassVar[Mapping[str, tuple[float, float, str]]] = {
        "gamma": (0, 1, "0.99 is usual"),
        "learning_rate": (0, 1e6, "0.0001 to 0.001 is usual"),
        "adam_epsilon": (1e-30, 1, "0.00001 is usual"),
        "max_gradient_norm": (1e-9, 1e9, "10 is usual; None leaves gradients as they are"),
        "target_steps": (0, 1e12, "2,000 is usual"),
        "target_rate": (1e-9, 1, "1 copies the weights, 0.005 with target_steps = 0 follows them"),
        "epsilon": (0, 1, "LinearSchedule(1, 0.05, to_step=…) is usual, to a tenth of all steps"),
    }

    changeable: ClassVar[Collection[str]] = ranges.keys() - {"adam_epsilon"}

    retired: ClassVar[Mapping[str, tuple[Any, str]]] = {
        **AdamSettings.retired,
        "target_every": (500, f"{IN_STEPS} target_steps"),
        "epsilon_start": (1.0, SCHEDULED),
        "epsilon_end": (0.05, SCHEDULED),
        "epsilon_updates": (10_000, SCHEDULED),
    }

    gamma: float = 0.99
    """Discount of a step."""
    double: bool = True
    """Whether the network itself chooses the action whose value the target network tells
    (van Hasselt et al. 2016)."""
    learning_rate: float | LinearSchedule = 5e-4
    """Learning rate of Adam."""
    max_gradient_norm: float | None = 10.0
    """The gradient of all weights together is scaled down to this Euclidean norm.
    None: it is not scaled."""
    target_steps: int = 2_000
    """Env steps between two moves of the target network; 0: it moves in each update."""
    target_rate: float = 1.0
    """Share of the way to the trained network that each move takes the target network:
    1 copies the weights, less is Polyak averaging."""
    epsilon: float | LinearSchedule = EXPLORATION
    """ε, the probability of an action drawn at random; before the first update it is what
    it is at step 0. A noisy network explores by its noise: actions are drawn at random
    before the first update, and then its ε is 0."""

    @classmethod
    def in_env_steps(cls, data: dict[str, Any], steps_of: Callable[[float], int]) -> dict[str, Any]:
        before = cls.retired.keys() - AdamSettings.retired.keys()
        counted = {name: data.get(name, cls.retired[name][0]) for name in before}
        every, updates = counted["target_every"], counted["epsilon_updates"]
        if not isinstance(every, int) or not isinstance(updates, int):
            return data
        given = before & data.keys()
        data = {name: value for name, value in data.items() if name not in before}
        if "target_every" in given:
            data["target_steps"] = 0 if every == 1 else steps_of(every) - steps_of(0)
        if given - {"target_every"}:
            ends = {"start": counted["epsilon_start"], "end": counted["epsilon_end"]}
            steps = {"from_step": steps_of(0), "to_step": steps_of(updates)}
            data["epsilon"] = {"kind": "LinearSchedule", **ends, **steps}
        return data

    def measures(self) -> tuple[str, ...]:
        return "loss/value", "q/mean", "error/mean", "gradient_norm", "learning_rate", "epsilon", "rows"

    def check_policy(self, policy: PolicyConfig) -> None:
        if isinstance(policy, QNetwork):
            self._check_head(policy)
        if isinstance(policy, QNetwork) and policy.noise:
            self.refuse_idle("epsilon", "on a noisy network, whose ε is 0 from the first update on")

    def _check_head(self, network: QNetwork) -> None:
        if network.quantiles:
            raise ConfigError(
                f"DQN cannot train a QNetwork with quantiles = {network.quantiles}; take QRDQN, or "
                "quantiles = 0"
            )

    def build(self, policy: Policy, seed: int) -> Algorithm:
        """Return the learner of `policy`, which must be what a `QNetwork` builds. A noisy
        network's noise is drawn from `seed`."""
        if not isinstance(policy, QPolicy):
            raise ConfigError(
                f"{type(self).__name__} cannot train a {type(policy).__name__}, which tells no action's "
                "value; take a QNetwork for the policy"
            )
        self.check_policy(policy.config)
        return self._learner(policy, seed)

    def _learner(self, policy: QPolicy, seed: int) -> Algorithm:
        return DQNLearner(self, policy, seed)


class DQNLearner(Algorithm):
    """The learner that `DQN` describes: it trains a `QPolicy` in place, on batches that a
    replay draws (see `ReplayBuffer.take`). Deterministic given seed, samples and one
    thread."""

    policy: QPolicy
    config: DQN

    def __init__(self, config: DQN, policy: QPolicy, seed: int) -> None:
        self.policy, self.config = policy, config.at(0, 0.0)
        self._rng = np.random.default_rng(seed)
        # updates so far, and env steps before the last one
        self._updates = self._steps = 0
        self._online, self._target = policy.function(policy.flat), policy.function(policy.flat.copy())
        self._gradient = np.zeros_like(policy.flat)
        # of the last sample, and its rows: a memory draws into the same arrays
        self._arrays: list[Array] = []
        self._batch = Arrays()
        # what the network has told of the batch's observations, [B, A, Z]
        self._values: Floats = self._gradient[:0]
        self._adam = adam(policy.flat, self._gradient, config.adam_epsilon, policy.kernels)
        self._native: NativeDQN | None = None
        if policy.kernels is not None and policy.shape.plain:
            self._native = NativeDQN(policy, self._online, self._target, self._gradient)
        self._explore()

    def take_in(self, sample: Sample) -> None:
        self.policy.take_in(sample)

    def update(self, samples: Sequence[Sample], steps: int) -> dict[str, float]:
        """See `Algorithm.update`. Raises `UpdateFault` when loss or gradient are not
        finite; the weights stay as they were."""
        return _SILENT.copy().run(self._update, samples[0], steps)  # which looks for what is not

    def _update(self, sample: Sample, steps: int) -> dict[str, float]:
        arrays = [*sample.values()]
        if len(arrays) != len(self._arrays) or not all(map(is_, arrays, self._arrays)):
            self._arrays, self._batch = arrays, {name: array[0] for name, array in sample.items()}
        batch = self._batch
        self.policy.fold()
        before = self._rng.bit_generator.state if self.policy.shape.noise else None
        rows = len(batch["weight"])
        loss, _, error, value = self._go_back(batch)
        rate, every = number(self.config.learning_rate), self.config.target_steps
        norm = self._adam.descend(rate, 1.0, self.config.max_gradient_norm, loss)
        if not isfinite(norm + loss):
            why = f"the loss is {loss}, the gradient's norm {norm}"
            drawn = {"random": state_numbers(before)} if before is not None else {}
            minibatch = {**batch, **drawn}
            minibatch.pop("priority", None)  # which this would have told
            raise spoilt(type(self.config).__name__, "the weights", why, "update", minibatch)
        if "priority" in sample:
            sample["priority"][0] = error
        self._updates += 1
        if not every or steps // every > self._steps // every:
            self._move_target()
        self._steps = steps
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

    def _go_back(self, batch: Arrays) -> tuple[float, Floats, Floats, Floats]:
        """Write the gradient of the batch's loss; return that, and what `_differentiate`
        does but for its derivative."""
        if self._native is not None:
            return self._native.go_back(batch, self.config.gamma, self.config.double)
        rows, share = len(batch["weight"]), batch["weight"] / np.float32(len(batch["weight"]))
        losses, slope, error, value = self._differentiate(batch)
        of_values = np.zeros_like(self._values)
        of_values[np.arange(rows), batch["action"]] = slope.reshape(rows, -1) * share[:, None]
        self._online.backward(of_values, self._gradient)
        return float(share @ losses), losses, error, value

    def trace(self, stage: str, minibatch: Arrays) -> Iterator[TracedArray]:
        """See `Algorithm.trace`."""
        for name, array in minibatch.items():
            if name != "random":
                yield TracedArray("input", name, array, 0)
        for name, array in self.policy.parameters().items():
            yield TracedArray("weights", name, array)
        yield TracedArray("weights", "target", self._target.flat)
        if "random" in minibatch:
            set_random_state(self._rng, minibatch["random"])
        loss, losses, error, value = self._go_back(minibatch)
        for function, of in ((self._target, "next.obs"), (self._online, "obs")):
            whose = "the target network's " if of == "next.obs" else ""
            for name, array, axis in function.trace(self.policy.inputs(minibatch, of)):
                yield TracedArray("layer", f"{whose}{name}", array, axis)
        yield TracedArray("layer", "value", value, 0)
        yield TracedArray("loss", "error", error, 0)
        yield TracedArray("loss", "loss", losses, 0)
        forms = {name: form for name, (form, _) in self.policy.shape.weights().items()}
        for name, array in views(self._gradient[: self.policy.shape.size], forms).items():
            yield TracedArray("gradient", name, array)
        yield TracedArray("loss", "loss", np.array(loss))
        yield TracedArray("gradient", "norm", np.array(np.linalg.norm(self._gradient)))

    def _differentiate(self, batch: Arrays) -> tuple[Floats, Floats, Floats, Floats]:
        """Return (loss [B], its derivative with respect to what the network tells of the
        action [B] or [B, atoms], how far off that was [B], the expected return [B] of
        it). The network has told its values of the batch's observations last."""
        config, policy = self.config, self.policy
        returns, discount = n_step_returns(batch["rewards"], batch["steps"], batch["done"], config.gamma)
        seen, then, rows = policy.inputs(batch), policy.inputs(batch, "next.obs"), np.arange(len(returns))
        self._target.draw_noise(self._rng)
        told = self._target.forward(then)
        expected = policy.expected(told)
        self._online.draw_noise(self._rng)  # the weights are others than at the last update, too
        chooser = policy.expected(self._online.forward(then)) if config.double else expected
        if policy.mask is not None:
            (mask,) = policy.mask.names
            forbidden = np.logical_not(batch[f"next.{mask}"])
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
        self._values = self._online.forward(seen)
        found = self._values[rows, batch["action"]]
        loss, slope = self._differentiate_spread(found, told[rows, best], returns, discount)
        return loss, slope, loss, policy.expected(found)

    def _differentiate_spread(
        self, found: Floats, then: Floats, returns: Floats, discount: Floats
    ) -> tuple[Floats, Floats]:
        """Return (loss [B], derivative [B, Z]) of a distribution `found` [B, Z] of which
        the network tells, where `returns` [B] and `discount` [B] times one that is like
        `then` [B, Z] should be."""
        goals = project(softmax(then), returns, discount, self.policy.support)
        return differentiate_cross_entropy(found, goals)

    def _move_target(self) -> None:
        target, rate = self._target.flat, self.config.target_rate
        if rate == 1:
            target[:] = self.policy.flat
        else:
            approach(target, self.policy.flat, rate, self.policy.kernels)

    def _explore(self) -> None:
        """Set the policy's ε."""
        by_noise = 0 if self._updates else 1
        self.policy.epsilon[...] = by_noise if self.policy.shape.noise else number(self.config.epsilon)

    def state(self) -> Arrays:
        """Return copies of the target network, Adam's moments and step, the number of
        updates, the env steps before the last one, the noise's random stream, and what
        arrived since the last update, where observations are normalised."""
        return {
            **({"arrived": self.policy.arrived.copy()} if self.policy.normalised else {}),
            "target": self._target.flat.copy(),
            "updates": np.array(self._updates),
            "steps": np.array(self._steps),
            "random": random_state(self._rng),
            **prefixed("adam", self._adam.state()),
        }

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take back what `state` returned; continues exactly as the learner that it came
        from would have."""
        state = {"steps": np.array(0), **state}  # earlier versions counted updates alone
        check_learner_state(self.state(), state)
        self._target.flat[:] = state["target"]
        self._updates, self._steps = int(state["updates"]), int(state["steps"])
        set_random_state(self._rng, state["random"])
        if self.policy.normalised:
            self.policy.arrived[:] = state["arrived"]
        self._adam.load_state(unprefixed("adam", state))
