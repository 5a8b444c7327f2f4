"""A ring that serves its targets strictly in turn waits for an environment, and not for
ever; each episode begins with a draw of its own."""

from pathlib import Path

import pytest
from tests.workers.world import Marked, World

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Asynchronous,
    Experiment,
    Gymnasium,
    Limits,
    Scripted,
    SimulatorEnvironment,
    Trainer,
    train,
)
from tidemill.core.errors import RunError
from tidemill.workers import ring
from tidemill.workers.ring import GRACE, patience_of


def test_an_environment_that_never_answers_is_a_fault_after_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "GRACE", 0.1)
    environment = Scripted(fault="hang", fault_tick=40)
    made = Experiment(
        name="hung",
        policies={"policy": ActorCritic(hidden=(4,))},
        workers={
            "actor": Actors(
                environment=environment, lanes=2, deadline_s=0.2, agents=(AgentSpec(sample_steps=8),)
            ),
            "trainer": Trainer(algorithm=PPO(minibatch_size=8, epochs=1)),
        },
        exact_resume=True,
        limits=Limits(updates=100),
    )
    with pytest.raises(RunError, match=r"actor-0: the environment of target 0 has not answered for 0\.3 s"):
        train(
            made, layout="given", run_dir=tmp_path / "run", quiet=True, launch="inline", source=Path(__file__)
        )


def test_what_environments_break_off_themselves_comes_before() -> None:
    actors = Actors(environment=Scripted(), lanes=2)
    assert patience_of(actors) == 300.0 + GRACE
    assert patience_of(actors.replace(deadline_s=3.0)) == 3.0 + GRACE
    other = Asynchronous(make="x.py:Make", deadline_s=1000.0)
    assert patience_of(actors.replace(environment=other, deadline_s=3.0)) == 1000.0 + GRACE
    one_after_another = Gymnasium(id="CartPole-v1", threads=1)
    assert patience_of(actors.replace(environment=one_after_another, deadline_s=3.0)) == 2 * 3.0 + GRACE
    simulator = SimulatorEnvironment(path="build/reach", start_seconds=90.0)
    assert patience_of(actors.replace(environment=simulator, deadline_s=3.0)) == 90.0 + GRACE


class OpensLate:
    """A gate that opens between two looks at it."""

    waits = False

    def __init__(self) -> None:
        self.looks = 0

    def opens(self) -> bool:
        self.looks += 1
        return self.looks % 2 == 0


def test_a_gate_that_opens_just_as_it_is_looked_at_lets_no_episode_begin_without_its_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When others open it is chance."""
    spec = AgentSpec(policy="p", samples="s", sample_steps=4)
    world = World(Actors(environment=Marked(), agents=(spec,), lanes=1, slots=50))
    world.begin()
    order = world.actor.order
    (target,), drawn, began = order.targets, list[int](), list[bool]()
    send = target._environment.send
    monkeypatch.setattr(order._refresh, "before_episodes", drawn.append)
    monkeypatch.setattr(
        target._environment,
        "send",
        lambda given, reset: (began.append(bool(reset.all())), send(given, reset)),
    )
    target._gate = OpensLate()
    for _ in range(20):
        world.poll()
        world.drain()
    assert sum(began) > 2 and drawn == [0] * sum(began)
