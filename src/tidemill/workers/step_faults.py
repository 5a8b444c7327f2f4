"""What an actor does about steps that its environments fail in: it writes down what led
to each, and what was told.

A record (``step-N``, see `fault_records`; N counts the actor's records) has up to three
files. ``row``: what the seats of the lane saw, and chose, when the step began, as
SPEC/NAME → [seats, ...]; nothing of a reset. ``told``: what the environment told, as
AGENT/NAME, raw; what is neither a number nor an array stands in the manifest as text.
``episode``: how the episode began and all actions in it, where they are kept (in runs
with `exact_resume`), so that it can be played again (`trained.replay_step`).
"""

import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from time import time
from typing import Any

import numpy as np

from tidemill.api.environment import Environment
from tidemill.api.plain_spaces import plain_spaces
from tidemill.api.worker import Context
from tidemill.core.clock import Clock, awake
from tidemill.core.cut import flatten
from tidemill.core.errors import (
    DeadlineError,
    EnvironmentAway,
    EnvironmentFault,
    EnvironmentHangs,
    Overtaken,
    TidemillError,
    fault_of,
    message_of,
    shortened,
)
from tidemill.core.forks import end_in_fork, forks
from tidemill.core.schema import Array, Arrays
from tidemill.envs.episode_replay import LONGEST
from tidemill.envs.lane_restarts import text_of
from tidemill.envs.space_values import brief
from tidemill.envs.wrapper import innermost
from tidemill.store.checkpoint import step_name
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.fault_records import FaultRecords
from tidemill.workers.service_order import ServiceOrder

MOST_A_MINUTE = 6
"""Records that an actor writes in a minute, so that an environment which fails in each
step neither fills the disk nor is slowed down."""
MINUTE = 60.0
MOST_BYTES = 16 << 20
"""Of what was told in a step; larger arrays are left out."""
MOST_PARTS, DEEPEST = 1000, 16  # of what an agent was told
TRACEBACK, LONGEST_KEY = 8000, 100  # characters
_NESTED = (Mapping, tuple, list, np.ndarray)


class StepFaults:
    """The faults of one actor's steps.

    clock: the actor's, by which the calls of environments are told apart
    tell: function that takes a text for the user
    left_out: faults that were not written down: there were too many in a minute, or they
        could not be
    """

    def __init__(
        self, context: Context, config: ActorConfig, clock: Clock, tell: Callable[[str], None]
    ) -> None:
        self._context, self._config, self._clock, self._tell = context, config, clock, tell
        instead = "Steps that environments fail in are counted, and not recorded"
        self._records = FaultRecords(context, config.lane_fault_records, tell, instead)
        self._lately = deque[float]()
        # of which environments and lanes something was written in the call under way,
        # and when that began
        self._noted, self._since = set[tuple[int, int | None]](), -1.0
        self._passed_over = 0  # since the last record
        self._told, self._first = False, 0  # record
        self.left_out = 0
        self._order: ServiceOrder | None = None
        self._forks = forks()

    def watch(
        self,
        order: ServiceOrder,
        environments: Sequence[Environment],
        groups: Sequence[Sequence[int]],
        keeps: bool,
    ) -> None:
        """Write down from now on what leads to faults in these `environments`. `groups`:
        the agents of each spec. `keeps`: open episodes are kept."""
        self._order, self._environments, self._groups = order, environments, groups
        self._keeps = keeps

    def stats(self) -> dict[str, float]:
        """Return how many faults were not written down, where there were any."""
        return {"lanes/unrecorded": float(self.left_out)} if self.left_out else {}

    def ends(self, target: int, fault: Exception) -> None:
        """Note the fault that an environment is about to end the actor with, unless it
        was noted when another environment was asked for in its place."""
        begun = self._clock.since == self._since
        if not (begun and any(target == noted for noted, _ in self._noted)):
            self.tell(self.note(target, fault))

    def note(self, target: int, fault: Exception) -> int:
        """Write down what led to a fault of an environment, whose state is still that in
        which it failed. Return the record's number; 0 where there is none."""
        end_in_fork(self._forks)  # before it writes, or closes what it shares
        if self._records.folder is None or self._order is None:
            return 0
        links = [*_links(fault)]
        if any(isinstance(link, EnvironmentAway) for link in links):
            return 0  # it is not there: nobody has told anything
        lanes = (link.lane for link in links if isinstance(link, EnvironmentFault))
        lane = next((lane for lane in lanes if lane is not None), None)
        if self._environments[target].lanes == 1:
            lane = 0
        if self._clock.since != self._since:
            self._noted.clear()
            self._since = self._clock.since
        if (target, lane) in self._noted:
            return 0  # what was made anew has failed in its reset
        self._noted.add((target, lane))
        now = awake()
        while self._lately and now - self._lately[0] > MINUTE:
            self._lately.popleft()
        number = 0
        if len(self._lately) < MOST_A_MINUTE:
            self._lately.append(now)
            try:
                number = self._write(target, lane, fault, links)
            except Overtaken:
                raise
            except BaseException as error:  # whatever an environment's own parts raise now
                fault_of(error)  # raises what is none
                self._tell(
                    f"what led to a fault is not recorded: {type(error).__name__}: {message_of(error)}"
                )
        if number:
            self._first = self._first or number
            self._passed_over = 0
        else:
            self._passed_over += 1
            self.left_out += 1
        return number

    def end(self) -> None:
        """Tell where the first record is, unless that was told."""
        self.tell(self._first)

    def tell(self, number: int) -> None:
        """Tell where the first record is; later ones, and 0, are none."""
        if number and not self._told:
            self._told = True
            self._tell(
                f"what led to that is recorded: tidemill replay-fault RUN {number} --worker "
                f"{self._context.name}. So is what leads to later faults: the newest "
                f"{self._config.lane_fault_records} records stay (lane_fault_records), and {MOST_A_MINUTE} a "
                "minute are written at most"
            )

    def _write(self, target: int, lane: int | None, fault: Exception, links: Sequence[BaseException]) -> int:
        """Return the number of the record, 0 where it cannot be written."""
        assert self._order is not None
        environment, number = self._environments[target], self._records.next_number()
        seats = self._order.seats(target, lane)
        resets = all(agent.finished[of].all() for agent, of in seats)
        told: Mapping[str, Mapping[str, Any]] = next(
            (link.told for link in links if isinstance(link, EnvironmentFault) and link.told), {}
        )
        arrays, texts = plain_told(told)
        row = Arrays()
        for spec, (agent, of) in enumerate(seats if not resets else ()):
            newest = agent.newest(of)
            if agent.in_place and len(of) == 1:
                newest = _before(newest, next(iter(told.values()), {}))
            row |= {f"{spec}/{name}": array for name, array in newest.items()}
        episode = None if lane is None else environment.episode(lane)
        began, known = (Arrays(), None) if episode is None else flatten(episode)
        facts = {
            "experiment": self._context.experiment.name,
            "cause": text_of(fault),
            "target": target,
            "lane": lane,
            "resets": resets,
            "hangs": any(isinstance(link, (EnvironmentHangs, DeadlineError)) for link in links),
            "time": time(),
            "life": self._context.life,
            "stage": seats[0][0].stage,
            "agents": self._agents(environment),
            "told": texts,
            "traceback": "" if told else _traceback(links),
            "episode": known,
            "why": "" if episode is not None else self._why(environment),
            "passed_over": self._passed_over,
        }
        files = {"row": row, "told": arrays, "episode": began}
        return number if self._records.write(step_name(number), files, facts) else 0

    def _agents(self, environment: Environment) -> list[dict[str, Any]]:
        """Return of each spec who plays, and the spaces of those as the environment has
        them: frames are not stacked."""
        agents = innermost(environment).agents
        return [
            {
                "match": spec.match,
                "policy": spec.policy,
                "names": [agents[index].name for index in group],
                "spaces": plain_spaces(agents[group[0]].spaces),
            }
            for spec, group in zip(self._config.agents, self._groups, strict=True)
        ]

    def _why(self, environment: Environment) -> str:
        """Return why an episode cannot be played again."""
        if not self._keeps:
            who = "only Actors of runs with exact_resume = True"
            return f"{who} keep how episodes begin, and what is done in them"
        kind = type(innermost(environment)).__name__
        return f"of this episode that was not kept: {kind} keeps none, or it has more than {LONGEST:,} steps"


def _links(fault: BaseException) -> Iterator[BaseException]:
    """Yield a fault, its cause, and so on."""
    link: BaseException | None = fault
    for _ in range(DEEPEST):
        if link is None:
            return
        yield link
        link = link.__cause__


def _traceback(links: Sequence[BaseException]) -> str:
    """Return the traceback of what an environment raised; "" where it raised nothing."""
    raised = next((link for link in reversed(links) if not isinstance(link, TidemillError)), None)
    lines = [] if raised is None else traceback.format_exception(raised)
    return "".join(shortened(line, TRACEBACK // 2) for line in lines)[-TRACEBACK:]


def _before(newest: Arrays, told: Mapping[str, Any]) -> Arrays:
    """Return the newest row of a seat, over which what was `told` may have been written:
    what is equal to that is what was told before, or left out where that is not known."""
    before, now = told.get("before"), told.get("obs")
    if isinstance(before, np.ndarray) and isinstance(now, np.ndarray) and np.shares_memory(before, now):
        before = None  # the environment has written over it, too
    here, kept = _leaves(told), Arrays()
    then = {} if before is None else _leaves({"obs": before})
    for name, seen in newest.items():
        if name not in here or not np.array_equal(seen[0], here[name].astype(seen.dtype), equal_nan=True):
            kept[name] = seen
        elif name in then:
            kept[name] = then[name].astype(seen.dtype)[None]
    return kept


def _leaves(said: Mapping[str, Any]) -> Arrays:
    return {name.removeprefix("0/"): array for name, array in plain_told({"": said})[0].items()}


def plain_told(told: Mapping[str, Mapping[str, Any]]) -> tuple[Arrays, dict[str, dict[str, str]]]:
    """Return what an environment told its agents as arrays, NUMBER/NAME, and what is none
    in words, by agent and name. The agents are numbered as in the latter. No more than
    `MOST_PARTS` of each are taken, and `MOST_BYTES` in all."""
    arrays, texts, left = Arrays(), {agent: dict[str, str]() for agent in told}, MOST_BYTES
    for number, (agent, values) in enumerate(told.items()):
        parts = (part for name, value in values.items() if name != "before" for part in _parts(name, value))
        for name, value in islice(parts, MOST_PARTS):
            array = _array(value)
            if array is not None and array.nbytes <= left:
                left -= array.nbytes
                arrays[f"{number}/{name}"] = array.astype(array.dtype.newbyteorder("="))
            elif array is not None:
                texts[agent][name] = f"{array.dtype} of shape {array.shape}, which is not kept"
            elif name.partition(".")[0] != "info" or isinstance(value, str):  # which may hold anything
                texts[agent][name] = _text(value)
    return arrays, texts


def _parts(name: str, value: Any, depth: int = DEEPEST) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of what was told, as spaces call them ("obs.camera", "obs.0")."""
    if isinstance(value, Mapping) and depth:
        for key, part in value.items():
            yield from _parts(f"{name}.{key!s:.{LONGEST_KEY}}", part, depth - 1)
    elif depth and (
        (isinstance(value, tuple) and any(isinstance(part, _NESTED) for part in value))
        or (isinstance(value, list) and _array(value) is None)
    ):
        for place, part in enumerate(value):
            yield from _parts(f"{name}.{place}", part, depth - 1)
    else:
        yield name, value


def _array(value: Any) -> Array | None:
    """Return what was told as an array of numbers, no copy; None for anything else."""
    with suppress(Exception):  # whatever another library's arrays raise
        array = np.asarray(value)
        if array.dtype.kind in "biuf" and array.dtype.itemsize <= 8:
            return array
    return None


def _text(value: Any) -> str:
    with suppress(Exception):  # by somebody else's __repr__
        return brief(value)
    return f"a {type(value).__name__}"
