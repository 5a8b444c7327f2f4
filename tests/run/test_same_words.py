"""Environments that fail or hang, of every kind, by the same words: `deadline_s`,
`lane_restarts` and `lane_restarts_within_s` of their actor."""

import asyncio
import json
import math
import re
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import gymnasium
import msgspec
import numpy as np
import pytest
from tests.remote.served import serving

import tidemill
from tidemill import (
    DQN,
    PPO,
    SAC,
    ActorCritic,
    Actors,
    AgentSpec,
    Asynchronous,
    Experiment,
    Gymnasium,
    Limits,
    OpenEnv,
    QNetwork,
    Replay,
    ReplayActors,
    ReplayTrainer,
    Rest,
    SimulatorEnvironment,
    Slots,
    SquashedGaussian,
    Trainer,
)
from tidemill.core.config import brought_up_to_date, decode, encode, set_path
from tidemill.core.errors import ConfigError, RunError
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.events import read_events
from tidemill.run.stall_report import stall_limit
from tidemill.store.checkpoint import read_newest

HERE = Path(__file__)
SIMULATORS = str(HERE.parents[1] / "bridge" / "simulators.py")
PATIENCE, PACE = 120.0, 0.01  # seconds


class Stuck(gymnasium.Env):
    """Each copy raises in its tenth step, or hangs in it until there is a file `flag`.
    Steps take so long that metrics see a run of some dozens."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, flag=""):
        self.flag, self.steps = flag, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        time.sleep(PACE)
        if self.steps == 10 and not self.flag:
            raise RuntimeError("the arm is stuck")
        if self.steps == 10:
            wait_for(self.flag)
        return np.zeros(2, np.float32), 1.0, self.steps % 4 == 0, False, {}


class Awaited:
    """The same with `async def`."""

    observation_space, action_space = Stuck.observation_space, Stuck.action_space

    def __init__(self, flag=""):
        self.flag, self.steps = flag, 0

    async def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    async def step(self, action):
        self.steps += 1
        await asyncio.sleep(PACE)
        if self.steps == 10 and not self.flag:
            raise RuntimeError("the arm is stuck")
        if self.steps == 10:
            await asyncio.sleep(PATIENCE)
        return np.zeros(2, np.float32), 1.0, self.steps % 4 == 0, False, {}


def wait_for(flag):
    until = time.monotonic() + PATIENCE
    while not Path(flag).exists() and time.monotonic() < until:
        time.sleep(0.02)


def copies(flag, threads):
    return Gymnasium(make=f"{HERE}:Stuck", kwargs={"flag": flag} if flag else {}, threads=threads)


@contextmanager
def environment(kind, flag):
    """Yield an environment of a kind that fails again and again; with a `flag` it hangs
    instead."""
    replays, kind = kind.startswith("replay"), kind.removeprefix("replay ")
    with ExitStack() as stack:
        server = stack.enter_context(serving(lambda: Stuck(flag))) if kind == "server" else None
        if flag:
            stack.callback(Path(flag).touch)  # so that no thread hangs any more
        if server is not None:
            yield Rest(url=server.url, token="")
        elif kind == "simulator":
            yield SimulatorEnvironment(
                path=SIMULATORS, arguments=("deaf" if flag else "mortal",), same_step=not replays
            )
        elif kind == "async":
            yield Asynchronous(make=f"{HERE}:Awaited", kwargs={"flag": flag})
        elif kind == "slots":
            yield Slots(environment=copies(flag, 1), backoff_s=0.01)
        else:
            yield copies(flag, 1 if kind == "threads" else 0)


def experiment(kind, played, steps, **words):
    """Return what trains on it until so many steps, with these words of its actor: PPO,
    but in slots, and where the kind begins with "replay"."""
    if kind == "slots" or kind.startswith("replay"):
        continuous = kind.endswith("simulator")
        policies = {"policy": SquashedGaussian(hidden=(8,)) if continuous else QNetwork(hidden=(8,))}
        workers = {
            "actor": ReplayActors(environment=played, lanes=1, ring=2),
            "trainer": ReplayTrainer(
                algorithm=SAC() if continuous else DQN(),
                buffer=Replay(capacity=1000, warm_up=4),
                batch_size=4,
                ratio="1/4",
            ),
        }
    else:
        policies = {"policy": ActorCritic(hidden=(8,))}
        workers = {
            "actor": Actors(environment=played, lanes=1, agents=(AgentSpec(sample_steps=2),)),
            "trainer": Trainer(algorithm=PPO(minibatch_size=2, epochs=1)),
        }
    made = Experiment(name="stuck", policies=policies, workers=workers, limits=Limits(steps=steps))
    for word, value in words.items():
        made = set_path(made, f"workers.actor.{word}", json.dumps(value))
    return made


def told(folder):
    return [event.cause for event in read_events(folder) if event.what == "told"]


def restarts(folder):
    return max(record.get("time/actor-0/lanes/restarts", 0.0) for record in read_metrics(folder))


def voided(folder):
    """Return how many steps a replay memory's limiter counts as lost, once its counts are
    right: each step that began is stored or lost, and updates are as the ratio has it."""
    n = read_newest(folder / "checkpoints" / "policy")[2]["limiter"]
    assert n["started"] == n["committed"] + n["voided"]
    assert n["tasks"] == (n["committed"] - n["waived"]) // 4
    return n["voided"]


REPLAYS = ["replay inline", "replay threads", "replay simulator"]
KINDS = ["inline", "threads", "slots", "simulator", "server", "async", *REPLAYS]


@pytest.mark.parametrize("kind", KINDS)
def test_what_fails_is_made_anew_counted_and_told_and_beyond_its_budget_the_run_ends(kind, tmp_path):
    launch = "threads" if kind.endswith("threads") else "inline"
    cause = "the sky fell" if kind.endswith("simulator") else "the arm is stuck"
    with environment(kind, "") as played:
        words = {"deadline_s": PATIENCE, "lane_restarts": 50, "lane_restarts_within_s": 300}
        within, beyond = tmp_path / "within", tmp_path / "beyond"
        steps = {"simulator": 30, "slots": 160, "replay simulator": 30}.get(kind, 80)
        made = experiment(kind, played, steps, **words)
        result = tidemill.train(made, launch=launch, run_dir=within, quiet=True)
        assert result.summary["status"] == "completed" and result.summary["env_steps"] >= steps
        assert 1 <= restarts(within) <= 50
        assert kind not in REPLAYS or voided(within) >= restarts(within)
        assert any(cause in text for text in told(within))
        made = experiment(kind, played, 10_000, **{**words, "lane_restarts": 2})
        with pytest.raises(
            RunError,
            match=rf"(?s){cause}.*Its actor's lanes were made anew 2 times within 300 s already, which is "
            r"all that lane_restarts = 2 allows.*allow more \(--set workers.actor.lane_restarts=N\)",
        ) as raised:
            tidemill.train(made, launch=launch, run_dir=beyond, quiet=True)
        assert "actor" in str(raised.value) and any(cause in text for text in told(beyond))


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("threads", "has not come back from a step"),
        ("replay threads", "has not come back from a step"),
        ("slots", "it did not answer within 1 s"),
        ("simulator", "did not hand the turn back within deadline_s = 1 s"),
        ("server", r"no answer within 1 s \(deadline_s\)"),
        ("async", r"lane 0 did not answer within 1 s \(deadline_s\)"),
    ],
)
def test_what_hangs_is_given_up_after_the_actor_s_deadline_and_made_anew(kind, cause, tmp_path):
    with environment(kind, str(tmp_path / "go on")) as played:
        steps = {"simulator": 3, "slots": 22, "replay threads": 22}.get(kind, 12)
        made = experiment(kind, played, steps, deadline_s=1.0, lane_restarts=50)
        result = tidemill.train(made, launch="threads", run_dir=tmp_path / "run", quiet=True)
        assert result.summary["status"] == "completed"
        assert any(re.search(cause, text) for text in told(tmp_path / "run"))
        assert not kind.startswith("replay") or voided(tmp_path / "run") >= 1


def test_without_a_number_lanes_have_five_slots_any_and_none_ends_with_the_first():
    bare, slots = Gymnasium(id="CartPole-v1"), Slots(environment=Gymnasium(id="CartPole-v1"))
    assert Actors(environment=bare).most_restarts == 5
    assert ReplayActors(environment=slots).most_restarts == float("inf")
    assert Actors(environment=bare, lane_restarts=None).most_restarts == 0
    assert ReplayActors(environment=slots, lane_restarts=3).most_restarts == 3
    with pytest.raises(ConfigError, match="lane_restarts = 'often'; take a number, or 'auto', null"):
        set_path(experiment("slots", slots, 4), "workers.actor.lane_restarts", "often")


def test_in_processes_a_step_lost_to_a_replay_memory_costs_nobody_a_life(tmp_path):
    with environment("replay inline", "") as played:
        made = experiment("replay inline", played, 40, lane_restarts=50)
        result = tidemill.train(made, launch="processes", run_dir=tmp_path / "run", quiet=True)
    assert result.summary["status"] == "completed" and voided(tmp_path / "run") >= 1
    assert not [event for event in read_events(tmp_path / "run") if event.what == "died"]


@pytest.mark.parametrize("kind", ["inline", "slots", "replay inline"])
def test_none_has_the_first_fault_end_the_run(kind, tmp_path):
    with environment(kind, "") as played:
        made = experiment(kind, played, 10_000, lane_restarts=None)
        with pytest.raises(RunError, match="the arm is stuck") as raised:
            tidemill.train(made, launch="inline", run_dir=tmp_path / "run", quiet=True)
        assert "made anew" not in str(raised.value)


def test_settings_that_were_saved_by_their_names_of_before_are_read():
    saved = encode(experiment("inline", SimulatorEnvironment(path="build/reach"), 4))
    actor = saved["workers"]["actor"]
    del actor["environment"]["deadline_s"]
    actor["environment"] |= {"deadline": 7.0, "restarts": 3}
    actor |= {"lanes": 2, "lane_restarts": 5}
    data, texts = brought_up_to_date(saved)
    now = decode(Experiment, data).workers["actor"]
    assert texts == [] and now.lane_restarts == 6 and now.environment.deadline_s == 7.0
    for before, after in (
        ({"kind": "Rest", "url": "http://h", "deadline": 30.0, "attempt": 2.0}, ("deadline_s", "attempt_s")),
        ({"kind": "Asynchronous", "make": "x.py:Y", "deadline": 60.0}, ("deadline_s",)),
        ({"kind": "OpenEnv", "url": "http://h", "translate": "x.py:Y", "deadline": 60.0}, ("deadline_s",)),
    ):
        read, texts = brought_up_to_date(before)
        assert (
            texts == [] and list(read)[-len(after) :] == list(after) and before["deadline"] == read[after[0]]
        )


ENDLESS = [
    Rest(url="http://h", deadline_s=math.inf),
    OpenEnv(url="http://h", translate="x.py:Y", deadline_s=math.inf),
    Asynchronous(make="x.py:Y", deadline_s=math.inf),
    SimulatorEnvironment(path="x", deadline_s=math.inf),
    Slots(environment=Gymnasium(id="CartPole-v1"), deadline_s=math.inf),
    Actors(environment=Gymnasium(id="CartPole-v1"), deadline_s=math.inf),
]


@pytest.mark.parametrize("made", ENDLESS, ids=lambda made: type(made).__name__)
def test_any_time_is_inf_however_it_is_typed_and_saved(made):
    saved = msgspec.json.decode(msgspec.json.encode(encode(made)))  # as a run's folder has it
    assert saved["deadline_s"] == "inf" and decode(type(made), saved) == made
    for text in ("inf", "Infinity"):
        assert set_path(made.replace(deadline_s=None), "deadline_s", text) == made
    for wrong in (0.0, -1.0, math.nan, -math.inf):
        with pytest.raises(ConfigError, match=f"deadline_s = {wrong} must be above 0"):
            made.replace(deadline_s=wrong)
    if isinstance(made, SimulatorEnvironment):
        with pytest.raises(ConfigError, match="start_seconds = inf must be finite"):
            made.replace(start_seconds=math.inf)


@pytest.mark.parametrize("kind", ["threads", "slots", "simulator", "server", "async"])
def test_with_any_time_steps_are_taken_and_what_fails_is_made_anew(kind, tmp_path):
    with environment(kind, "") as played:
        steps = {"simulator": 14, "slots": 40}.get(kind, 12)
        made = experiment(kind, played, steps, lane_restarts=50)
        made = set_path(made, "workers.actor.deadline_s", "inf")
        assert stall_limit(made) == math.inf
        result = tidemill.train(made, launch="threads", run_dir=tmp_path / "run", quiet=True)
        assert result.summary["status"] == "completed"
        cause = "the sky fell" if kind == "simulator" else "the arm is stuck"
        assert any(cause in text for text in told(tmp_path / "run"))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: Rest(url="http://h", deadline=5.0),
            "Rest has no setting deadline any more: it is called deadline_s$",
        ),
        (lambda: Rest(url="http://h", attempt=5.0), "it is called attempt_s"),
        (lambda: Asynchronous(make="x.py:Y", deadline=5.0), "it is called deadline_s"),
        (lambda: SimulatorEnvironment(path="x", restarts=2), r"--set workers.actor.lane_restarts=N"),
        (
            lambda: set_path(
                experiment("inline", Rest(url="http://h"), 4), "workers.actor.environment.deadline", "5"
            ),
            "workers.actor.environment.deadline: Rest has no .* any more: it is called deadline_s$",
        ),
    ],
)
def test_who_types_a_name_of_before_is_told_that_of_today(make, said):
    with pytest.raises(ConfigError, match=said):
        make()
