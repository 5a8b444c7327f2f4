"""What workers of later lives go on from, and are told, so that they are where the ones
before were."""

from collections.abc import Callable, Mapping, Sequence
from time import time

from msgspec.structs import replace

from tidemill.api.control_messages import ChangeSettings, Down, Exit, Hold, Pause
from tidemill.api.edges import group_of
from tidemill.core.clock import awake
from tidemill.run.conditions import Conditions
from tidemill.run.cuts import Cuts
from tidemill.run.events import Event
from tidemill.run.progress import Progress
from tidemill.run.recorder import Recorder
from tidemill.run.run_state import RunState
from tidemill.workers.cut_files import drains


class NextLives:
    """The next lives of a run's workers.

    undo: function that is called with the policies whose trainers have died, and with how
        far the others are; see `Controller`. None where no trainer has a next life
    """

    def __init__(
        self,
        exact: bool,
        state: RunState,
        recorder: Recorder,
        conditions: Conditions,
        cuts: Cuts,
        undo: Callable[[Sequence[str], Progress], Progress] | None,
    ) -> None:
        self._exact, self._state, self._recorder = exact, state, recorder
        self._conditions, self._cuts, self._undo = conditions, cuts, undo
        # by group: what was changed, in order, and not changed again
        self._changed = dict[str, list[ChangeSettings]]()

    def change(self, settings: Mapping[str, dict[str, float | None]]) -> None:
        """Tell workers of settings that have changed, by group: those that live, and
        later lives, too, since what they go on from may be of before."""
        self._state.progress.changes += 1
        orders = {group: ChangeSettings(new, self._state.progress.changes) for group, new in settings.items()}
        for group, order in orders.items():
            earlier = [
                ChangeSettings(left, before.number)
                for before in self._changed.get(group, ())
                if (left := {name: v for name, v in before.settings.items() if name not in order.settings})
            ]
            self._changed[group] = [*earlier, order]
        for name, member in self._state.members.items():
            if group_of(name) in orders:
                member.send(orders[group_of(name)])

    def orders(self, name: str) -> tuple[list[Down], list[Down]]:
        """Return what a worker of a later life is told before it starts, and after."""
        before: list[Down] = [*self._changed.get(group_of(name), ())]
        reason, config = self._state.reason, self._state.members[name].config
        held = self._exact and bool(reason) and not drains(config)  # see `Cuts.hold_for_good`
        if self._exact:
            before.append(Hold(on=held, cut=self._cuts.number))
        before += self._conditions.stages_for(name)
        after: list[Down] = [Pause()] if self._state.paused and not reason else []
        if reason and (config.limited or not held):
            after.append(Exit(reason))
        return before, after

    def go_back(self, policies: Sequence[str], died: str) -> None:
        """Go back to the newest checkpoints of `policies`, whose trainers begin a new
        life there, since the worker `died`."""
        assert self._undo is not None  # `Deaths.bury` has seen to that
        self._recorder.record_rest()
        before, others, member = Progress(), Progress(), self._state.members[died]
        gone = round(awake() - member.died_at, 3)
        event = Event(time(), "went back", died, member.life + 1, seconds=gone)
        for member in self._state.members.values():
            if member.update.update:
                (before if member.buried else others).count(member.update)
            if member.buried:
                member.forget_updates()
        point = self._undo(policies, others)
        if point.of_cut:
            self._state.go_on()
        self._cuts.forget()
        self._state.progress.go_back(point, others, policies)
        if self._state.progress.rounds is not None:
            self._conditions.look_at_rounds()
            self._conditions.tell_all_stages()
        undone = max(before.steps - point.steps, 0)
        names, why = " and ".join(policies), ""
        several = len(policies) > 1
        where = "go back to their newest checkpoints" if several else "goes back to its newest checkpoint"
        if not point.policy_updates:
            why = "there is no checkpoint to go back to yet"
            where = f"begin{'s' * (not several)} anew, since {why}"
        self._state.report.events.append(replace(event, policy=names, steps=undone, cause=why))
        self._state.report.notify_of_event(f"{names} {where}: {undone:,} env steps are undone")
