"""Settings that a policy leaves to a measurement: what is decided, by which costs, where
it is written and when nothing is measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Atari,
    Experiment,
    Gymnasium,
    Limits,
    Trainer,
    resume,
    train,
)
from tidemill.core.config import decode, encode
from tidemill.core.errors import RunError
from tidemill.launchers.kinds import instructions
from tidemill.layouts import auto_layout
from tidemill.layouts.auto_layout import costs_of, lay_out
from tidemill.layouts.costs import Costs
from tidemill.layouts.probe import NO_TRAINING, PlayerCosts, changes, quickest
from tidemill.presets.experiments import experiment_for

DECIDED = Costs(
    300e-6, 300e-6, 100e-6, 300e-6, 2e-3, 1, True, decided={"policy": {"convolutions": "bfloat16"}}
)
GAME = """
import gymnasium, numpy as np

class Game(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (36, 36), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, False, False, {}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def made(tmp_path: Path) -> Experiment:
    (tmp_path / "game.py").write_text(GAME)
    environment = Gymnasium(make=f"{tmp_path / 'game.py'}:Game", max_episode_steps=20)
    return Experiment(
        name="game",
        policies={"policy": ActorCritic(convolutions="auto", shared_critic=True)},
        workers={
            "actor": Actors(environment=environment, lanes=2, agents=(AgentSpec(sample_steps=16),)),
            "trainer": Trainer(algorithm=PPO(minibatch_size=16, epochs=1)),
        },
        limits=Limits(updates=2),
    )


def measured(monkeypatch: pytest.MonkeyPatch, costs: Costs = DECIDED) -> list[Experiment]:
    """Experiments whose costs are asked for from now on: the answer is `costs`."""
    asked: list[Experiment] = []

    def probe(experiment: Experiment, source: Path | None) -> Costs:
        asked.append(experiment)
        return costs

    monkeypatch.setattr(auto_layout, "probe", probe)
    return asked


def convolutions(experiment: Experiment) -> str:
    policy = experiment.policies["policy"]
    assert isinstance(policy, ActorCritic)
    return policy.convolutions


def test_the_plain_way_is_taken_unless_another_is_clearly_quicker() -> None:
    plain, other = ActorCritic(), ActorCritic(convolutions="bfloat16")

    def found(of_plain: float, of_other: float) -> ActorCritic:
        one = PlayerCosts(plain, 16, 1e-5, 1e-4, NO_TRAINING._replace(row=of_plain))
        two = one._replace(config=other, trained=NO_TRAINING._replace(row=of_other))
        config = quickest([one, two]).config
        assert isinstance(config, ActorCritic)
        return config

    assert found(1e-3, 0.98e-3) is plain and found(1e-3, 2e-3) is plain
    assert found(1e-3, 0.8e-3) is other
    assert changes(plain, other) == {"convolutions": "bfloat16"} and changes(plain, plain) == {}


def test_calls_count_in_proportion_to_the_rows_that_they_answer() -> None:
    quick_calls = PlayerCosts(ActorCritic(), 16, 20e-6, 0.1e-3, NO_TRAINING)
    quick_rows = PlayerCosts(ActorCritic(), 16, 10e-6, 10e-3, NO_TRAINING)
    assert quickest([quick_rows, quick_calls]) is quick_calls
    many = [each._replace(seats=4096) for each in (quick_calls, quick_rows)]
    assert quickest(many) is many[1]


def test_what_is_decided_is_the_runs_configuration_and_stays_when_it_is_resumed(
    made: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = msgspec.structs.replace(DECIDED, decided={"policy": {"convolutions": "float32"}})
    asked = measured(monkeypatch, plain)
    run = train(made, run_dir=tmp_path / "run", source=tmp_path / "game.py", quiet=True).folder

    def kept() -> str:
        return convolutions(decode(Experiment, json.loads((run / "config.json").read_bytes())))

    assert kept() == "float32" and len(asked) == 1
    measured(monkeypatch)
    resume(run, limits={"updates": 3}, quiet=True)
    assert kept() == "float32"


@pytest.mark.parametrize(
    ("layout", "fixed"),
    [
        ("auto", []),
        ("measure", []),
        ("actors=1,trainers=1,together,lanes=2,sample_steps=16,ring=1,slots=1", []),
        ("auto", ["workers.actor.count"]),
    ],
)
def test_settings_are_decided_whether_or_not_the_layout_is_chosen(
    made: Experiment, layout: str, fixed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = measured(monkeypatch)
    found = lay_out(made, None, layout, fixed)
    assert convolutions(found.experiment) == "bfloat16" and len(asked) == 1
    assert found.note.endswith("policy: convolutions = bfloat16")
    decided = made.replace(policies=found.experiment.policies)
    assert lay_out(decided, None, layout, fixed).experiment == found.experiment


def test_nothing_is_measured_for_a_run_as_given_or_in_one_process(
    made: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = measured(monkeypatch)
    text = "actors=1,trainers=1,lanes=2,sample_steps=16,ring=1,slots=1"
    for layout, processes in (("given", True), ("auto", False), ("measure", False), (text, False)):
        found = lay_out(made, None, layout, processes=processes)
        assert convolutions(found.experiment) == "auto"
    assert asked == []


def test_what_a_user_decided_is_not_measured(made: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = measured(monkeypatch)
    own = made.replace(policies={"policy": ActorCritic(convolutions="bfloat16")})
    assert lay_out(own, None, "auto", ["workers.actor.lanes"]).experiment == own and asked == []


def test_undecided_settings_stay_so_where_nothing_can_be_measured_and_the_note_says_why(
    made: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(*_: object) -> Costs:
        raise RunError("no answer after 20 s")

    monkeypatch.setattr(auto_layout, "probe", probe)
    found = lay_out(made, None, "auto", ["workers.actor.count"])
    assert convolutions(found.experiment) == "auto"
    assert "stay so, since costs could not be measured: no answer after 20 s" in found.note


def test_costs_are_those_of_the_instructions_that_libraries_may_use(
    made: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, before = measured(monkeypatch), instructions()
    costs_of(made, None)
    for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "OPENBLAS_CORETYPE"):
        monkeypatch.setenv(name, "AVX2")
        costs_of(made, None)
        costs_of(made, None)
    assert len(asked) == 4 and instructions() != before


def test_the_preset_of_atari_games_leaves_the_data_type_to_a_measurement() -> None:
    assert convolutions(experiment_for("pong", Atari(id="ALE/Pong-v5"), "ppo")) == "auto"


def test_a_processor_without_bfloat16_decides_for_float32(made: Experiment, tmp_path: Path) -> None:
    """Measured in the real probe, held back to AVX2."""
    order = tmp_path / "order.py"
    order.write_text(
        "import sys; from pathlib import Path\n"
        "from tidemill.core.config import decode; from tidemill.api.experiment import Experiment\n"
        "import json; from tidemill.layouts import auto_layout\n"
        "auto_layout.SECONDS = 240\n"
        "made = decode(Experiment, json.loads(Path(sys.argv[1]).read_text()))\n"
        "print(auto_layout.probe(made, None).decided)\n"
    )
    (tmp_path / "made.json").write_text(json.dumps(encode(made)))
    found = subprocess.run(
        [sys.executable, str(order), str(tmp_path / "made.json")],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.stdout.strip() == "{'policy': {'convolutions': 'float32'}}", found.stderr
