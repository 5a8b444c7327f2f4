"""The trainer's end: a simulator, its groups of agents, their steps and actions."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tidemill.bridge.specs import ActionTuple, BehaviorSpec, DecisionSteps, RawChannels, TerminalSteps


class Simulator:
    """A simulator at the other end of the bridge. Use it as a context manager, or call `close`.

        with Simulator("worlds/reach") as simulator:
            simulator.reset()
            decisions, terminals = simulator.get_steps("reach")
            simulator.set_actions("reach", ActionTuple(np.zeros((len(decisions), 2), np.float32)))
            simulator.step()

    path           the executable, started with `--memory-path PATH` after `arguments`; None: an editor or another process that joins by itself
    arguments      further arguments for it
    layout         "0", "0.3.0" or "0.3.2" (docs/simulator-memory.md)
    channels       stands for this end's side channels
    memory_path    without an executable: the file at which the two meet; None: "ml-agents/default" in the temporary directory
    start_seconds  how long the simulator may take until it first answers; None: any time
    deadline       how long it may take over any later step, in seconds; None: any time. Its death is noticed within a second, whatever this is
    environment    environment variables besides this process's own

    Errors: ConfigError (no such layout or executable, a second trainer at one file), SimulatorError (it ended at once, with its output's tail;
    another version), PeerLost (it died or closed), ImageError (what it wrote cannot be), EnvironmentFault (NaN or infinite observations or
    rewards), DeadlineError. After an error of these the simulator is closed and nothing stays behind. Wrong names, agents and actions raise
    SchemaError and change nothing.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        arguments: Sequence[str] = (),
        *,
        layout: str = "0",
        channels: RawChannels | None = None,
        memory_path: str | Path | None = None,
        start_seconds: float | None = 60.0,
        deadline: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        """Groups by name, in the order in which they appeared. Some simulators have none before the first `reset`, or more later on."""
        raise NotImplementedError

    @property
    def exchanges(self) -> int:
        """How often the turn was handed over and came back."""
        raise NotImplementedError

    def get_steps(self, name: str) -> tuple[DecisionSteps, TerminalSteps]:
        """Return what a group's agents saw, as copies. An agent that ended and began again within a step is in both."""
        raise NotImplementedError

    def set_actions(self, name: str, action: ActionTuple) -> None:
        """Set the actions of all agents of the group that ask for a decision, in the order of `DecisionSteps`. Without it they are zeros."""
        raise NotImplementedError

    def set_action_for_agent(self, name: str, agent_id: int, action: ActionTuple) -> None:
        """Set the action of one agent: arrays of one row, or of one dimension."""
        raise NotImplementedError

    def step(self) -> None:
        """Send the actions and wait for the next steps."""
        raise NotImplementedError

    def reset(self) -> None:
        """Begin all over: the next steps are the first of new episodes."""
        raise NotImplementedError

    def query(self) -> None:
        """Exchange side channels without a step (layout 0.3.2)."""
        raise NotImplementedError

    def close(self) -> None:
        """Tell the simulator, wait for its end (and end it after 5 s), and remove the files. Does nothing the second time."""
        raise NotImplementedError

    def __enter__(self) -> "Simulator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
