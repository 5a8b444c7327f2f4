"""What workers report, and where it goes: to the run's records, conditions, cuts and
stalls."""

from typing import Any

from tidemill.api.control_messages import (
    ENDED,
    LONGEST_GROWN,
    EnvironmentStatistics,
    Episodes,
    Facts,
    Holding,
    Measured,
    MemoryGrown,
    Notice,
    Relay,
    RoundOver,
    SampleFacts,
    Saved,
    Saving,
    State,
    Status,
    Staying,
    Voided,
    WorkerStatistics,
    unpack_up,
)
from tidemill.api.experiment import Experiment
from tidemill.core.clock import awake
from tidemill.core.errors import RunError
from tidemill.core.memory import own_of
from tidemill.run.conditions import Conditions, each_to_its_limit
from tidemill.run.cuts import Cuts
from tidemill.run.member import Member
from tidemill.run.recorder import Recorder
from tidemill.run.run_state import RunState
from tidemill.run.stall_watch import Stalls
from tidemill.run.supervisor import Supervisor


class WorkerMessages:
    """The messages of a run's workers.

    takes_turns: workers take turns in one thread
    """

    def __init__(
        self,
        experiment: Experiment,
        takes_turns: bool,
        state: RunState,
        recorder: Recorder,
        conditions: Conditions,
        cuts: Cuts,
        stalls: Stalls,
        supervisor: Supervisor,
    ) -> None:
        self._state, self._recorder = state, recorder
        self._conditions, self._cuts, self._stalls = conditions, cuts, stalls
        self._supervisor = supervisor
        self._each_to_its_limit = each_to_its_limit(experiment, takes_turns)

    def read(self, name: str) -> bool:
        """Take all that a worker has reported. False where its link is gone, and nothing
        is left to read."""
        member = self._state.members[name]
        messages = member.link.receive()
        if messages is None:
            return False
        unread = (unpack_up(data, name) for data in messages)
        try:
            for message in unread:
                self.take(name, message)
        except BaseException:
            # that the worker has ended, say, is not lost behind what was raised
            states = [message.state for message in unread if isinstance(message, Status)]
            member.state = [member.state, *states][-1]
            raise
        return True

    def take(self, name: str, message: Any) -> None:
        """Take a message of a worker's. Raises `RunError` where it has failed."""
        member = self._state.members[name]
        member.heard, member.where, member.saving = awake(), "", isinstance(message, Saving)
        if isinstance(message, (Status, Episodes, Measured, Saving, Saved, Holding, Staying)):
            self._stalls.note(name)
        self._cuts.take(name, message)
        rounds = self._state.progress.rounds
        kept = rounds is not None and rounds.take(name, message)
        match message:
            case Saving():
                self._state.progress.keep(message.policy, message.updates)
                # a run that goes on from there keeps all records until there, and drops
                # the others
                self._recorder.record_rest()
            case Saved():
                self._state.progress.note_saved(message.policy, message.steps, message.updates)
            case Staying():
                member.awaits = message
            case Status():
                self._take_status(name, member, message)
            case WorkerStatistics():
                self._take_statistics(name, member, message)
            case Measured():
                self._conditions.note_measured(name, message)
            case Episodes() if not kept:
                self._conditions.count_episodes(name, message)
            case RoundOver():
                self._conditions.look_at_rounds()
            case EnvironmentStatistics():
                self._state.progress.environment_statistics.merge(message.values)
            case Relay(policy=policy):
                for other in self._state.members.values():
                    if any((port.stream, port.role) == (policy, "publish") for port in other.config.ports()):
                        other.send(message.message)
            case Voided():
                self._supervisor.voided(name, message.samples)
            case MemoryGrown(text=text):
                member.grows = text[:LONGEST_GROWN]
            case Notice():
                self._state.report.notify_for(name, message.text, message.steps)

    def _take_status(self, name: str, member: Member, message: Status) -> None:
        """Note what a worker has become. Raises `RunError` where it failed."""
        member.state = message.state
        self._supervisor.entered(name, message.state)
        if message.state is State.FAILED:
            if message.details:
                self._state.report.trace(name, message.details)
            meanwhile = self._state.report.meanwhile(name, message.waited)
            still = self._stalls.conditions_of(self._state.members) if message.waited else ""
            raise RunError(
                f"{name}{f' (life {member.life + 1})' * bool(member.life)}: "
                f"{self._state.report.mask(message.error)}{meanwhile}{still}"
            )
        if message.state is State.READY:
            member.needs = message.facts.memory
            member.unfilled = own_of(member.needs)  # until it tells
            self._merge(name, message.facts)
        if message.state is State.COMPLETED and not (self._state.reason or self._state.finishing):
            if not member.config.limited:
                said = f": {message.reason}" if message.reason else ""
                raise RunError(
                    f"{name} ended before it was told to{said}; only workers of a configuration with "
                    "limited = True may"
                )
            if not self._others_go_on():
                self._state.end(message.reason, reached=True)

    def _others_go_on(self) -> bool:
        """True while other policies go on to limits of their own."""
        return self._each_to_its_limit and any(
            member.config.limited and member.state not in ENDED for member in self._state.members.values()
        )

    def _take_statistics(self, name: str, member: Member, message: WorkerStatistics) -> None:
        """Count an update that a trainer has finished, or note what any worker tells of
        its time."""
        if message.update or message.progress != member.progress:
            self._stalls.note(name, update=message.update)
        if message.update:
            first = not member.update.update
            self._state.progress.count_update(name, message, self._state.members)
            self._recorder.record_when_due()
            if first:
                self._conditions.look_at_names()
            self._conditions.advance()
        else:
            member.note_statistics(message)

    def _merge(self, name: str, facts: Facts) -> None:
        for policy, spaces in facts.spaces.items():
            known = self._state.facts.spaces.setdefault(policy, spaces)
            if known != spaces:
                raise RunError(
                    f'{name} plays policy "{policy}" in spaces that differ from those of another worker; '
                    f"give each kind of agents a policy: {spaces} and {known}"
                )
        for stream, blocks in facts.samples.items():
            other = self._state.facts.samples.setdefault(stream, blocks)
            if other != blocks:
                fields = [
                    field
                    for field in SampleFacts.__struct_fields__
                    if getattr(blocks, field) != getattr(other, field)
                ]
                ours, theirs = (
                    ", ".join(f"{field} = {getattr(facts, field)}" for field in fields)
                    for facts in (blocks, other)
                )
                raise RunError(
                    f'{name} fills sample stream "{stream}" with samples of {ours}, another worker with '
                    f"samples of {theirs}; one stream has one shape of samples: give each kind of actors a "
                    "stream"
                )
