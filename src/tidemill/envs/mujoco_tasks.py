"""What Gymnasium's MuJoCo environments make of the state of a simulation, for all lanes
at once: what is observed, what is paid, and what ends an episode.

The numbers are Gymnasium's to the last bit, but for sines and norms, where another
processor may round differently. So sums go over one lane's numbers in a row, costs stay
float32 where actions are, and what Gymnasium computes by a dot product is one here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tidemill.core.schema import Array
from tidemill.envs.mujoco_lanes import Judgement, MujocoLanes, State


def _squares(values: Array) -> Array:
    """Return the sum of the squares of each lane's numbers."""
    sums: Array = np.add.reduce(np.square(values).reshape(len(values), -1), axis=1)
    return sums


def _norm(vectors: Array) -> Array:
    norms: Array = np.sqrt(np.vecdot(vectors, vectors))
    return norms


def _within(values: Array, bounds: Sequence[float | Array]) -> Array:
    inside: Array = (bounds[0] < values) & (values < bounds[1])
    return inside


def _clip(values: Array, low: float, high: float) -> Array:
    """Return what `np.clip` does, which with numbers for bounds takes four times as
    long."""
    clipped: Array = np.minimum(np.maximum(values, low), high)
    return clipped


def _finite(state: State) -> Array:
    """Return whose positions and velocities are all finite."""
    finite: Array = np.isfinite(np.concatenate((state["qpos"], state["qvel"]), axis=1)).all(axis=1)
    return finite


def _power(values: Array) -> Array:
    """Return squares as C's `pow` has them, which are not always those of a product."""
    return np.array([value**2 for value in values.tolist()])


# ---- paid for moving -------------------------------------------------------------------


class Mover(MujocoLanes):
    """A body that is paid for moving along x, and for being healthy, and pays for its
    actions."""

    def place(self, state: State) -> Array:
        """Return what is to move: x, and perhaps y."""
        return state["qpos"][:, :1]

    def healthy(self, state: State) -> Array | None:
        """Return who is healthy; None where nobody asks."""
        return None

    def cost(self, action: Array, state: State, parts: dict[str, Array]) -> Array:
        """Return what the step cost, and note it in `parts`."""
        parts["ctrl"] = self.given.ctrl_cost_weight * _squares(action)
        return parts["ctrl"]

    def judge(self, before: State, state: State, action: Array) -> Judgement:
        velocity = (self.place(state) - self.place(before)) / self.dt
        forward: Array = self.given.forward_reward_weight * velocity[:, 0]
        reward = forward
        parts = {"velocity": velocity, "forward": forward}
        ended: Array | None = None
        if (healthy := self.healthy(state)) is not None:
            leaves = self.given.terminate_when_unhealthy
            ended = np.logical_not(healthy) if leaves else None
            # in version 4 the step that ends an episode is paid as a healthy one
            alive = np.ones_like(healthy) if self.version == 4 and leaves else healthy
            parts["survive"] = alive * self.given.healthy_reward
            reward = forward + parts["survive"]
        return Judgement(reward - self.cost(action, state, parts), ended, parts)

    def observe(self, state: State) -> Sequence[Array]:
        return self._positions(state), state["qvel"]

    def infos(self, state: State, parts: Mapping[str, Array]) -> dict[str, Array]:
        return {"x_position": state["qpos"][:, 0], "x_velocity": parts["velocity"][:, 0]}


class HalfCheetahLanes(Mover):
    """A cheetah in a plane, which runs."""

    def infos(self, state: State, parts: Mapping[str, Array]) -> dict[str, Array]:
        forward = "reward_forward" if self.version == 5 else "reward_run"
        return {**super().infos(state, parts), forward: parts["forward"], "reward_ctrl": -parts["ctrl"]}


class Walker2dLanes(Mover):
    """Two legs in a plane, which walk and must not fall."""

    def healthy(self, state: State) -> Array:
        height, angle = state["qpos"][:, 1], state["qpos"][:, 2]
        return _within(height, self.given.healthy_z_range) & _within(angle, self.given.healthy_angle_range)

    def observe(self, state: State) -> Sequence[Array]:
        return self._positions(state), _clip(state["qvel"], -10, 10)

    def infos(self, state: State, parts: Mapping[str, Array]) -> dict[str, Array]:
        infos = super().infos(state, parts)
        if self.version == 5:
            infos["z_distance_from_origin"] = state["qpos"][:, 1] - self.env.init_qpos[1]
            infos["reward_forward"], infos["reward_ctrl"] = parts["forward"], -parts["ctrl"]
            infos["reward_survive"] = parts["survive"]
        return infos


class HopperLanes(Walker2dLanes):
    """One leg in a plane, which hops and must not fall."""

    def __init__(self, env: Any, name: str, lanes: int, seed: int, limit: int) -> None:
        super().__init__(env, name, lanes, seed, limit)
        height, angle, others = (
            getattr(self.given, f"healthy_{what}_range") for what in ("z", "angle", "state")
        )
        both = (max(angle[0], others[0]), min(angle[1], others[1]))
        rest = env.model.nq + env.model.nv - 3
        self._bounds = tuple(np.array((height, both, *[others] * rest), np.float64).T)

    def healthy(self, state: State) -> Array:
        values = np.concatenate((state["qpos"][:, 1:], state["qvel"]), axis=1)
        inside: Array = np.logical_and.reduce(_within(values, self._bounds), axis=1)
        return inside


class PlaneMover(Mover):
    """A body that moves along x and y."""

    left_out = 2

    def place(self, state: State) -> Array:
        return state["qpos"][:, :2]

    def infos(self, state: State, parts: Mapping[str, Array]) -> dict[str, Array]:
        # version 4 tells the place whose movement is paid, version 5 that of the joint
        place = state["qpos"][:, :2] if self.version == 5 else self.place(state)
        return {
            "x_position": place[:, 0],
            "y_position": place[:, 1],
            "distance_from_origin": _norm(place),
            "x_velocity": parts["velocity"][:, 0],
            "y_velocity": parts["velocity"][:, 1],
        }


class SwimmerLanes(PlaneMover):
    """Three links in water, which swim."""

    def infos(self, state: State, parts: Mapping[str, Array]) -> dict[str, Array]:
        told = {"reward_forward": parts["forward"]}
        if self.version == 4:
            told = {"reward_fwd": parts["forward"], "forward_reward": parts["forward"]}
        return {**super().infos(state, parts), **told, "reward_ctrl": -parts["ctrl"]}


class AntLanes(PlaneMover):
    """Four legs, which run and must not fall."""

    reads = ("xpos", "cfrc_ext")
    contact_forces = True
    constants: Mapping[str, Any] = {"forward_reward_weight": 1.0, "main_body": "torso"}

    def __init__(self, env: Any, name: str, lanes: int, seed: int, limit: int) -> None:
        super().__init__(env, name, lanes, seed, limit)
        self._main: int = env.model.body(self.given.main_body).id
        contacts = self.version == 5 or self.given.use_contact_forces
        self._paid = contacts  # for contacts
        self._seen = self.given.include_cfrc_ext_in_observation if self.version == 5 else contacts

    def place(self, state: State) -> Array:
        return state["xpos"][:, self._main, :2]

    def healthy(self, state: State) -> Array | None:
        height, (lowest, highest) = state["qpos"][:, 2], self.given.healthy_z_range
        upright: Array = (lowest <= height) & (height <= highest)
        return _finite(state) & upright

    def cost(self, action: Array, state: State, parts: dict[str, Array]) -> Array:
        cost = super().cost(action, state, parts)
        if not self._paid:
            return cost
        parts["contact"] = self.given.contact_cost_weight * _squares(self._forces(state))
        return cost + parts["contact"]

    def observe(self, state: State) -> Sequence[Array]:
        parts = super().observe(state)
        if not self._seen:
            return parts
        forces = self._forces(state)[:, 1 if self.version == 5 else 0 :]
        return *parts, forces.reshape(len(forces), -1)

    def infos(self, state: State, parts: Mapping[str, Array]) -> dict[str, Array]:
        infos = super().infos(state, parts)
        infos["reward_forward"], infos["reward_survive"] = parts["forward"], parts["survive"]
        infos["reward_ctrl"] = -parts["ctrl"]
        if self.version == 5:
            infos["reward_contact"] = -parts["contact"]
            return infos
        infos["forward_reward"] = parts["forward"]
        if self._paid:
            infos["reward_ctrl"] = -parts["contact"]  # as Gymnasium has it
        return infos

    def _forces(self, state: State) -> Array:
        return _clip(state["cfrc_ext"], *self.given.contact_force_range)


_HUMANOID = {
    f"include_{name}_in_observation": True for name in ("cinert", "cvel", "qfrc_actuator", "cfrc_ext")
}


class Body(MujocoLanes):
    """A humanoid, of which much is observed."""

    reads: tuple[str, ...] = ("cinert", "cvel", "qfrc_actuator", "cfrc_ext", "ctrl")
    contact_forces = True
    left_out = 2

    def observe(self, state: State) -> Sequence[Array]:
        # version 5 leaves out the world, and the joint that no actuator moves
        first = {"cinert": 1, "cvel": 1, "qfrc_actuator": 6, "cfrc_ext": 1} if self.version == 5 else {}
        parts = [self._positions(state), state["qvel"]]
        for name in ("cinert", "cvel", "qfrc_actuator", "cfrc_ext"):
            if getattr(self.given, f"include_{name}_in_observation") is True:
                values = state[name][:, first.get(name, 0) :]
                parts.append(values.reshape(len(values), -1))
        return parts

    def _impact(self, state: State, weight: float, bounds: tuple[float, float]) -> Array:
        return _clip(weight * _squares(state["cfrc_ext"]), *bounds)

    def _tendons(self, state: State) -> dict[str, Array]:
        return {"tendon_length": state["ten_length"], "tendon_velocity": state["ten_velocity"]}


class HumanoidLanes(Body, PlaneMover):
    """A humanoid that walks and must not fall."""

    reads = (*Body.reads, "xipos", "ten_length", "ten_velocity")
    constants: Mapping[str, Any] = _HUMANOID

    def __init__(self, env: Any, name: str, lanes: int, seed: int, limit: int) -> None:
        super().__init__(env, name, lanes, seed, limit)
        self._masses = self.env.model.body_mass.copy()

    def place(self, state: State) -> Array:
        centre: Array = np.einsum("b,lbj->lj", self._masses, state["xipos"]) / self._masses.sum()
        return centre[:, :2]

    def healthy(self, state: State) -> Array | None:
        return _within(state["qpos"][:, 2], self.given.healthy_z_range)

    def cost(self, action: Array, state: State, parts: dict[str, Array]) -> Array:
        cost = super().cost(state["ctrl"], state, parts)
        if self.version == 4:
            return cost
        parts["contact"] = self._impact(state, self.given.contact_cost_weight, self.given.contact_cost_range)
        return cost + parts["contact"]

    def infos(self, state: State, parts: Mapping[str, Array]) -> dict[str, Array]:
        infos = super().infos(state, parts)
        if self.version == 4:
            return infos | {
                "reward_linvel": parts["forward"],
                "reward_quadctrl": -parts["ctrl"],
                "reward_alive": parts["survive"],
                "forward_reward": parts["forward"],
            }
        return (infos | self._tendons(state)) | {
            "reward_forward": parts["forward"],
            "reward_ctrl": -parts["ctrl"],
            "reward_survive": parts["survive"],
            "reward_contact": -parts["contact"],
        }


class HumanoidStandupLanes(Body):
    """A humanoid that lies on the ground and is to stand up."""

    reads = (*Body.reads, "ten_length", "ten_velocity")
    constants: Mapping[str, Any] = {
        **_HUMANOID,
        "exclude_current_positions_from_observation": True,
        "uph_cost_weight": 1,
        "ctrl_cost_weight": 0.1,
        "impact_cost_weight": 0.5e-6,
        "impact_cost_range": (-np.inf, 10),
    }

    def judge(self, before: State, state: State, action: Array) -> Judgement:
        up = state["qpos"][:, 2] / self.env.model.opt.timestep
        control = self.given.ctrl_cost_weight * _squares(state["ctrl"])
        impact = self._impact(state, self.given.impact_cost_weight, self.given.impact_cost_range)
        parts = {"reward_linup": up, "reward_quadctrl": -control, "reward_impact": -impact}
        return Judgement(up - control - impact + 1, None, parts)

    def infos(self, state: State, parts: Mapping[str, Array]) -> dict[str, Array]:
        if self.version == 4:
            return dict(parts)
        qpos = state["qpos"]
        place = {
            "x_position": qpos[:, 0],
            "y_position": qpos[:, 1],
            "z_distance_from_origin": qpos[:, 2] - self.env.init_qpos[2],
        }
        return {**place, **self._tendons(state), **parts}


# ---- paid for staying up ---------------------------------------------------------------


class InvertedPendulumLanes(MujocoLanes):
    """A pole on a cart, which must not fall."""

    def observe(self, state: State) -> Sequence[Array]:
        return state["qpos"], state["qvel"]

    def judge(self, before: State, state: State, action: Array) -> Judgement:
        ended = ~_finite(state) | (np.abs(state["qpos"][:, 1]) > 0.2)
        survive = np.ones(len(ended)) if self.version == 4 else (~ended).astype(np.float64)
        return Judgement(survive, ended, {"reward_survive": survive} if self.version == 5 else {})


class InvertedDoublePendulumLanes(MujocoLanes):
    """Two poles on a cart, one on the other."""

    reads = ("site_xpos", "qfrc_constraint")
    constants: Mapping[str, Any] = {"healthy_reward": 10}

    def observe(self, state: State) -> Sequence[Array]:
        angles = state["qpos"][:, 1:].copy()
        forces = _clip(state["qfrc_constraint"], -10, 10)
        return (
            state["qpos"][:, :1],
            np.sin(angles),
            np.cos(angles),
            _clip(state["qvel"], -10, 10),
            forces[:, :1] if self.version == 5 else forces,
        )

    def judge(self, before: State, state: State, action: Array) -> Judgement:
        x, y = state["site_xpos"][:, 0, 0], state["site_xpos"][:, 0, 2]
        first, second = state["qvel"][:, 1], state["qvel"][:, 2]
        ended = y <= 1
        distance = 0.01 * _power(x) + _power(y - 2)
        velocity = 0.001 * _power(first) + 0.005 * _power(second)
        # in version 4 the step that ends an episode is paid, too
        alive = self.given.healthy_reward * (
            np.ones(len(ended)) if self.version == 4 else (~ended).astype(np.float64)
        )
        parts = {"reward_survive": alive, "distance_penalty": -distance, "velocity_penalty": -velocity}
        return Judgement(alive - distance - velocity, ended, parts)

    def infos(self, state: State, parts: Mapping[str, Array]) -> dict[str, Array]:
        return dict(parts) if self.version == 5 else {}


# ---- paid for being near ---------------------------------------------------------------


class ReacherLanes(MujocoLanes):
    """An arm in a plane, whose fingertip is to come near a target."""

    reads = ("xpos",)
    constants: Mapping[str, Any] = {"reward_dist_weight": 1, "reward_control_weight": 1}

    def __init__(self, env: Any, name: str, lanes: int, seed: int, limit: int) -> None:
        super().__init__(env, name, lanes, seed, limit)
        self._fingertip, self._target = (env.model.body(body).id for body in ("fingertip", "target"))

    def observe(self, state: State) -> Sequence[Array]:
        angles = state["qpos"][:, :2].copy()
        way = self._way(state)
        return (
            np.cos(angles),
            np.sin(angles),
            state["qpos"][:, 2:],
            state["qvel"][:, :2],
            way[:, :2] if self.version == 5 else way,
        )

    def judge(self, before: State, state: State, action: Array) -> Judgement:
        # version 4 pays for where the step began
        distance = -_norm(self._way(state if self.version == 5 else before)) * self.given.reward_dist_weight
        control = -_squares(action) * self.given.reward_control_weight
        return Judgement(distance + control, None, {"reward_dist": distance, "reward_ctrl": control})

    def _way(self, state: State) -> Array:
        return state["xpos"][:, self._fingertip] - state["xpos"][:, self._target]


class PusherLanes(MujocoLanes):
    """An arm that is to push a thing near a goal."""

    reads = ("xpos",)

    def __init__(self, env: Any, name: str, lanes: int, seed: int, limit: int) -> None:
        super().__init__(env, name, lanes, seed, limit)
        self._tip, self._object, self._goal = (
            env.model.body(body).id for body in ("tips_arm", "object", "goal")
        )

    def observe(self, state: State) -> Sequence[Array]:
        bodies = [state["xpos"][:, body] for body in (self._tip, self._object, self._goal)]
        return state["qpos"][:, :7], state["qvel"][:, :7], *bodies

    def judge(self, before: State, state: State, action: Array) -> Judgement:
        thing = state["xpos"][:, self._object]
        near = -_norm(thing - state["xpos"][:, self._tip]) * self.given.reward_near_weight
        distance = -_norm(thing - state["xpos"][:, self._goal]) * self.given.reward_dist_weight
        control = -_squares(action) * self.given.reward_control_weight
        parts = {"reward_dist": distance, "reward_ctrl": control, "reward_near": near}
        return Judgement(distance + control + near, None, parts)

    def infos(self, state: State, parts: Mapping[str, Array]) -> dict[str, Array]:
        return dict(parts)
