"""Steps that environments fail in are recorded with what led to them, and can be looked
at and played again."""

import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.remote.served import serving
from tests.run import spoilt
from typer.testing import CliRunner

import tidemill
from tidemill import (
    DQN,
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    GymnasiumVector,
    Limits,
    PettingZoo,
    QNetwork,
    Replay,
    ReplayActors,
    ReplayTrainer,
    Rest,
    SimulatorEnvironment,
    Slots,
    Trainer,
)
from tidemill.cli.main import app
from tidemill.core.errors import CheckpointError, RunError
from tidemill.run.events import read_events
from tidemill.store.checkpoint import checkpoints, read_checkpoint, write_checkpoint
from tidemill.trained.replay_fault import replay_fault
from tidemill.workers.step_faults import MOST_A_MINUTE

SPOILT = Path(spoilt.__file__)
SIMULATORS = SPOILT.parents[1] / "bridge" / "simulators.py"


def made(fault: str = "nan", **settings) -> Gymnasium:
    return Gymnasium(make=f"{SPOILT}:Spoilt", kwargs={"fault": fault}, **settings)


def run(folder, environment, steps=80, *, exact=False, launch="inline", specs=("",), **actor):
    """Train on it; with several `specs` a policy each."""
    names = [f"policy{name}" for name in specs]
    agents = tuple(
        AgentSpec(match=each or ".*", policy=name, samples=f"of-{name}", sample_steps=4)
        for each, name in zip(specs, names, strict=True)
    )
    workers = {
        "actor": Actors(environment=environment, agents=agents, **{"lanes": 2, "lane_restarts": 50, **actor})
    }
    for name in names:
        workers[f"trainer-of-{name}"] = Trainer(
            algorithm=PPO(minibatch_size=8, epochs=1),
            policy=name,
            samples=f"of-{name}",
            database_seconds=None,
        )
    experiment = Experiment(
        name="spoilt",
        policies={name: ActorCritic(hidden=(8,)) for name in names},
        workers=workers,
        limits=Limits(steps=steps),
        exact_resume=exact,
    )
    return tidemill.train(experiment, launch=launch, run_dir=folder, quiet=True, log="")


def records(folder):
    found = checkpoints(folder / "faults" / "actor-0")
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def told(folder):
    return [event.cause for event in read_events(folder) if event.what == "told"]


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        ("nan", r"agent agent: obs\[1\] is nan"),
        ("reward", r"agent agent: reward is -inf"),
        ("shape", r"agent agent: obs has shape \(2,\); the observation space says \(3,\)"),
        ("raise", ""),
        ("panic", ""),
    ],
)
def test_a_step_that_fails_is_recorded_with_what_led_to_it_and_comes_again(fault, first, tmp_path):
    run(tmp_path / "run", made(fault), exact=True)
    path = records(tmp_path / "run")[-1]
    arrays, facts = read_checkpoint(path)
    assert {oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == {"0o600"}
    # the row from which the step began, and what was told as it was
    seen, action = arrays["row"]["0/obs"], arrays["row"]["0/action"]
    assert seen[0, 0] == arrays["row"]["0/steps"][0] == spoilt.STEP - 1
    assert seen[0, 1] < 0.5
    if fault not in ("raise", "panic"):
        assert arrays["told"]["0/info.sum"] == seen[0, 2] + action[0]
        assert arrays["told"]["0/info.at"].tolist() == [1, 2]
        assert facts["told"] == {"agent": {}}  # the arm in its info is no plain data
    assert (facts["lane"] in (0, 1)) and facts["target"] == 0 and not facts["resets"]
    # all actions of the episode; their sum is seen in it
    assert arrays["episode"]["actions/0:action"].shape == (spoilt.STEP, 1)
    assert arrays["episode"]["actions/0:action"][:-1].sum() == seen[0, 2]
    report = replay_fault(tmp_path / "run")
    assert re.fullmatch(first, report.first)
    assert report.again == "played again from the same beginning with the same 5 actions, it comes again"
    assert report.same is True
    assert f"lane {facts['lane']} of target 0 of actor-0, in its life 1" in report.where
    assert "after 4 steps of its episode, by version" in report.where
    assert [line.name for line in report.lines] == ["obs", "action"]
    assert ("the arm is stuck" in report.traceback) == (fault in ("raise", "panic"))


@pytest.mark.parametrize(("launch", "threads"), [("inline", 0), ("inline", 2), ("processes", 2)])
@pytest.mark.parametrize(
    ("fault", "says"), [("panic", "the arm is stuck"), ("wordless", "its __str__ raised RuntimeError")]
)
def test_whatever_an_environment_raises_costs_no_more_than_its_lane(fault, says, launch, threads, tmp_path):
    result = run(tmp_path / "run", made(fault, threads=threads), launch=launch)
    assert result.summary.status == "completed"
    first = rf"lane \d raised {fault.title()} while stepping with action \d: {says}; the step is void"
    assert re.search(first, told(tmp_path / "run")[0])
    assert not [event for event in read_events(tmp_path / "run") if event.what == "died"]


def test_a_lane_that_cannot_be_made_again_is_told_with_the_place_of_either_error(tmp_path):
    made = f"{SPOILT.with_name('test_stall_report.py')}:Licensed"
    licensed = Gymnasium(make=made, kwargs={"licence": str(tmp_path / "licence")})
    with pytest.raises(RunError) as raised:
        run(tmp_path / "run", licensed, lanes=1)
    told = str(raised.value).partition("\n")[0]
    assert re.search(r"FileExistsError: .*pathlib.py, line \d+, in touch\)\); let its close\(\)", told)
    assert re.search(r"the arm is stuck \([^()]*test_stall_report.py, line \d+, in step\)$", told)


@pytest.mark.parametrize("fault", ["long", "long infos"])
def test_texts_of_any_length_are_shortened_in_the_record_and_wherever_they_are_told(fault, tmp_path):
    folder = tmp_path / "run"
    run(folder, made(fault))
    path = records(folder)[-1]
    assert sum(file.stat().st_size for file in path.iterdir()) < 50_000
    assert (folder / "events.jsonl").stat().st_size < 50_000
    _, facts = read_checkpoint(path)
    if fault == "long":
        shown = "x" * 750
        left = f"{spoilt.LONG - 1500:,}"
        assert facts["cause"].endswith(
            f"ValueError while stepping with action {facts['cause'].partition('action ')[2][0]}: "
            f"{shown} […{left} characters are left out…] {shown}"
        )
        assert 'spoilt.py", line' in facts["traceback"]
        assert "characters are left out" in facts["traceback"]
    else:
        assert facts["told"]["agent"]["info.text"] == f"'{'t' * 99}…"
        assert f"0/info.{'k' * 100}" in read_checkpoint(path)[0]["told"]


def test_what_follows_from_something_else_does_not_come_again_and_the_command_says_so(tmp_path):
    run(tmp_path / "run", made("once"), exact=True)
    (path,) = records(tmp_path / "run")
    shown = CliRunner().invoke(app, ["replay-fault", str(tmp_path / "run"), "1", "--worker", "actor-0"])
    assert shown.exit_code == 1, shown.output
    assert "the cable was loose" in shown.output
    assert "it does not come again: the fault follows from something else, too" in shown.output
    assert re.search(r"agent +obs +\[4\. ", shown.output)  # brackets are no markup
    arrays, facts = read_checkpoint(path)
    arrays["row"]["0/obs"][0, 2] += 1
    write_checkpoint(path.parent, path.name, arrays, facts, 5)
    report = replay_fault(tmp_path / "run")
    assert report.same is False
    assert "it is another episode: obs was another before its last step" in report.again


def test_of_a_run_that_is_not_exact_it_is_said_why_nothing_is_played_again(tmp_path):
    run(tmp_path / "run", made("nan", threads=1), launch="processes")
    report = replay_fault(tmp_path / "run")
    assert report.first == "agent agent: obs[1] is nan"
    assert report.same is None
    assert report.again == (
        "it cannot be played again: only Actors of runs with exact_resume = True keep how episodes begin, "
        "and what is done in them"
    )
    first = records(tmp_path / "run")[0].name.partition("-")[2]
    where = f"what led to that is recorded: tidemill replay-fault RUN {first} --worker actor-0."
    assert sum(where in text for text in told(tmp_path / "run")) == 1


@pytest.mark.parametrize("permitted", [None, 1])
def test_lanes_that_step_together_and_their_fault_that_ends_the_run(permitted, tmp_path):
    vector = GymnasiumVector(make=f"{SPOILT}:Vector")
    with pytest.raises(RunError, match="obs of agent agent in lane 1 is not finite"):
        run(tmp_path / "run", vector, lane_restarts=permitted)
    found = records(tmp_path / "run")  # each is written once
    assert [path.name for path in found] == [f"step-{number}" for number in range(1, len(found) + 1)]
    assert len(found) == 1 + (permitted or 0)
    arrays, facts = read_checkpoint(found[-1])
    assert facts["lane"] == 1
    assert arrays["row"]["0/obs"].tolist() == [[1, 6]]
    report = replay_fault(tmp_path / "run")
    assert report.first == "agent agent: obs[1] is nan"
    assert any("replay-fault RUN 1 --worker actor-0" in text for text in told(tmp_path / "run"))


def test_agents_of_one_environment_by_several_specs(tmp_path):
    run(tmp_path / "run", PettingZoo(make=f"{SPOILT}:Both"), exact=True, specs=("a", "b"))
    path = records(tmp_path / "run")[-1]
    arrays, facts = read_checkpoint(path)
    assert [each["names"] for each in facts["agents"]] == [["a"], ["b"]]
    assert arrays["told"]["0/obs"][0] == arrays["told"]["1/obs"][0] == spoilt.STEP
    assert [arrays["row"][f"{spec}/obs"][0, 0] for spec in (0, 1)] == [spoilt.STEP - 1] * 2
    report = replay_fault(tmp_path / "run")
    assert report.first == "agent b: obs[2] is nan"
    assert [(line.agent, line.name) for line in report.lines] == [
        (agent, name) for agent in "ab" for name in ("obs", "action")
    ]
    assert report.same is True, report.again


@pytest.mark.parametrize("slots", [True, False])
@pytest.mark.parametrize("fault", ["nan", "raise"])
def test_of_a_replay_memory_it_is_known_what_was_seen_before_what_was_told_was_written_over_it(
    fault, slots, tmp_path
):
    lanes = {
        "environment": Slots(environment=made(fault), backoff_s=0.0, max_backoff_s=0.0), "lanes": 1, "ring": 2
    } if slots else {"environment": made(fault), "lanes": 2, "lane_restarts": 1000}  # fmt: skip
    workers = {
        "actor": ReplayActors(**lanes),
        "trainer": ReplayTrainer(
            algorithm=DQN(), buffer=Replay(capacity=1000, warm_up=4), batch_size=4, ratio="1/4",
            database_seconds=None,
        ),
    }  # fmt: skip
    experiment = Experiment(
        name="replay", policies={"policy": QNetwork(hidden=(8,))}, workers=workers, limits=Limits(steps=60)
    )
    tidemill.train(experiment, launch="inline", run_dir=tmp_path / "run", quiet=True, log="")
    arrays, facts = read_checkpoint(records(tmp_path / "run")[-1])
    assert arrays["row"]["0/obs"][0, 0] == spoilt.STEP - 1
    assert np.isfinite(arrays["row"]["0/obs"]).all()
    assert facts["lane"] == 0 and facts["target"] in (0, 1)
    report = replay_fault(tmp_path / "run")
    assert report.first == ("agent agent: obs[1] is nan" if fault == "nan" else "")
    assert report.same is None


def test_simulators_and_servers(tmp_path):
    simulator = SimulatorEnvironment(path=str(SIMULATORS), arguments=("notanumber",))
    run(tmp_path / "simulator", simulator, steps=12, lanes=1)
    report = replay_fault(tmp_path / "simulator")
    assert report.first == "agent group: observation 0[0, 0] is nan"
    assert report.lines[0].values == "[2.]"
    with serving(lambda: spoilt.Spoilt("reward")) as server:
        run(tmp_path / "server", Rest(url=server.url, token=""), steps=40)
    report = replay_fault(tmp_path / "server")
    assert report.first == "agent agent: reward is -inf"
    assert report.lines[0].values.startswith("[4. ")


def test_records_are_bounded_by_number_and_by_the_minute(tmp_path, monkeypatch):
    monkeypatch.setattr("tidemill.workers.step_faults.awake", lambda: 1.0)
    run(tmp_path / "run", made("raise"), steps=120, lane_fault_records=3)
    assert [path.name for path in records(tmp_path / "run")] == [
        f"step-{MOST_A_MINUTE - back}" for back in (2, 1, 0)
    ]
    with pytest.raises(
        RunError, match=r"there is no record 1 in .*there are: actor-0 step-4, actor-0 step-5"
    ):
        replay_fault(tmp_path / "run", 1)
    run(tmp_path / "none", made("raise"), lane_fault_records=0)
    assert not (tmp_path / "none" / "faults").exists()
    with pytest.raises(RunError, match="no record of an update that was left out, or a step that"):
        replay_fault(tmp_path / "none")


def test_the_debugger_stops_where_the_environment_raised_or_its_step_begins(tmp_path, monkeypatch, capsys):
    stopped = []
    monkeypatch.setattr("pdb.post_mortem", stopped.append)
    run(tmp_path / "raise", made("raise"), exact=True)
    assert replay_fault(tmp_path / "raise", debugger=True).same is True
    (traceback,) = stopped
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    assert traceback.tb_frame.f_code.co_name == "step"
    assert traceback.tb_frame.f_locals["self"].seen[0] == spoilt.STEP
    run(tmp_path / "nan", made("nan"), exact=True)
    monkeypatch.setattr("sys.stdin", io.StringIO("p 'before', self.seen[0]\nc\n"))
    assert replay_fault(tmp_path / "nan", debugger=True).same is True
    assert f"('before', {np.float32(spoilt.STEP - 1)!r})" in capsys.readouterr().out


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    run(folder, made("nan"), exact=True)
    return folder


def changed(recorded, folder, change):
    """Return a copy of a run whose newest record is another one."""
    shutil.copytree(recorded, folder)
    path = records(folder)[-1]
    arrays, facts = read_checkpoint(path)
    change(arrays, facts)
    write_checkpoint(path.parent, path.name, arrays, facts, 20)
    return folder


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays, facts: facts.update(lane="two"),
        lambda arrays, facts: facts.update(time=1e300),
        lambda arrays, facts: facts.update(told=[1]),
        lambda arrays, facts: facts.update(agents=[{"policy": "policy", "names": [], "spaces": {}}]),
        lambda arrays, facts: arrays.pop("row"),
        lambda arrays, facts: arrays["row"].pop("0/steps"),
        lambda arrays, facts: arrays["row"].update({"0/version": np.zeros((0, 3))}),
        lambda arrays, facts: arrays["row"].update({"0/version": np.zeros((1, 3), np.int64)}),
        lambda arrays, facts: arrays["row"].update({"0/finished": np.zeros((1, 3), np.bool_)}),
        lambda arrays, facts: arrays["row"].update({"0/steps": np.ones(1, np.bool_)}),
        lambda arrays, facts: arrays["row"].update({"0/obs": np.zeros((0, 3), np.float32)}),
        lambda arrays, facts: arrays["episode"].update({"actions/0:action": np.zeros((5, 1), np.float32)}),
        lambda arrays, facts: arrays["episode"].update({"actions/0:action": np.zeros((4, 1), np.int64)}),
        lambda arrays, facts: facts["episode"].update(steps=10**9),
        lambda arrays, facts: facts["episode"].update(generator={"bit_generator": "MT19937"}),
        lambda arrays, facts: facts["episode"].pop("seed"),
    ],
)
def test_a_record_that_cannot_be_is_one_error(change, recorded, tmp_path):
    with pytest.raises(CheckpointError):
        replay_fault(changed(recorded, tmp_path / "run", change))


def test_a_torn_record_is_one_error_and_one_tells_a_terminal_nothing(recorded, tmp_path):
    def words(arrays, facts):
        facts["cause"] += "\x1b]0;owned\x07"
        arrays["row"]["0/obs.\x1b"] = arrays["row"]["0/obs"]
        arrays["told"] = {"0/obs": arrays["row"]["0/obs"][0], "0/\x1b": np.full(1, np.nan)}

    folder = changed(recorded, tmp_path / "run", words)
    shutil.copytree(folder / "faults" / "actor-0", folder / "faults" / "\x1b")
    report = replay_fault(folder)
    assert report.first == "agent agent: ?[0] is nan"
    assert "obs.?" in [line.name for line in report.lines] and "\x1b" not in str(report)
    file = records(folder)[-1] / "told.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is damaged"):
        replay_fault(folder)


def test_code_that_the_user_has_not_had_run_is_not_played(recorded, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    shutil.copytree(recorded, tmp_path / "run")
    config = tmp_path / "run" / "config.json"
    content = json.loads(config.read_text())
    content["workers"]["actor"]["environment"]["make"] = f"{own}:Spoilt"
    config.write_text(json.dumps(content))
    report = replay_fault(tmp_path / "run")
    assert report.first == "agent agent: obs[1] is nan"
    assert report.same is None
    assert re.search(r"it is not played again: (.|\n)*own\.py(.|\n)*--trust", report.again)
    assert not (tmp_path / "ran").exists()
