"""Several groups of actors, several policies, opponents from the parameter database and
an evaluation in lockstep: what is learnt does not depend on where and how they run."""

from pathlib import Path
from typing import Any

import pytest
from tests.launchers.host_launchers import TwoHosts

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Drawn,
    Evaluation,
    Experiment,
    Limits,
    PettingZoo,
    Query,
    Trainer,
    resume,
    train,
)
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.folder import RunFolder
from tidemill.store.checkpoint import read_newest
from tidemill.training.check_resume import compare

GAME = PettingZoo(make="pettingzoo.classic.tictactoe_v3")
POLICIES = "crosses", "noughts"
UPDATES = 6


class Apart(TwoHosts):
    """Each trainer gets samples from both hosts: actors of both groups are on the other
    one, as are a trainer and the judge."""

    on_b = ("together-1", "past-0", "noughts-0", "judge-0")

    def __init__(self) -> None:
        super().__init__({**dict.fromkeys(self.on_b, "b"), "together-0": "runner"})


def several(updates: int = UPDATES) -> Experiment:
    """Two policies learn from games with each other, and the first one also from games
    with its own past; an evaluation has its versions play."""
    crosses, noughts = (
        AgentSpec(match=f"player_{seat}", policy=name, samples=name, sample_steps=8)
        for seat, name in enumerate(POLICIES, 1)
    )
    drawn = Drawn(among=Query(limit=3))
    past = AgentSpec(match="player_2", policy="crosses", parameters=drawn, samples=None)
    judged = AgentSpec(
        match="player_1",
        policy="crosses",
        parameters=Drawn(tag="evaluating"),
        mode="concise",
        samples="evaluation",
    )
    actors = Actors(environment=GAME, lanes=2, count=2, agents=(crosses, noughts))
    return Experiment(
        name="several",
        policies={name: ActorCritic(hidden=(8,)) for name in POLICIES},
        workers={
            "together": actors,
            "past": actors.replace(count=1, ring=2, agents=(crosses, past)),
            **{
                name: Trainer(
                    policy=name,
                    samples=name,
                    algorithm=PPO(minibatch_size=16, epochs=1),
                    max_policy_lag=0,
                    database_updates=1,
                    database_versions=None,
                )
                for name in POLICIES
            },
            "judge": Actors(environment=GAME, lanes=1, agents=(judged, past)),
            "evaluation": Evaluation(policy="crosses", games=3, updates=2),
        },
        limits=Limits(updates=updates),
        exact_resume=True,
        seed=5,
    )


def judged(run: Path) -> list[dict[str, float]]:
    """Return what was told of each version that training waited for to be judged."""
    return [
        {name: value for name, value in record.items() if not name.startswith("time/")}
        for record in read_metrics(run)
        if record.get("evaluation/version", UPDATES) < UPDATES
    ]


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("several") / "inline"
    train(several(), launch="inline", run_dir=run, quiet=True)
    assert [each["evaluation/version"] for each in judged(run)] == [0, 2, 4]
    return run


@pytest.mark.parametrize("launch", ["threads", "processes", Apart])
def test_several_policies_learn_the_same_wherever_they_are(inline: Path, launch: Any, tmp_path: Path) -> None:
    run, hosts = tmp_path / "run", launch is Apart
    train(several(UPDATES - hosts), launch=launch, layout="given", run_dir=run, quiet=True)
    if hosts:  # what hosts have left goes on without them
        assert RunFolder.open(run).read("placement.json")["b"]["workers"] == list(Apart.on_b)
        resume(run, launch="inline", limits={"updates": UPDATES}, quiet=True)
    for name in POLICIES:
        found = [read_newest(folder / "checkpoints" / name) for folder in (inline, run)]
        compared, differing = compare(name, *found)
        assert compared > 15 and differing == [] and found[1].facts["updates"] == UPDATES
    assert judged(run) == judged(inline)
