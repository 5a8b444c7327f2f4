"""The simulator bridge: engines in any language join over shared memory (docs/simulators.md)."""

from tidemill.bridge.bridge import Bridge
from tidemill.bridge.simulator import Simulator
from tidemill.bridge.specs import ActionSpec, ActionTuple, BehaviorSpec, DecisionSteps, ObservationSpec, TerminalSteps
from tidemill.bridge.world import ActionEvent, Request, World

__all__ = [
    "ActionEvent",
    "ActionSpec",
    "ActionTuple",
    "BehaviorSpec",
    "Bridge",
    "DecisionSteps",
    "ObservationSpec",
    "Request",
    "Simulator",
    "TerminalSteps",
    "World",
]
