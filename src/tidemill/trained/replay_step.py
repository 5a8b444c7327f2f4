"""Shows a step that an environment failed in, from its record (`workers.step_faults`):
what it told that cannot be, and what led to it. Where the record has the whole episode,
that is played again in an environment made anew.

Nothing in a record is trusted: it is arrays and plain data, and dtypes and shapes are
checked against the spaces of the environment before they are used. That is built by the
run's configuration, with the user's leave (`run.trust`) alone.
"""

import bdb
import pdb
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import sleep

import numpy as np

from tidemill.api.environment import Environment, Tick
from tidemill.api.experiment import Experiment
from tidemill.api.spaces import schema_of_space
from tidemill.core.clock import awake
from tidemill.core.errors import CheckpointError, DeadlineError, RunError, fault_of
from tidemill.core.schema import Array, Arrays, allocate
from tidemill.core.step_deadlines import FIRST
from tidemill.envs.lane_restarts import cause_of, text_of
from tidemill.envs.wrapper import innermost
from tidemill.run.folder import RunFolder
from tidemill.run.trust import Trust
from tidemill.trained.step_record import RowLine, StepRecord, first_wrong, lines_of, place_of, shown
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.agent_spec import match_agents

LOOK = 0.001  # seconds between two looks at an environment that is waited for


@dataclass(frozen=True)
class StepReport:
    """A step report tells what led to a step that an environment failed in.

    record: where it was recorded
    error: what was told then
    where: in which lane, when, and by which policy
    first: the first number that cannot be among those that the environment told; "" where
        it told none, or all of them can be
    lines: what the agents saw and chose
    traceback: of what the environment raised; "" where it raised nothing
    again: what came of playing the episode again, or why it was not
    same: whether the fault came again; None where it was not played again
    """

    record: Path
    error: str
    where: str
    first: str
    lines: list[RowLine]
    traceback: str
    again: str
    same: bool | None


def replay_step(folder: RunFolder, path: Path, debugger: bool, trust: Trust) -> StepReport:
    """Show the record at `path` of the run in `folder`, and play its episode again, where
    it is known. `debugger`: whether to stop in Python's debugger where the environment
    raised, or else where its step begins. Raises `CheckpointError`."""
    record = StepRecord(path)
    again, same = _play_again(folder, record, debugger, trust)
    first, lines = shown(first_wrong(record)), lines_of(record)
    return StepReport(path, record.cause, place_of(record), first, lines, record.traceback, again, same)


def _play_again(
    folder: RunFolder, record: StepRecord, debugger: bool, trust: Trust
) -> tuple[str, bool | None]:
    """Return what came of playing the episode again, in words, and whether it was the
    same fault; None: it was not played."""
    if record.episode is None:
        return f"it cannot be played again: {record.why}", None
    if record.hangs:
        return "it is not played again, since it would hang again", None
    try:
        experiment = folder.experiment(None, trust).experiment
    except RunError as error:  # without the user's leave, say
        return f"it is not played again: {error}", None
    config = experiment.workers.get(record.worker.rpartition("-")[0])
    if not isinstance(config, ActorConfig):
        raise CheckpointError(f"{record.path} is of {record.worker}, which is no actor of this run")
    made = config.environment
    if getattr(made, "threads", 0):
        made = made.replace(threads=0)  # which changes nothing but where a debugger can stop
    with closing(made.build(1, 0)) as environment:
        try:
            return _Again(environment, config, experiment, record, debugger).play()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as broken:
            raise CheckpointError(
                f"{record.path} does not hold what an episode of {type(made).__name__} needs: {broken!r}"
            ) from None


class _Again:
    """Plays the episode of a record again in an environment of one lane."""

    def __init__(
        self,
        environment: Environment,
        config: ActorConfig,
        experiment: Experiment,
        record: StepRecord,
        debugger: bool,
    ) -> None:
        assert record.episode is not None
        self._environment, self._record, self._debugger = environment, record, debugger
        groups = match_agents(environment.agents, config.agents)
        environment.bind(groups)
        spaces = [environment.agents[group[0]].spaces for group in groups]
        self._ticks = [
            Tick.allocate(each.observation, len(group), environment.info, environment.same_step)
            for each, group in zip(spaces, groups, strict=True)
        ]
        self._blank = [
            allocate(schema_of_space(each.action, "action"), (len(group),))
            for each, group in zip(spaces, groups, strict=True)
        ]
        for number, group in enumerate(groups if record.row else ()):
            if len(record.of(number, "finished")) != len(group):
                raise ValueError(f"rows that are not of {len(group)} agents")
        self._steps = int(record.episode["steps"])
        self._actions = [
            {name: self._checked(f"{number}:{name}", array) for name, array in blank.items()}
            for number, blank in enumerate(self._blank if self._steps else ())
        ]
        if experiment.curriculum:
            stage = int(record.of(0, "stage")[0]) if record.row else record.stage
            environment.enter_stage(experiment.curriculum[stage].options)
        environment.begin_like(record.episode)

    def _checked(self, name: str, one: Array) -> Array:
        """Return the actions of one group; `one` is what those of a step are like."""
        assert self._record.episode is not None
        found: Array = self._record.episode["actions"][name]
        if found.dtype != one.dtype or found.shape != (self._steps, *one.shape):
            raise ValueError(f"actions {found.dtype} {found.shape}")
        return found

    def play(self) -> tuple[str, bool | None]:
        """See `_play_again`."""
        steps, at = self._steps, 0
        text = f"played again from the same beginning{f' with the same {steps:,} actions' * bool(steps)}"
        try:
            self._tick(self._blank, True, not steps)
            for at in range(1, steps + 1):
                if at == steps and (other := self._other()):
                    return f"{text}, it is another episode: {other} was another before its last step", False
                actions = [{name: array[at - 1] for name, array in each.items()} for each in self._actions]
                self._tick(actions, False, at == steps)
                if at < steps and all((tick.done | tick.truncated).all() for tick in self._ticks):
                    return f"{text}, it is another episode: it ended after {at:,} of them", False
        except bdb.BdbQuit:
            return "the debugger was left", None
        except BaseException as fault:
            told, before = text_of(fault_of(fault)), self._record.cause
            if at < steps:
                return f"{text}, it fails sooner, in step {at:,}: {told}", False
            if cause_of(told) != cause_of(before):
                return f"{text}, it fails likewise, by another fault: {told}", False
            return f"{text}, it comes again", True
        return f"{text}, it does not come again: the fault follows from something else, too", False

    def _tick(self, actions: Sequence[Arrays], resets: bool, last: bool) -> None:
        """Play one tick; with the debugger, in the `last` one."""

        def tick() -> None:
            self._environment.send(actions, np.array([resets]))
            until = awake() + FIRST
            while not self._environment.ready():
                if awake() > until:
                    raise DeadlineError(f"the environment has not answered for {FIRST:g} s")
                sleep(LOOK)
            self._environment.recv(self._ticks)

        if not (last and self._debugger):
            tick()
        elif not self._record.traceback:
            _stop_in(self._environment, tick)
        else:
            try:
                tick()
            except BaseException as fault:
                cause: BaseException = fault_of(fault)
                while cause.__cause__ is not None:
                    cause = cause.__cause__
                print("The debugger is where the environment raised; its own frames are further down (d).")
                pdb.post_mortem(cause.__traceback__)
                raise

    def _other(self) -> str:
        """Return which observation is another one now than where the step began; "" for
        none. Stacks of frames are not compared."""
        for number, tick in enumerate(self._ticks if self._record.row else ()):
            here = tick.present & ~self._record.of(number, "finished").astype(np.bool_)
            for name, seen in tick.observation.items():
                then = self._record.row.get(f"{number}/{name}")
                if then is None or then.shape != seen.shape:
                    continue
                if then[here].tobytes() != seen[here].tobytes():
                    return name
        return ""


def _stop_in(environment: Environment, tick: Callable[[], None]) -> None:
    """Play a tick in the debugger, which stops where the environment's own step
    begins."""
    own = getattr(innermost(environment), "envs", [environment])[0]
    code = getattr(getattr(type(getattr(own, "unwrapped", own)), "step", None), "__code__", None)
    debugger = pdb.Pdb(nosigint=True)
    if code is not None:
        debugger.set_break(code.co_filename, code.co_firstlineno, funcname=code.co_name)
        debugger.rcLines.append("continue")
    print("The debugger is before the last step; what it tells is not raised by the environment itself.")
    debugger.runcall(tick)
