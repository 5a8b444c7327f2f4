"""Proximal policy optimisation: the learner that `PPO` builds."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.algorithms.batch import gather
from tidemill.algorithms.formulas import approximate_kl, clip_fraction, clipped_surrogate, clipped_value_loss, explained_variance, value_loss
from tidemill.algorithms.random_state import random_state, set_random_state
from tidemill.api.algorithm import Algorithm, Sample
from tidemill.core.errors import RunError, SchemaError
from tidemill.core.schema import Array, Arrays
from tidemill.nets.trainable import TrainablePolicy

if TYPE_CHECKING:
    from tidemill.algorithms.ppo import PPO

MEASURED = ("loss/policy", "loss/value", "entropy", "kl", "clip_fraction")
"""What is measured on every minibatch, in this order."""


class PPOLearner(Algorithm):
    """Trains a `TrainablePolicy` in place. Deterministic given seed, samples and one torch thread."""

    policy: TrainablePolicy

    def __init__(self, config: "PPO", policy: TrainablePolicy, seed: int) -> None:
        self.policy = policy
        self._config = config
        self._rng = np.random.default_rng(seed)
        self._parameters = policy.trainable_parameters()
        self._optimiser = torch.optim.Adam(self._parameters, lr=config.learning_rate, eps=config.adam_epsilon, fused=True)
        for p in self._parameters:  # made now, not at the first step, so that `state` always has them
            self._optimiser.state[p] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def update(self, samples: Sequence[Sample], progress: float) -> dict[str, float]:
        """See `Algorithm.update`. Raises `RunError` before a minibatch whose loss or gradient is not finite can spoil the weights."""
        config, policy = self._config, self.policy
        rate = config.learning_rate * (1 - progress if config.learning_rate_schedule == "linear" else 1)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        batch = gather(samples, config.gamma, config.gae_lambda, self._log_ratio if config.correct_off_policy else None)
        rows = len(batch)
        if rows == 0:
            return {"rows": 0.0, "learning_rate": rate}

        inputs = policy.prepare(batch.observation)
        advantage = batch.advantage
        if config.normalise_advantages:
            advantage = (advantage - advantage.mean(dtype=np.float64)) / (advantage.std(dtype=np.float64) + 1e-8)
        scale = policy.value_scale
        columns = {f"input {k}": v for k, v in inputs.items()} | {f"action {k}": v for k, v in batch.action.items()}
        columns |= {
            "log_prob": batch.log_prob,
            "advantage": advantage.astype(np.float32, copy=False),
            "target": batch.target / np.float32(scale),
            "value": batch.value / np.float32(scale),
        }
        tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
        count = max(1, round(rows / config.minibatch_size))
        bounds = [rows * i // count for i in range(count + 1)]
        measured: list[Tensor] = []
        norms: list[float] = []
        for _ in range(config.epochs):
            order = torch.from_numpy(self._rng.permutation(rows))
            shuffled = {name: column.index_select(0, order) for name, column in tensors.items()}
            for start, end in pairwise(bounds):
                loss, parts = self._loss({name: column[start:end] for name, column in shuffled.items()})
                if config.target_kl is not None and parts[3] > config.target_kl:
                    break
                norms.append(self._step(loss, parts))
                measured.append(parts)
            else:
                continue
            break

        metrics = {
            "explained_variance": explained_variance(batch.value, batch.target),
            "learning_rate": rate,
            "rows": float(rows),
            "minibatches": float(len(norms)),
        }
        if measured:
            means = torch.stack(measured).mean(0).tolist()
            last = torch.stack(measured[-count:]).mean(0).tolist()  # how far the last epoch has gone, not the average of all
            metrics |= dict(zip(MEASURED, means[:3] + last[3:], strict=True))
            metrics["gradient_norm"] = sum(norms) / len(norms)
        policy.fold(batch.observation, batch.target if config.normalise_returns else None)
        return metrics

    def _loss(self, columns: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss of one minibatch, a scalar with gradients, and its `MEASURED` parts without."""
        config = self._config
        inputs = {name[6:]: column for name, column in columns.items() if name.startswith("input ")}
        action = {name[7:]: column for name, column in columns.items() if name.startswith("action ")}
        evaluation = self.policy.evaluate(inputs, action)
        log_ratio = evaluation.log_prob - columns["log_prob"]
        of_policy = clipped_surrogate(log_ratio, columns["advantage"], config.clip)
        if config.clip_value is None:
            of_value = value_loss(evaluation.value, columns["target"])
        else:
            of_value = clipped_value_loss(evaluation.value, columns["value"], columns["target"], config.clip_value)
        entropy = evaluation.entropy.mean()
        loss = of_policy + config.value_coefficient * of_value
        if config.entropy_coefficient:
            loss = loss - config.entropy_coefficient * entropy
        with torch.no_grad():
            parts = torch.stack((of_policy, of_value, entropy, approximate_kl(log_ratio), clip_fraction(log_ratio, config.clip)))
        return loss, parts

    def _step(self, loss: Tensor, parts: Tensor) -> float:
        """Do one step of Adam down the gradient of `loss`; return the gradient's norm before clipping."""
        self._optimiser.zero_grad(set_to_none=False)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not np.isfinite(norm) or not np.isfinite(loss.item()):
            raise RunError(self._explain(parts, norm))
        limit = self._config.max_gradient_norm
        if limit is not None and norm > limit:
            for gradient in gradients:
                gradient.mul_(limit / norm)
        self._optimiser.step()
        return norm

    def _explain(self, parts: Tensor, norm: float) -> str:
        values = dict(zip(MEASURED, parts.tolist(), strict=True))
        wrong = [f"{name} is {value}" for name, value in values.items() if not np.isfinite(value)] or [f"the gradient's norm is {norm}"]
        return (
            f"PPO stopped before a step that would have spoilt the weights: {', '.join(wrong)} (all: {values}, gradient norm {norm}). "
            "Look for NaN or huge numbers in observations and rewards (tidemill check-env), then lower learning_rate"
        )

    def _log_ratio(self, observation: Arrays, action: Arrays, log_prob: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return log π - log μ of n rows, π being the policy at the start of the update."""
        inputs = {k: torch.from_numpy(v) for k, v in self.policy.prepare(observation).items()}
        actions = {k: torch.from_numpy(v) for k, v in action.items()}
        size = self._config.minibatch_size
        with torch.no_grad():
            parts = [
                self.policy.evaluate({k: v[i : i + size] for k, v in inputs.items()}, {k: v[i : i + size] for k, v in actions.items()}).log_prob
                for i in range(0, len(log_prob), size)
            ]
        return torch.cat(parts).numpy() - log_prob if parts else log_prob

    def state(self) -> Arrays:
        """Return copies of Adam's moments and step (``adam.0.step``, …) and the shuffling stream's state."""
        arrays: Arrays = {"random": random_state(self._rng)}
        for i, p in enumerate(self._parameters):
            arrays |= {f"adam.{i}.{k}": v.detach().numpy().copy() for k, v in self._optimiser.state[p].items()}
        return arrays

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take back what `state` returned; continues exactly as the learner that it came from would have."""
        own = {name: array.shape for name, array in self.state().items()}
        given = {name: array.shape for name, array in state.items()}
        if own != given:
            wrong = sorted(k for k in own.keys() | given.keys() if own.get(k) != given.get(k))
            raise SchemaError(f"this learner state does not fit: {', '.join(wrong)}; resume with the algorithm and network that saved it")
        set_random_state(self._rng, state["random"])
        for i, p in enumerate(self._parameters):
            for key, tensor in self._optimiser.state[p].items():
                tensor.copy_(torch.from_numpy(np.array(state[f"adam.{i}.{key}"])))
