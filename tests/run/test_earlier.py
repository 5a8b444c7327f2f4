"""Runs that earlier versions have saved (`earlier/`) are read as what their parts are
called now, and go on."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidemill import (
    DQN,
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    Limits,
    LinearSchedule,
    QNetwork,
    Replay,
    ReplayActors,
    ReplayTrainer,
    Trainer,
    load,
    resume,
)
from tidemill.core.config import brought_up_to_date, decode, set_path
from tidemill.core.errors import ConfigError
from tidemill.trained.retrain import retrain

CARTPOLE = Gymnasium(id="CartPole-v1")
REPLAY = Experiment(
    name="replay",
    policies={"policy": QNetwork(hidden=(8,), duelling=False, scaled_bytes="all")},
    workers={
        "actor": ReplayActors(environment=CARTPOLE, lanes=1, ring=3, frame_stack=2),
        "trainer": ReplayTrainer(
            algorithm=DQN(
                target_steps=1_000, epsilon=LinearSchedule(1.0, 0.05, from_step=20, to_step=20_020)
            ),
            buffer=Replay(capacity=2000, warm_up=20, frame_stack=2),
            batch_size=8,
            ratio="1/2",
            exact=True,
            journal=True,
            iteration_steps=60,
            finish_episodes=True,
            evaluation_steps=20,
            max_no_progress_s=30.0,
            database_seconds=None,
            checkpoints=1,
        ),
    },
    limits=Limits(steps=120),
)
PLAIN = Experiment(
    name="ppo",
    policies={"policy": ActorCritic(scaled_bytes="all", normalise_observations=False)},
    workers={
        "actor": Actors(environment=CARTPOLE, lanes=4, slots=2, agents=(AgentSpec(sample_steps=16),)),
        "trainer": Trainer(algorithm=PPO(minibatch_size=32, epochs=4, clip_apart=False)),
    },
    limits=Limits(updates=3),
)


EARLIER = Path(__file__).parent / "earlier"


def saved(name: str) -> Any:
    with zipfile.ZipFile(EARLIER / "replay.zip") as run:
        return json.loads(run.read("config.json") if name == "replay" else (EARLIER / name).read_text())


@pytest.mark.parametrize(("name", "now"), [("replay", REPLAY), ("ppo.json", PLAIN)])
def test_what_was_saved_before_replay_training_had_its_own_configurations_is_read(
    name: str, now: Experiment
) -> None:
    data, told = brought_up_to_date(saved(name))
    assert decode(Experiment, data) == now
    assert told == []


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        ({"samples": None, "mode": "fixed"}, {}),
        ({"samples": "s", "mode": "concise"}, {"slots": 2}),
        ({"samples": "s", "mode": "fixed"}, {"slots": 2, "sample_steps": 128}),
    ],
)
def test_defaults_of_before_are_no_idle_settings(spec: dict[str, Any], kept: dict[str, int]) -> None:
    """All settings are saved, and these were the defaults of what has no effect there."""
    agent = {"kind": "AgentSpec", "sample_steps": 128, **spec}
    actors = {
        "kind": "Actors",
        "environment": {"kind": "Gymnasium", "id": "CartPole-v1"},
        "lanes": 64,
        "slots": 2,
        "agents": [agent],
    }
    data, told = brought_up_to_date(actors)
    read = decode(Actors, data)
    now = {"slots": Actors.slots, "sample_steps": AgentSpec.sample_steps, **kept}
    assert (read.slots, read.agents[0].sample_steps, read.lanes) == (now["slots"], now["sample_steps"], 64)
    assert told == []
    if "sample_steps" not in kept:
        agent["sample_steps"] = 77  # which nobody has by default
        with pytest.raises(ConfigError, match="sample_steps = 77 has no effect"):
            decode(Actors, brought_up_to_date(actors)[0])


def test_a_run_from_before_that_goes_on_with_its_memory_its_slots_and_its_journal(tmp_path: Path) -> None:
    with zipfile.ZipFile(EARLIER / "replay.zip") as run:
        run.extractall(tmp_path)
    at = json.loads((tmp_path / "summary.json").read_text())
    assert load(tmp_path, trust=True).act(np.zeros((2, 4), np.float32)) in (0, 1)
    resume(tmp_path, limits={"steps": 240}, quiet=True, trust=True)
    again = retrain(tmp_path, trust=True)
    # what it learned on another machine may differ in the last bits
    assert again.updates == again.compared > at["updates"] and again.committed >= 240


def test_what_replay_training_is_called_now_is_told_where_it_is_asked_for_as_before() -> None:
    with pytest.raises(ConfigError, match="take ReplayActors"):
        AgentSpec(mode="stepwise")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no setting ratio any more: .* take ReplayTrainer\(ratio=…\)"):
        Trainer(algorithm=DQN(), ratio=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"--set workers.trainer.ratio: Trainer .* take ReplayTrainer"):
        set_path(PLAIN, "workers.trainer.ratio", "1")
    with pytest.raises(ConfigError, match="take ReplayTrainer"):
        Trainer(algorithm=DQN(), buffer=Replay(capacity=1000))
