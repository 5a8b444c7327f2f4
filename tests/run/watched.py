"""Runs that watch themselves, wherever their trainer and their actors are: what must hold
is asserted where it happens, so that a run in which it does not fails. The limiter is
looked at after every change of its counters, observations say of which slot, episode and
step they are, and each environment notes in a file what was asked of it."""

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import tidemill
from tidemill import (
    Experiment,
    Gymnasium,
    Limits,
    ReplayActors,
    ReplayTrainer,
    Slots,
)
from tidemill.api.algorithm import Algorithm, AlgorithmConfig, Sample
from tidemill.api.buffer import Demand, Received, ReplayBuffer
from tidemill.api.policy import Policy, PolicyConfig
from tidemill.api.spaces import Spaces
from tidemill.api.stream import SampleConsumer
from tidemill.core.schema import Array, Arrays, Field
from tidemill.replay.limiter import Limiter
from tidemill.replay.replay import Replay, UniformReplay
from tidemill.replay_training import ingest, trainer

KILL = "TIDEMILL_TEST_KILL"

# ---- the environment: all of it can be known from (copy, episode, step) ----------------


def length_of(copy: Any, episode: Any) -> Any:
    """Steps of an episode."""
    return 1 + (copy + 5 * episode) % 11


def reward_of(copy: Any, episode: Any, step: Any) -> Any:
    """The reward of the step that led there."""
    return copy % 97 + 100 * (episode % 100) + 10_000 * (step % 100)


def action_of(copy: Any, episode: Any, step: Any) -> Any:
    """The action that is chosen there."""
    return (copy + 5 * episode + 7 * step) % 3


class Coded(gymnasium.Env[Any, Any]):
    """Sees (copy, episode, step); a copy's number comes from its seed. Every second
    episode is cut, the others end.

    log: a file to which it adds a line for each step that it was asked for: "taken" or
        "lost", and the code of where that led
    every: so many steps after another (of all copies in this process) raise; 0: none does
    endless: no episode but a copy's first one comes to an end
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)
    copies = 16_777_199
    steps = 0

    def __init__(self, log: str, every: int = 0, endless: bool = False) -> None:
        self.log, self.every, self.endless = log, every, endless
        self.episode, self.wait = -1, np.random.default_rng()

    def _see(self) -> Any:
        return np.array([self.copy, self.episode, self.step_], np.float32)

    def _note(self, what: str) -> None:
        with open(self.log, "a") as file:
            file.write(f"{what} {self.copy} {self.episode} {self.step_}\n")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.copy = seed % self.copies
        self.episode, self.step_ = self.episode + 1, 0
        return self._see(), {}

    def step(self, action: Any) -> Any:
        wanted = action_of(self.copy, self.episode, self.step_)
        self.step_ += 1
        number = Coded.steps = Coded.steps + 1  # its own: others step while this one sleeps
        time.sleep(self.wait.exponential(0.0005))
        if action != wanted:
            self._note("mistaken")  # by the action of another slot, say
        if self.every and number % self.every == 0:
            self._note("lost")
            raise ConnectionError("lost")
        self._note("taken")
        over = self.step_ == length_of(self.copy, self.episode) and not (self.endless and self.episode > 0)
        terminal = self.episode % 2 == 0
        return (
            self._see(),
            reward_of(self.copy, self.episode, self.step_),
            over and terminal,
            over and not terminal,
            {},
        )


# ---- the policy remembers what it saw last ---------------------------------------------


def newest(observations: Array) -> Any:
    """Return the newest frames, as whole numbers [3, n], of observations [n, 3] or stacks
    of them [n, frames, 3], whose others are looked at."""
    codes = observations.astype(np.int64)
    if codes.ndim == 3:
        ages = codes[:, -1:, 2] - np.arange(codes.shape[1] - 1, -1, -1)
        assert (codes[:, :, 2] == np.maximum(ages, 0)).all() and (
            codes[:, :, :2] == codes[:, -1:, :2]
        ).all(), f"a stack is mixed: {codes}"
        codes = codes[:, -1]
    return codes.T


@dataclass(frozen=True, kw_only=True)
class Remembering(PolicyConfig):
    """Its state is the code that it saw last."""

    def answer(self, spaces: Spaces) -> dict[str, Field]:
        return {"action": Field((), "int64")}

    def state(self, spaces: Spaces) -> dict[str, Field]:
        return {"state.seen": Field((3,), "float64")}

    def build(self, spaces: Spaces, seed: int) -> Policy:
        return _Remembering()


class _Remembering(Policy):
    def __init__(self) -> None:
        self.w = np.zeros(1)

    def act(self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays) -> None:
        copy, episode, step = newest(observation["obs"])
        before = np.where(step > 0, (copy, episode, step - 1), 0).T
        assert (state["state.seen"] == before).all(), f"a state is mixed: {state['state.seen']}, not {before}"
        out["state.seen"][: len(step)] = np.array((copy, episode, step)).T
        out["action"][: len(step)] = action_of(copy, episode, step)

    def reseed(self, seed: int) -> None:
        """It draws nothing."""

    def parameters(self) -> Arrays:
        return {"w": self.w}

    def load(self, parameters: Mapping[str, Array], version: int) -> None:
        self.w[:], self.version = parameters["w"], version


# ---- the algorithm looks at its batches ------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Checking(AlgorithmConfig):
    """Each transition is of one slot and one episode. Each update adds 1 to the
    weights."""

    def measures(self) -> tuple[str, ...]:
        return ("transitions",)

    def build(self, policy: Policy, seed: int) -> Algorithm:
        return _Checking(policy)


class _Checking(Algorithm):
    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def update(self, samples: Sequence[Sample], steps: int) -> dict[str, float]:
        (sample,) = samples
        (copy, episode, step), (*then, last) = newest(sample["obs"][0]), newest(sample["next.obs"][0])
        steps, rewards = sample["steps"][0], sample["rewards"][0]
        n = np.arange(1, rewards.shape[1] + 1)
        assert (
            (np.array(then) == (copy, episode)).all() and (last - step == steps).all() and (steps >= 1).all()
        ), "a transition is mixed"
        assert (sample["action"][0] == action_of(copy, episode, step)).all(), "an action is of another step"
        wanted = np.where(
            n <= steps[:, None], reward_of(copy[:, None], episode[:, None], step[:, None] + n), 0
        )
        assert (rewards == wanted).all(), "rewards are of other steps"
        over = (last == length_of(copy, episode)) & (episode % 2 == 0)
        assert (sample["done"][0] <= over).all(), "an episode is over that is not"
        self.policy.parameters()["w"][:] += 1
        return {"transitions": float(len(steps))}

    def state(self) -> Arrays:
        return {"nothing": np.zeros(1)}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """It has none."""


# ---- limiter and memory: those that every run has, looked at ---------------------------


class Watched(Limiter):
    """Looks at its gates after every change of its counters, by the definitions of ratio,
    debt and slack alone."""

    looks = 0
    memory: "_Watching"

    def _note(self) -> None:
        super()._note()
        self.look()

    def start(self, most: int = 1) -> int:
        started = super().start(most)
        self.look()
        # debts begin when there is something to draw, no sooner, no later
        assert (self.counts.waived is not None) == Watched.memory.enough
        return started

    def sampleable(self, least: int = 0) -> None:
        before = self.counts
        super().sampleable(least)
        if before.waived is None:
            # C + I
            assert self.counts.waived == max(before.started - before.voided, before.committed + least)

    def look(self) -> None:
        n, ratio = self.counts, self.ratio
        flying, most = n.started - n.committed - n.voided, max(ceil(self.slack * ratio), ceil(ratio))

        def owed(steps: int) -> int:
            return (0 if n.waived is None else floor(max(0, steps - n.waived) * ratio)) - n.tasks

        # never ahead of what is stored, nor gathering further ahead than the slack
        assert flying >= 0 and 0 <= owed(n.committed) <= most
        assert owed(n.committed + flying) <= most  # nor will it be, once all comes
        assert flying or owed(n.committed) or owed(n.committed + 1) <= most  # something can happen
        Watched.looks += 1


@dataclass(frozen=True, kw_only=True)
class Watching(Replay):
    """Has the trainer's limiter be `Watched`, and looks at what may be drawn. It must
    have room for all rows of the run."""

    def build(self, source: SampleConsumer, demand: Demand) -> ReplayBuffer:
        ingest.Limiter = Watched
        trainer.DRAIN = 60.0  # what is in flight at the end comes, however busy the machine is
        Watched.memory = memory = _Watching(self, source, demand)
        return memory


class _Watching(UniformReplay):
    """Counts steps of each seat: `stored`, `lost`, of episodes that are `over`, and in
    the one that is `open` (-1: none is)."""

    enough = False
    """Whether there was ever enough to draw from."""
    _dying = False

    def _open(self, lanes: int, length: int, places: int) -> None:
        super()._open(lanes, length, places)
        self.counted = {
            name: np.full(lanes, start)
            for name, start in (("stored", 0), ("lost", 0), ("over", 0), ("open", -1))
        }

    def _take_in(self, sample: Sample) -> Received:
        received = super()._take_in(sample)
        seats = slice(
            int(self._first[sample.channel]), int(self._first[sample.channel]) + sample["version"].shape[1]
        )
        stored, lost, over, opened = (array[seats] for array in self.counted.values())
        for row in range(len(sample["version"])):
            stepped = sample["version"][row] >= 0
            begins = sample["on_reset"][row]
            voided = sample["voided"][row]
            stored += stepped
            lost += voided
            _close(over, opened, voided | begins)
            opened[begins] = 0
            opened[stepped] += 1
            _close(over, opened, sample["done"][row] | sample["truncated"][row])
        self._die_at(int(self.counted["stored"].sum()))
        self.enough |= self._drawable() >= self._config.warm_up
        assert self.sequences.count == self._drawable()
        return received

    def _die_at(self, steps: int) -> None:
        """Kill whom the environment says, once so many steps are stored, and so many
        seconds later; no more than a hundred other steps are stored meanwhile."""
        whom, at, later, *once = os.environ.get(KILL, "nobody -1 0").split()
        if steps >= int(at) >= 0 and not self._dying and not (once and Path("killed").exists()):
            self._dying = True
            Path("killed").touch()
            threading.Timer(
                float(later), os.kill, (os.getppid() if whom == "main" else os.getpid(), signal.SIGKILL)
            ).start()
        if self._dying and steps >= int(at) + 100:
            time.sleep(60)

    def _drawable(self) -> int:
        """Return how many transitions there should be: all steps of episodes that are
        over, and of open ones those whose windows are complete."""
        within = (
            0
            if self._config.whole_episodes
            else np.maximum(self.counted["open"] - self._config.steps + 1, 0).sum()
        )
        return int(self.counted["over"].sum() + within)

    def _draw(self, count: int, version: int) -> Any:
        places, weights = super()._draw(count, version)
        if self._config.whole_episodes:
            seats, rows = np.divmod(places, self.sequences.length)
            assert (rows < (self.sequences.heads - self.counted["open"] - 1)[seats]).all(), (
                "what was drawn is of an open episode"
            )
        return places, weights

    def _more_facts(self) -> dict[str, Any]:
        return {**{name: array.tolist() for name, array in self.counted.items()}, "looks": Watched.looks}

    def _take_facts(self, manifest: dict[str, Any]) -> None:
        for name, array in self.counted.items():
            array[:] = manifest[name]
        self.enough = self._drawable() >= self._config.warm_up


def _close(over: Array, opened: Array, ends: Array) -> None:
    """Where they end, count the open episodes' steps."""
    over[ends] += np.maximum(opened[ends], 0)
    opened[ends] = -1


def experiment(
    log: Path,
    steps: int = 150,
    slots: int = 3,
    actors: int = 1,
    every: int = 0,
    endless: bool = False,
    frames: int = 1,
    buffer: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> Experiment:
    """`slots` of each of `actors`."""
    coded = Gymnasium(
        make=f"{__file__}:Coded", kwargs={"log": str(log), "every": every, "endless": endless}, threads=1
    )
    memory = Watching(capacity=4000, frame_stack=frames, **{"warm_up": 10, **(buffer or {})})
    return Experiment(
        name="watched",
        policies={"policy": Remembering()},
        workers={
            "actor": ReplayActors(
                environment=Slots(environment=coded, backoff_s=0.001, failures=1000, window_steps=1000),
                lanes=1, ring=slots, count=actors, frame_stack=frames,
            ),
            "trainer": ReplayTrainer(
                algorithm=Checking(), buffer=memory, batch_size=8, database_seconds=None,
                max_no_progress_s=120.0, **{"ratio": "1/2", **trainer}
            ),
        },
        limits=Limits(steps=steps),
    )  # fmt: skip


def live(folder: Path, resume: bool) -> None:
    """A life of a run in processes, which is long, and has checkpoints all the time. A
    trainer that is killed "once" lives again, any other one ends it."""
    made = experiment(folder / "log", checkpoint_seconds=0.5, checkpoint_share=1, ratio=None)
    if not os.environ.get(KILL, "").endswith("once"):
        workers = {name: config.replace(restarts=None) for name, config in made.workers.items()}
        made = made.replace(workers=workers)
    runner = tidemill.AsyncTrainRunner(
        made, num_slots=3, ratio="3/2", num_iterations=5, training_steps=100, launch="processes"
    )
    runner.run(folder / "run", source=__file__, quiet=True, resume=resume)
