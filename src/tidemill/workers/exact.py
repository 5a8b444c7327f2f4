"""Exact runs: slots are served strictly in turn."""

from collections.abc import Iterator

from tidemill.streams.credits import Credits
from tidemill.workers.ring import EnvRing, EnvTarget
from tidemill.workers.stepwise import StepwiseAgent


class ExactTarget(EnvTarget):
    """A target of an exact run: it is served in its turn only, and acts (or resets) once all that the rows before owe has been trained."""

    turn = False

    def join(self, ring: "ExactRing", credits: Credits) -> None:
        """Say in which ring its turns come, and whose credits its steps need."""
        self._ring, self._credits = ring, credits

    @property
    def agent(self) -> StepwiseAgent:
        """Its one agent."""
        (agent,) = self._agents
        assert isinstance(agent, StepwiseAgent)
        return agent

    @property
    def away(self) -> bool:
        """It waits for its environment."""
        return self._stepping

    def step(self) -> None:
        self.agent.begun_in.fill(self._stage)
        super().step()
        self.turn = False

    def ready_to_observe(self) -> bool:
        return self.turn and super().ready_to_observe()

    def _agents_ready(self) -> bool:
        agent = self.agent
        if self._credits.received() != self._ring.sent() or not agent.is_ready():
            return False
        if agent.asked or not agent.acts:
            return True
        if not self._may_step(agent):
            return False
        agent.ask()
        return agent.is_ready()

    def _may_step(self, agent: StepwiseAgent) -> bool:
        """All samples are dealt with. Where there is no credit now, none comes (the run is about to end): what is in flight still has its turns."""
        granted = self._credits.take(agent.acts)
        self.turn = granted or not self._ring.in_flight()
        return granted


class ExactRing(EnvRing):
    """Targets strictly in turn: each turn ends when the target's next step (or reset) was sent, however long it takes, and begins with the answer."""

    targets: list[ExactTarget]  # type: ignore[assignment]

    def __init__(self, targets: list[ExactTarget], credits: Credits) -> None:
        super().__init__(targets)
        for target in targets:
            target.join(self, credits)
        targets[0].turn = True

    def __iter__(self) -> Iterator[ExactTarget]:
        target = self.targets[self._at]
        yield target
        if not target.turn:
            self._at = (self._at + 1) % len(self.targets)
            self.targets[self._at].turn = True

    def in_flight(self) -> bool:
        """True when a target waits for its environment."""
        return any(target.away for target in self.targets)

    def sent(self) -> int:
        """Return how many samples all targets have sent."""
        return sum(target.agent.sent for target in self.targets)
