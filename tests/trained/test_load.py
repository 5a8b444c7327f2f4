"""Policies taken out of a run: observations and actions in the environment's own form."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import tidemill
from tidemill import PPO, ActorCritic, Actors, Experiment, Gymnasium, Limits, Trainer
from tidemill.api.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Spaces, Tuple
from tidemill.api.weights_header import write_header
from tidemill.core.errors import (
    CheckpointError,
    ConfigError,
    DatabaseError,
    RunError,
    SchemaError,
    VersionGone,
)
from tidemill.core.safetensors_io import pack, unpack
from tidemill.run.folder import RunFolder
from tidemill.store.checkpoint import write_checkpoint
from tidemill.store.parameter_database import ParameterDatabase
from tidemill.trained.load import LoadedPolicy, load

FOUR, TWO = Box((4,), "float32"), Discrete(2)


def experiment(**limits: Any) -> Experiment:
    actors = Actors(
        environment=Gymnasium(id="CartPole-v1"), lanes=8, agents=(tidemill.AgentSpec(sample_steps=32),)
    )
    return Experiment(
        name="cartpole",
        policies={"policy": ActorCritic()},
        workers={"actor": actors, "trainer": Trainer(algorithm=PPO())},
        limits=Limits(**limits),
    )


def write(folder: RunFolder, spaces: Spaces, update: int, policy: str = "policy", seed: int = 1) -> Path:
    arrays = {"policy": ActorCritic().build(spaces, seed).parameters()}
    return write_checkpoint(
        folder.checkpoints(policy),
        f"update-{update}",
        arrays,
        {"updates": update, "steps": update * 10, "spaces": msgspec.to_builtins(spaces)},
        9,
    )


def made(path: Path, observation: Space, action: Space) -> LoadedPolicy:
    """Return an untrained policy for these spaces, out of a run's folder."""
    folder = RunFolder.create(path / "run", experiment(), None)
    write(folder, Spaces(observation, action), 3)
    return load(folder.path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tidemill.train(
        experiment(steps=2000), launch="inline", run_dir=tmp_path_factory.mktemp("runs") / "run", quiet=True
    )
    return run.folder


def test_a_trained_run_gives_the_policy_with_its_own_spaces_and_counters(trained: Path) -> None:
    policy = tidemill.load(trained)
    summary = RunFolder.open(trained).read("summary.json")
    assert (policy.name, policy.update, policy.steps) == ("policy", summary["updates"], summary["env_steps"])
    assert policy.spaces.action == Discrete(2)
    # infinite bounds included
    assert policy.spaces.observation == Gymnasium(id="CartPole-v1").build(1, 0).agents[0].spaces.observation
    assert policy.act(np.zeros(4, np.float32)) in (0, 1)
    answer = policy.answer(np.zeros(4, np.float32))
    assert answer.keys() == {"action", "log_prob", "value"}
    assert answer["log_prob"] <= 0


def test_loading_and_acting_import_neither_torch_nor_gymnasium(trained: Path) -> None:
    code = f"""
import sys, tidemill
action = tidemill.load({str(trained)!r}).act([0.0, 0.0, 0.0, 0.1])
print(action, [name for name in ("torch", "gymnasium") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout.strip() in ("0 []", "1 []"), result.stderr) == (True, "")


def test_a_batch_is_answered_row_by_row(tmp_path: Path) -> None:
    policy = made(tmp_path, FOUR, Discrete(3))
    batch = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    actions, answers = policy.act(batch), policy.answer(batch)
    assert actions.shape == answers["value"].shape == (5,)
    assert [policy.act(row) for row in batch] == actions.tolist()
    np.testing.assert_allclose([policy.answer(row)["value"] for row in batch], answers["value"], rtol=1e-5)
    assert policy.act(batch[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("space", "dtype", "shape"),
    [
        (Discrete(3, start=5), np.int64, ()),
        (MultiDiscrete((2, 3)), np.int64, (2,)),
        (MultiBinary(4), np.int8, (4,)),
        (Box((2, 2), "float64", (-0.5,), (0.5,)), np.float64, (2, 2)),
    ],
)
def test_actions_have_the_form_of_the_environment(
    tmp_path: Path, space: Space, dtype: Any, shape: tuple[int, ...]
) -> None:
    from tidemill.api.spaces import to_gymnasium

    policy = made(tmp_path, FOUR, space)
    policy.deterministic = False
    for _ in range(20):
        action = policy.act(np.ones(4))
        assert (action.dtype, action.shape) == (dtype, shape)
        assert to_gymnasium(space).contains(action)
    assert policy.act(np.ones((7, 4))).shape == (7, *shape)


def test_nested_observations_come_as_mappings_and_sequences(tmp_path: Path) -> None:
    space = Dict({"place": Discrete(3, start=1), "eyes": Tuple((Box((2,), "uint8"), MultiBinary(2)))})
    policy = made(tmp_path, space, Discrete(2))
    one = {"place": 3, "eyes": (np.array([0, 255], np.uint8), np.array([1, 0], np.int8))}
    assert policy.act(one) in (0, 1)
    many = {"place": np.array([1, 2, 3]), "eyes": [np.zeros((3, 2), np.uint8), np.zeros((3, 2), np.int8)]}
    assert policy.act(many).shape == (3,)
    with pytest.raises(SchemaError, match=r"no part 'eyes'.*obs\.eyes\.0: uint8 of shape \[2\]"):
        policy.act({"place": 1})
    with pytest.raises(
        SchemaError,
        match=r"different numbers of observations: obs\.place 3, obs\.eyes\.0 2, obs\.eyes\.1 a single one",
    ):
        policy.act({"place": np.array([1, 2, 3]), "eyes": (np.zeros((2, 2), np.uint8), np.zeros(2, np.int8))})
    with pytest.raises(SchemaError, match=r"obs\.place is 4; expected obs\.place: an integer from 1 to 3"):
        policy.act({**one, "place": 4})
    with pytest.raises(SchemaError, match=r"dtype int64; expected .*uint8"):
        policy.act({**one, "eyes": (np.array([0, 255]), np.zeros(2, np.int8))})


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (np.zeros(3), r"obs has shape \(3,\); expected obs: float32 of shape \[4\], or \[n, 4\] for a batch"),
        (np.zeros((2, 3, 4)), r"shape \(2, 3, 4\)"),
        (0.0, r"shape \(\)"),
        ([[1.0], [1.0, 2.0]], "obs is no array"),
        (["a", "b", "c", "d"], "dtype <U1"),
        ([0.0, np.nan, 0.0, 0.0], "NaN"),
    ],
)
def test_what_the_space_does_not_hold_is_refused(tmp_path: Path, observation: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        made(tmp_path, FOUR, Discrete(2)).act(observation)


def test_the_mode_is_the_same_every_time_and_samples_follow_the_seed(tmp_path: Path) -> None:
    folder = made(tmp_path, FOUR, Box((1,), "float32", (-1.0,), (1.0,)))
    path, zero = tmp_path / "run", np.zeros(4)
    assert {float(folder.act(zero)[0]) for _ in range(5)} == {float(folder.act(zero)[0])}
    draws = [
        [float(p.act(zero)[0]) for _ in range(5)]
        for p in (load(path, deterministic=False, seed=s) for s in (1, 1, 2))
    ]
    assert draws[0] == draws[1] != draws[2]
    assert len(set(draws[0])) > 1


def test_a_checkpoint_is_named_by_update_name_or_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", experiment(), None)
    spaces = Spaces(FOUR, Discrete(2))
    paths = [write(folder, spaces, update, seed=update) for update in (2, 10)]
    assert load(folder.path).update == 10
    assert [load(folder.path, checkpoint=c).update for c in (2, "2", "update-2", paths[0])] == [2] * 4
    with pytest.raises(CheckpointError, match='no checkpoint "update-11"; did you mean "update-10"'):
        load(folder.path, checkpoint="update-11")


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.create(tmp_path / "run", experiment(), None)
    for update in (2, 10):
        path = write(folder, Spaces(FOUR, Discrete(2)), update)
    (path / "policy.safetensors").write_bytes(b"torn")
    assert load(folder.path).update == 2
    assert "warning" in (said := capsys.readouterr().err) and "damaged" in said and "taking" in said
    with pytest.raises(CheckpointError, match="damaged"):
        load(folder.path, checkpoint=10)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"not a run's folder"):
        load(tmp_path)
    folder = RunFolder.create(tmp_path / "run", experiment(), None)
    with pytest.raises(CheckpointError, match="no readable checkpoint"):
        load(folder.path)
    with pytest.raises(RunError, match='no policy "polcy"; did you mean "policy"'):
        load(folder.path, policy="polcy")


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    folder = RunFolder.create(
        tmp_path / "run", experiment().replace(policies={"policy": ActorCritic(hidden=(8,))}), None
    )
    write(folder, Spaces(FOUR, Discrete(2)), 1)
    with pytest.raises(CheckpointError, match="does not fit the run's configuration"):
        load(folder.path)


def test_one_of_several_policies_must_be_named(tmp_path: Path) -> None:
    two = experiment()
    workers = {**two.workers, "second": Trainer(algorithm=PPO(), policy="other", samples="others")}
    folder = RunFolder.create(
        tmp_path / "run",
        two.replace(policies={"policy": ActorCritic(), "other": ActorCritic()}, workers=workers),
        None,
    )
    for policy in ("policy", "other"):
        write(folder, Spaces(FOUR, Discrete(2)), 1, policy)
    with pytest.raises(RunError, match="trains 2 policies; say which of other, policy"):
        load(folder.path)
    assert load(folder.path, policy="other").name == "other"


# ---- versions of the parameter database, and exported files ----------------------------


def exported(path: Path, observation: Space = FOUR, action: Space = TWO) -> Path:
    """Write an untrained policy's file, as a trainer and an export do."""
    config = ActorCritic(normalise_observations=True)
    spaces = Spaces(observation, action)
    database = ParameterDatabase(path / "parameters")
    database.push(
        "red", 7, config.build(spaces, 1).parameters(), {"env_steps": 70}, write_header(config, spaces)
    )
    database.export("red", 7, path / "red.safetensors")
    return path / "red.safetensors"


def test_a_version_is_loaded_by_number_or_tag(trained: Path) -> None:
    database = RunFolder.open(trained).database()
    database.tag("policy", "first", 0)
    summary = RunFolder.open(trained).read("summary.json")
    assert [load(trained, version=v).update for v in (0, "0", "first", "latest")] == [
        0,
        0,
        0,
        summary["updates"],
    ]
    newest, by_version = load(trained), load(trained, version="latest")
    assert (newest.update, newest.steps, newest.spaces) == (
        by_version.update,
        by_version.steps,
        by_version.spaces,
    )
    assert newest.answer(np.ones(4)) == by_version.answer(np.ones(4))
    assert newest.answer(np.ones(4)) != load(trained, version="first").answer(np.ones(4))
    with pytest.raises(VersionGone, match='no tag "frst"; did you mean "first"'):
        load(trained, version="frst")
    with pytest.raises(ConfigError, match="take one of the two"):
        load(trained, version=0, checkpoint=1)


def test_an_exported_file_is_a_policy_without_its_run(tmp_path: Path) -> None:
    space = Dict({"place": Discrete(3, start=1), "eyes": Box((2,), "float64")})  # infinite bounds included
    policy = load(exported(tmp_path, space, Box((1,), "float32", (-1.0,), (1.0,))))
    assert (policy.name, policy.update, policy.steps) == ("red", 7, 70)
    assert policy.spaces == Spaces(space, Box((1,), "float32", (-1.0,), (1.0,)))
    assert policy.act({"place": 3, "eyes": [0.5, 0.5]}).shape == (1,)


def test_an_exported_file_is_played_without_torch(tmp_path: Path) -> None:
    code = f"""
import sys, tidemill
action = tidemill.load({str(exported(tmp_path))!r}).act([0.0, 0.0, 0.0, 0.1])
print(action, [name for name in ("torch", "gymnasium") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout.strip() in ("0 []", "1 []"), result.stderr) == (True, "")


def test_a_file_that_is_no_exported_policy_is_refused(tmp_path: Path) -> None:
    file, good = tmp_path / "file", exported(tmp_path)
    content = good.read_bytes()
    arrays, text = unpack(content)
    for data, message in (
        (b"", "no safetensors file"),
        (content[:-1], "no safetensors file"),
        (pack({"w": np.zeros(2)}), "does not say what policy it holds"),
        (pack(arrays, {**text, "tidemill": "{}"}), "does not say what policy it holds"),
        (
            pack(arrays, {**text, "tidemill": text["tidemill"].replace('"format": 1', '"format": 9')}),
            "has format 9",
        ),
        (pack(arrays, {**text, "version": "x"}), "no exported policy"),
        (pack({"w": np.zeros(2)}, text), "another network"),
    ):
        file.write_bytes(data)
        with pytest.raises(DatabaseError, match=message):
            load(file)
    with pytest.raises(ConfigError, match="leave policy, checkpoint and version out"):
        load(good, version="latest")


def test_a_policy_of_the_users_own_is_loaded_once_its_file_is_named(tmp_path: Path) -> None:
    source = tmp_path / "own.py"
    source.write_text("""
from dataclasses import dataclass
from tidemill import ActorCritic

@dataclass(frozen=True, kw_only=True)
class OwnForExport(ActorCritic):
    extra: int = 3
""")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import numpy as np, tidemill
from own import OwnForExport
from tidemill.api.weights_header import write_header
from tidemill.api.spaces import Box, Discrete, Spaces
from pathlib import Path
from tidemill.core.safetensors_io import pack
spaces, config = Spaces(Box((4,), "float32"), Discrete(2)), OwnForExport()
text = {{**write_header(config, spaces), "policy": "p", "version": "1", "counters": "{{}}"}}
Path({str(tmp_path / "own.safetensors")!r}).write_bytes(pack(config.build(spaces, 1).parameters(), text))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(ConfigError, match=r'no PolicyConfig is called "OwnForExport".*file=FILE\.py'):
        load(tmp_path / "own.safetensors")
    assert load(tmp_path / "own.safetensors", file=source).act(np.zeros(4)) in (0, 1)
