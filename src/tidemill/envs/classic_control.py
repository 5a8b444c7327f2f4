"""Gymnasium's classic control for all lanes at once, equal to it in every bit: the order
of operations is Gymnasium's, and so are types and functions wherever they round
differently from numpy's for arrays."""

import math
from collections.abc import Mapping, Sequence
from ctypes import addressof
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.core.cut import Part, generator_state, set_generator_state
from tidemill.core.schema import Array
from tidemill.envs.batch_lanes import BatchLanes
from tidemill.envs.vector import lane_spaces, no_options
from tidemill.native.library import KernelCartPoles, address, asked_for, choices


def _square(values: Array) -> Array:
    """Return squares as C's `pow` has them, which Gymnasium's scalars call: about one in
    a thousand is not the product's."""
    return np.float_power(values, 2.0)


class _CartPoles:
    """The positions of carts and poles and their speeds, in memory that steps change. The
    native core steps them, where it is there; calls of numpy are most of what a step
    costs.

    state: [4, lanes]: the cart's position and speed, the pole's angle and speed
    seen: float32 [lanes, 4]: the same after a step, as it is observed
    """

    def __init__(self, env: Any, lanes: int) -> None:
        """Take the constants of `env`."""
        self._env, self.state = env, np.zeros((4, lanes))
        self.seen = np.zeros((lanes, 4), np.float32)
        self._limits = np.array([[env.x_threshold], [env.theta_threshold_radians]])
        self._work = np.empty((6, lanes))
        self._angle, (self._cos, self._sin) = self.state[2], self._work[:2]
        self._moved, self._beyond = np.empty((2, lanes)), np.empty((2, lanes), np.bool_)
        self._over: NDArray[np.bool_] = self._beyond[0]
        self._actions = np.empty(lanes, np.int64)
        kernels = asked_for(choices()[-1])
        self._kernel = None if kernels is None else kernels.cart_pole
        numbers = (
            *(env.force_mag, env.gravity, env.total_mass, env.masspole, env.length),
            *(env.polemass_length, env.tau, env.x_threshold, env.theta_threshold_radians),
        )
        held = (self._actions, self._cos, self._sin, self.state, self._over, self.seen)
        self._taken = KernelCartPoles(*numbers, lanes, *map(address, held))
        self._of_taken = addressof(self._taken)

    def step(self, actions: Array) -> NDArray[np.bool_]:
        """Step all, pushed to the right where an action is 1, else to the left; return
        which have fallen or left the track, in an array that the next step changes."""
        np.cos(self._angle, self._cos)
        np.sin(self._angle, self._sin)
        if self._kernel is not None:
            self._actions[...] = actions
            self._kernel(self._of_taken)
            return self._over
        env, (cos, sin, over_mass, bottom, *_), accelerations = self._env, self._work, self._work[4:]
        spin, (acceleration, turn) = self.state[3], accelerations
        np.square(spin, out=over_mass)
        over_mass *= env.polemass_length
        over_mass *= sin
        over_mass += np.where(actions == 1, env.force_mag, -env.force_mag)
        over_mass /= env.total_mass
        np.square(cos, out=bottom)
        bottom *= env.masspole
        bottom /= env.total_mass
        np.subtract(4.0 / 3.0, bottom, out=bottom)
        bottom *= env.length
        np.multiply(cos, over_mass, out=turn)
        sin *= env.gravity
        np.subtract(sin, turn, out=turn)
        turn /= bottom
        np.multiply(turn, env.polemass_length, out=acceleration)
        acceleration *= cos
        acceleration /= env.total_mass
        np.subtract(over_mass, acceleration, out=acceleration)
        places, speeds = self.state[::2], self.state[1::2]
        places += np.multiply(speeds, env.tau, out=self._moved)
        accelerations *= env.tau
        speeds += accelerations
        np.greater(np.abs(places, out=self._moved), self._limits, out=self._beyond)
        self.seen[...] = self.state.T
        self._over |= self._beyond[1]
        return self._over


class CartPole(BatchLanes):
    """Lanes of CartPole."""

    def __init__(self, env: Any, name: str, lanes: int, seed: int, limit: int) -> None:
        super().__init__(env, name, lanes, seed, limit)
        self._poles = _CartPoles(env, lanes)
        self._punished, self._ones = bool(env._sutton_barto_reward), np.ones(lanes)

    def _lane_states(self) -> Part:
        return {"state": self._poles.state}

    def _load_lane_states(self, state: Part) -> None:
        self._poles.state[:] = state["state"]

    @classmethod
    def fits(cls, env: Any) -> bool:
        return bool(env.kinematics_integrator == "euler")

    def _load(self, lane: int) -> None:
        self._poles.state[:, lane] = self.env.state

    def _step(self, actions: Array) -> tuple[Array, Array, Array]:
        if 1 in self._idle.tobytes():  # where it fell, so that waiting takes it nowhere
            self._poles.state[:, self._idle] = 0
        over = self._poles.step(actions)
        return self._poles.seen, (-1.0 * over if self._punished else self._ones), over


class CartPoleVector(CartPole):
    """Lanes of CartPole as Gymnasium's vector form has them, whose generator is one: it
    draws the beginnings of all lanes that begin together. Like others of its kind it
    resets lanes that have finished, and takes no options.

    env: the vector form; it resets all lanes together
    """

    fewest, resets_any = 1, False
    _spaces_of = staticmethod(lane_spaces)

    @classmethod
    def fits(cls, env: Any) -> bool:
        return bool(env.max_episode_steps > 0) and super().fits(env)

    def seed(self, seed: int) -> None:
        self._seed: int | None = seed  # of the next beginning

    def enter_stage(self, options: Mapping[str, Any]) -> None:
        raise no_options(self.name)

    def _begin(self, lanes: Sequence[int]) -> Mapping[int, Any]:
        """Reset these lanes and return their first observations."""
        env, state, seed = self.env, self._poles.state, self._seed
        if seed is not None or len(lanes) == self.lanes:
            env.reset(seed=seed)
            self._seed = None
            state[:, lanes] = env.state[:, lanes]
        else:
            state[:, lanes] = env.np_random.uniform(env.low, env.high, (4, len(lanes)))
        return dict(zip(lanes, state[:, lanes].T, strict=True))

    def _lane_states(self) -> Part:
        drawn = generator_state(self.env.np_random)
        return {**super()._lane_states(), "seed": self._seed, "generator": drawn}

    def _load_lane_states(self, state: Part) -> None:
        super()._load_lane_states(state)
        self._seed = state["seed"]
        set_generator_state(self.env.np_random, state["generator"])


class Pendulum(BatchLanes):
    """Lanes of Pendulum-v1."""

    def __init__(self, env: Any, name: str, lanes: int, seed: int, limit: int) -> None:
        super().__init__(env, name, lanes, seed, limit)
        self._angle, self._speed = np.zeros((2, lanes))

    def _lane_states(self) -> Part:
        return {"angle": self._angle, "speed": self._speed}

    def _load_lane_states(self, state: Part) -> None:
        self._angle, self._speed = state["angle"], state["speed"]

    def _load(self, lane: int) -> None:
        self._angle[lane], self._speed[lane] = self.env.state

    def _step(self, actions: Array) -> tuple[Array, Array, Array]:
        env, angle, speed, torque = self.env, self._angle, self._speed, actions[:, 0]
        squared = np.array([each**2 for each in torque])  # in float32, by C's powf
        upright = ((angle + np.pi) % (2 * np.pi)) - np.pi
        costs = _square(upright) + 0.1 * _square(speed) + 0.001 * squared
        acceleration = 3 * env.g / (2 * env.l) * np.sin(angle) + 3.0 / (env.m * env.l**2) * torque
        speed = np.clip(speed + acceleration * env.dt, -env.max_speed, env.max_speed)
        self._angle, self._speed = angle, speed = angle + speed * env.dt, speed
        seen = np.stack((np.cos(angle), np.sin(angle), speed), axis=1)
        return seen, -costs, np.zeros(self.lanes, np.bool_)


def _cosine(values: Array) -> Array:
    """Return cosines in float64 as Python's `math` has them."""
    return np.array([*map(math.cos, values.tolist())])


class MountainCar(BatchLanes):
    """Lanes of MountainCar-v0."""

    def __init__(self, env: Any, name: str, lanes: int, seed: int, limit: int) -> None:
        super().__init__(env, name, lanes, seed, limit)
        self._position, self._velocity = np.zeros((2, lanes))

    def _lane_states(self) -> Part:
        return {"position": self._position, "velocity": self._velocity}

    def _load_lane_states(self, state: Part) -> None:
        self._position, self._velocity = state["position"], state["velocity"]

    def _load(self, lane: int) -> None:
        self._position[lane], self._velocity[lane] = self.env.state

    def _step(self, actions: Array) -> tuple[Array, Array, Array]:
        env, position, velocity = self.env, self._position, self._velocity
        velocity = velocity + ((actions - 1) * env.force + _cosine(3 * position) * (-env.gravity))
        velocity = np.clip(velocity, -env.max_speed, env.max_speed)
        position = np.clip(position + velocity, env.min_position, env.max_position)
        velocity[(position == env.min_position) & (velocity < 0)] = 0  # stopped by the wall
        self._position, self._velocity = position, velocity
        over = (position >= env.goal_position) & (velocity >= env.goal_velocity)
        return np.stack((position, velocity), axis=1), np.full(self.lanes, -1.0), over


class MountainCarContinuous(BatchLanes):
    """Lanes of MountainCarContinuous-v0. The state that a reset leaves is float64, the
    one that a step leaves is float32."""

    def __init__(self, env: Any, name: str, lanes: int, seed: int, limit: int) -> None:
        super().__init__(env, name, lanes, seed, limit)
        self._state = np.zeros((2, lanes), np.float32)
        self._fresh: dict[int, Array] = {}  # states of the lanes that have been reset and not stepped

    def _lane_states(self) -> Part:
        return {"state": self._state, "fresh": {str(lane): state for lane, state in self._fresh.items()}}

    def _load_lane_states(self, state: Part) -> None:
        self._state[:] = state["state"]
        self._fresh = {int(lane): fresh for lane, fresh in state["fresh"].items()}

    def _load(self, lane: int) -> None:
        self._fresh[lane] = self.env.state

    def _step(self, actions: Array) -> tuple[Array, Array, Array]:
        force = actions[:, 0]
        (position, velocity), over = self._move(self._state, force)
        if self._fresh:
            lanes = [*self._fresh]
            (position[lanes], velocity[lanes]), over[lanes] = self._move(
                np.stack([*self._fresh.values()], axis=1), force[lanes]
            )
            self._fresh.clear()
        self._state[:] = position, velocity
        reward = over * 100.0 - np.square(force.astype(np.float64)) * 0.1
        return self._state.T, reward, over

    def _move(self, state: Array, force: Array) -> tuple[tuple[Array, Array], Array]:
        """Return positions and velocities after a step from `state`, in its type, and
        which of them have arrived."""
        env, (position, velocity) = self.env, state
        pull = 0.0025 * _cosine(3 * position)
        velocity = velocity + (force * env.power - pull.astype(np.float32))
        velocity = np.clip(velocity, -env.max_speed, env.max_speed)
        position = np.clip(position + velocity, env.min_position, env.max_position)
        velocity[(position == env.min_position) & (velocity < 0)] = 0  # stopped by the wall
        return (position, velocity), (position >= env.goal_position) & (velocity >= env.goal_velocity)


class Acrobot(BatchLanes):
    """Lanes of Acrobot-v1."""

    def __init__(self, env: Any, name: str, lanes: int, seed: int, limit: int) -> None:
        super().__init__(env, name, lanes, seed, limit)
        self._state = np.zeros((4, lanes))  # two angles, two speeds
        self._torques = np.array(env.AVAIL_TORQUE)

    def _lane_states(self) -> Part:
        return {"state": self._state}

    def _load_lane_states(self, state: Part) -> None:
        self._state = state["state"]

    def _load(self, lane: int) -> None:
        self._state[:, lane] = self.env.state

    def _step(self, actions: Array) -> tuple[Array, Array, Array]:
        env, torque, dt = self.env, self._torques[actions], self.env.dt
        start = self._state  # a step of Runge and Kutta's method
        first = self._change(start, torque)
        second = self._change(start + dt / 2.0 * first, torque)
        third = self._change(start + dt / 2.0 * second, torque)
        fourth = self._change(start + dt * third, torque)
        state = start + dt / 6.0 * (first + 2 * second + 2 * third + fourth)
        angles, speeds = state[:2], state[2:]
        while (over := angles > np.pi).any():
            angles[over] -= 2 * np.pi
        while (under := angles < -np.pi).any():
            angles[under] += 2 * np.pi
        fastest = np.array([[env.MAX_VEL_1], [env.MAX_VEL_2]])
        np.clip(speeds, -fastest, fastest, out=speeds)
        self._state = state
        (cos1, cos2), (sin1, sin2) = np.cos(angles), np.sin(angles)
        high = -cos1 - np.cos(angles[1] + angles[0]) > 1.0
        return np.stack((cos1, sin1, cos2, sin2, *speeds), axis=1), np.where(high, 0.0, -1.0), high

    def _change(self, state: Array, torque: Array) -> Array:
        """Return what `state` changes by in a second, by the equations of Sutton and
        Barto's book."""
        env, (angle1, angle2, speed1, speed2) = self.env, state
        m1, m2, g = env.LINK_MASS_1, env.LINK_MASS_2, 9.8
        l1, c1, c2, inertia = env.LINK_LENGTH_1, env.LINK_COM_POS_1, env.LINK_COM_POS_2, env.LINK_MOI
        cos2, sin2 = np.cos(angle2), np.sin(angle2)
        d1 = m1 * c1**2 + m2 * (l1**2 + c2**2 + 2 * l1 * c2 * cos2) + inertia + inertia
        d2 = m2 * (c2**2 + l1 * c2 * cos2) + inertia
        phi2 = m2 * c2 * g * np.cos(angle1 + angle2 - np.pi / 2.0)
        phi1 = (
            -m2 * l1 * c2 * _square(speed2) * sin2
            - 2 * m2 * l1 * c2 * speed2 * speed1 * sin2
            + (m1 * c1 + m2 * l1) * g * np.cos(angle1 - np.pi / 2)
            + phi2
        )
        change2 = (torque + d2 / d1 * phi1 - m2 * l1 * c2 * _square(speed1) * sin2 - phi2) / (
            m2 * c2**2 + inertia - _square(d2) / d1
        )
        return np.stack((speed1, speed2, -(d2 * change2 + phi1) / d1, change2))
