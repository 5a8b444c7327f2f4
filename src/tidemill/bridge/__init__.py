"""The simulator bridge: engines in any language join over shared memory
(docs/simulators.md)."""

from tidemill.bridge.protocol.specs import ActionSpec as ActionSpec
from tidemill.bridge.protocol.specs import ActionTuple as ActionTuple
from tidemill.bridge.protocol.specs import BehaviorSpec as BehaviorSpec
from tidemill.bridge.protocol.specs import DecisionStep as DecisionStep
from tidemill.bridge.protocol.specs import DecisionSteps as DecisionSteps
from tidemill.bridge.protocol.specs import ObservationSpec as ObservationSpec
from tidemill.bridge.protocol.specs import TerminalStep as TerminalStep
from tidemill.bridge.protocol.specs import TerminalSteps as TerminalSteps
from tidemill.bridge.trainer_side.simulator import Simulator as Simulator
from tidemill.bridge.world_side.bridge import Bridge as Bridge
from tidemill.bridge.world_side.world import ActionEvent as ActionEvent
from tidemill.bridge.world_side.world import Request as Request
from tidemill.bridge.world_side.world import World as World
