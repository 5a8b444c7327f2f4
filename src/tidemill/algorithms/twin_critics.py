"""What algorithms have in common that fit two critics to the lesser of two target
critics, and an actor to the critics (SAC, TD3): the base of their configurations and of
their learners."""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

import numpy as np

from tidemill.algorithms.action_value_formulas import Floats, approach, n_step_returns
from tidemill.algorithms.adam import Optimiser, adam, spoilt
from tidemill.algorithms.learner_state import (
    check_learner_state,
    prefixed,
    random_state,
    set_random_state,
    state_numbers,
    unprefixed,
)
from tidemill.api.algorithm import Algorithm, AlgorithmConfig, Sample, TracedArray, UpdateFault
from tidemill.api.schedule import LinearSchedule, number
from tidemill.core.schema import Array, Arrays
from tidemill.nets.bounded_actor import BoundedPolicy
from tidemill.nets.native_mlp import mlp
from tidemill.nets.weights import views


def _layers(whose: str, layers: Iterable[tuple[str, Array, int]]) -> Iterator[TracedArray]:
    return (TracedArray("layer", f"{whose} {name}", array, axis) for name, array, axis in layers)


@dataclass(frozen=True, kw_only=True)
class TwinCritics(AlgorithmConfig):
    """The base of algorithms that train an actor and two critics on batches of a `Replay`
    or `PrioritisedReplay`."""

    ranges: ClassVar[Mapping[str, tuple[float, float, str]]] = {
        "gamma": (0, 1, "0.99 is usual"),
        "learning_rate": (0, 1e6, "0.0003 is usual"),
        "critic_learning_rate": (0, 1e6, "0.0003 to 0.001 is usual; None: as learning_rate"),
        "adam_epsilon": (1e-30, 1, "0.00000001 is usual"),
        "max_gradient_norm": (1e-9, 1e9, "None is usual: gradients stay as they are"),
        "target_rate": (1e-9, 1, "0.005 is usual"),
    }

    changeable: ClassVar[Collection[str]] = ranges.keys() - {"adam_epsilon"}

    gamma: float = 0.99
    """Discount of a step."""
    learning_rate: float | LinearSchedule = 3e-4
    """Learning rate of Adam, for the actor (and SAC's temperature)."""
    critic_learning_rate: float | LinearSchedule | None = None
    """Learning rate of Adam, for the critics; None: as `learning_rate`."""
    adam_epsilon: float = 1e-8
    """Added to Adam's denominator."""
    max_gradient_norm: float | None = None
    """The gradients of the actor, and of both critics together, are scaled down to this
    Euclidean norm. None: they are not scaled."""
    target_rate: float = 0.005
    """τ: the targets move to what is trained by this share of the way, in each update (of
    TD3: in each that steps the actor)."""


class TwinCriticLearner(Algorithm):
    """The base of learners that train a `BoundedPolicy` in place, and two critics, on
    batches that a replay draws. Deterministic given seed, samples and one thread."""

    policy: BoundedPolicy
    config: TwinCritics

    def __init__(self, config: TwinCritics, policy: BoundedPolicy, seed: int) -> None:
        self.policy, self.config = policy, config.at(0, 0.0)
        weights_seed, drawing_seed = np.random.SeedSequence(seed).spawn(2)
        self._rng = np.random.default_rng(drawing_seed)
        kernels = policy.kernels
        self._actor = policy.network(policy.flat)
        shape = policy.config.critics(policy.encoder.width + policy.actions)
        self.critics = mlp(shape, shape.begin(np.random.default_rng(weights_seed)), kernels)
        self.targets = mlp(shape, self.critics.flat.copy(), kernels)
        self._of_actor, self._of_critics = np.zeros_like(policy.flat), np.zeros_like(self.critics.flat)
        self._error: Floats = self._of_actor[:0]
        # of the update that was begun last, and the random state before its last step
        self._batch, self._drawn = Arrays(), self._rng.bit_generator.state
        self._adams: dict[str, Optimiser] = {
            "actor": adam(policy.flat, self._of_actor, config.adam_epsilon, kernels),
            "critics": adam(self.critics.flat, self._of_critics, config.adam_epsilon, kernels),
        }

    def take_in(self, sample: Sample) -> None:
        self.policy.take_in(sample)

    def update(self, samples: Sequence[Sample], steps: int) -> dict[str, float]:
        """See `Algorithm.update`. Raises `UpdateFault` when a loss or gradient is not
        finite; the weights that it is of stay as they were."""
        with np.errstate(over="ignore", invalid="ignore"):  # `_step` looks for what is not finite
            return self._update(*samples)

    def _update(self, sample: Sample) -> dict[str, float]:
        batch = {name: array[0] for name, array in sample.items()}
        self.policy.fold()
        seen = self.policy.features(batch)
        self._batch, self._drawn = batch, self._rng.bit_generator.state
        metrics = self._improve_critics(batch, seen)
        if "priority" in sample:
            sample["priority"][0] = self._error
        self._drawn = self._rng.bit_generator.state
        return {**metrics, **self._improve_actor(seen, batch["weight"]), "rows": float(len(seen))}

    @abstractmethod
    def _values(self, then: Floats) -> Floats:
        """Return [n]: what the target critics promise of the next observations."""

    @abstractmethod
    def _improve_actor(self, seen: Floats, weight: Floats) -> dict[str, float]:
        """Do what an update does besides the critics; return its metrics."""

    def _approach(self) -> None:
        """Move the target critics."""
        approach(self.targets.flat, self.critics.flat, self.config.target_rate, self.policy.kernels)

    def _improve_critics(self, batch: Arrays, seen: Floats) -> dict[str, float]:
        """Do a step down Σ ½ (Q - y)² of both critics (Haarnoja et al. 2018, eq. 5;
        Fujimoto et al. 2018, algorithm 1), y being the returns and `_values`."""
        config, weight = self.config, batch["weight"]
        returns, discount = n_step_returns(batch["rewards"], batch["steps"], batch["done"], config.gamma)
        goal = returns + discount * self._values(self.policy.features(batch, "next.obs"))
        found = self.critics.forward(np.concatenate([seen, self.policy.unscaled(batch["action"])], 1))[..., 0]
        error = found - goal
        self._error = np.abs(error).mean(0)
        share = weight / np.float32(len(weight))
        value = float(found.mean())
        loss = float((0.5 * error * error @ share).sum())
        self.critics.backward(np.multiply(error, share, dtype=np.float32)[..., None], self._of_critics)
        rate = config.learning_rate if config.critic_learning_rate is None else config.critic_learning_rate
        norm = self._step("critics", number(rate), loss)
        return {
            "loss/value": loss,
            "q/mean": value,
            "error/mean": float(self._error.mean()),
            "gradient_norm": norm,
        }

    def _step(self, name: str, rate: float, loss: float) -> float:
        limit = None if name == "temperature" else self.config.max_gradient_norm
        norm: float = self._adams[name].descend(rate, 1.0, limit, loss)
        if not isfinite(norm + loss):
            why = f"the loss is {loss}, the gradient's norm {norm}"
            self._batch.pop("priority", None)  # which this would have told
            minibatch = {**self._batch, "random": state_numbers(self._drawn)}
            raise spoilt(type(self.config).__name__, f"the weights of the {name}", why, name, minibatch)
        return norm

    def trace(self, stage: str, minibatch: Arrays) -> Iterator[TracedArray]:
        """See `Algorithm.trace`."""
        batch = {name: array for name, array in minibatch.items() if name != "random"}
        for name, array in batch.items():
            yield TracedArray("input", name, array, 0)
        for name, array in {**self.policy.parameters(), **self._own()}.items():
            yield TracedArray("weights", name, array)
        set_random_state(self._rng, minibatch["random"])
        seen = self.policy.features(batch)
        if stage == "critics":
            then = self.policy.features(batch, "next.obs")
            yield from _layers("the actor's", self._actor.trace(then))
            yield TracedArray("layer", "the target critics' values", self._values(then), 0)
            actions = self.policy.unscaled(batch["action"])
        else:
            yield from _layers("the actor's", self._actor.trace(seen))
            actions = np.tanh(self._actor.forward(seen)[0][:, : self.policy.actions])
        yield from _layers("the critics'", self.critics.trace(np.concatenate([seen, actions], 1)))
        with suppress(UpdateFault):
            if stage == "critics":
                self._improve_critics(batch, seen)
            else:
                self._improve_actor(seen, batch["weight"])
        yield TracedArray("loss", "error", self._error, 0)
        network, gradient = (
            (self.critics, self._of_critics) if stage == "critics" else (self._actor, self._of_actor)
        )
        for name, array in views(gradient, network.shape.forms()).items():
            yield TracedArray("gradient", name, array)
        yield TracedArray("gradient", "norm", np.array(np.linalg.norm(gradient)))

    def _own(self) -> Arrays:
        """Return by name, as views, the arrays that a resumed run needs besides the
        moments."""
        own: Arrays = {"critics": self.critics.flat, "targets": self.targets.flat}
        return own | {"arrived": self.policy.arrived} if self.policy.normalised else own

    def state(self) -> Arrays:
        """Return copies of critics, target critics and what else is the learner's own,
        the moments and steps of the Adams, and the random stream."""
        own: Arrays = {name: array.copy() for name, array in self._own().items()}
        own["random"] = random_state(self._rng)
        for name, each in self._adams.items():
            own |= prefixed(f"adam.{name}", each.state())
        return own

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take back what `state` returned; continues exactly as the learner that it came
        from would have."""
        check_learner_state(self.state(), state)
        for name, array in self._own().items():
            array[...] = state[name]
        set_random_state(self._rng, state["random"])
        for name, each in self._adams.items():
            each.load_state(unprefixed(f"adam.{name}", state))
