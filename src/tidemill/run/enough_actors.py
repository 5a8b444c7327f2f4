"""Whether enough actors run: while fewer do than `ActorConfig.min_running` says, since
others have died, trainers pause."""

from collections.abc import Callable, Collection
from math import ceil

from tidemill.api.control_messages import Pause, Start, State
from tidemill.api.edges import group_of
from tidemill.api.experiment import Experiment
from tidemill.core.clock import awake
from tidemill.run.run_state import RunState
from tidemill.workers.actor_config import ActorConfig


class EnoughActors:
    """The groups of actors of which a share must run for trainers to go on.

    given_up: workers without whom the run goes on
    waits: function that is called while trainers pause: they are to make no progress
    """

    def __init__(
        self,
        experiment: Experiment,
        state: RunState,
        given_up: Collection[str],
        waits: Callable[[], None],
    ) -> None:
        self._state, self._given_up, self._waits = state, given_up, waits
        self._shares = {
            group: config.min_running
            for group, config in experiment.groups(ActorConfig).items()
            if config.min_running is not None
        }
        self._since: float | None = None  # when too few were found
        self._paused = set[tuple[str, int]]()  # trainers that were told to pause since, by life

    def look(self) -> None:
        """Have trainers pause, or go on. While the run is paused, or ends, they are told
        nothing: who goes on from a pause is looked at again."""
        state = self._state
        if not self._shares or state.phase != "running":
            self._paused.clear()
            return
        trainers = {name: member for name, member in state.members.items() if member.config.limited}
        if few := self._too_few():
            if self._since is None:
                self._since = awake()
                state.report.notify(f"{few}: trainers wait until they do")
            for name, member in trainers.items():
                if member.state is State.RUNNING and (name, member.life) not in self._paused:
                    self._paused.add((name, member.life))
                    member.send(Pause())
            self._waits()
        elif self._since is not None:
            state.report.notify(
                f"enough actors run again: trainers go on, after {awake() - self._since:.0f} s"
            )
            self._since = None
            self._paused.clear()
            for member in trainers.values():
                if member.runs:
                    member.send(Start())

    def _too_few(self) -> str:
        """Return of which group too few run, in words."""
        for group, share in self._shares.items():
            members = {
                name: member
                for name, member in self._state.members.items()
                if group_of(name) == group and name not in self._given_up
            }
            run = sum(m.runs and not (m.buried or m.reviving) for m in members.values())
            # at least one, unless all are given up
            if run < (least := ceil(max(share * len(members) - 1e-9, min(len(members), 1)))):
                of = f"{run} of {len(members)} actors of {group} run"
                return f"{of}, and {least} must (min_running = {share:g})"
        return ""
