"""Playing a recording into a simulator, to see whether it answers as it, or another,
did."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tidemill.bridge.kit.playback import RecordedSideChannels
from tidemill.bridge.kit.recording import Exchange, Recording
from tidemill.bridge.kit.trial_trainer import Program
from tidemill.bridge.protocol.specs import ActionTuple, BehaviorSpec, DecisionSteps, TerminalSteps
from tidemill.bridge.protocol.tables import QUERY
from tidemill.bridge.trainer_side.simulator import Simulator


def compare(
    recording: Recording, program: Program, tolerance: float = 0.0, tell: Callable[[str], None] = print
) -> int:
    """Play a recording into a simulator: its commands, side-channel data and actions.
    Return how many exchanges were answered as recorded.

    It ends with the first answer that is another; `tell` is called with what differs
    there. The order of rows does not count, nor do side channels. Numbers may differ by
    `tolerance`.
    """
    given = RecordedSideChannels()
    with Simulator(**program.settings(), channels=given) as simulator:
        last = recording[0]
        for number, exchange in enumerate(recording):
            if number:
                given.data = exchange.sent
                _act(recording, last, exchange, simulator)
                simulator.begin(exchange.command)
                simulator.finish()
            if exchange.command == QUERY:
                continue
            last = exchange
            if differences := _differences(recording, exchange, simulator, tolerance):
                for difference in differences:
                    tell(f"exchange {number}: {difference}")
                return number
    return len(recording)


def _act(recording: Recording, last: Exchange, exchange: Exchange, simulator: Simulator) -> None:
    """Set the recorded actions, for the same agents in the order in which they ask
    now."""
    for name in exchange.actions:
        recorded, now = recording.steps(last, name)[0], simulator.get_steps(name)[0]
        order = np.empty(len(now), np.intp)
        order[np.argsort(now.agent_id, kind="stable")] = np.argsort(recorded.agent_id, kind="stable")
        action = recording.actions(exchange, name, len(recorded))
        assert action.continuous is not None and action.discrete is not None
        simulator.set_actions(name, ActionTuple(action.continuous[order], action.discrete[order]))


def _differences(
    recording: Recording, exchange: Exchange, simulator: Simulator, tolerance: float
) -> list[str]:
    found = []
    specs = simulator.behavior_specs
    for name in exchange.steps:
        spec = recording.specs[name]
        if name not in specs:
            found.append(f'there is no group "{name}"')
        elif _bare(spec) != _bare(specs[name]):
            found.append(f'group "{name}" is another: it was {spec}, and is {specs[name]}')
        else:
            (asked, ended), (asks, ends) = recording.steps(exchange, name), simulator.get_steps(name)
            texts = (_difference(asked, asks, "ask", tolerance), _difference(ended, ends, "end", tolerance))
            found += [f'group "{name}": {text}' for text in texts if text]
    found += [
        f'there is a group "{name}", which was not there' for name in specs if name not in exchange.steps
    ]
    return found


def _bare(spec: BehaviorSpec) -> tuple[Any, ...]:
    """What a group is in every layout: without the properties of observations, which only
    layout 0.3.2 has."""
    return spec.max_agents, spec.action_spec, [one.shape for one in spec.observation_specs]


def _difference(
    old: DecisionSteps | TerminalSteps, new: DecisionSteps | TerminalSteps, what: str, tolerance: float
) -> str:
    """Return how two sets of rows differ, in whatever order; "" where they do not."""
    was, now = np.argsort(old.agent_id, kind="stable"), np.argsort(new.agent_id, kind="stable")
    if not np.array_equal(old.agent_id[was], new.agent_id[now]):
        return (
            f"the agents that {what} were {old.agent_id[was].tolist()}, and are {new.agent_id[now].tolist()}"
        )
    fields: list[tuple[str, Any, Any]] = [("reward", old.reward, new.reward)]
    fields += [
        (f"observation {k}", one, other) for k, (one, other) in enumerate(zip(old.obs, new.obs, strict=True))
    ]
    if isinstance(old, TerminalSteps) and isinstance(new, TerminalSteps):
        fields.append(("interrupted", old.interrupted, new.interrupted))
    elif isinstance(old, DecisionSteps) and isinstance(new, DecisionSteps) and old.forbidden is not None:
        fields.append(("masks", old.forbidden, new.forbidden))
    for field, one, other in fields:
        one, other = one[was].astype(np.float64), other[now].astype(np.float64)
        for row in np.flatnonzero((np.abs(one - other) > tolerance).any(axis=tuple(range(1, one.ndim)))):
            return (
                f"{field} of agent {old.agent_id[was[row]]} was {np.ravel(one[row])[:8].tolist()}, and is "
                f"{np.ravel(other[row])[:8].tolist()}"
            )
    return ""
