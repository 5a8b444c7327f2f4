"""What a trainer pushes into the run's parameter database: a version now and then.

A trainer pushes a version at its start, every `database_seconds` and at its end; or every
`database_updates`, before anybody gets to know that version: then which ones there are at
an update is the same in a run that is resumed. The tag ``latest`` moves with it; of the
others, the newest `database_versions` are kept, and all that are tagged. The header of a
version's file says what policy it is, so that exporting one is copying it. Where time
says when, weights are copied in the trainer's thread and written in another. A run that
goes on from a checkpoint removes the versions after it, tagged or not, and says which
tags that were: their numbers are going to mean other weights.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from time import monotonic

from tidemill.api.policy import Policy, number_of
from tidemill.core.clock import awake
from tidemill.core.errors import DatabaseAway, DatabaseError, TidemillError
from tidemill.core.schema import Array, Arrays
from tidemill.store.parameter_database import ParameterDatabase
from tidemill.workers.update_faults import not_finite

LAST_PUSH = 4.0  # seconds that the end of a run waits for the disk
LOOK = 0.1  # seconds between looks at the time meanwhile


class VersionWriter:
    """A version writer pushes versions of one policy.

    seconds: between two pushes
    updates: between two pushes, in place of seconds; None: by seconds
    keep: versions that are kept besides tagged ones; None: all
    text: goes into each version's file, see `ParameterDatabase.push`
    infinite: where its parameters may be infinite, by name
    tell: function that is called with what the user should read, in the thread of the
        caller
    """

    def __init__(
        self,
        folder: Path,
        policy: str,
        seconds: float,
        updates: int | None,
        keep: int | None,
        text: Mapping[str, str],
        infinite: Mapping[str, Array],
        tell: Callable[[str], None],
    ) -> None:
        self._database = ParameterDatabase(folder)
        self._policy = policy
        self._seconds, self._updates = seconds, updates
        self._keep = keep
        self._text, self._infinite = text, infinite
        self._tell = tell
        self._thread: Thread | None = None
        self._last, self._pushed = 0.0, -1
        self._failed, self._told, self._kept = "", False, False  # the last one
        self._rewinds_to: int | None = None  # before the next push

    def begin(self, policy: Policy, counters: Mapping[str, float], waits: bool = False) -> None:
        """Push the version from which the run goes on, and remove later ones that a run
        before it has left. Raises what `ParameterDatabase` does; `waits`: where that
        cannot be written now it is done with the next push."""
        number = number_of(policy.version)
        # the last one of the run before was pushed at whichever update that ended
        regular = number - number % (self._updates or 1)
        try:
            for notice in self._database.rewind(self._policy, regular):
                self._tell(notice)
        except DatabaseAway as error:
            if not waits:
                raise
            self._failed, self._rewinds_to = str(error), regular
            self._tell_failure()
            return
        self._last, self._pushed = monotonic(), policy.version if number == regular else -1
        if self._updates and any(each.version == regular for each in self._database.versions(self._policy)):
            return
        self._push(number, policy.parameters(), counters)
        self._pushed = policy.version

    @property
    def counts(self) -> bool:
        """True where updates say when a version is pushed: whoever needs it waits."""
        return bool(self._updates)

    def due(self, version: int) -> bool:
        """Return whether it is time to push version number `version`."""
        if self._updates:
            return version % self._updates == 0
        return monotonic() - self._last >= self._seconds and not (
            self._thread is not None and self._thread.is_alive()
        )

    def look(self, policy: Policy, counters: Mapping[str, float]) -> None:
        """Begin to push the policy's version when it is time, which costs a copy of its
        parameters; every so many updates push it."""
        if not self.due(number_of(policy.version)):
            return
        if self._updates:
            self._pushed = policy.version
            self._push_aside(number_of(policy.version), policy.parameters(), counters)
            self._tell_failure()
            return
        self._tell_failure()
        self._start(policy, counters)

    def end(self, policy: Policy, counters: Mapping[str, float]) -> None:
        """Push the last version, and wait until it is on the disk."""
        deadline = awake() + LAST_PUSH
        self.wait(LAST_PUSH)
        if policy.version != self._pushed and (self._thread is None or not self._thread.is_alive()):
            self._tell_failure()
            self._start(policy, counters)
            self.wait(deadline - awake())
        self._tell_failure()
        if self._thread is not None and self._thread.is_alive():
            self._tell(
                f"the disk of {self._database.folder} did not take the last version of policy {self._policy} "
                f"within {LAST_PUSH:g} s"
            )

    def wait(self, seconds: float) -> None:
        """Wait until what was begun is on the disk, so long at most. While this process
        is stopped nothing could be written, and that is no time."""
        until = awake() + seconds
        while self._thread is not None and self._thread.is_alive() and (left := until - awake()) > 0:
            self._thread.join(min(left, LOOK))

    def _start(self, policy: Policy, counters: Mapping[str, float]) -> None:
        self._last, self._pushed = monotonic(), policy.version
        copy = {name: array.copy() for name, array in policy.parameters().items()}
        self._thread = None
        thread = Thread(
            target=self._push_aside,
            args=(number_of(policy.version), copy, dict(counters)),
            name="push",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError:  # no more are allowed
            self._push_aside(number_of(policy.version), copy, counters)
        else:
            self._thread = thread

    def _push_aside(self, version: int, parameters: Arrays, counters: Mapping[str, float]) -> None:
        self._kept = False
        try:
            if wrong := not_finite(parameters, self._infinite):
                raise DatabaseError(
                    f"weight {wrong} of version {version} of policy {self._policy} is not finite"
                )
            self._push(version, parameters, counters)
            self._kept = True
        except Exception as error:  # told by the trainer: training goes on
            self._failed = (
                str(error) if isinstance(error, TidemillError) else f"{type(error).__name__}: {error}"
            )
            self._pushed = -1  # so that the end tries again

    def _push(self, version: int, parameters: Arrays, counters: Mapping[str, float]) -> None:
        if self._rewinds_to is not None:
            self._database.rewind(self._policy, self._rewinds_to)
            self._rewinds_to = None
        self._database.push(self._policy, version, parameters, counters, self._text)
        if self._keep is not None:
            self._database.collect(self._policy, self._keep)

    def _tell_failure(self) -> None:
        if self._failed:
            if not self._told:
                self._tell(f"a version was not kept: {self._failed}. It is told when they are kept again")
            self._told, self._failed = True, ""
        elif self._told and self._kept:
            self._tell("versions are kept again")
            self._told = False
