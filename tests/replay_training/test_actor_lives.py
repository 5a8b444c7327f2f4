"""The trainer of a replay memory and its actors, which die and live again: real workers,
which take turns here."""

from collections import deque
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tests.run.environments import Numbered
from tests.run.watching import EXPERIMENTS

from tidemill import Gymnasium, Replay
from tidemill.api.control_messages import Facts, State, Status, unpack_up
from tidemill.api.transport import Handle
from tidemill.api.worker import Context
from tidemill.core.clock import awake
from tidemill.core.errors import NoProgress
from tidemill.core.memory import LocalSegment
from tidemill.core.user_code_loading import load_file
from tidemill.replay.limiter import Limiter
from tidemill.replay.replay import UniformReplay
from tidemill.replay_training.trainer import ReplayTrainerWorker
from tidemill.store.checkpoint import checkpoints
from tidemill.transports.local import LocalBell, LocalLink
from tidemill.transports.slots import SlotEndpoints
from tidemill.workers import checkpoint_pace
from tidemill.workers.actor import ActorWorker
from tidemill.workers.base import Worker

experiments = load_file(EXPERIMENTS, "test")
ENVIRONMENT = f"{EXPERIMENTS.with_name('environments.py')}:Numbered"


class Lives:
    """Actors of `ring` targets of `lanes`, and the trainer of a replay memory, which has
    `settings` besides, and its checkpoints in `folder`."""

    def __init__(
        self, actors: int, ring: int = 1, lanes: int = 1, folder: Path | None = None, **settings: object
    ) -> None:
        made = experiments.from_memory(Gymnasium(make=ENVIRONMENT))
        gathers, trains = made.workers["actor"], made.workers["trainer"]
        algorithm = trains.algorithm.replace(seconds=0.0)
        workers = {
            "actor": gathers.replace(count=actors, ring=ring, lanes=lanes),
            "trainer": trains.replace(algorithm=algorithm, **settings),
        }
        self.experiment = made.replace(workers=workers)
        self._segments = {edge.name: LocalSegment() for edge in self.experiment.edges()}
        self._renewed = deque[LocalSegment]()
        self._lives = dict.fromkeys([*(f"actor-{number}" for number in range(actors)), "trainer-0"], 0)
        self._folder = None if folder is None else str(folder)
        self.actors = dict[str, ActorWorker]()
        self._facts = [self.make(f"actor-{number}") for number in range(actors)]
        self.train()
        for actor in self.actors.values():
            actor.start()

    def _context(self, name: str, life: int) -> tuple[Context, LocalLink]:
        ours, runners = LocalLink.pair(LocalBell(), LocalBell())
        edges = {
            edge.name: (self._segments[edge.name], [LocalBell() for _ in edge.targets])
            for edge in self.experiment.edges()
            if name in (edge.source, *edge.targets)
        }
        ends = SlotEndpoints(ours.bell, ours, edges, lambda _: self._renewed.popleft())
        config = dict(self.experiment.members())[name]
        folder = self._folder if name == "trainer-0" else None
        return Context(self.experiment, name, config, ends, folder, life=life), runners

    def train(self) -> None:
        """Have the trainer begin, where its newest checkpoint is."""
        context, _ = self._context("trainer-0", self._lives["trainer-0"])
        self.trainer = ReplayTrainerWorker(context, context.config)  # type: ignore[arg-type]
        self.trainer.configure(self._facts[0])
        self.trainer.start()
        self.trains = True

    def make(self, name: str) -> Facts:
        """Have an actor make its environment, and offer samples."""
        context, runners = self._context(name, self._lives[name])
        actor = self.actors[name] = ActorWorker(context, context.config)  # type: ignore[arg-type]
        while not (told := [unpack_up(data) for data in runners.receive() or ()]):
            actor.configure(Facts())
        (status,) = told
        assert isinstance(status, Status) and status.facts is not None
        return status.facts

    def die(self, name: str) -> None:
        """Have a worker die. Its next life begins, and has made nothing yet."""
        if name in self.actors:
            self.actors.pop(name)._close()
        else:
            self.trains = False
        self._lives[name] += 1
        anew = [edge for edge in self.experiment.edges() if name in edge.begins_with]
        self._segments |= {edge.name: LocalSegment() for edge in anew}
        living: dict[str, Worker] = {**self.actors}
        if self.trains:
            living["trainer-0"] = self.trainer
        for other, worker in living.items():
            ends = [edge.name for edge in anew if other in (edge.source, *edge.targets)]
            self._renewed.extend(self._segments[edge] for edge in ends)
            worker.context.endpoints.renew(dict.fromkeys(ends, Handle()))

    def turn(self) -> None:
        """Give all that live a turn."""
        for worker in (*[self.trainer] * self.trains, *self.actors.values()):
            worker.run_once()
            assert not worker.ended

    def gather(self, steps: int) -> None:
        """Give turns until so many steps are stored, and what they owe is trained."""
        counts = self.trainer.limiter.counts
        for _ in range(50 * steps):
            if counts.committed >= steps and not self.trainer.limiter.owed:
                return
            self.turn()
            counts = self.trainer.limiter.counts
        raise AssertionError(f"all stand still: {counts}")


def test_who_dies_as_open_episodes_are_awaited_goes_on_in_the_next_iteration() -> None:
    lives = Lives(1, iteration_steps=2, finish_episodes=True)
    lives.gather(2)
    while not lives.trainer._phases.finishing:
        lives.turn()
    lives.die("actor-0")
    lives.make("actor-0")
    lives.turn()  # its new life is known before it takes a step
    lives.actors["actor-0"].start()
    lives.gather(20)


def test_however_long_an_actor_makes_its_environments_anew_that_is_no_want_of_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once they are made it may be."""
    lives, later = Lives(1, max_no_progress_s=100.0), [0.0]
    monkeypatch.setattr("tidemill.replay_training.trainer.awake", lambda: awake() + later[0])
    lives.gather(20)
    lives.die("actor-0")
    for _ in range(3):
        later[0] += 101.0
        lives.turn()
    assert lives.trainer.limiter.in_flight == 1
    lives.make("actor-0")
    lives.turn()
    lives.turn()
    assert lives.trainer.limiter.in_flight == 1
    later[0] += 101.0
    with pytest.raises(NoProgress, match=r"no step was stored for 100 s"):
        lives.trainer._poll()


@pytest.mark.parametrize("exact", [False, True])
def test_a_pause_saves_what_is_not_saved_yet_of_an_exact_run_at_a_cut_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    """With no step's updates half done."""
    monkeypatch.setattr(checkpoint_pace, "LEAST", 3600.0)  # by time there is the first one alone
    monkeypatch.setattr(checkpoint_pace, "LONG", 3600.0)
    lives = Lives(1, folder=tmp_path, checkpoint_share=1, checkpoint_seconds=3600.0)
    lives.gather(60)
    lives.trainer._config = lives.trainer._config.replace(exact=exact)

    def saved_in_a_pause() -> list[int]:
        lives.trainer.pause()
        lives.trainer.start()
        return [int(path.name[7:]) for path in checkpoints(tmp_path / "checkpoints" / "policy")]

    now = lives.trainer.learner.counters.updates
    with monkeypatch.context() as patch:
        patch.setattr(Limiter, "owed", 1)
        assert (now in saved_in_a_pause()) is not exact
    assert now > 1 and now in saved_in_a_pause()


@pytest.mark.parametrize("seed", range(6))
def test_every_step_that_was_begun_is_stored_or_void_whoever_dies(seed: int) -> None:
    """Also while the memory warms up, and where one step alone may be begun at a time."""
    draw = Random(seed)
    lives = Lives(2, ring=2, slack=draw.choice([1, None]), iteration_steps=draw.choice([7, None]))
    made, trainer, deaths = lives.actors, lives.trainer, 0
    limiter = trainer.limiter
    for _ in range(3000):
        if limiter.counts.committed >= 60 and deaths == 8 and len(made) == 2:
            break
        lives.turn()
        assert 0 <= limiter.owed <= limiter.queue
        assert limiter.in_flight == sum(grant.outstanding for grant in trainer._grants._grants)
        if made and deaths < 8 and draw.random() < 0.2:
            deaths += 1
            lives.die(draw.choice(list(made)))
        elif len(made) < 2 and draw.random() < 0.3:
            name = next(name for name in ("actor-0", "actor-1") if name not in made)
            lives.make(name)
            if draw.random() < 0.7:  # else it dies, or waits, before it has begun
                made[name].start()
        for actor in made.values():
            if actor.state is State.READY and draw.random() < 0.3:
                actor.start()
    counts = limiter.counts
    assert counts.committed >= 60 and 1 <= counts.voided <= 2 * deaths
    assert counts.started == counts.committed + counts.voided + limiter.in_flight


def transitions(memory: object) -> list[tuple[int, ...]]:
    """Return where the transitions of a memory begin. Each is of rows that follow one
    another in one episode."""
    assert isinstance(memory, UniformReplay)
    sequences, arrays, found = memory.sequences, memory._store.arrays, list[tuple[int, ...]]()
    for place in sequences.span.nonzero()[0]:
        rows = sequences.ahead(place, np.arange(sequences.span[place] + 1))
        obs = arrays["obs"][rows].astype(np.int64)
        assert (np.diff(obs, axis=0) == [0, 0, 1]).all()
        assert (arrays["reward"][rows[1:]] == Numbered.paid(*obs[1:].T)).all()
        found.append(tuple(obs[0].tolist()))
    assert len(found) == len(set(found))
    return found


@pytest.mark.parametrize("ring", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_actors_outlive_the_trainer_and_each_step_is_stored_once(
    ring: int, seed: int, tmp_path: Path
) -> None:
    """Also where an actor dies before the trainer's next life knows of it, and where that
    begins before a first checkpoint. No transition reaches over what is undone."""
    draw, length = Random(100 * seed + ring), 1 + 2 * (seed % 2)
    lives = Lives(
        2, ring, 4 - ring, tmp_path, buffer=Replay(capacity=60_000, warm_up=10, steps=length),
        slack=draw.choice([5, None]), iteration_steps=draw.choice([7, None]), checkpoint_seconds=1000.0,
    )  # fmt: skip
    made, deaths, names = lives.actors, 0, [*lives._lives]
    for _ in range(20_000):
        trainer = lives.trainer
        counts = trainer.limiter.counts
        if counts.committed >= 120 and deaths == 12 and lives.trains and len(made) == 2:
            break
        lives.turn()
        if lives.trains:
            assert 0 <= trainer.limiter.owed <= trainer.limiter.queue
            granted = sum(grant.outstanding for grant in trainer._grants._grants)
            assert trainer.limiter.in_flight == granted
        if deaths < 12 and draw.random() < 0.1 and (alive := [*made, *["trainer-0"] * lives.trains]):
            deaths += 1
            lives.die(draw.choice(alive))
        elif draw.random() < 0.3:
            for name in set(names) - {*made, "trainer-0"}:
                lives.make(name)
                made[name].start()
        elif not lives.trains and len(made) == 2 and draw.random() < 0.3:
            lives.train()
        elif lives.trains and draw.random() < 0.05:
            trainer._save(again=True)
    counts = lives.trainer.limiter.counts
    assert counts.committed >= 120
    assert counts.started == counts.committed + counts.voided + lives.trainer.limiter.in_flight
    found = len(transitions(lives.trainer._buffer))
    # the last ones of open episodes reach further than there are rows
    assert counts.committed - (length - 1) * 6 <= found <= counts.committed
