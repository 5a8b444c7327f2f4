"""Runs in which every row can be known again: each cell of an observation says in which
environment, episode and step it was seen, and by whom, rewards and all that a policy
answers follow from these, environments write down each step that they take, and trainers
each row that they train on. `found` compares the two, and `too_many` what nobody trained
on with what the run says is lost."""

import os
import random
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pettingzoo
from faulty import LOOK_EVERY, judged, trainers

from tidemill import AgentSpec, Buffers, Experiment, PettingZoo, PolicyWorkers
from tidemill.api.algorithm import Algorithm, AlgorithmConfig, DataParallel, Sample
from tidemill.api.policy import Policy, PolicyConfig, number_of
from tidemill.api.spaces import Spaces
from tidemill.core.schema import Array, Arrays, Field
from tidemill.run.events import Event

AGENTS = 2
ACTORS, BUFFERS, SLOTS = 2, 2, 2  # workers, and samples that a stream holds of each
LANES, STEPS = 4, 16  # of an actor, and rows of a sample
SAMPLE = LANES * STEPS  # env steps of one
OF_DEATH = 2 * SAMPLE + LANES
"""Most env steps that go with an actor: of each seat one unfinished sample, a slot that
is not full yet, and a tick."""
IN_FLIGHT = OF_DEATH + (SLOTS - 1) * SAMPLE
"""Most that an actor has as a run ends: samples that were sent are not trained on
then."""
FAILS = 400  # one of so many steps of an environment raises, on average
UPDATE = 0.01  # seconds that one takes
BEGUN, TAKEN, FAILED = b"|", b".", b"!"
UNDONE = ".undone"  # the end of a file's name


def steps_of(copy: Any, episode: Any) -> Any:
    """Steps of an episode."""
    return 3 + (copy + episode) % 29


def action_of(copy: Any, episode: Any, step: Any, agent: Any) -> Any:
    """The action that is chosen there."""
    return (copy + 5 * episode + 7 * step + agent) % 3


def value_of(copy: Any, episode: Any, step: Any, agent: Any) -> Any:
    """The value that is estimated there: of each cell another one. The logarithm of the
    action's probability is as far below 0."""
    return 1 + agent + AGENTS * (step % 32 + 32 * (episode % 128 + 128 * (copy % 512)))


def paid(copy: Any, episode: Any, step: Any, agent: Any) -> Any:
    """The reward of the step that led there."""
    return copy % 97 + 100 * (episode % 100) + 10_000 * (step % 100) + 1_000_000 * agent


class Cells(pettingzoo.ParallelEnv[int, Any, Any]):
    """Two agents; each sees which copy this is, its episode, its step and its own number.
    Every second episode is cut, the others end. Each reset and step is a byte in the
    copy's file in `folder`, which numbers it; "": it is not to be known again, and never
    fails. Others take the faults that lie in `faults`, too: "nan" and "hang"."""

    def __init__(self, folder: str, faults: str) -> None:
        self.metadata, self.possible_agents = {"name": "cells"}, list(range(AGENTS))
        seen, acts = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32), gymnasium.spaces.Discrete(3)
        self.observation_spaces = dict.fromkeys(self.possible_agents, seen)
        self.action_spaces = dict.fromkeys(self.possible_agents, acts)
        self._copy, self._episode, self._file = 0, -1, -1
        self._faults, self._left = faults, LOOK_EVERY
        self._draw = random.Random()
        while folder and self._file < 0:
            self._copy = len(os.listdir(folder)) + self._draw.randrange(3)
            with suppress(FileExistsError):
                flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND
                self._file = os.open(f"{folder}/{self._copy}", flags)

    def observation_space(self, agent: int) -> Any:
        return self.observation_spaces[agent]

    def action_space(self, agent: int) -> Any:
        return self.action_spaces[agent]

    def _see(self) -> Any:
        at = self._copy, self._episode, self._step
        return {agent: np.array([*at, agent], np.float32) for agent in self.possible_agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        self._episode, self._step = self._episode + 1, 0
        self._note(BEGUN)
        return self._see(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[int, Any]) -> Any:
        for agent, action in actions.items():
            wanted = action_of(self._copy, self._episode, self._step, agent)
            if action != wanted:
                raise SystemExit(f"{self._copy}: agent {agent} was to do {wanted}, not {action}")
        fault = self._fault() if self._file >= 0 else ""
        self._step += 1
        self._note(FAILED if fault else TAKEN)
        if fault == "raise":
            raise RuntimeError("as it is to")
        if fault == "hang":
            time.sleep(1e6)
        over, ends = self._step == steps_of(self._copy, self._episode), self._episode % 2 == 0
        at = self._copy, self._episode, self._step
        rewards = {agent: float(paid(*at, agent)) for agent in self.agents}
        done, cut = (dict.fromkeys(self.agents, over and said) for said in (ends, not ends))
        infos: dict[int, Any] = {agent: {} for agent in self.agents}
        self.agents = [] if over else self.agents
        seen = self._see()
        if fault == "nan":
            seen[AGENTS - 1][:] = np.nan
        return seen, rewards, done, cut, infos

    def _fault(self) -> str:
        """Return which fault this step is to have, "" for none."""
        self._left = (self._left or LOOK_EVERY) - 1
        for fault in () if self._left else os.listdir(self._faults):
            with suppress(FileNotFoundError):  # another lane was before this one
                os.unlink(f"{self._faults}/{fault}")
                return fault
        return "" if self._draw.randrange(FAILS) else "raise"

    def _note(self, what: bytes) -> None:
        if self._file >= 0:
            os.write(self._file, what)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@dataclass(frozen=True, kw_only=True)
class ByCell(PolicyConfig):
    """Its answers depend on the cell alone."""

    def answer(self, spaces: Spaces) -> dict[str, Field]:
        return {"action": Field((), "int64"), "log_prob": Field((), "float32"), "value": Field((), "float32")}

    def build(self, spaces: Spaces, seed: int) -> Policy:
        return _ByCell()


class _ByCell(Policy):
    def __init__(self) -> None:
        self.w = np.zeros(64)

    def act(self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays) -> None:
        cells = observation["obs"].astype(np.int64)
        out["action"][: len(cells)] = action_of(*cells.T)
        out["value"][: len(cells)] = value_of(*cells.T)
        out["log_prob"][: len(cells)] = -value_of(*cells.T)

    def parameters(self) -> Arrays:
        return {"w": self.w}

    def load(self, parameters: Mapping[str, Array], version: int) -> None:
        self.w[:], self.version = parameters["w"], version


@dataclass(frozen=True, kw_only=True)
class RowRecorder(AlgorithmConfig):
    """Each trainer writes down what each update has trained on, in `folder`. What one
    had that is done again, since it was undone, is kept as that."""

    folder: str

    def build(self, policy: Policy, seed: int) -> Algorithm:
        return _Recorder(self, policy)


class _Recorder(DataParallel):
    largest_sum = 8

    def __init__(self, config: RowRecorder, policy: Policy) -> None:
        self.config, self.policy = config, policy

    def parallel_update(
        self, samples: Sequence[Sample], steps: int
    ) -> Generator[Array, None, dict[str, float]]:
        worker = Path(os.readlink("/proc/self/fd/1")).stem
        file = Path(self.config.folder) / f"{number_of(self.policy.version)} {worker}.npz"
        rows = {f"{n}.{name}": sample[name] for n, sample in enumerate(samples) for name in _KEPT}
        np.savez(file.with_suffix(".half.npz"), **rows)
        if file.exists():
            file.rename(file.with_suffix(f".{time.time_ns()}{UNDONE}"))
        file.with_suffix(".half.npz").rename(file)
        time.sleep(UPDATE)
        weights, trainers = self.policy.parameters()["w"], np.ones(1)
        weights[...] += 1000  # what an update that is broken off must not leave behind
        yield trainers
        weights[...] -= 999
        return {"trainers": float(trainers[0])}

    def state(self) -> Arrays:
        return {"nothing": np.zeros(1)}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """It has none."""


_KEPT = ("obs", "action", "log_prob", "value", "reward", "done", "truncated", "version")


def _cells(workers: dict[str, Any], agent: AgentSpec, **settings: Any) -> Experiment:
    known, unknown = (
        PettingZoo(make=f"{__file__}:Cells", kwargs={"folder": folder, "faults": os.environ["FAULTS"]})
        for folder in (str(_folder("played")), "")
    )
    return judged(known, workers, agent, unknown, ByCell(), (LANES, 2), **settings)


def _folder(name: str) -> Path:
    folder = Path(os.environ["FAULTS"]).with_name(name)
    folder.mkdir(exist_ok=True)
    return folder


def rows_apart() -> Experiment:
    """Two actors, a policy worker, a trainer and an evaluation, in processes of their
    own."""
    trainer = trainers(RowRecorder(folder=str(_folder("trained"))))
    server = PolicyWorkers(stream="inference", restarts=1000)
    agent = AgentSpec(inference="inference", sample_steps=STEPS)
    return _cells({"server": server, "trainer": trainer}, agent)


def rows_equal() -> Experiment:
    """Two processes, each an actor and an equal trainer by turns, beside an
    evaluation."""
    trainer = trainers(RowRecorder(folder=str(_folder("trained"))), count=2)
    return _cells({"trainer": trainer}, AgentSpec(sample_steps=STEPS), together=("actor", "trainer"))


def rows_buffered() -> Experiment:
    """Two actors, two buffer workers behind them, a trainer and an evaluation, in
    processes of their own."""
    trainer = trainers(RowRecorder(folder=str(_folder("trained"))))
    buffers = Buffers(process=(), count=BUFFERS, restarts=1000)
    agent = AgentSpec(samples="gathered", sample_steps=STEPS)
    return _cells({"buffers": buffers, "trainer": trainer}, agent)


@dataclass
class Rows:
    """What became of the steps of a run; a step is one of an environment, with a row of
    each agent."""

    played: int = 0
    failed: int = 0
    trained: int = 0
    tails: int = 0
    """Steps that nobody trained on, nor on any later one of their environment: void with
    another lane's, in flight as the run ended, or begun by who died."""
    gaps: int = 0
    """Others that nobody trained on: undone, and not done again, or dropped."""
    undone: int = 0
    """Steps that were trained on in updates which do not count."""
    most: int = 0
    """Most steps that nobody may have trained on, as the run says (`too_many`)."""
    wrong: list[str] = field(default_factory=list)


def found(folder: Path, updates: int) -> Rows:
    """Compare what was trained in so many updates with what was played."""
    rows, trained = Rows(), Counter[tuple[int, ...]]()
    for file in (folder / "trained").iterdir():
        if ".half" in file.name:
            continue
        with np.load(file) as arrays:
            kept = dict(arrays)
        samples = [{name: kept[f"{n}.{name}"] for name in _KEPT} for n in range(len(kept) // len(_KEPT))]
        acted = [cell for sample in samples for cell in _acted(sample, file.name, rows.wrong)]
        if file.suffix == UNDONE or int(file.name.split()[0]) >= updates:
            rows.undone += len({cell[:-1] for cell in acted})
        else:
            trained.update(acted)
    twice = sum(count > 1 for count in trained.values())
    if twice:
        rows.wrong.append(f"{twice} rows were trained on twice")
    for file in (folder / "played").iterdir():
        _compare(int(file.name), file.read_bytes(), trained, rows)
    if trained:
        rows.wrong.append(f"{len(trained)} rows were trained on that nobody has played")
    return rows


def _acted(sample: dict[str, Any], where: str, wrong: list[str]) -> list[tuple[int, ...]]:
    """Return the cells of a sample's rows that somebody acted on, which must fit each
    other."""
    cells, final = sample["obs"].astype(np.int64), sample["done"] | sample["truncated"]
    acts = ~final[:-1]
    before, after = cells[:-1][acts], cells[1:][acts]
    fits = (
        (after - before == [0, 0, 1, 0]).all()
        and (sample["reward"][:-1][acts] == paid(*after.T).astype(np.float32)).all()
        and (sample["action"][:-1][acts] == action_of(*before.T)).all()
        and (sample["value"][:-1][acts] == value_of(*before.T)).all()
        and (sample["log_prob"][:-1][acts] == -value_of(*before.T)).all()
        and (sample["version"][:-1][acts] >= 0).all()
    )
    if not fits:
        wrong.append(f"{where} has rows that do not fit each other")
    return list(map(tuple, before.tolist()))


def _compare(copy: int, log: bytes, trained: Counter[tuple[int, ...]], rows: Rows) -> None:
    """Go through the steps of one environment, and take what was trained on of them out
    of `trained`."""
    episode, step, waiting = -1, 0, 0
    for byte in map(int.to_bytes, log):
        if byte == BEGUN:
            episode, step = episode + 1, 0
            continue
        rows.played += 1
        agents = sum(trained.pop((copy, episode, step, agent), 0) > 0 for agent in range(AGENTS))
        if byte == FAILED:
            rows.failed += 1
            if agents:
                rows.wrong.append(f"a step that failed was trained on: {copy}, {episode}, {step}")
        elif agents:
            rows.trained, rows.gaps, waiting = rows.trained + 1, rows.gaps + waiting, 0
            if agents < AGENTS:
                rows.wrong.append(f"of {copy}, {episode}, {step} only {agents} rows were trained on")
        else:
            waiting += 1
        step += 1
    rows.tails += waiting


def too_many(
    rows: Rows, events: Sequence[Event], told: Mapping[str, float], commands: int, buffers: int = 0
) -> list[str]:
    """Return in words what nobody trained on beyond what can be: with each step that
    failed those of the other lanes in its tick, with each actor that died what it had
    begun, what the run tells as lost or dropped, what was trained on in updates that do
    not count, and what was in flight as each of its `commands` ended, in so many
    `buffers`, too. Of `events` and of the newest record, `told`, the losses must agree,
    and be no more than that."""
    begun, samples, deaths = dict[tuple[str, int], int](), 0, 0
    for event in events:
        if event.what in ("died", "lost"):
            begun[event.worker, event.life] = event.steps  # the last word of each life
            samples += event.samples
            deaths += event.what == "died" and event.worker.startswith("actor")
    rows.most = (
        rows.failed * (LANES - 1)
        + deaths * OF_DEATH
        + (samples + int(told["dropped"])) * SAMPLE
        + rows.undone
        + commands * (ACTORS * IN_FLIGHT + buffers * SLOTS * SAMPLE)
    )
    wrong = []
    if (missing := rows.tails + rows.gaps) > rows.most:
        wrong.append(f"nobody trained on {missing} steps, and at most {rows.most} can be lost")
    if (steps := sum(begun.values())) > deaths * OF_DEATH:
        wrong.append(f"{steps} steps are told to be lost with {deaths} actors")
    if told.get("lost/steps", 0) > steps or told.get("lost/samples", 0) > samples:
        wrong.append(f"lost are {steps} steps and {samples} samples by the events, and more by the metrics")
    return wrong
