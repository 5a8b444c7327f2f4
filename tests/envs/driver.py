"""Drives an environment of one group as a target would, and keeps copies of what it
told."""

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from tests.run.watching import wait_until

from tidemill.api.environment import Environment, NotReady, Tick
from tidemill.core.schema import poison
from tidemill.testing.check_env import sample_actions


@dataclass
class Told:
    """One tick: what the tick held, and the reset mask and actions that were sent for
    it."""

    tick: Tick
    reset: np.ndarray
    actions: dict


def copy_of(tick: Tick) -> Tick:
    return Tick(
        **{
            k: {n: a.copy() for n, a in v.items()} if isinstance(v, dict) else v.copy()
            for k, v in vars(tick).items()
        }
    )


class Driver:
    def __init__(self, environment: Environment, groups=None, seed: int = 0) -> None:
        self.environment = environment
        self.groups = groups or [list(range(len(environment.agents)))]
        environment.bind(self.groups)
        lanes = environment.lanes
        self.spaces = [environment.agents[g[0]].spaces for g in self.groups]
        self.ticks = [
            Tick.allocate(s.observation, lanes * len(g), environment.info, environment.same_step)
            for s, g in zip(self.spaces, self.groups, strict=True)
        ]
        self.over = [np.ones((lanes, len(g)), bool) for g in self.groups]
        self.rng = np.random.default_rng(seed)

    def receive(self) -> None:
        """Finish the tick, after what failed was made anew."""
        while True:
            with suppress(NotReady):
                return self.environment.recv(self.ticks)
            wait_until(self.environment.ready, 120, "what failed is made anew")

    def tick(self, reset=None, actions=None) -> list[Told]:
        lanes = self.environment.lanes
        if reset is None:
            reset = np.logical_and.reduce([over.all(axis=1) for over in self.over])
        if actions is None:
            actions = [
                sample_actions(s.action, self.rng, lanes * len(g))
                for s, g in zip(self.spaces, self.groups, strict=True)
            ]
        for tick in self.ticks:
            poison(tick.observation)
            poison(tick.final)
            for array in (tick.reward, tick.done, tick.truncated, tick.present, tick.restarted):
                poison({"": array})
        kept = [{k: v.copy() for k, v in a.items()} for a in actions]
        self.environment.send(actions, reset)
        for given in actions:
            poison(given)  # they were to be read before send returned
        self.receive()
        for over, tick in zip(self.over, self.ticks, strict=True):
            ends = tick.done | tick.truncated
            over |= ends.reshape(over.shape)
            over &= ~((tick.present & ~ends) | tick.restarted).reshape(over.shape)
        return [Told(copy_of(tick), np.array(reset), a) for tick, a in zip(self.ticks, kept, strict=True)]
