"""The step limit: a lane whose episode has had so many steps is cut."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import Environment, Tick
from tidemill.core.cut import Part
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Arrays
from tidemill.envs.wrapper import Wrapper


class StepLimit(Wrapper):
    """An environment that cuts (truncates) its lanes' episodes after `steps` steps. Of
    several agents that restart by themselves, the first one to do so begins the count of
    its lane anew. Raises `ConfigError` for an environment whose lanes cannot be reset at
    any time."""

    def __init__(self, inner: Environment, steps: int) -> None:
        if not inner.resets_any:
            raise ConfigError(
                f"max_episode_steps = {steps}: this environment resets finished lanes by itself and no "
                "others, so that we cannot cut its episodes; set the limit in the environment"
            )
        super().__init__(inner)
        self.max_episode_steps = min(steps, inner.max_episode_steps or steps)
        self._limit = steps
        self._steps = np.zeros(self.lanes, np.int64)
        self._reset = np.ones(self.lanes, np.bool_)
        self._finished = [self._reset]  # of the seats of each group: those between two episodes
        self._alone = True  # a lane has one seat, which is finished when the lane is reset

    def bind(self, groups: Sequence[Sequence[int]]) -> None:
        super().bind(groups)
        self._alone = len(groups) == len(groups[0]) == 1
        if not self._alone:
            self._finished = [np.ones(self.lanes * len(group), np.bool_) for group in groups]

    def _own_state(self) -> Part:
        finished = {} if self._alone else {str(group): each for group, each in enumerate(self._finished)}
        return {"steps": self._steps, "finished": finished}

    def _load_own_state(self, state: Part) -> None:
        self._steps[:] = state["steps"]
        for group, finished in state["finished"].items():
            self._finished[int(group)][:] = finished

    def send(self, actions: Sequence[Arrays], reset: NDArray[np.bool_]) -> None:
        self._reset[:] = reset
        self._inner.send(actions, reset)

    def recv(self, ticks: Sequence[Tick]) -> None:
        self._inner.recv(ticks)
        steps = self._steps
        steps += 1
        steps[self._reset] = 0
        for finished, tick in zip(self._finished, ticks, strict=True):
            if 1 in tick.restarted.tobytes():
                steps[tick.restarted.reshape(self.lanes, -1).any(1)] = 0
                if not self._alone:  # of those that do not begin again at once
                    finished |= tick.restarted & tick.voided
        over = steps >= self._limit
        if np.count_nonzero(over):
            cut(ticks, self._finished, over, self._reset, self.same_step)
        for finished, tick in zip(self._finished, ticks, strict=True) if not self._alone else ():
            final = (tick.done | tick.truncated) & ~finished
            np.copyto(finished, final & ~tick.restarted, where=tick.present | final)


def cut(
    ticks: Sequence[Tick],
    finished: Sequence[NDArray[np.bool_]],
    lanes: NDArray[np.bool_],
    reset: NDArray[np.bool_],
    same_step: bool,
) -> None:
    """Cut the open episodes of `lanes` ([L]) in `ticks`. `finished` has for each group
    the seats that were between two episodes before the tick; `reset` ([L]) the lanes that
    it has reset."""
    running = lanes & ~reset
    for done_before, tick in zip(finished, ticks, strict=True):
        agents = len(done_before) // len(lanes)
        tick.truncated |= np.repeat(lanes, agents) & ~tick.done & ~done_before
        if not same_step:  # nobody begins in the tick that cuts its lane
            tick.present &= ~(np.repeat(running, agents) & done_before)
