"""Workers that fall silent while they run: one whose poll takes far longer than any
before is stuck, in its environment most likely. It is told with where its thread is, and
where an environment holds it for too long, its process counts as dead."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tidemill.api.control_messages import State
from tidemill.api.launcher import Call
from tidemill.core.clock import awake
from tidemill.run.progress import Member
from tidemill.workers.actor_config import ActorConfig

LEAST = 5.0  # seconds of silence that are told
FIRST = 30.0  # while a trainer of its process has finished no update: it may be a long one
TIMES = 5.0  # so many times the longest poll so far
# seconds that an environment may take by itself: at least, so many times the longest poll
# so far, and as long as so few polls are known
LEAST_DEADLINE, DEADLINE_TIMES, FIRST_DEADLINE, KNOWN_POLLS = 10.0, 20.0, 300.0, 100
ASK_EVERY = 10.0  # seconds: to ask for a stack takes a moment
SHOWN_CALLS = 6  # of a stack, the innermost ones
# who is called by a worker's poll where it is in its environment
_ENVIRONMENTS = tuple(f"/tidemill/{room}/" for room in ("envs", "bridge", "remote", "testing"))


class SilenceWatch:
    """A silence watch tells of each process that falls silent, once, and when it speaks
    again.

    processes: the workers that share each process or thread
    stack: function that returns where a worker's thread is (see `Launcher.stack`)
    condition: function that returns what keeps a worker still that its environment has
        nothing to do with, or ""
    tell: function that tells the user
    hangs: function that is called with a worker whose environment holds it for too long,
        and why it counts as gone
    """

    def __init__(
        self,
        processes: Sequence[Sequence[str]],
        stack: Callable[[str], Sequence[Call]],
        condition: Callable[[str], str],
        tell: Callable[[str], None],
        hangs: Callable[[str, str], None],
    ) -> None:
        self._processes, self._stack, self._condition = processes, stack, condition
        self._tell, self._hangs = tell, hangs
        self._silent: dict[str, float] = {}  # since when, by first worker
        self._asked: dict[str, float] = {}  # when for its stack, once its deadline was over

    def look(self, members: Mapping[str, Member]) -> None:
        """Look at all of them, as they are now."""
        for names in self._processes:
            group = {name: members[name] for name in names}
            running = all(m.state is State.RUNNING and not m.buried for m in group.values())
            if not running or any(member.saving for member in group.values()):
                self._silent.pop(names[0], None)
                continue
            self._look_at(names[0], group)

    def _look_at(self, first: str, group: Mapping[str, Member]) -> None:
        heard = max(member.heard for member in group.values())
        silent, whose = awake() - heard, ", ".join(group)
        if first in self._silent and heard > self._silent[first]:
            self._tell(f"{whose} speaks again, after {heard - self._silent.pop(first):.0f} s")
        longest = max(member.statistics.get("longest_poll", 0.0) for member in group.values())
        begins = any(m.config.limited and not m.update.update for m in group.values())
        if first not in self._silent and silent > max(FIRST if begins else LEAST, TIMES * longest):
            self._silent[first] = heard
            why = self._condition(first) or _words(self._stack(first))
            self._tell(
                f"{whose} is silent for {silent:.0f} s (no poll took longer than {longest:.2g} s before)"
                + (f": {why}" if why else "")
            )
        if awake() - self._asked.get(first, 0.0) < ASK_EVERY:
            return
        for name, member in group.items():
            config = member.config
            if isinstance(config, ActorConfig) and silent > deadline(
                config.deadline_s, longest, member.polls
            ):
                self._asked[first] = awake()
                calls = () if self._condition(name) else self._stack(name)
                if any(room in call.file for call in calls for room in _ENVIRONMENTS):
                    self._silent.pop(first, None)
                    why = f"its environment has not come back for {silent:.0f} s: {_words(calls)}"
                    self._hangs(name, why)
                    return


def deadline(given: float | None, longest: float, polls: int) -> float:
    """Return how many seconds an actor's environment may take, which were `given`, or
    follow from its longest poll so far, once so many polls are known."""
    if given is not None:
        return given
    return max(LEAST_DEADLINE, DEADLINE_TIMES * longest) if polls >= KNOWN_POLLS else FIRST_DEADLINE


def _words(calls: Sequence[Call]) -> str:
    return " ← ".join(f"{call.name} ({Path(call.file).name}:{call.line})" for call in calls[:SHOWN_CALLS])
