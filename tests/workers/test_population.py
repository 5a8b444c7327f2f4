"""Populations: who goes on from whom, with which settings, and that weights, samples and
settings are those that were meant."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.run.watching import EXPERIMENTS, wait_until
from tests.workers.paid_members import Adding
from tests.workers.world import KnownPolicy

from tidemill import (
    DQN,
    PPO,
    AgentSpec,
    Drawn,
    Evaluation,
    Experiment,
    Gymnasium,
    Limits,
    Population,
    QNetwork,
    Scripted,
    Trainer,
    WorkerConfig,
    populate,
)
from tidemill.api.control_messages import Adopt, Facts, Measured, Notice, Relay, Status, unpack_up
from tidemill.api.edges import Port
from tidemill.api.worker import Context
from tidemill.core.errors import ConfigError, DatabaseError, RunError
from tidemill.core.user_code_loading import load_file
from tidemill.metrics.json_lines import read_metrics
from tidemill.run import ending
from tidemill.store.parameter_database import PARAMETERS, ParameterDatabase
from tidemill.store.recorded_results import RecordedResults
from tidemill.training.train import resume, train
from tidemill.transports.local import local_endpoints
from tidemill.workers import population
from tidemill.workers.population import PopulationWorker
from tidemill.workers.population_formulas import choose_donor, explore

experiments = load_file(EXPERIMENTS, "test")
SOURCE = Path(__file__).with_name("paid_members.py")

# ---- ranking and perturbing ------------------------------------------------------------

# a is worst, h best
EIGHT = {name: float(score) for name, score in zip("hgfedcba", (80, 70, 60, 50, 40, 30, 20, 10), strict=True)}


def donors(scores: Mapping[str, float], member: str, quantile: float = 0.25) -> set[str | None]:
    return {choose_donor(scores, member, quantile, np.random.default_rng(seed)) for seed in range(50)}


def test_the_worst_quarter_goes_on_from_the_best_quarter() -> None:
    assert {member: donors(EIGHT, member) for member in "abcdefgh"} == {"a": {"g", "h"}, "b": {"g", "h"}} | {
        key: {None} for key in "cdefgh"
    }


def test_one_at_least_is_replaced_and_nobody_is_among_both() -> None:
    assert donors({"x": 1.0, "y": 2.0}, "x") == {"y"} and donors({"x": 1.0, "y": 2.0}, "y") == {None}
    three = {"x": 1.0, "y": 2.0, "z": 3.0}
    assert [donors(three, member, 0.5) for member in "xyz"] == [{"z"}, {None}, {None}]


def test_equals_go_on_by_themselves() -> None:
    assert donors(dict.fromkeys("abcd", 500.0), "a") == {None}
    # among equals the first by name is the worst
    assert donors({"a": 1.0, "b": 1.0, "c": 1.0, "d": 2.0}, "a") == {"d"}
    assert donors({"a": 1.0, "b": 1.0, "c": 1.0, "d": 2.0}, "b") == {None}


BOUNDS = {"rate": (1e-4, 1e-1), "bonus": (0.5, 1.0)}


def explored(rate: float, resample: float) -> list[dict[str, float]]:
    return [
        explore({"rate": rate, "bonus": 0.8}, BOUNDS, (0.8, 1.25), resample, np.random.default_rng(seed))
        for seed in range(2000)
    ]


def test_settings_are_multiplied_by_a_factor_each_within_bounds() -> None:
    drawn = {(round(changed["rate"], 12), round(changed["bonus"], 12)) for changed in explored(0.01, 0.0)}
    assert drawn == {(0.008, 0.64), (0.008, 1.0), (0.0125, 0.64), (0.0125, 1.0)}
    assert {changed["rate"] for changed in explored(1e-6, 0.0)} == {1e-4}
    assert {changed["rate"] for changed in explored(0.3, 0.0)} == {0.1}


def test_settings_drawn_anew_are_spread_by_their_logarithm() -> None:
    rates = np.array([changed["rate"] for changed in explored(0.05, 1.0)])
    assert ((rates >= 1e-4) & (rates <= 1e-1)).all()
    np.testing.assert_allclose([np.mean(rates < 1e-3), np.mean(rates < 1e-2)], [1 / 3, 2 / 3], atol=0.04)
    kept = np.mean([changed["rate"] in (0.05 * 0.8, 0.05 * 1.25) for changed in explored(0.05, 0.25)])
    np.testing.assert_allclose(kept, 0.75, atol=0.04)


# ---- the manager, on records that the test writes --------------------------------------


@dataclass(frozen=True, kw_only=True)
class Store(WorkerConfig):
    """Stands where trainers do."""

    members: tuple[str, ...]

    def ports(self) -> tuple[Port, ...]:
        return tuple(Port(member, role) for member in self.members for role in ("store", "publish"))


class Bench:
    """A manager of four members, polled by the test, which pushes their versions."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.members = tuple("abcd")
        usual: dict[str, Any] = {
            "explore": {"rate": (1e-4, 1.0)},
            "steps": 100,
            "factors": (0.5,),
            "resample": 0.0,
        }
        config = Population(members=self.members, **{**usual, **settings})
        workers: dict[str, WorkerConfig] = {"store": Store(members=self.members), "population": config}
        made = Experiment(name="bench", policies=dict.fromkeys(self.members, KnownPolicy()), workers=workers)
        end, self.link = local_endpoints(["store-0", "population-0"], made.edges())["population-0"]
        folder.mkdir(exist_ok=True)  # as a run does
        self.database = ParameterDatabase(folder / PARAMETERS)
        self.worker = PopulationWorker(Context(made, "population-0", config, end, str(folder)), config)
        self.worker.configure(Facts())
        self.heard()

    def push(
        self,
        version: int,
        steps: int,
        scores: Mapping[str, float | None],
        adopted: Mapping[str, int] | None = None,
        rate: float = 0.1,
    ) -> None:
        for member, score in scores.items():
            known = {
                "env_steps": float(steps),
                "adopted": float((adopted or {}).get(member, 0)),
                "algorithm/rate": rate,
            }
            self.database.push(
                member,
                version,
                {"w": np.zeros(1)},
                known if score is None else {**known, "training_return": score},
            )

    def poll(self) -> list[Any]:
        self.worker._poll()
        return self.heard()

    def heard(self) -> list[Any]:
        return [
            message
            for data in self.link.receive() or []
            if not isinstance(message := unpack_up(data), Status)
        ]


SCORES = {"a": 3.0, "b": 4.0, "c": 1.0, "d": 2.0}


@pytest.fixture(autouse=True)
def _look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(population, "LOOK", 0.0)


def test_it_decides_when_every_member_has_trained_enough_and_something_is_known_of_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.push(0, 0, dict.fromkeys(SCORES))
    assert bench.poll() == []
    bench.push(1, 99, SCORES)
    bench.push(2, 100, {"a": 3.0, "b": 4.0, "c": None})
    assert bench.poll() == []  # d has trained 99
    bench.push(3, 300, {"d": 2.0})
    relay, measured = bench.poll()
    assert measured == Measured(300, 0, {"population/best": 4.0, "population/mean": 2.5})
    assert relay == Relay("c", Adopt("b", 2, {"rate": 0.05}))  # what c has reached is known of version 1
    assert bench.poll() == []
    other = Bench(tmp_path / "unknown")
    other.push(0, 0, dict.fromkeys(SCORES))
    other.poll()
    other.push(1, 1000, {**SCORES, "a": None})
    assert other.poll() == []


def test_it_says_what_is_due_to_it_once_a_member_has_trained_enough(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.push(0, 0, dict.fromkeys(SCORES))
    bench.poll()
    bench.push(1, 99, SCORES)
    bench.poll()
    assert not bench.worker._lacks()
    bench.push(2, 100, {"a": 3.0, "b": 4.0})
    bench.poll()
    assert bench.worker._lacks() == {"c": "", "d": ""}
    bench.push(2, 100, {"c": 1.0, "d": 2.0})
    assert len(bench.poll()) == 2 and not bench.worker._lacks()
    bench.push(3, 200, SCORES)  # c has not gone on from another yet
    bench.poll()
    assert bench.worker._lacks() == {"c": ""}
    unknown = Bench(tmp_path / "unknown", metric="evaluation/return")
    unknown.push(0, 0, SCORES)
    unknown.poll()
    unknown.push(1, 100, SCORES)
    unknown.poll()
    assert unknown.worker._lacks() == dict.fromkeys(SCORES, "evaluation/return")


def test_a_full_disk_holds_a_decision_up_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, late = (Bench(tmp_path / name, updates=2, steps=50_000) for name in ("whole", "late"))
    for bench in (whole, late):
        bench.push(0, 0, SCORES)
        assert bench.poll() == []  # nobody has trained
        bench.push(2, 200, SCORES)
    told = whole.poll()

    def full(*_: Any) -> None:
        raise DatabaseError("no space left")

    monkeypatch.setattr(population, "AGAIN", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(RecordedResults, "add", full)
        assert [*late.poll(), *late.poll()] == [
            Notice("no space left. The population decides when it can be written again")
        ]
    again = Notice("the parameter database is written again: the population goes on")
    heard: list[Any] = []
    wait_until(lambda: heard.extend(late.poll()) or heard, 60, "the population looks again")
    assert heard == [*told, again] and len(told) > 1
    for name in late.members:
        known = [[each.means for each in bench.database.versions(name)] for bench in (whole, late)]
        assert known[0] == known[1]


def adopting(folder: Path, **settings: Any) -> Bench:
    """A manager that has told c to go on from version 1 of b."""
    bench = Bench(folder, **settings)
    bench.push(0, 0, dict.fromkeys(SCORES))
    bench.poll()
    bench.push(1, 100, SCORES)
    relay, _ = bench.poll()
    assert relay == Relay("c", Adopt("b", 1, {"rate": 0.05}))
    return bench


def test_the_version_that_is_adopted_is_kept_until_it_is(tmp_path: Path) -> None:
    bench = adopting(tmp_path)
    assert bench.database.tags("b") == {"for-member-2": 1, "latest": 1}
    bench.push(2, 300, {**SCORES, "c": 100.0})  # c has not heard of it yet: this is of its old weights
    assert bench.poll() == []
    assert bench.database.collect("b", 1) == [0]
    bench.push(4, 320, {"c": None}, {"c": 3}, rate=0.05)
    measured, notice = bench.poll()
    told = {"from": 1.0, "from_version": 1.0, "version": 3.0, "rate": 0.05}
    assert measured == Measured(320, 0, {f"population/2/{key}": value for key, value in told.items()})
    assert notice == Notice("c goes on from version 1 of b, as version 3, with rate = 0.05")
    assert bench.database.tags("b") == {"latest": 2} and bench.database.collect("b", 1) == [1]


def test_who_has_not_gone_on_from_another_for_long_is_decided_on_anew(tmp_path: Path) -> None:
    """Its trainer died just then, say: no decision would ever come again."""
    bench = adopting(tmp_path)
    bench.push(2, 300, SCORES)
    assert bench.poll() == []
    bench.push(3, 301, SCORES)
    notice, relay, measured = bench.poll()
    assert notice.text.startswith("c has not gone on from version 1 of b")
    assert relay == Relay("c", Adopt("b", 3, {"rate": 0.05})) and measured.values["population/best"] == 4.0
    assert bench.database.tags("b") == {"for-member-2": 3, "latest": 3}


def test_who_went_on_from_another_is_judged_by_what_it_has_reached_since(tmp_path: Path) -> None:
    bench = adopting(tmp_path)
    bench.push(3, 500, {"c": None}, {"c": 2})
    bench.push(3, 500, {"a": 3.0, "b": 4.0, "d": 2.0})
    bench.poll()
    bench.push(4, 599, {"c": 9.0}, {"c": 2})
    assert bench.poll() == []  # it has trained 99 since
    bench.push(5, 600, {"c": 9.0}, {"c": 2}, rate=0.08)
    relay, measured = bench.poll()
    assert relay == Relay("d", Adopt("c", 5, {"rate": 0.04})) and measured.values["population/best"] == 9.0


def test_equal_records_and_seeds_give_equal_decisions(tmp_path: Path) -> None:
    def decisions(name: str) -> list[Any]:
        bench = Bench(tmp_path / name, quantile=0.5, factors=(0.8, 1.25), resample=0.5)
        bench.push(0, 0, dict.fromkeys(SCORES))
        told: list[Any] = bench.poll()
        for round in range(1, 9):
            bench.push(round, 100 * round, SCORES, dict.fromkeys("cd", round))
            told += bench.poll()
        return told

    first = decisions("first")
    relays = [message for message in first if isinstance(message, Relay)]
    assert first == decisions("second") and len(relays) == 8
    assert {relay.message.source for relay in relays} == {"a", "b"} and len(
        {relay.message.settings["rate"] for relay in relays}
    ) > 4


@pytest.mark.parametrize("clean", [True, False])
def test_a_version_is_kept_no_longer_than_the_run(tmp_path: Path, clean: bool) -> None:
    bench = adopting(tmp_path)
    bench.database.tag("b", "mine", 1)
    if clean:
        bench.worker.exit()
    else:  # it was killed; another one goes on from the records
        bench = Bench(tmp_path)
        assert bench.poll() == []  # every member trains another 100 steps first
    assert bench.database.tags("b") == {"mine": 1, "latest": 1}


# ---- real runs -------------------------------------------------------------------------


def one(**trainer: Any) -> Experiment:
    made: Experiment = experiments.experiment(
        Gymnasium(make=f"{SOURCE}:Paying", kwargs={"pay": 1.0}), algorithm=Adding(), **trainer
    )
    return made


def two(until: str, steps: int = 200, sample_steps: int = 16) -> Experiment:
    """Member 0 adds 1 and is paid 2, member 1 adds 2⁻¹⁰ and is paid 1: it goes on from
    member 0 again and again, and adds ½ from then on."""
    starts = [{"amount": 1.0}, {"amount": 2**-10}]
    made = populate(
        one(database_seconds=0.03, sample_steps=sample_steps),
        starts,
        explore={"amount": (2**-10, 1.0)},
        steps=steps,
        factors=(0.5,),
        resample=0.0,
    )
    better = made.workers["actor-0"].replace(
        environment=Gymnasium(make=f"{SOURCE}:Paying", kwargs={"pay": 2.0})
    )
    return made.replace(workers={**made.workers, "actor-0": better}, limits=Limits(until=until))


def lineage(folder: Path) -> list[tuple[int, int, int]]:
    """Return (from, from_version, version) of each time that member 1 went on."""
    keys = [f"population/1/{name}" for name in ("from", "from_version", "version")]
    return [
        (int(record[keys[0]]), int(record[keys[1]]), int(record[keys[2]]))
        for record in read_metrics(folder)
        if keys[0] in record
    ]


def check_run(folder: Path) -> int:
    """Check what member 1 was trained on, and the weights of the versions of it that are
    kept. Return how many of these came after an adoption."""
    database, adoptions = ParameterDatabase(folder / PARAMETERS), lineage(folder)
    assert adoptions and {source for source, _, _ in adoptions} == {0}
    origins = {version: from_version for _, from_version, version in adoptions}
    # a record tells of all updates since the one before: of them the oldest sample
    trained = [record for record in read_metrics(folder) if "trainer-1-0/update" in record]
    for version in origins:
        for before, record in pairwise(trained):
            if before["trainer-1-0/update"] >= version:
                assert record["trainer-1-0/oldest_min"] >= version, (
                    "a sample from before the adoption was trained on"
                )
    after = 0
    for known in database.versions("policy-0"):
        assert (database.load("policy-0", known.version)[0]["w"] == known.version).all() and known.counters[
            "algorithm/amount"
        ] == 1
    for known in database.versions("policy-1"):
        adopted = int(known.counters["adopted"])
        if adopted in origins or not adopted:  # else the run ended before it was told
            expected = (
                origins[adopted] + 0.5 * (known.version - adopted) if adopted else known.version * 2**-10
            )
            assert (database.load("policy-1", known.version)[0]["w"] == expected).all()
            assert known.counters["algorithm/amount"] == (0.5 if adopted else 2**-10)
            after += adopted > 0
    assert database.tags("policy-0").keys() == {"latest"}
    return after


@pytest.mark.parametrize("launch", ["inline", "processes"])
def test_a_member_goes_on_from_the_weights_and_settings_of_a_better_one(
    tmp_path: Path, launch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "CLOSE_DEADLINE", 120.0)  # nobody is ended by force, and leaves a tag
    result = train(
        two("population/1/version > 20"), launch=launch, run_dir=tmp_path, source=SOURCE, quiet=True
    )
    assert result.summary["reason"] == "population/1/version > 20"
    assert check_run(tmp_path) > 0
    means = [record["population/mean"] for record in read_metrics(tmp_path) if "population/mean" in record]
    assert means == [7.5] * len(means) and len(means) >= len(lineage(tmp_path))


def test_a_resumed_population_goes_on(tmp_path: Path) -> None:
    train(two("population/1/version > 20"), launch="inline", run_dir=tmp_path, source=SOURCE, quiet=True)
    before, database = lineage(tmp_path), ParameterDatabase(tmp_path / PARAMETERS)
    last = database.versions("policy-1")[-1]
    resume(
        tmp_path, launch="inline", limits={"until": f"population/1/version > {last.version + 20}"}, quiet=True
    )
    assert lineage(tmp_path)[: len(before)] == before and len(lineage(tmp_path)) > len(before)
    assert check_run(tmp_path) > 0


# ---- what cannot be --------------------------------------------------------------------


def population_of(**settings: Any) -> Experiment:
    made = populate(changed(one(), "trainer", algorithm=PPO()), [{}, {}], explore={})
    return made.replace(
        workers={
            **made.workers,
            "population": Population(**{"members": ("policy-0", "policy-1"), "explore": {}, **settings}),
        }
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"members": ("policy-0",)}, "members = .* must be at least two different policies"),
        ({"members": ("policy-0", "policy-0")}, "at least two different policies"),
        (
            {"members": ("policy-0", "polcy-1")},
            'uses policy "polcy-1", which the experiment lacks; did you mean "policy-1"',
        ),
        (
            {"explore": {"learning_rat": (1e-5, 1e-2)}},
            'PPO has no number "learning_rat"; did you mean "learning_rate"',
        ),
        ({"explore": {"normalise_returns": (1, 2)}}, 'PPO has no number "normalise_returns"'),
        ({"explore": {"gamma": (0.9, 2.0)}}, "gamma = 2.0 is not between 0 and 1"),
        (
            {"explore": {"gamma": (0.9, 0.8)}},
            "the bounds 0.9 and 0.8 of gamma must be positive, the lower one first",
        ),
        ({"explore": {"gamma": (0.9,)}}, "of gamma must be two numbers, its lower and its upper bound"),
        (
            {"metric": "training_retrun"},
            'metric = "training_retrun" is not recorded of member "policy-0"; did you mean "training_return"',
        ),
        ({"quantile": 0.6}, "quantile = 0.6 must be above 0 and at most 0.5"),
        ({"factors": ()}, "must be positive numbers"),
        ({"resample": 2.0}, "resample = 2.0 must be between 0 and 1"),
        ({"steps": 0}, "steps = 0 must be at least 1"),
        ({"count": 2}, "one worker manages a population"),
    ],
)
def test_bad_settings_are_refused_at_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        population_of(**settings).check()


def changed(made: Experiment, name: str, **settings: Any) -> Experiment:
    return made.replace(workers={**made.workers, name: made.workers[name].replace(**settings)})


def test_members_that_could_not_go_on_from_one_another_are_refused_at_start() -> None:
    made = population_of()
    made.check()
    with pytest.raises(
        ConfigError,
        match='member "policy-1" of the population has 2 trainers; each member needs one of its own',
    ):
        changed(changed(made, "trainer-1", count=2), "actor-1", count=2).check()
    with pytest.raises(ConfigError, match=r"no trainer stores its versions there.*set the database_seconds"):
        changed(made, "trainer-1", database_seconds=None).check()
    with pytest.raises(
        ConfigError, match='members "policy-0" and "policy-1" of the population are different policies'
    ):
        made.replace(policies={**made.policies, "policy-1": KnownPolicy()}).check()


@dataclass(frozen=True, kw_only=True)
class Judge(WorkerConfig):
    """Records something of one member."""

    def ports(self) -> tuple[Port, ...]:
        return (Port("policy-0", "draw"),)

    def records(self) -> tuple[str, ...]:
        return ("win_rate",)


def test_settings_that_members_could_not_take_are_refused_at_start() -> None:
    made = changed(one(), "trainer", algorithm=DQN())
    made = made.replace(policies={"policy": QNetwork(hidden=(4,), noise=0.5)})
    with pytest.raises(
        ConfigError, match="epsilon of DQN is a schedule, so that there is no number to explore"
    ):
        populate(made, [{}, {}], explore={"epsilon": (0.1, 0.2)}).check()
    made = changed(made, "trainer", algorithm=DQN(epsilon=0.3))
    with pytest.raises(ConfigError, match=r"epsilon = 0\.3 has no effect on a noisy network"):
        populate(made, [{}, {}], explore={"epsilon": (0.1, 0.2)}).check()


def test_a_metric_must_be_recorded_of_every_member() -> None:
    made = population_of(metric="win_rate")
    with pytest.raises(ConfigError, match='metric = "win_rate" is not recorded of member "policy-1"'):
        made.replace(workers={**made.workers, "judge": Judge()}).check()


def test_members_in_different_spaces_are_refused(tmp_path: Path) -> None:
    made = changed(populate(one(), [{}, {}], explore={}), "actor-1", environment=Scripted())
    with pytest.raises(
        RunError, match='members "policy-0" and "policy-1" of the population play in different spaces'
    ):
        train(made, launch="inline", run_dir=tmp_path / "run", source=SOURCE, quiet=True)


def test_a_policy_is_a_member_of_one_population() -> None:
    made = population_of()
    with pytest.raises(
        ConfigError, match='policy "policy-0" is a member of the populations population and second'
    ):
        made.replace(workers={**made.workers, "second": made.workers["population"]}).check()


def test_members_are_compared_by_their_evaluations(tmp_path: Path) -> None:
    judge = AgentSpec(parameters=Drawn(tag="evaluating"), mode="concise", samples="evaluation")
    single = one(database_seconds=0.03)
    judges = {
        "judge": single.workers["actor"].replace(agents=(judge,), lanes=2),
        "evaluation": Evaluation(games=2),
    }
    starts = [{"amount": 1.0}, {"amount": 2**-10}]
    made = populate(
        single.replace(workers={**single.workers, **judges}),
        starts,
        explore={},
        steps=200,
        metric="evaluation/return",
    )
    better = made.workers["judge-0"].replace(
        environment=Gymnasium(make=f"{SOURCE}:Paying", kwargs={"pay": 2.0})
    )
    made = made.replace(
        workers={**made.workers, "judge-0": better}, limits=Limits(until="population/1/version > 0")
    )
    train(made, launch="inline", run_dir=tmp_path, source=SOURCE, quiet=True)
    assert {source for source, _, _ in lineage(tmp_path)} == {0}
    records = read_metrics(tmp_path)
    for number, reached in ((0, 10.0), (1, 5.0)):
        assert {r[name] for r in records if (name := f"evaluation-{number}/evaluation/return") in r} == {
            reached
        }
    assert {r["population/mean"] for r in records if "population/mean" in r} == {7.5}
    with pytest.raises(
        ConfigError, match=r'"evaluation/return", which nobody measures; .*evaluation-\d/evaluation/return'
    ):
        made.replace(limits=Limits(until="evaluation/return > 3")).check()


def test_what_populate_cannot_multiply_is_refused() -> None:
    single = one()
    with pytest.raises(ConfigError, match="at least two different policies"):
        populate(single, [{}], explore={})
    with pytest.raises(ConfigError, match='Adding has no number "amont"; did you mean "amount"'):
        populate(single, [{"amont": 1.0}, {}], explore={})
    with pytest.raises(ConfigError, match="one policy, one trainer, actors and evaluations"):
        populate(populate(single, [{}, {}], explore={}), [{}, {}], explore={})


def test_populate_keeps_specs_that_keep_nothing() -> None:
    single = one()
    (spec,) = single.workers["actor"].agents
    silent = changed(
        single, "actor", agents=(spec.replace(match="0"), spec.replace(samples=None, sample_steps=256))
    )
    made = populate(silent, [{}, {"amount": 3.0}], explore={})
    assert [[s.samples for s in made.workers[f"actor-{n}"].agents] for n in (0, 1)] == [
        ["samples-0", None],
        ["samples-1", None],
    ]
    assert [made.workers[f"trainer-{n}"].algorithm for n in (0, 1)] == [Adding(), Adding(amount=3.0)]
    assert isinstance(made.workers["trainer-1"], Trainer)
