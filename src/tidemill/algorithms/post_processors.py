"""What actors compute of finished episodes and add to their rows (`AgentSpec.post`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

from tidemill.algorithms.policy_gradient_formulas import gae
from tidemill.api.algorithm import PostProcessor
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Array, Arrays, Field, Schema

_READ = ("reward", "value", "done", "truncated", "version")


@dataclass(frozen=True, kw_only=True)
class Returns(PostProcessor):
    """Returns adds ``post.return`` to rows, float32: the discounted sum of the rewards
    from the row on; after a cut, the final row's value stands for what would have come,
    and is that row's own return. 0 in final rows that ended."""

    reads: ClassVar[tuple[str, ...]] = _READ

    gamma: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(gamma=self.gamma)

    def fields(self) -> Schema:
        return {"return": Field((), "float32")}

    def process(self, episodes: Mapping[str, Array]) -> Arrays:
        reward, value, done, truncated, version = (episodes[name] for name in _READ)
        # the λ-return with λ = 1
        return {"return": gae(reward, value, done, truncated, version >= 0, self.gamma, 1.0)[1]}


@dataclass(frozen=True, kw_only=True)
class GAE(PostProcessor):
    """GAE adds ``post.advantage`` and ``post.target`` to rows, float32, in reward units:
    generalised advantages and λ-returns, by the values of the policy that acted (see
    `tidemill.algorithms.policy_gradient_formulas.gae`). PPO trains by them instead of
    computing its own, unless `PPO.correct_off_policy` is set; other algorithms do not
    read them."""

    reads: ClassVar[tuple[str, ...]] = _READ

    gamma: float = 0.99
    gae_lambda: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(gamma=self.gamma, gae_lambda=self.gae_lambda)

    def fields(self) -> Schema:
        return {"advantage": Field((), "float32"), "target": Field((), "float32")}

    def process(self, episodes: Mapping[str, Array]) -> Arrays:
        reward, value, done, truncated, version = (episodes[name] for name in _READ)
        advantage, target = gae(reward, value, done, truncated, version >= 0, self.gamma, self.gae_lambda)
        return {"advantage": advantage, "target": target}


def _check(**values: float) -> None:
    for name, value in values.items():
        if not (isfinite(value) and 0 <= value <= 1):
            raise ConfigError(
                f"{name} = {value} is not between 0 and 1; 0.99 for gamma and 0.95 for gae_lambda are usual"
            )
