"""Policies learn from images, by each of the networks that these may go through."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import tidemill
from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Gymnasium, Limits, Trainer

QUARTERS, SIDE = 4, 40


class WhichQuarter(gymnasium.Env[Any, Any]):
    """One quarter of a noisy picture is brighter, and the action that names it is paid 1:
    random play comes to 0.25 a step."""

    observation_space = gymnasium.spaces.Box(0, 255, (SIDE, SIDE, 1), np.uint8)
    action_space = gymnasium.spaces.Discrete(QUARTERS)

    def _draw(self) -> Any:
        self._bright = int(self.np_random.integers(QUARTERS))
        picture = self.np_random.integers(0, 128, (SIDE, SIDE, 1), np.uint8)
        down, right = (SIDE // 2 * part for part in divmod(self._bright, 2))
        picture[down : down + SIDE // 2, right : right + SIDE // 2] += 100
        return picture

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action: Any) -> Any:
        paid = float(action == self._bright)
        return self._draw(), paid, True, False, {}


@pytest.mark.parametrize("encoder", ["nature_cnn", "impala_cnn"])
def test_what_a_picture_shows_is_learnt(encoder: Any, tmp_path: Path) -> None:
    made = Experiment(
        name="images",
        policies={"policy": ActorCritic(encoder=encoder)},
        workers={
            "actor": Actors(
                environment=Gymnasium(make=f"{__file__}:WhichQuarter"),
                lanes=8,
                agents=(AgentSpec(sample_steps=32),),
            ),
            "trainer": Trainer(algorithm=PPO(minibatch_size=64, epochs=2, learning_rate=1e-3)),
        },
        limits=Limits(steps=12_000, mean_return=0.9, window=200),
    )
    result = tidemill.train(made, launch="inline", run_dir=tmp_path / "run", source=__file__, quiet=True)
    assert result.summary.reason.startswith("mean return"), result.summary
