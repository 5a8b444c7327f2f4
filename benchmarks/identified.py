"""Runs in which every row can be known again: each cell of an observation says in which
environment, episode and step it was seen, and by whom, rewards and actions follow from
these, environments write down each step that they take, and trainers each row that they
train on. `found` compares the two."""

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
from faulty import judged, trainers

from tidemill import AgentSpec, Experiment, PettingZoo, PolicyWorkers
from tidemill.api.algorithm import Algorithm, AlgorithmConfig, DataParallel, Sample
from tidemill.api.policy import Policy, PolicyConfig, number_of
from tidemill.api.spaces import Spaces
from tidemill.core.schema import Array, Arrays, Field

AGENTS = 2
LANES, STEPS = 4, 16  # of an actor, and rows of a sample
FAILS = 400  # one of so many steps of an environment raises, on average
UPDATE = 0.01  # seconds that one takes
BEGUN, TAKEN, FAILED = b"|", b".", b"!"


def steps_of(copy: Any, episode: Any) -> Any:
    """Steps of an episode."""
    return 3 + (copy + episode) % 29


def action_of(copy: Any, episode: Any, step: Any, agent: Any) -> Any:
    """The action that is chosen there."""
    return (copy + 5 * episode + 7 * step + agent) % 3


def paid(copy: Any, episode: Any, step: Any, agent: Any) -> Any:
    """The reward of the step that led there."""
    return copy % 97 + 100 * (episode % 100) + 10_000 * (step % 100) + 1_000_000 * agent


class Cells(pettingzoo.ParallelEnv[int, Any, Any]):
    """Two agents; each sees which copy this is, its episode, its step and its own number.
    Every second episode is cut, the others end. Each reset and step is a byte in the
    copy's file in `folder`, which numbers it; "": it is not to be known again, and never
    fails."""

    def __init__(self, folder: str) -> None:
        self.metadata, self.possible_agents = {"name": "cells"}, list(range(AGENTS))
        seen, acts = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32), gymnasium.spaces.Discrete(3)
        self.observation_spaces = dict.fromkeys(self.possible_agents, seen)
        self.action_spaces = dict.fromkeys(self.possible_agents, acts)
        self._copy, self._episode, self._file = 0, -1, -1
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
        fails = self._file >= 0 and self._draw.randrange(FAILS) == 0
        self._step += 1
        self._note(FAILED if fails else TAKEN)
        if fails:
            raise RuntimeError("as it is to")
        over, ends = self._step == steps_of(self._copy, self._episode), self._episode % 2 == 0
        at = self._copy, self._episode, self._step
        rewards = {agent: float(paid(*at, agent)) for agent in self.agents}
        done, cut = (dict.fromkeys(self.agents, over and said) for said in (ends, not ends))
        infos: dict[int, Any] = {agent: {} for agent in self.agents}
        self.agents = [] if over else self.agents
        return self._see(), rewards, done, cut, infos

    def _note(self, what: bytes) -> None:
        if self._file >= 0:
            os.write(self._file, what)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@dataclass(frozen=True, kw_only=True)
class ByCell(PolicyConfig):
    """Its actions depend on the cell alone."""

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
        out["log_prob"][: len(cells)] = out["value"][: len(cells)] = 0

    def parameters(self) -> Arrays:
        return {"w": self.w}

    def load(self, parameters: Mapping[str, Array], version: int) -> None:
        self.w[:], self.version = parameters["w"], version


@dataclass(frozen=True, kw_only=True)
class RowRecorder(AlgorithmConfig):
    """Each trainer writes down what each update has trained on, in `folder`. One that is
    done again, since it was undone, is written over."""

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


_KEPT = ("obs", "action", "reward", "done", "truncated", "version")


def _cells(workers: dict[str, Any], agent: AgentSpec, **settings: Any) -> Experiment:
    told, unknown = (
        PettingZoo(make=f"{__file__}:Cells", kwargs={"folder": str(_folder("played"))}),
        {"folder": ""},
    )
    judged_in = PettingZoo(make=f"{__file__}:Cells", kwargs=unknown)
    return judged(told, workers, agent, judged_in, ByCell(), (LANES, 2), **settings)


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
    wrong: list[str] = field(default_factory=list)


def found(folder: Path, updates: int) -> Rows:
    """Compare what was trained in so many updates with what was played."""
    rows, trained = Rows(), Counter[tuple[int, ...]]()
    for file in (folder / "trained").glob("*.npz"):
        if ".half" not in file.name and int(file.name.split()[0]) < updates:
            with np.load(file) as arrays:
                kept = dict(arrays)
            for number in range(len(kept) // len(_KEPT)):
                sample = {name: kept[f"{number}.{name}"] for name in _KEPT}
                trained.update(_acted(sample, file.name, rows.wrong))
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
