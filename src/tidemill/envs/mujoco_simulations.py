"""Simulations of one MuJoCo model, one for each lane, stepped one after the other on the
calling thread.

A state of MuJoCo is more than positions and velocities: its solver begins where it ended
a step before (`qacc_warmstart`). So `mujoco.rollout`, which does not return that, will
not do: after 100 steps its numbers are others. What is here has the numbers of an MjData
for each simulation in every bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import mujoco
import numpy as np

from tidemill.core.schema import Array

_WHOLE = mujoco.mjtState.mjSTATE_INTEGRATION


class SimulationFailed(Exception):
    """MuJoCo raised an error in simulation `number`."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


class Simulations(ABC):
    """Simulations of `model`, of each of which so many steps are one call of `step`."""

    def __init__(self, model: Any, steps: int) -> None:
        self.model, self.steps = model, steps

    @abstractmethod
    def step(self, controls: Array, chosen: Sequence[int] | None) -> None:
        """Step the `chosen` simulations (None: all) by their rows of `controls`, [L,
        actuators]. Raises `SimulationFailed`."""

    @abstractmethod
    def read(self) -> dict[str, Array]:
        """Return copies of the arrays that are to be read, [L, ...] each, by name."""

    @abstractmethod
    def take(self, number: int, data: Any) -> None:
        """Take over the state of an MjData."""

    @abstractmethod
    def states(self) -> Array:
        """Return all states, [L, numbers]."""

    @abstractmethod
    def load_states(self, states: Array) -> None:
        """Take back what `states` returned. What follows from a state is read once it has
        been stepped."""


class Together(Simulations):
    """Simulations in one call of MuJoCo (`mujoco.batch`, from 4.0 on): a state is a row
    of numbers, and goes through an MjData that stays in the processor's cache. With an
    MjData each 64 of HalfCheetah take a seventh longer."""

    def __init__(self, model: Any, count: int, steps: int, names: Sequence[str]) -> None:
        super().__init__(model, steps)
        from mujoco.batch import Batch, SimulationError

        self._failed = SimulationError
        self._batch = Batch(model, count, nthread=1)
        self._controls = self._batch.bind("ctrl")
        self._views = {name: self._batch.bind(name) for name in names}

    def step(self, controls: Array, chosen: Sequence[int] | None) -> None:
        if chosen is None:
            self._controls[...] = controls
        else:
            self._controls[chosen] = controls[chosen]
        try:
            self._batch.step(chosen, self.steps)
        except self._failed as error:
            number = int(error.ids[0])
            raise SimulationFailed(number, self._batch.error(number)) from error

    def read(self) -> dict[str, Array]:
        return {name: view.copy() for name, view in self._views.items()}

    def take(self, number: int, data: Any) -> None:
        mujoco.mj_getState(self.model, data, self._batch.state[number], _WHOLE)

    def states(self) -> Array:
        states: Array = self._batch.state.copy()
        return states

    def load_states(self, states: Array) -> None:
        self._batch.state[...] = states


class Apart(Simulations):
    """Simulations with an MjData each: for a MuJoCo before 4.0, where a function of
    Python is called back, and where forces of contacts are asked for (`contact_forces`:
    `mj_rnePostConstraint` fills `cfrc_ext` after a step), which need all that an MjData
    has: copied out of a batch, an Ant took 5 % longer."""

    def __init__(
        self, model: Any, count: int, steps: int, names: Sequence[str], contact_forces: bool
    ) -> None:
        super().__init__(model, steps)
        self._contact_forces = contact_forces
        self._data = [mujoco.MjData(model) for _ in range(count)]
        self._controls = [data.ctrl for data in self._data]
        self._views = {name: [getattr(data, name) for data in self._data] for name in names}

    def step(self, controls: Array, chosen: Sequence[int] | None) -> None:
        ours, datas = self._controls, self._data
        if chosen is not None:
            ours, datas = [ours[number] for number in chosen], [datas[number] for number in chosen]
            controls = controls[chosen]
        for control, values in zip(ours, controls, strict=True):
            control[:] = values
        done: list[None] = []  # has those before one that raises
        try:
            done.extend(map(mujoco.mj_step, repeat(self.model), datas, repeat(self.steps)))
        except mujoco.FatalError as error:
            number = len(done) if chosen is None else chosen[len(done)]
            raise SimulationFailed(number, str(error)) from error
        if self._contact_forces:
            for data in datas:
                mujoco.mj_rnePostConstraint(self.model, data)

    def read(self) -> dict[str, Array]:
        count = len(self._data)
        return {
            name: np.concatenate(views).reshape(count, *views[0].shape) for name, views in self._views.items()
        }

    def take(self, number: int, data: Any) -> None:
        mujoco.mj_copyData(self._data[number], self.model, data)

    def states(self) -> Array:
        states = np.empty((len(self._data), mujoco.mj_stateSize(self.model, _WHOLE)))
        for data, state in zip(self._data, states, strict=True):
            mujoco.mj_getState(self.model, data, state, _WHOLE)
        return states

    def load_states(self, states: Array) -> None:
        for data, state in zip(self._data, states, strict=True):
            mujoco.mj_setState(self.model, data, state, _WHOLE)


def simulations(
    model: Any, count: int, steps: int, names: Sequence[str], contact_forces: bool
) -> Simulations:
    """Return `count` simulations of `model`, of which the arrays with these names are to
    be read, in the quickest way that there is."""
    called_back = any(
        getattr(mujoco, name)() is not None for name in vars(mujoco) if name.startswith("get_mjcb_")
    )
    if not (contact_forces or called_back):
        try:
            return Together(model, count, steps, names)
        except ImportError:
            pass
    return Apart(model, count, steps, names, contact_forces)
