"""Layouts: what follows from costs, what they change, what they are called; and where
costs come from."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.run.watching import wait_until

import tidemill
from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Evaluation,
    Experiment,
    Gymnasium,
    GymnasiumVector,
    Limits,
    PolicyWorkers,
    Scripted,
    Slots,
    Trainer,
)
from tidemill.api.environment import Environment, EnvironmentConfig
from tidemill.api.launcher import GivenHost, ProbeAnswer
from tidemill.core import memory
from tidemill.core.blas_threads import limit_threads
from tidemill.core.config import decode, encode
from tidemill.core.cores import cores as available_cores
from tidemill.core.errors import ConfigError, RunError
from tidemill.launchers.kinds import own_kind
from tidemill.launchers.measuring import Measurement, order_of, read_answer
from tidemill.layouts import auto_layout as arranging
from tidemill.layouts import experiment_layout
from tidemill.layouts import probe as probing
from tidemill.layouts.auto_layout import cache, costs_of, kept_paces, lay_out
from tidemill.layouts.choice import COLD, choose, promises, trained
from tidemill.layouts.cost_measurement import TimeSpent
from tidemill.layouts.costs import Costs
from tidemill.layouts.experiment_layout import apply, by_turns, layout_of, why_unchanged
from tidemill.layouts.layout import Layout, parse
from tidemill.layouts.probe import measure_environment, threads_serve
from tidemill.native.library import choices
from tidemill.presets import experiments as presets
from tidemill.training.replay_slots import with_slots

CARTPOLE = Costs(4.5e-6, 4.5e-6, 0.3e-6, 17e-6, 3.6e-6, 1, True)
SLEEPS = Costs(74e-6, 5.1e-3, 0.3e-6, 17e-6, 3.6e-6, 1, True, True)
HEAVY = Costs(300e-6, 300e-6, 100e-6, 300e-6, 2e-3, 1, True, sums=7_000_000)  # convolutions


def experiment(
    lanes: int = 64,
    steps: int = 64,
    minibatch: int = 1024,
    environment: EnvironmentConfig | None = None,
    **trainer: Any,
) -> Experiment:
    return Experiment(
        name="small",
        policies={"policy": ActorCritic(hidden=(8,))},
        workers={
            "actor": Actors(
                environment=environment or Gymnasium(id="CartPole-v1"),
                lanes=lanes,
                slots=2,
                agents=(AgentSpec(sample_steps=steps),),
            ),
            "trainer": Trainer(**{"algorithm": PPO(minibatch_size=minibatch, epochs=4), **trainer}),
        },
        limits=Limits(updates=3),
    )


def chosen(made: Experiment, costs: Costs, cores: int) -> str:
    return str(choose(made, costs, cores))


# ---- choosing --------------------------------------------------------------------------


def test_quick_environments_are_gathered_and_trained_on_by_equal_processes() -> None:
    ends = "ring=1,slots=1,threads=0"
    assert (
        chosen(experiment(), CARTPOLE, 1) == f"actors=1,trainers=1,together,lanes=64,sample_steps=64,{ends}"
    )
    assert (
        chosen(experiment(), CARTPOLE, 2) == f"actors=2,trainers=2,together,lanes=32,sample_steps=64,{ends}"
    )
    assert choose(experiment(), CARTPOLE, 3).processes <= 3  # 4,096 rows do not divide by three


def test_actors_are_ahead_of_trainers_only_where_the_experiment_allows_it_by_name() -> None:
    costs = msgspec.structs.replace(HEAVY, parallel=False, train=300e-6)
    for lag in (None, 0, 1):  # with two slots the oldest row is two versions old
        for cores in (1, 2, 4, 16):
            promised = [layout for layout, _ in promises(experiment(max_policy_lag=lag), costs, cores)]
            assert all(layout.together and layout.slots == 1 for layout in promised)
    allowed = choose(experiment(max_policy_lag=2), costs, 2)
    assert (allowed.together, allowed.processes, allowed.slots) == (False, 2, 2)
    for lag, slots in ((1, 1), (2, 2), (4, 2)):  # with one slot actors wait for the update
        one_slot = experiment(max_policy_lag=lag)
        one_slot = one_slot.replace(
            workers={**one_slot.workers, "actor": one_slot.workers["actor"].replace(slots=1)}
        )
        layout = choose(one_slot, costs, 2)
        assert (layout.together, layout.slots) == (slots == 1, slots)


def slower(costs: Costs, factor: float) -> Costs:
    """Costs of a host that takes so much longer."""
    own = {name: getattr(costs, name) * factor for name in ("env", "wall", "infer", "train")}
    return msgspec.structs.replace(costs, **own)


def test_a_slow_host_is_used_where_it_brings_more_than_it_holds_up_the_others() -> None:
    made, costs = experiment(), msgspec.structs.replace(HEAVY, parallel=False, train=100e-6)
    # a batch has a sample of each
    for factor, actors in ((0.5, 4), (1.0, 4), (1.3, 4), (2.5, 2), (50.0, 2)):
        assert choose(made, costs, 2, [slower(costs, factor)] * 2).actors == actors
    # fast cores are used first, and the actor beside the trainer stays there
    assert choose(made, costs, 1, [slower(costs, 9), slower(costs, 0.1), slower(costs, 0.1)]).actors == 2
    assert choose(made, costs, 0, [slower(costs, 0.1)] * 2).actors == 2  # a login node has the trainer
    assert choose(made, costs, 2, [costs] * 2) == choose(made, costs, 4)


def test_hosts_whose_actors_may_be_ahead_each_add_what_they_do() -> None:
    made, costs = experiment(max_policy_lag=2), msgspec.structs.replace(HEAVY, parallel=False, train=1e-6)
    promised = promises(made, costs, 3, [slower(costs, 2)] * 2)
    apart = {layout.actors: speed for layout, speed in promised if not layout.together}
    here = {each.actors: speed for each, speed in promises(made, costs, 3) if not each.together}
    assert apart[2] == here[2] and apart[4] == pytest.approx(1.5 * here[2], rel=0.05)


def test_environments_that_wait_are_stepped_in_threads_where_all_hosts_can() -> None:
    made = experiment(steps=128)
    assert choose(made, SLEEPS, 2, [slower(SLEEPS, 1.5)] * 6).threads
    none = msgspec.structs.replace(SLEEPS, threaded=False)
    assert apply(made, choose(made, SLEEPS, 2, [none] * 6)) == made
    # where its work takes most of a step, a host does not try threads
    busy = msgspec.structs.replace(none, env=SLEEPS.wall)
    assert not busy.waits and choose(made, SLEEPS, 2, [busy] * 6).threads


@given(
    gather=st.floats(1e-6, 1e-3),
    train=st.floats(1e-6, 1e-3),
    minibatch=st.integers(1, 4096),
    besides=st.floats(0, 1e-3),
)
def test_all_cores_gather_and_as_many_train_as_the_costs_of_a_minibatch_advise(
    gather: float, train: float, minibatch: int, besides: float
) -> None:
    costs = Costs(gather, gather, 1e-9, 0.0, train, 1, True, minibatch=besides, sums=40_000)
    made = experiment(lanes=8, minibatch=minibatch)
    promised = {(layout.actors, layout.trainers): speed for layout, speed in promises(made, costs, 2)}
    assert promised[2, 1] > promised[1, 1]
    layout = choose(made, costs, 2)
    assert promised[layout.actors, layout.trainers] >= 0.95 * max(promised.values())
    assert layout.processes == layout.actors and layout.together


def test_small_minibatches_are_gathered_by_all_and_trained_on_by_one() -> None:
    lunar_lander = Costs(69e-6, 69e-6, 0.5e-6, 60e-6, 18e-6, 1, True, minibatch=230e-6, sums=39_000)
    made = experiment(lanes=16, steps=256, algorithm=PPO(minibatch_size=128, epochs=6))
    layout = choose(made, lunar_lander, 2)
    assert (layout.actors, layout.trainers, layout.together, layout.lanes) == (2, 1, True, 8)
    assert layout.words() == (
        "2 processes, each an actor of 8 lanes × 256 steps, and a trainer by turns with one"
    )
    # calls that cost nothing beside their rows, and larger minibatches, are worth a sum
    for minibatch, besides in ((128, 0.0), (2048, 230e-6)):
        costs = msgspec.structs.replace(lunar_lander, train=100e-6, minibatch=besides)
        made = experiment(lanes=16, steps=256, minibatch=minibatch)
        assert choose(made, costs, 2).trainers == 2


def test_lanes_stay_in_one_process_where_ticks_cost_more_than_steps() -> None:
    cart_pole = Costs(0.7e-6, 4e-6, 0.4e-6, 10e-6, 13e-6, 1, True, minibatch=20e-6, sums=39_000, tick=25e-6)
    made = experiment(lanes=8, steps=256, algorithm=PPO(minibatch_size=64, epochs=10))
    layout = choose(made, cart_pole, 2)
    assert (layout.actors, layout.trainers, layout.lanes) == (1, 1, 8)
    assert cart_pole.words(8).startswith("a step takes 3.8 µs, inference 1.7, training 13")
    # as many seconds, which shrink with the lanes
    slow_steps = msgspec.structs.replace(cart_pole, env=60e-6, tick=0.0)
    assert choose(made, slow_steps, 2).actors == 2


def test_an_environment_s_tick_is_told_from_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def undisturbed(work: Callable[[], int], seconds: float) -> tuple[float, float]:
        lanes = work() or work()  # the first tick resets
        return (20e-6 + lanes * 3e-6) / lanes, 30e-6

    monkeypatch.setattr(probing, "undisturbed", undisturbed)
    monkeypatch.setattr(probing, "QUICK", inf)  # however long a tick is kept waiting
    actors = Actors(environment=Gymnasium(id="CartPole-v1"), lanes=8)
    assert measure_environment(actors, lambda _: None) == pytest.approx((3e-6, 30e-6, 20e-6))


def test_many_cores_share_small_minibatches_among_few_trainers() -> None:
    for cores in (16, 64):
        layout = choose(experiment(), CARTPOLE, cores)
        assert layout.together and layout.trainers < layout.actors <= cores
        assert layout.actors > cores // 3 and layout.actors % layout.trainers == 0
    small = choose(experiment(minibatch=64), CARTPOLE, 16)
    assert small.trainers == 1 and small.actors > 1
    large = choose(experiment(minibatch=64 * 1024, steps=1024), CARTPOLE, 64)
    assert large.together and large.trainers >= 8


def test_an_algorithm_that_cannot_be_shared_has_one_trainer() -> None:
    for cores in (1, 2, 16):
        assert choose(experiment(), msgspec.structs.replace(CARTPOLE, parallel=False), cores).trainers == 1


def test_environments_that_wait_step_in_threads_beside_the_trainer() -> None:
    for cores in (1, 2, 16):
        layout = choose(experiment(steps=128), SLEEPS, cores)
        assert (layout.actors, layout.trainers, layout.together, layout.slots) == (1, 1, False, 2)
        assert layout.ring == layout.lanes == layout.threads == 8 and not layout.one_core  # as was fastest
        assert layout.sample_steps == 128
        kept = choose(experiment(steps=128), msgspec.structs.replace(SLEEPS, one_core=True), cores)
        assert (kept.ring, kept.lanes, kept.threads, kept.one_core) == (16, 4, 4, True)  # likewise
    for lag, slots in ((None, 1), (0, 1), (1, 1), (2, 2)):  # with two slots rows are two versions old
        made = experiment(steps=128, max_policy_lag=lag)
        actors = made.workers["actor"].replace(slots=1)
        made = made.replace(workers={**made.workers, "actor": actors})
        assert choose(made, SLEEPS, 2).slots == slots
    slower = choose(experiment(), msgspec.structs.replace(SLEEPS, wall=0.5), 2)
    assert slower.ring <= 8 and slower.ring * slower.lanes == 64
    busy = msgspec.structs.replace(SLEEPS, env=1e-3)  # one process could not serve them all
    assert choose(experiment(steps=128), busy, 16).actors > 1


def test_what_waits_and_has_no_threads_stays_as_it_is() -> None:
    for environment in (GymnasiumVector(id="CartPole-v1"), Scripted()):
        made = experiment(environment=environment)
        assert apply(made, choose(made, SLEEPS, 16)) == made


OF_ONE_THREAD = """
import threading
import gymnasium
import numpy as np

class OfOneThread(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.thread = threading.get_ident()

    def reset(self, *, seed=None, options=None):
        if threading.get_ident() != self.thread:
            raise RuntimeError("made in another thread, as connections to some databases are")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, False, {}
"""


def test_what_waits_and_cannot_step_in_threads_stays_as_it_is(tmp_path: Path) -> None:
    made = experiment()
    assert apply(made, choose(made, msgspec.structs.replace(SLEEPS, threaded=False), 2)) == made
    assert threads_serve(Gymnasium(id="CartPole-v1"))[0]
    (tmp_path / "env.py").write_text(OF_ONE_THREAD)
    assert threads_serve(Gymnasium(make=f"{tmp_path}/env.py:OfOneThread")) == (False, False)
    assert threads_serve(Scripted()) == (False, False)


def test_heavy_networks_are_trained_on_all_cores() -> None:
    assert choose(experiment(lanes=16, steps=128, minibatch=512), HEAVY, 2).together
    layout = choose(experiment(lanes=16, steps=128, minibatch=512), HEAVY, 16)
    assert layout.trainers == layout.processes == 16


def test_trainers_on_several_hosts_sum_across_them_where_that_pays() -> None:
    heavy = experiment(lanes=32, steps=128, minibatch=256)
    for cores, hosts in ((1, 2), (2, 3), (8, 4)):
        elsewhere = cores * (hosts - 1)
        assert choose(heavy, HEAVY, cores, [HEAVY] * elsewhere, hosts).trainers >= hosts
        layout = choose(experiment(minibatch=2048), CARTPOLE, cores, [CARTPOLE] * elsewhere, hosts)
        assert (layout.trainers, layout.actors > 1) == (1, True)
    # they wait for the slowest of them
    assert choose(heavy, HEAVY, 1, [slower(HEAVY, 3)], 2).trainers == 1
    algorithm = PPO(minibatch_size=256, epochs=3)
    on_one = 2e-3 / 4 + (3 * 90e-6 + 2 * 0.25e-9 * 7e6) * 3 / 256
    assert trained(algorithm, HEAVY, 4) == pytest.approx(on_one)
    # two here, two there: each hears twice half of the quarters of two others
    across = 2.5e-3 + 2.3e-9 * 7e6 * (2 * 2 * 2 / 4)
    assert trained(algorithm, HEAVY, 4, 2) == pytest.approx(on_one + across * 3 / 256)
    small = msgspec.structs.replace(HEAVY, sums=1000)
    more = trained(algorithm, small, 4, 2) - trained(algorithm, small, 4)
    assert more == pytest.approx((2.5e-3 + 2.3e-9 * 1000 * 4) * 3 / 256)
    # one for each host hears the other's sum
    for costs, heard in ((small, 1000), (HEAVY, 7e6)):
        more = trained(algorithm, costs, 4, 2, by_host=True) - trained(algorithm, costs, 4)
        assert more == pytest.approx((2.5e-3 + 2.3e-9 * heard) * 3 / 256)


counts = st.integers(1, 100)
times = st.floats(1e-7, 1e-1)


@given(
    lanes=st.integers(1, 300),
    steps=st.integers(1, 300),
    minibatch=st.integers(1, 1 << 20),
    burn_in=st.sampled_from([0, 0, 4]),
    cores=st.integers(1, 128),
    costs=st.builds(
        Costs,
        times,
        times,
        times,
        times | st.just(0.0),
        times,
        st.integers(1, 10),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
)
def test_learning_does_not_change_with_the_layout(
    lanes: int, steps: int, minibatch: int, burn_in: int, cores: int, costs: Costs
) -> None:
    made = experiment(lanes, steps, minibatch)
    spec = AgentSpec(sample_steps=steps, burn_in=burn_in)
    made = made.replace(workers={**made.workers, "actor": made.workers["actor"].replace(agents=(spec,))})
    own = layout_of(made)
    for layout, speed in promises(made, costs, cores):
        assert layout.rows == own.rows and speed > 0
        assert layout.sample_steps == steps
        assert layout.lanes <= lanes and layout.actors * layout.ring % layout.trainers == 0
        assert layout.processes <= max(cores, 2 if costs.waits else 1)
        assert layout.trainers == 1 or (costs.parallel and minibatch >= layout.trainers)
    layout = choose(made, costs, cores)
    laid = apply(made, layout)
    laid.check()
    assert layout_of(laid) == layout == parse(str(layout))
    assert apply(laid, own) == made  # nothing else has changed
    assert decode(Experiment, encode(laid)) == laid


def test_several_agent_specs_keep_their_kinds() -> None:
    specs = (AgentSpec(match="red_.*", sample_steps=64), AgentSpec(match="blue_.*", samples=None))
    made = experiment(environment=Scripted(agents=4, kinds=2))
    made = made.replace(workers={**made.workers, "actor": made.workers["actor"].replace(agents=specs)})
    laid = apply(made, choose(made, CARTPOLE, 2))
    actors = laid.workers["actor"]
    assert (
        isinstance(actors, Actors)
        and [spec.sample_steps for spec in actors.agents] == [64, 256]
        and actors.lanes == 32
    )


# ---- text ------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    together, actors = draw(st.booleans()), draw(counts)
    most = actors if together else 100
    numbers = {name: draw(counts) for name in ("lanes", "sample_steps", "ring", "slots")}
    trainers, threads = draw(st.integers(1, most)), draw(st.none() | st.integers(0, 100))
    return Layout(
        actors=actors,
        trainers=trainers,
        together=together,
        threads=threads,
        one_core=draw(st.booleans()),
        **numbers,
    )


@given(layouts())
def test_a_text_says_all_of_a_layout(layout: Layout) -> None:
    assert parse(str(layout)) == layout
    assert parse(", ".join(reversed(str(layout).split(",")))) == layout


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("fast", ['"fast"', "auto, measure, given", "e.g. actors=2"]),
        ("", ["auto, measure, given"]),
        ("actors=2,lanes=4", ["trainers, sample_steps, ring, slots is missing", "e.g. actors=2"]),
        ("actors=2,lames=4", ['"lames=4"', 'did you mean "lanes"?']),
        ("actors=two,lanes=4", ["actors = two", "whole number of at least 1"]),
        ("actors=2,actors=2", ["actors is said twice"]),
        ("actors=0,lanes=4", ["actors = 0", "at least 1"]),
        ("actors=1,lanes", ['"lanes"', "write lanes=NUMBER"]),
        (
            "actors=1,trainers=2,together,lanes=1,sample_steps=1,ring=1,slots=1",
            ["an actor for each trainer, not 1 for 2", "leave together out"],
        ),
    ],
)
def test_a_text_that_says_nothing_is_refused(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    for part in (f"--layout {text}", *parts):
        assert part in str(caught.value)


def test_words() -> None:
    made = experiment()
    assert (
        choose(made, CARTPOLE, 2).words()
        == "2 processes, each an actor of 32 lanes × 64 steps and a trainer by turns"
    )
    assert (
        choose(made, CARTPOLE, 1).words()
        == "1 process, an actor of 64 lanes × 64 steps and a trainer by turns"
    )
    assert layout_of(made).words() == "an actor of 64 lanes × 64 steps beside a trainer"
    assert "in threads beside a trainer" in choose(made, SLEEPS, 1).words()
    assert (
        "in threads on one core beside a trainer"
        in choose(made, msgspec.structs.replace(SLEEPS, one_core=True), 1).words()
    )
    assert CARTPOLE.words(64) == "a step takes 4.5 µs, inference 0.6, training 3.6 on a core"
    assert SLEEPS.words(64) == "a step takes 5,100 µs, of which it waits 5,026, inference 0.6, training 3.6"


# ---- what is left alone ----------------------------------------------------------------


def test_what_the_user_says_is_left_alone() -> None:
    made = experiment()
    assert why_unchanged(made) == ""
    free = [
        "workers.trainer.algorithm.epochs",
        "seed",
        "workers.actor.environment.kwargs.threads",
        "workers.actor.max_episode_steps",
        "limits.steps",
        "workers.actor.environment",
        "workers.nobody.count",
    ]
    assert why_unchanged(made, free) == ""
    for path in (
        "count",
        "one_core",
        "lanes",
        "ring",
        "slots",
        "agents",
        "agents.0.sample_steps",
        "environment.threads",
        "math_threads",
    ):
        assert why_unchanged(made, [*free, f"workers.actor.{path}"]) == f"workers.actor.{path} was set"
    assert (
        why_unchanged(made, ["workers.trainer.count"])
        and why_unchanged(made, ["together"])
        and why_unchanged(made, ["workers"])
        and why_unchanged(made, ["workers.trainer"])
    )

    def changed(group: str, **values: Any) -> Experiment:
        return made.replace(workers={**made.workers, group: made.workers[group].replace(**values)})

    for other, why in (
        (changed("actor", count=2), "workers.actor.count is 2"),
        (changed("trainer", count=2), "workers.trainer.count is 2"),
        (changed("actor", one_core=True), "workers.actor.one_core is set"),
        (changed("actor", ring=2), "workers.actor.ring is 2"),
        (
            changed("actor", environment=Gymnasium(id="CartPole-v1", threads=2)),
            "workers.actor.environment.threads is 2",
        ),
        (changed("trainer", batch_size=100), "workers.trainer.batch_size is set"),
        (made.replace(together=("actor", "trainer")), "together is set"),
        (changed("actor", agents=(AgentSpec(inference="inference"),)), "its actors ask policy workers"),
        (changed("actor", agents=(AgentSpec(mode="full"),)), 'its actors send samples of mode "full"'),
        (
            made.replace(workers={**made.workers, "server": PolicyWorkers(stream="x")}),
            "workers of other kinds (server)",
        ),
        (made.replace(workers={**made.workers, "second": made.workers["actor"]}), "2 groups of Actors"),
    ):
        assert why in why_unchanged(other)
        assert lay_out(other, None).experiment == other and why in lay_out(other, None).note


def test_a_gpu_if_there_is_one_leaves_layouts_to_be_chosen_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = experiment(device="auto")
    monkeypatch.setattr(experiment_layout, "choose_device", lambda device, _: "cpu")
    assert why_unchanged(made) == ""
    monkeypatch.setattr(experiment_layout, "choose_device", lambda device, _: "cuda:0")
    assert why_unchanged(made) == "workers.trainer.device is cuda:0"
    assert why_unchanged(experiment(device="cuda")) == "workers.trainer.device is cuda"


@pytest.mark.parametrize(("algorithm", "environment"), [("dqn", "CartPole-v1"), ("sac", "Pendulum-v1")])
def test_what_computes_a_replay_policy_is_measured(
    algorithm: str, environment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TIDEMILL_NATIVE", raising=False)
    monkeypatch.setattr(arranging, "SECONDS", 240)  # also on a busy machine
    made = presets.experiment_for(environment, Gymnasium(id=environment), algorithm)
    assert made.policies["policy"].undecided
    found = lay_out(made, None)
    assert found.costs is not None and "1 process" in found.note
    chosen = found.costs.decided["policy"]["native"]
    assert chosen in choices() and chosen in found.note
    assert found.experiment.policies["policy"] == made.policies["policy"].replace(native=chosen)
    actors = made.workers["actor"].replace(
        environment=Slots(environment=Gymnasium(id=environment, threads=1))
    )
    slots = made.replace(workers={**made.workers, "actor": actors})
    assert lay_out(slots, None).costs is None  # what slots step is not measured


def test_steps_that_wait_for_training_anyway_are_made_in_the_trainers_process() -> None:
    made = presets.experiment_for("CartPole-v1", Gymnasium(id="CartPole-v1"), "dqn")
    made = made.replace(policies={"policy": made.policies["policy"].replace(native="off")})
    found = lay_out(made, None)
    # before a tick all that is owed is trained
    ahead = made.workers["trainer"].replace(slack=made.workers["actor"].lanes)
    assert (
        found.experiment
        == made.replace(together=("actor", "trainer"), workers={**made.workers, "trainer": ahead})
        and "1 process" in found.note
    )

    def changed(group: str, **values: Any) -> Experiment:
        return made.replace(workers={**made.workers, group: made.workers[group].replace(**values)})

    for other in (
        changed("trainer", slack=16),
        changed("actor", count=2),
        changed("actor", environment=Gymnasium(id="CartPole-v1", threads=8)),
        with_slots(made, 4),
        made.replace(workers={**made.workers, "evaluation": Evaluation()}),
        experiment(),
    ):
        assert by_turns(other) == other
    assert by_turns(made, ["together"]) == made


@dataclass(frozen=True, kw_only=True)
class Eights(EnvironmentConfig):
    """Has lanes in eights."""

    def build(self, lanes: int, seed: int, render: bool = False) -> Environment:
        if lanes % 8:
            raise ConfigError(f"lanes = {lanes} are no eights")
        return Scripted().build(lanes, seed)


def test_an_environment_may_refuse_the_lanes_of_a_probe_but_not_its_own() -> None:
    with pytest.raises(RunError, match="lanes = 1 are no eights"):
        measure_environment(Actors(environment=Eights(), lanes=8), lambda _: None)
    with pytest.raises(ConfigError, match="lanes = 12 are no eights"):
        measure_environment(Actors(environment=Eights(), lanes=12), lambda _: None)


@pytest.mark.parametrize(
    ("own", "waking", "left"), [(200e-6, 180e-6, 100e-6), (200e-6, COLD / 2, 200e-6), (80e-6, 1e-3, 0.0)]
)
def test_what_waking_costs_beside_other_programs_is_no_cost_of_an_environment(
    own: float, waking: float, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def undisturbed(work: Callable[[], int], seconds: float) -> tuple[float, float]:
        work()
        return costs.pop(0), 5e-3

    def timed(work: Callable[[], int], seconds: float, precise: bool) -> TimeSpent:
        return TimeSpent(1, *undisturbed(work, seconds), 0.0)

    monkeypatch.setattr(probing, "undisturbed", undisturbed)
    monkeypatch.setattr(probing, "timed", timed)
    costs = [own, waking]
    core, wall, _ = measure_environment(
        Actors(environment=Gymnasium(id="CartPole-v1"), lanes=8), lambda _: None
    )
    assert (core, wall) == (pytest.approx(left, abs=2e-9), 5e-3) and core > 0
    costs = [own, waking]
    # has no threads: its costs choose nothing
    assert measure_environment(Actors(environment=Scripted(), lanes=8), lambda _: None) == (own, 5e-3, 0.0)


def test_layouts_are_chosen_for_processes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arranging, "probe", lambda *_: pytest.fail("measured"))
    made = experiment()
    for layout in ("auto", "measure"):
        assert lay_out(made, None, layout, processes=False).experiment == made
    assert lay_out(made, None, "given").experiment == made


def test_a_layout_can_be_told() -> None:
    made = experiment()
    text = "actors=2,trainers=2,together,lanes=16,sample_steps=128,ring=1,slots=1,threads=0"
    found = lay_out(made, None, text)
    assert str(layout_of(found.experiment)) == text and "batch" not in found.note
    more = lay_out(made, None, text.replace("lanes=16", "lanes=32"))
    assert "a batch has 8,192 rows, not 4,096" in more.note
    with pytest.raises(ConfigError, match=r"workers\.actor\.lanes was set besides"):
        lay_out(made, None, text, ["workers.actor.lanes"])
    with pytest.raises(ConfigError, match="a Scripted environment has no threads; leave threads=0 out"):
        lay_out(experiment(environment=Scripted()), None, text)
    with pytest.raises(
        ConfigError,
        match=r"cannot be laid out, since it has workers of other kinds \(server\); use --layout given",
    ):
        lay_out(made.replace(workers={**made.workers, "server": PolicyWorkers(stream="x")}), None, text)


# ---- costs -----------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tidemill"


def test_costs_are_measured_once(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Experiment] = []

    def probe(made: Experiment, source: Path | None) -> Costs:
        measured.append(made)
        return msgspec.structs.replace(CARTPOLE, infer=len(measured) * 1e-6)

    monkeypatch.setattr(arranging, "probe", probe)
    made = experiment()
    first = lay_out(made, None)
    assert "2 processes" in first.note or available_cores() != 2
    assert lay_out(made, None) == first and len(measured) == 1
    (file,) = kept.iterdir()
    assert (file.stat().st_mode & 0o777, kept.stat().st_mode & 0o777) == (0o600, 0o700)
    # these cost nothing
    assert lay_out(made.replace(seed=3, limits=Limits(steps=5)), None).costs == first.costs
    assert len(measured) == 1
    assert lay_out(made, None, "measure").costs != first.costs and len(measured) == 2
    assert lay_out(made, None).costs == msgspec.structs.replace(CARTPOLE, infer=2e-6)
    lay_out(experiment(lanes=32), None)
    lay_out(experiment(minibatch=512), None)
    assert len(measured) == 4


def test_costs_are_measured_on_one_host_of_each_kind(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arranging, "probe", lambda *_: CARTPOLE)
    own = own_kind()
    slow = msgspec.structs.replace(own, processor="slow")
    other = msgspec.structs.replace(own, cores=99)
    hosts = [
        GivenHost("runner", 2, own),
        GivenHost("b", 4, slow),
        GivenHost("c", 2, own),
        GivenHost("d", 4, slow),
    ]
    asked: list[str] = []
    answer = {"measured": msgspec.to_builtins(slower(CARTPOLE, 10))}

    def measure(names: Sequence[str], *_: object) -> dict[str, ProbeAnswer]:
        asked.extend(names)
        return {name: ProbeAnswer(json.dumps(answer).encode()) for name in names}

    made = experiment()
    first = lay_out(made, None, hosts=hosts, measure=measure)
    assert asked == ["b"] and first.layout is not None and first.layout.actors == 4
    assert "b, d (slow): a step takes 45 µs, inference 4.1; 12 cores of 4 hosts" in first.note
    assert first.paces[slow.digest] > 6 * first.paces[own.digest]
    assert kept_paces(json.loads(msgspec.json.encode(first.plain()))) == first.paces
    assert lay_out(made, None, hosts=hosts, measure=measure) == first and asked == ["b"]  # it is kept
    lay_out(made, None, "measure", hosts=hosts, measure=measure)
    assert asked == ["b", "b"]
    answer = {"error": "no step"}
    found = lay_out(made, None, hosts=[*hosts, GivenHost("e", 1, other)], measure=measure)
    assert found.layout is None and "could not be measured: on host e: no step" in found.note
    answer = {"error": "\x1b[2J\ud800\nTraceback"}
    found = lay_out(made, None, hosts=[*hosts, GivenHost("e", 1, other)], measure=measure)
    assert found.note.endswith(r"on host e: \x1b[2J\ud800")
    answer = {"error": ""}  # of whoever answers so
    assert "on host e" in lay_out(made, None, hosts=[*hosts, GivenHost("e", 1, other)], measure=measure).note
    answer = {"refused": "no game"}
    with pytest.raises(ConfigError, match="on host e: no game"):
        lay_out(made, None, hosts=[*hosts, GivenHost("e", 1, other)], measure=measure)


def test_trainers_stand_on_several_hosts_where_all_see_the_folder(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arranging, "probe", lambda *_: HEAVY)
    made, own = experiment(lanes=32, steps=128, minibatch=256), own_kind()
    for sees, trainers in ((True, 2), (False, 1)):
        hosts = [GivenHost("runner", 1, own), GivenHost("b", 1, own, sees)]
        found = lay_out(made, None, hosts=hosts).layout
        assert found is not None and (found.actors, found.trainers) == (2, trainers)


def test_layers_are_computed_by_what_all_hosts_have(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = {"policy": {"native": "avx512"}}
    asked: list[Experiment] = []

    def probe(made: Experiment, source: Path | None) -> Costs:
        asked.append(made)
        return msgspec.structs.replace(CARTPOLE, decided=best if len(asked) == 1 else {})

    monkeypatch.setattr(arranging, "probe", probe)
    own = msgspec.structs.replace(own_kind(), native=("off", "avx512"))
    older = msgspec.structs.replace(own, native=("off", "avx2"))
    measured = {"b": ProbeAnswer(json.dumps({"measured": msgspec.to_builtins(CARTPOLE)}).encode())}
    hosts = [GivenHost("runner", 2, own), GivenHost("b", 2, older)]
    found = lay_out(experiment(), None, hosts=hosts, measure=lambda *_: measured)
    assert [made.policies["policy"].native for made in (*asked, found.experiment)] == [
        "auto",
        "avx2",
        "avx2",
    ]
    assert "policy: native = avx2" in found.note


@pytest.mark.parametrize(("there", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_convolutions_are_in_bfloat16_where_all_hosts_have_that(
    there: bool, expected: str, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Experiment] = []

    def probe(made: Experiment, source: Path | None) -> Costs:
        asked.append(made)
        best = {"policy": {"convolutions": "bfloat16"}} if len(asked) == 1 else {}
        return msgspec.structs.replace(CARTPOLE, decided=best)

    monkeypatch.setattr(arranging, "probe", probe)
    has = ("avx512_bf16", "ONEDNN_MAX_CPU_ISA=None")
    own = msgspec.structs.replace(own_kind(), instructions=has)
    other = msgspec.structs.replace(own, instructions=(*has, "amx") if there else has[1:])
    measured = {"b": ProbeAnswer(json.dumps({"measured": msgspec.to_builtins(CARTPOLE)}).encode())}
    hosts = [GivenHost("runner", 2, own), GivenHost("b", 2, other)]
    made = experiment().replace(policies={"policy": ActorCritic(convolutions="auto")})
    found = lay_out(made, None, hosts=hosts, measure=lambda *_: measured)
    assert found.experiment.policies["policy"].convolutions == expected


@pytest.mark.parametrize(
    ("setting", "file"),
    [
        ({"make": "{folder}/games.py:Game"}, "games.py"),
        ({"make": "games:Game"}, "games.py"),
        ({"id": "games:Game-v0"}, "games.py"),
        ({"make": "arcade.inner.pinball:Game"}, "arcade/inner/pinball.py"),
        ({"make": "arcade.inner:Game"}, "arcade/inner/__init__.py"),
    ],
)
def test_costs_of_code_that_has_changed_are_measured_anew(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: dict[str, str], file: str
) -> None:
    code = tmp_path / file
    code.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "arcade").mkdir(exist_ok=True)
    (tmp_path / "arcade" / "__init__.py").write_text(
        "raise RuntimeError('nothing is run to see whether it has changed')"
    )
    code.write_text("1")
    monkeypatch.syspath_prepend(str(tmp_path))
    measured: list[Experiment] = []
    monkeypatch.setattr(arranging, "probe", lambda made, source: measured.append(made) or CARTPOLE)
    made = experiment(
        environment=Gymnasium(**{name: value.format(folder=tmp_path) for name, value in setting.items()})
    )
    costs_of(made, None)
    costs_of(made, None)
    assert len(measured) == 1
    code.write_text("2")
    costs_of(made, None)
    assert len(measured) == 2


@pytest.mark.parametrize(
    "file", ["parts.py", "lab/__init__.py", "lab/nets.py", "lab/deep.py", "elsewhere/tools.py"]
)
def test_costs_are_measured_anew_where_what_the_experiments_file_imports_has_changed(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    raises = "\nraise RuntimeError('nothing is run to see whether it has changed')"
    code = {
        "mine.py": "import parts\nimport lab.nets\nimport tools, torch, no_such_module",
        "parts.py": "def later():\n    import mine",
        "lab/__init__.py": "",
        "lab/nets.py": "from .deep import Deep",
        "lab/deep.py": "from . import nets",
        "elsewhere/tools.py": "",
        "unused.py": "",
    }
    for name, text in code.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + raises)
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    measured: list[Experiment] = []
    monkeypatch.setattr(arranging, "probe", lambda made, source: measured.append(made) or CARTPOLE)
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "unused.py").write_text("1")
    costs_of(experiment(), tmp_path / "mine.py")
    (tmp_path / "unused.py").write_text("2")
    costs_of(experiment(), tmp_path / "mine.py")
    assert len(measured) == 1
    (tmp_path / file).write_text("import broken")
    costs_of(experiment(), tmp_path / "mine.py")
    assert len(measured) == 2


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"\xff", b'{"env": 0}', b'{"env": 1e-5}', b"nan", b"x" * 100_000]
)
def test_kept_costs_that_make_no_sense_are_measured_anew(
    kept: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(arranging, "probe", lambda *_: CARTPOLE)
    costs_of(experiment(), None)
    (file,) = kept.iterdir()
    file.write_bytes(content)
    assert costs_of(experiment(), None) == CARTPOLE
    assert json.loads(file.read_bytes())["rows"] == 1


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_where_costs_should_be_is_not_waited_for(
    kept: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    def late(*_: object) -> None:
        raise AssertionError("waited")

    monkeypatch.setattr(arranging, "probe", lambda *_: CARTPOLE)
    costs_of(experiment(), None)
    (file,) = kept.iterdir()
    file.unlink()
    make(file)
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    try:
        assert costs_of(experiment(), None) == CARTPOLE
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "change",
    [
        {"env": 0.0},
        {"env": -1.0},
        {"rows": 0},
        {"train": 1e9},
        {"infer": "1"},
        {"call": -1.0},
        {"parallel": 1},
        {"more": 1.0},
    ],
)
def test_kept_costs_are_read_strictly(
    kept: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    monkeypatch.setattr(arranging, "probe", lambda *_: CARTPOLE)
    costs_of(experiment(), None)
    (file,) = kept.iterdir()
    file.write_bytes(msgspec.json.encode({**msgspec.structs.asdict(CARTPOLE), "infer": 5.0, **change}))
    assert costs_of(experiment(), None) == CARTPOLE


def test_costs_that_cannot_be_kept_are_measured_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(arranging, "probe", lambda *_: CARTPOLE)
    assert costs_of(experiment(), None) == CARTPOLE


def test_the_cache_is_where_such_files_belong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache() == tmp_path / ".cache" / "tidemill"


def test_a_probe_that_fails_leaves_the_experiment_as_it_is(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arranging, "SECONDS", 240)
    (tmp_path / "broken.py").write_text(
        "import gymnasium\nclass Broken(gymnasium.Env):\n    def __init__(self):\n        import os; "
        "os._exit(3)"
    )
    made = experiment(environment=Gymnasium(make=f"{tmp_path}/broken.py:Broken"))
    found = lay_out(made, None)
    assert found.experiment == made
    assert (
        found.note
        == "layout: as given, since its costs could not be measured: the process that measures them ended "
        "with status 3"
    )
    assert not kept.exists()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"environment": Gymnasium(id="CartPol-v1")}, '^no environment "CartPol-v1" is registered'),
        ({"policies": {"policy": ActorCritic(encoder="nature_cnn")}}, "nature_cnn"),
    ],
)
def test_what_no_run_can_be_made_of_is_refused_where_it_would_be_measured(
    kept: Path, change: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arranging, "SECONDS", 240)
    made = experiment(environment=change.get("environment")).replace(
        **{name: value for name, value in change.items() if name != "environment"}
    )
    with pytest.raises(ConfigError, match=why):
        lay_out(made, None)
    assert not kept.exists()


@pytest.mark.parametrize(("lanes", "steps"), [(64, 100_000_000), (50_000_000, 128)])
def test_a_batch_that_cannot_fit_is_refused_before_anything_is_measured(
    kept: Path, monkeypatch: pytest.MonkeyPatch, lanes: int, steps: int
) -> None:
    def probe(*_: object) -> Costs:
        raise AssertionError("measured")

    monkeypatch.setattr(arranging, "probe", probe)
    monkeypatch.setattr(memory, "available", lambda: 64 << 30)
    with pytest.raises(
        ConfigError,
        match=rf"this needs 16\d\.\d GB of memory, .*\n  samples: 16\d\.\d GB = {steps:,} rows x {lanes:,} "
        rf"lanes x 26 bytes at least",
    ):
        lay_out(experiment(lanes, steps), None)


def test_a_probe_says_how_it_ended() -> None:
    for code, status in (
        ("", "0"),
        ("import os; os.abort()", "-6"),
        ("import signal; signal.raise_signal(signal.SIGALRM)", r"-14 \(too slow\)"),
    ):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            with pytest.raises(RunError, match=f"ended with status {status}$"):
                read_answer(ProbeAnswer(process.stdout.read(), process.wait()))
            for answer in (b"nonsense", b"[]", b"{}", b"3", b"[" * 99_999):
                with pytest.raises(RunError, match="make no sense"):
                    read_answer(ProbeAnswer(answer, process.wait()))


FILE = """
import time
import gymnasium, numpy as np
from tidemill import *

class Sleeping(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, seconds=0.005):
        self.seconds, self.steps = seconds, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        print("what an environment prints")
        time.sleep(self.seconds)
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, self.steps % 10 == 0, False, {}

def experiment():
    return Experiment(
        name="sleeping",
        policies={"policy": ActorCritic(hidden=(8,))},
        workers={
            "actor": Actors(
                environment=Gymnasium(make=f"{__file__}:Sleeping"), lanes=16,
                agents=(AgentSpec(sample_steps=8),),
            ),
            "trainer": Trainer(algorithm=PPO(minibatch_size=64)),
        },
        limits=Limits(updates=3),
    )
"""


PATIENT = """
from tidemill.layouts import auto_layout
auto_layout.SECONDS = 240
from tidemill.cli.main import app
app()
"""
"""The command, which gives no probe up because the machine is busy."""


def train(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PATIENT, "train", *words, "--run-dir", "run"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_whose_environment_sleeps(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(FILE)
    said = train(tmp_path, "made.py:experiment")
    record = json.loads((tmp_path / "run" / "layout.json").read_bytes())
    assert record["told"] in said and f"again: --layout {record['layout']}" in said
    assert record["costs"]["wall"] > 0.004 > record["costs"]["env"]
    layout = parse(record["layout"])
    assert (layout.actors, layout.trainers, layout.together) == (
        1,
        1,
        False,
    ) and layout.threads == layout.lanes
    assert layout.ring > 1 and layout.rows == 16 * 8
    ran = decode(Experiment, {**json.loads((tmp_path / "run" / "config.json").read_bytes())})
    assert layout_of(ran) == layout


TOLD = """
import os
import time
import gymnasium, numpy as np

class Telling(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, folder, processes):
        self.folder, self.processes = folder, processes
        self.tell("made")

    def tell(self, when):
        open(f"{self.folder}/{when} {os.getpid()} {sorted(os.sched_getaffinity(0))}", "w").close()

    def reset(self, *, seed=None, options=None):
        self.tell("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.tell("step")
        deadline = time.monotonic() + 60
        while self.stepping() < self.processes and time.monotonic() < deadline:
            time.sleep(0.005)  # or one alone might do all that the run needs
        return np.zeros(2, np.float32), 1.0, False, False, {}

    def stepping(self):
        return len({name.split()[1] for name in os.listdir(self.folder) if name.startswith("step")})
"""


@pytest.mark.parametrize("launch", ["processes", "threads"])
def test_actors_keep_to_a_core_and_what_their_environments_start_does_not(
    tmp_path: Path, launch: str
) -> None:
    (tmp_path / "env.py").write_text(TOLD)
    (tmp_path / "told").mkdir()
    settings = {"folder": f"{tmp_path}/told", "processes": 2 if launch == "processes" else 1}
    made = experiment(
        steps=4,
        minibatch=16,
        environment=Gymnasium(make=f"{tmp_path}/env.py:Telling", kwargs=settings, threads=2),
    )
    actors = made.workers["actor"].replace(count=2, lanes=2, one_core=True)
    tidemill.train(
        made.replace(workers={**made.workers, "actor": actors}),
        launch=launch,
        run_dir=tmp_path / "run",
        quiet=True,
    )
    told: dict[str, set[str]] = {}
    for file in (tmp_path / "told").iterdir():
        when, _, affinity = file.name.split(" ", 2)
        told.setdefault(when, set()).add(affinity)
    every = sorted(os.sched_getaffinity(0))
    assert told["made"] == told["reset"] == {str(every)}  # where they may start what they need
    assert told["step"] <= {str([core]) for core in every}
    # threads of one process have Python's lock by turns
    assert len(told["step"]) == (min(2, len(every)) if launch == "processes" else 1)
    assert sorted(os.sched_getaffinity(0)) == every  # the run is over


COUNTED = """
import gymnasium, numpy as np
from threadpoolctl import threadpool_info

class Counted(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        (blas,) = {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}
        return np.zeros(2, np.float32), float(blas), True, False, {}
"""


@pytest.mark.parametrize(
    ("launch", "together", "threads"),
    [("processes", False, 1), ("processes", True, 2), ("threads", False, 2), ("inline", False, 2)],
)
def test_numeric_libraries_have_the_threads_that_the_workers_of_a_process_ask_for(
    tmp_path: Path, launch: str, together: bool, threads: int
) -> None:
    (tmp_path / "env.py").write_text(COUNTED)
    made = experiment(
        lanes=2,
        steps=4,
        minibatch=8,
        environment=Gymnasium(make=f"{tmp_path}/env.py:Counted"),
        math_threads=2,
    )
    made = made.replace(together=("actor", "trainer") if together else ())
    try:
        result = tidemill.train(made, launch=launch, run_dir=tmp_path / "run", quiet=True)
    finally:
        limit_threads(1)
    assert result.summary["mean_return"] == threads


def test_a_layout_is_not_chosen_where_threads_of_numeric_libraries_are_set() -> None:
    assert why_unchanged(experiment(math_threads=2)) == "workers.trainer.math_threads is 2"
    with pytest.raises(ConfigError, match="math_threads = 0 must be at least 1"):
        experiment(math_threads=0)
    with pytest.raises(ConfigError, match="math_threads = 100,000 must be at most 1,024"):
        experiment(math_threads=100_000)


def test_a_run_of_cartpole_and_its_resumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = train(tmp_path, "CartPole-v1", "--max-steps", "20000")
    record = json.loads((tmp_path / "run" / "layout.json").read_bytes())
    layout = parse(record["layout"])
    assert layout.rows == 32 * 64 and layout.threads == 0 and str(layout) in said
    monkeypatch.setattr(arranging, "probe", lambda *_: pytest.fail("measured"))
    tidemill.resume(tmp_path / "run", limits={"steps": 30_000}, quiet=True)
    assert (
        layout_of(decode(Experiment, json.loads((tmp_path / "run" / "config.json").read_bytes()))) == layout
    )
    assert json.loads((tmp_path / "run" / "layout.json").read_bytes()) == record


def test_the_probe_survives_what_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made.py").write_text(FILE.replace("seconds=0.005", "seconds=1000"))
    monkeypatch.setattr(arranging, "SECONDS", 0.5)
    made = experiment(environment=Gymnasium(make=f"{tmp_path / 'made.py'}:Sleeping"))
    with pytest.raises(RunError, match=r"no answer after|too slow"):  # who of the two sees it first
        arranging.probe(made, tmp_path / "made.py")


def test_a_measurement_beside_is_ended_with_all_that_it_began(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(FILE.replace("seconds=0.005", "seconds=1000"))
    made = experiment(environment=Gymnasium(make=f"{tmp_path / 'made.py'}:Sleeping"))
    ended: list[bool] = []
    beside = Measurement(order_of(made, None), 240, lambda: ended.append(True))
    wait_until(lambda: any(p.children() for p in probes_of(os.getpid())), 60, "both have begun")
    (probe,) = probes_of(os.getpid())
    both = [probe, *probe.children()]
    beside.close()
    assert ended == [True]
    wait_until(lambda: not any(map(lives, both)), 60, "both have ended")


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def probes_of(main: int) -> list[psutil.Process]:
    """Of the children, which may be others for a moment (git)."""
    found = []
    for child in psutil.Process(main).children():
        with suppress(psutil.NoSuchProcess):
            found += [child] if "tidemill.layouts.probe" in child.cmdline() else []
    return found


def test_the_probe_ends_with_whoever_started_it(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(FILE.replace("seconds=0.005", "seconds=1000"))
    main = subprocess.Popen(
        [sys.executable, "-c", PATIENT, "train", "made.py:experiment", "--layout", "measure"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    wait_until(lambda: probes_of(main.pid), 60, "the probe has begun")
    (probe,) = probes_of(main.pid)
    wait_until(probe.children, 60, "the one that measures policies and learner has begun")
    both = [probe, *probe.children()]
    main.kill()
    main.wait()
    wait_until(lambda: not any(map(lives, both)), 60, "both have ended")
    (begun,) = (tmp_path / "runs").iterdir()
    assert "checkpoints" not in {path.name for path in begun.iterdir()}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_costs_are_measured_ends_the_command_and_says_so(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "made.py").write_text(FILE.replace("seconds=0.005", "seconds=1000"))
    main = subprocess.Popen(
        [sys.executable, "-c", PATIENT, "train", "made.py:experiment", "--layout", "measure"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background jobs ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    wait_until(lambda: probes_of(main.pid), 60, "the probe has begun")
    (probe,) = probes_of(main.pid)
    main.send_signal(number)
    _, said = main.communicate(timeout=240)
    assert main.returncode == 128 + number
    assert "before the run began: nothing is kept" in said and "Traceback" not in said
    wait_until(lambda: not lives(probe), 60, "the probe has ended, were it just being born")
    assert not (tmp_path / "runs").exists()
