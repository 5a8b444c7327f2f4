"""The policy that `ActorCritic` describes, for MLPs on a CPU: all in numpy; only
`evaluate` imports torch, over the same memory. Images and GPUs: `torch_actor_critic`.

All weights lie in one flat float32 array. Layers of the actor and of the critic have the
same shapes (but for the heads), so they lie stacked along a first axis "towers" (2, or 1
when the critic shares them) and run as one batched product.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tidemill.api.spaces import Spaces
from tidemill.core.schema import Array, Arrays
from tidemill.nets.cells import Memory
from tidemill.nets.distributions import distribution_of
from tidemill.nets.masks import Bools, forbid, mask_of
from tidemill.nets.mlp import Layer, Towers
from tidemill.nets.normaliser import RunningMoments
from tidemill.nets.scratch import Scratch
from tidemill.nets.trainable import Evaluation, LibraryName, TrainablePolicy
from tidemill.nets.weights import load_parameters, orthogonal, views

if TYPE_CHECKING:
    from torch import Tensor

    from tidemill.nets.actor_critic import ActorCritic

Floats = NDArray[np.float32]

OBSERVATION_CLIP = np.float32(10)  # deviations


class ActorCriticPolicy(TrainablePolicy):
    """Acts for any number of rows; see `ActorCritic` for the network and `distributions`
    for what an action and its log-probability are."""

    library: LibraryName = "numpy"
    _memory: Memory | None

    def __init__(self, config: "ActorCritic", spaces: Spaces, seed: int) -> None:
        weights_seed, sampling_seed = np.random.SeedSequence(seed).spawn(2)
        self.encoder = encoder = config.observation_encoder(spaces)
        self.mask = mask_of(spaces, config.action_mask)
        self.distribution = distribution_of(spaces.action)
        self.activation = config.activation
        self.towers = config.towers(encoder)
        self._rng = np.random.default_rng(sampling_seed)
        self._memory = config.memory
        gains = config.shapes(encoder, self.distribution)
        self._shapes = {name: shape for name, (shape, _) in gains.items()}
        self.flat: Floats = np.zeros(sum(int(np.prod(shape)) for shape in self._shapes.values()), np.float32)
        """All weights, one after the other; `weights` are views of it."""
        self.weights = views(self.flat, self._shapes)
        rng = np.random.default_rng(weights_seed)
        for name, (_, gain) in gains.items():
            # the actor's are 0 where it does not see, and stay so
            if gain and encoder.critic_only and name == "hidden.0.weight":
                actor, critic = self.weights[name]
                for part in (actor[: len(actor) - encoder.width + encoder.seen], critic):
                    orthogonal(part, gain, rng, 0)
            elif gain:
                orthogonal(
                    self.weights[name],
                    gain,
                    rng,
                    self.towers if not name.startswith(("actor", "critic")) else 0,
                )
        self.weights["log_std"][...] = config.log_std_init
        if self._memory is not None:
            self._memory.cell.begin(self.weights)
        self.layers = layers_of(self.weights)
        """(weight [towers, in, out], bias [towers, 1, out]) of each hidden layer."""
        self._towers_of_acting, self._towers_of_training = (
            Towers(self.layers, config.activation, encoder.seen if encoder.critic_only else None)
            for _ in range(2)
        )
        self._scratch = Scratch()  # of training
        self.turn = 0
        """Counts what changes the intermediate results that `backward` needs."""
        self._last: Floats = self.flat[:0]  # what `forward` kept: what the heads see, [towers, n, width]
        self._forbidden: Bools = np.empty((0, 0), np.bool_)  # likewise, where there is a mask: [n, actions]
        # where `backward` wrote last, and its views
        self._gradient: tuple[Floats | None, dict[str, Floats]] = None, {}
        self._observation = (
            RunningMoments("observation", (self.encoder.width,))
            if config.normalise_observations and self.encoder.width
            else None
        )
        self._returns = RunningMoments("returns", ())
        self._leaf: Tensor | None = None  # all weights as torch sees them
        self._features: Floats = np.empty((0, self.encoder.width), np.float32)
        self._refresh()

    def reseed(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def act(self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays) -> None:
        """See `Policy.act`. `observation` has any number of rows n."""
        n = len(observation[self.encoder.names[0]])
        if n == 0:
            return
        if n != len(self._features):
            self._features = np.empty((n, self.encoder.width), np.float32)
        self.encoder.encode(observation, self._features)
        self._normalise(self._features)
        last = self._remember(self._towers_of_acting.forward(self._features), state, out)
        actor, critic = last[0], last[-1]
        weights = self.weights
        head = np.matmul(weights["actor.weight"], actor.T)
        head += weights["actor.bias"]
        if self.mask is not None:
            forbid(head, self.mask.forbidden(observation))
        value = np.matmul(critic, weights["critic.weight"])
        value += weights["critic.bias"]
        value *= self._scale
        out["value"][:n] = value
        if not isinstance(deterministic, bool):
            some = deterministic.any()
            deterministic = deterministic if deterministic.ndim and some else bool(some)
        self.distribution.sample(
            head, weights["log_std"], deterministic, self._rng, out["action"][:n], out["log_prob"][:n]
        )

    def _remember(self, last: Floats, state: Arrays, out: Arrays) -> Floats:
        """Return what the heads see, [towers, n, width], when acting: the `last` hidden
        layers."""
        return last

    def _normalise(self, x: Floats) -> None:
        if self._observation is not None:
            x -= self._shift
            x *= self._factor
            np.minimum(x, OBSERVATION_CLIP, out=x)
            np.maximum(x, -OBSERVATION_CLIP, out=x)

    def _refresh(self) -> None:
        """Derive what acting multiplies with from the statistics."""
        self._scale = np.float32(self._returns.deviation())
        if self._observation is not None:
            boxes = self.encoder.normalised
            self._shift = np.where(boxes, self._observation.mean, 0).astype(np.float32)
            self._factor = np.where(boxes, 1 / np.sqrt(self._observation.variance + 1e-8), 1).astype(
                np.float32
            )

    def parameters(self) -> Arrays:
        """Return the weights (float32) and the statistics ``observation.*`` and
        ``returns.*`` (float64), as views."""
        return self._named()

    def _named(self) -> Arrays:
        named: dict[str, Any] = {name: weight for name, weight in self.weights.items() if weight.size}
        if self._observation is not None:
            named |= self._observation.parameters()
        return named | self._returns.parameters()

    def load(self, parameters: Mapping[str, Array], version: int) -> None:
        """See `Policy.load`. Nothing is changed when a name, shape or dtype does not
        fit."""
        load_parameters(self._named(), parameters)
        self.version = version
        self._refresh()

    def prepare(self, observation: Arrays) -> Arrays:
        """Return ``features`` (float32 [n, width], flattened and normalised) when
        anything is flattened, the images as they are, and where there is a mask
        ``forbidden`` (bool [n, actions])."""
        inputs: Arrays = {name: observation[name] for name in self.encoder.images}
        if self.mask is not None:
            inputs["forbidden"] = self.mask.forbidden(observation)
        if self.encoder.width:
            features = np.empty((len(observation[self.encoder.names[0]]), self.encoder.width), np.float32)
            self.encoder.encode(observation, features)
            self._normalise(features)
            inputs["features"] = features
        return inputs

    def check(self, observation: Arrays) -> None:
        if self.mask is not None:
            self.mask.check(observation)

    def evaluate(self, inputs: "dict[str, Tensor]", action: "dict[str, Tensor]") -> Evaluation:
        from tidemill.nets.torch_gradients import evaluate

        return evaluate(self, self.trainable_parameters()[0], inputs, action)

    def trainable_parameters(self) -> "list[Tensor]":
        """Return one float32 tensor: all weights, flat, with `.grad` in place."""
        if self._leaf is None:
            import torch

            from tidemill.nets.torch_gradients import leaf

            self._leaf = leaf(torch.from_numpy(self.flat))
        return [self._leaf]

    @property
    def size(self) -> int:
        return self.flat.size

    def flat_weights(self) -> Floats:
        return self.flat

    def forward(self, inputs: Mapping[str, Any], action: Mapping[str, Any]) -> Evaluation:
        self.turn += 1
        weights = self.weights
        self._last = last = self._ascend(inputs)
        n = last.shape[1]
        head = np.matmul(
            weights["actor.weight"], last[0].T, out=self._scratch("head", (self.distribution.size, n))
        )
        head += weights["actor.bias"]
        if self.mask is not None:
            self._forbidden = inputs["forbidden"][inputs["rows"]] if self.recurrent else inputs["forbidden"]
            forbid(head, self._forbidden)
        value = np.matmul(last[-1], weights["critic.weight"], out=self._scratch("value", (n,)))
        value += weights["critic.bias"]
        return Evaluation(*self.distribution.forward(head, weights["log_std"], action["action"]), value)

    def backward(self, of_log_prob: Any, of_entropy: Any, of_value: Any, out: Floats) -> None:
        self.turn += 1
        if self._gradient[0] is not out:
            self._gradient = out, views(out, self._shapes)
        weights, gradient, last, n = self.weights, self._gradient[1], self._last, len(of_value)
        of_head = self._scratch("of head", (self.distribution.size, n))
        self.distribution.backward(of_log_prob, of_entropy, of_head, gradient["log_std"])
        if self.mask is not None:
            np.copyto(of_head, 0, where=self._forbidden.T)
        np.matmul(of_head, last[0], out=gradient["actor.weight"])
        np.add.reduce(of_head, axis=1, out=gradient["actor.bias"], keepdims=True)
        np.matmul(of_value, last[-1], out=gradient["critic.weight"])
        np.add.reduce(of_value, axis=0, out=gradient["critic.bias"], keepdims=True)
        if not self.layers and self._memory is None:
            return
        of_last = self._scratch("of last", last.shape)
        np.matmul(of_head.T, weights["actor.weight"], out=of_last[0])
        of_critic = of_last[1] if self.towers == 2 else self._scratch("of critic", last.shape[1:])
        np.multiply(of_value[:, np.newaxis], weights["critic.weight"], out=of_critic)
        if self.towers == 1:
            of_last[0] += of_critic
        self._descend(of_last, gradient)

    def _ascend(self, inputs: Mapping[str, Any]) -> Floats:
        """Return what the heads see, [towers, n, width], when training: the last hidden
        layers."""
        return self._towers_of_training.forward(inputs["features"])

    def _descend(self, of_last: Floats, gradient: dict[str, Floats]) -> None:
        """Write the gradients of all weights below the heads, `of_last` being that of
        what `_ascend` returned."""
        self._towers_of_training.backward(of_last, layers_of(gradient))

    @property
    def value_scale(self) -> float:
        """The running deviation of the λ-returns: reward units per unit of the critic's
        head."""
        return float(self._scale)

    def moments(self, observation: Arrays, returns: Array | None) -> NDArray[np.float64]:
        parts = [self._returns.moments(returns)]
        if self._observation is not None:
            features = np.empty(
                (len(next(iter(observation.values()))) if observation else 0, self.encoder.width), np.float32
            )
            if observation:
                self.encoder.encode(observation, features)
            parts.append(self._observation.moments(features))
        return np.concatenate(parts)

    def fold_moments(self, moments: NDArray[np.float64]) -> None:
        """See `TrainablePolicy.fold_moments`. The critic's head is rescaled so that no
        value changes in reward units when the deviation does (van Hasselt et al. 2016,
        "Learning values across many orders of magnitude", eq. 2-3, without the shift)."""
        before = self._returns.deviation()
        self._returns.fold(moments[:3])
        if moments[0]:
            ratio = np.float32(before / self._returns.deviation())
            self._rescale_critic(ratio)
        if self._observation is not None:
            self._observation.fold(moments[3:])
        self._refresh()

    def _rescale_critic(self, ratio: np.float32) -> None:
        self.weights["critic.weight"] *= ratio
        self.weights["critic.bias"] *= ratio


def layers_of(named: dict[str, Floats]) -> list[Layer]:
    """Return (weight, bias) of each hidden layer."""
    return [
        (named[f"hidden.{i}.weight"], named[f"hidden.{i}.bias"])
        for i in range(sum(name.startswith("hidden.") for name in named) // 2)
    ]
