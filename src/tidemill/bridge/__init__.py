"""The simulator bridge: engines in any language join over shared memory
(docs/simulators.md)."""

from tidemill.bridge.protocol.specs import (
    ActionSpec,
    ActionTuple,
    BehaviorSpec,
    DecisionStep,
    DecisionSteps,
    ObservationSpec,
    TerminalStep,
    TerminalSteps,
)
from tidemill.bridge.trainer_side.simulator import Simulator
from tidemill.bridge.world_side.bridge import Bridge
from tidemill.bridge.world_side.world import ActionEvent, Request, World

__all__ = [
    "ActionEvent",
    "ActionSpec",
    "ActionTuple",
    "BehaviorSpec",
    "Bridge",
    "DecisionStep",
    "DecisionSteps",
    "ObservationSpec",
    "Request",
    "Simulator",
    "TerminalStep",
    "TerminalSteps",
    "World",
]
