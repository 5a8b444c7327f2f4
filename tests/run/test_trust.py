"""A folder that somebody else made has nothing done that the user has not had done
before, or given the word for."""

import importlib
import json
import os
import pty
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib._bootstrap_external import _code_to_timestamp_pyc  # type: ignore[import-not-found]
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

import tidemill
from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    Atari,
    Experiment,
    Gymnasium,
    Limits,
    Rest,
    Scripted,
    SimulatorEnvironment,
    Slots,
    Trainer,
)
from tidemill.api.environment import EnvironmentConfig
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.api.weights_header import write_header
from tidemill.bridge.trainer_side.environment import SimulatorEnvironment as Simulators
from tidemill.core.config import encode
from tidemill.core.errors import RunError, SimulatorError, Untrusted
from tidemill.core.safetensors_io import pack
from tidemill.core.user_code_loading import expect, file_digest, load_file
from tidemill.presets.experiments import experiment_for
from tidemill.run.folder import CONFIG, SOURCE, RunFolder
from tidemill.run.trust import MOST, allow, named

ENVIRONMENT = """
import gymnasium, numpy
class Own(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return numpy.zeros(2, numpy.float32), {}
    def step(self, action):
        self.steps += 1
        return numpy.zeros(2, numpy.float32), 1.0, self.steps == 5, False, {}
"""


@pytest.fixture(autouse=True)
def config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is remembered yet, and what this process is to look at has no end."""
    monkeypatch.setattr("tidemill.core.user_code_loading._FILES.digests", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


def experiment(environment: EnvironmentConfig) -> Experiment:
    workers = {"actor": Actors(environment=environment, lanes=2), "trainer": Trainer(algorithm=PPO())}
    return Experiment(
        name="mine", policies={"policy": ActorCritic()}, workers=workers, limits=Limits(updates=1)
    )


def foreign(path: Path, environment: Any = None, source: Path | None = None) -> RunFolder:
    """Return a run's folder that somebody else filled."""
    folder = RunFolder.create(path, experiment(Scripted()), None)
    folder.unlock()
    if environment is not None:
        content = folder.read(CONFIG)
        content["workers"]["actor"]["environment"] = environment
        folder.write(CONFIG, content)
    if source is not None:
        folder.write(
            SOURCE,
            {"file": str(source), "sha256": file_digest(source), "named": {str(source): file_digest(source)}},
        )
    return folder


TOUCH = {"kwargs": {"command": "touch done"}}
WAYS = {
    "callable": (
        {"kind": "Gymnasium", "make": "os:system", **TOUCH},
        r'calls "os:system" with {"command": "touch done"}',
    ),
    "vector": (
        {"kind": "GymnasiumVector", "make": "os:system", **TOUCH},
        r'calls "os:system" with {"command": "touch done"}',
    ),
    "async": (
        {"kind": "Asynchronous", "make": "os:system", **TOUCH},
        r'calls "os:system" with {"command": "touch done"}',
    ),
    "pettingzoo": (
        {"kind": "PettingZoo", "make": "os:system", **TOUCH},
        r'calls "os:system" with {"command": "touch done"}',
    ),
    "slots": (
        {"kind": "Slots", "environment": {"kind": "Gymnasium", "make": "os:system", **TOUCH}},
        r'calls "os:system"',
    ),
    "wrapper": (
        {"kind": "Gymnasium", "id": "CartPole-v1", "wrap": ["flatten", "os:system(command='touch done')"]},
        r"wraps it in \"os:system\(command='touch done'\)\"",
    ),
    "wrapper of several agents": (
        {"kind": "PettingZoo", "make": "mpe2.simple_spread_v3", "wrap": ["os:system(command='touch done')"]},
        r"wraps it in \"os:system\(command='touch done'\)\"",
    ),
    "import": (
        {"kind": "Gymnasium", "id": "antigravity:X-v0"},
        r'imports "antigravity" for "antigravity:X-v0"',
    ),
    "argument": (
        {"kind": "Gymnasium", "id": "X-v0", "kwargs": {"env_id": "os:X"}},
        r'makes "X-v0" with {"env_id": "os:X"}',
    ),
    "program": (
        {"kind": "SimulatorEnvironment", "path": "/bin/touch", "arguments": ["done"]},
        r'starts "/bin/touch" with \["done"\]',
    ),
    "channel": ({"kind": "SimulatorEnvironment", "channels": ["os:abort"]}, r'calls "os:abort"'),
    "address": (
        {"kind": "Rest", "url": "http://h", "token": "$AWS_KEY"},
        r'connects to "http://h", and sends it the environment variable "AWS_KEY"',
    ),
    "default": ({"kind": "Rest", "url": "http://h"}, r'"TIDEMILL_TOKEN"'),
    "openenv": (
        {"kind": "OpenEnv", "url": "ws://h", "translate": "os:system", **TOUCH},
        r'connects to "ws://h".*\n.*calls "os:system"',
    ),
    "unknown": (
        {"kind": "Whatever", "command": "sudo reboot"},
        r'gives "Whatever", a class of somebody\'s own, .*"sudo reboot"',
    ),
    "escapes": ({"kind": "Gymnasium", "make": "os:\x1b[2Ksystem\n"}, r'calls "os:\\u001b\[2Ksystem\\n"'),
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_done_that_the_configuration_names(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environment, words = WAYS[way]
    path = foreign(tmp_path / "run", environment).path
    for use in (tidemill.evaluate, tidemill.resume):
        with pytest.raises(Untrusted, match=rf"{words}(.|\n)*allow it with --trust \(Python: trust=True\)$"):
            use(path)
    assert not (tmp_path / "done").exists()
    if "Whatever" not in str(environment):
        RunFolder.open(path).experiment(environments=False)  # whoever builds no environment has nothing done


def test_no_digest_in_the_folder_proves_anything(tmp_path: Path) -> None:
    file = tmp_path / "run" / "theirs.py"
    (tmp_path / "run").mkdir()
    file.write_text(f"open({str(tmp_path / 'done')!r}, 'w')")
    path = foreign(tmp_path / "run", None, file).path
    uses: list[Callable[[Path], object]] = [
        tidemill.load,
        tidemill.evaluate,
        tidemill.resume,
        lambda run: RunFolder.open(run).experiment(),
    ]
    for use in uses:
        with pytest.raises(Untrusted, match=r'runs the code in ".*theirs.py"\n'):
            use(path)
    assert not (tmp_path / "done").exists()
    RunFolder.open(path).experiment(trust=True)
    assert (tmp_path / "done").exists()


def test_what_needs_no_word(tmp_path: Path) -> None:
    for what in ("CartPole-v1", "ALE/Pong-v5", "HalfCheetah-v5", "Anything-v3"):
        config = encode(experiment_for(what, Atari(id=what) if "/" in what else Gymnasium(id=what)))
        assert named(config).things == []
    for plain in (
        Scripted(),
        Gymnasium(id="CartPole-v1", wrap=("frame-skip(4)", "time-limit(max_episode_steps=9)")),
        Slots(environment=Gymnasium(id="FrozenLake-v1", kwargs={"map_name": "8x8", "is_slippery": False})),
        SimulatorEnvironment(),
    ):
        assert named(encode(experiment(plain))).things == []


def test_what_this_user_trained_needs_no_word(tmp_path: Path, config_home: Path) -> None:
    file, helper = tmp_path / "own.py", tmp_path / "beside.py"
    file.write_text("import beside\n" + ENVIRONMENT)
    helper.write_text("")
    run = tidemill.train(
        experiment(Gymnasium(make=f"{file}:Own", kwargs={})),
        launch="inline",
        run_dir=tmp_path / "run",
        quiet=True,
    ).folder
    assert tidemill.evaluate(run, 2, quiet=True).mean == 5
    tidemill.resume(run, launch="inline", limits={"updates": 2}, quiet=True)
    for path in (config_home / "tidemill", config_home / "tidemill" / "trusted"):
        assert path.stat().st_mode & 0o777 == 0o700
    kept = list((config_home / "tidemill" / "trusted").iterdir())
    assert kept and all(entry.stat().st_mode & 0o777 == 0o600 for entry in kept)

    helper.write_text("# another\n")  # what the file imports is its code, too
    with pytest.raises(
        Untrusted, match=r'runs the code in ".*beside.py", which has changed since you last had it run\nLook'
    ):
        tidemill.evaluate(run, 2, quiet=True)
    # the word for this file, and what it imports
    assert tidemill.evaluate(run, 2, quiet=True, file=file).mean == 5
    shutil.copytree(tmp_path, elsewhere := tmp_path.with_name("elsewhere"), dirs_exist_ok=True)
    content = json.loads((elsewhere / "run" / CONFIG).read_text())
    content["workers"]["actor"]["environment"]["make"] = f"{elsewhere / 'own.py'}:Own"
    (elsewhere / "run" / CONFIG).write_text(json.dumps(content))
    with pytest.raises(
        Untrusted, match=r'calls ".*elsewhere/own.py:Own"\n  runs the code in ".*elsewhere/own.py"\n'
    ):
        tidemill.evaluate(elsewhere / "run", 2, quiet=True)  # whatever lies beside it there


def test_a_file_that_is_given_is_the_word_for_it_alone(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("from os import system\n")
    folder = foreign(
        tmp_path / "run", {"kind": "Gymnasium", "make": f"{own}:system", "kwargs": {"command": "exit 3"}}
    )
    with pytest.raises(Untrusted, match=r'calls ".*own.py:system" with {"command": "exit 3"}\nLook'):
        folder.experiment(own)
    assert folder.experiment(own, trust=True).source == own
    assert folder.experiment().source is None  # remembered from now on


def test_the_word_is_asked_for_with_what_it_is_about(tmp_path: Path) -> None:
    folder = foreign(tmp_path / "run", {"kind": "Gymnasium", "make": "os:system"})
    asked: list[str] = []
    with pytest.raises(Untrusted):
        folder.experiment(trust=lambda text: bool(asked.append(text)))
    assert 'calls "os:system"' in asked[0]
    folder.experiment(trust=lambda text: True)
    folder.experiment()


def test_where_nothing_can_be_remembered_it_is_asked_each_time(tmp_path: Path, config_home: Path) -> None:
    config_home.write_text("a file, not a folder")
    file = tmp_path / "own.py"
    file.write_text(ENVIRONMENT)
    run = tidemill.train(
        experiment(Gymnasium(make=f"{file}:Own")), launch="inline", run_dir=tmp_path / "run", quiet=True
    ).folder
    for _ in range(2):
        with pytest.raises(
            Untrusted,
            match=r"asked again each time: nothing can be remembered in .*config/tidemill/trusted\)",
        ):
            tidemill.evaluate(run, 2)
        assert tidemill.evaluate(run, 2, quiet=True, trust=True).mean == 5


def test_a_place_that_others_can_write_is_not_believed(tmp_path: Path, config_home: Path) -> None:
    folder = foreign(tmp_path / "run", {"kind": "Gymnasium", "make": "os:system"})
    folder.experiment(trust=True)
    folder.experiment()
    (config_home / "tidemill" / "trusted").chmod(0o777)
    with pytest.raises(Untrusted):
        folder.experiment()


def test_the_oldest_are_forgotten_first(
    tmp_path: Path, config_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST > 1000
    monkeypatch.setattr("tidemill.run.trust.MOST", 2)
    folders = [
        foreign(tmp_path / name, {"kind": "Gymnasium", "make": f"os:{name}"})
        for name in ("one", "two", "three")
    ]
    for age, folder in enumerate(folders):
        folder.experiment(trust=True)
        for entry in (config_home / "tidemill" / "trusted").iterdir():
            os.utime(entry, (entry.stat().st_mtime - 10 + age,) * 2)
    folders[2].experiment()
    folders[1].experiment()
    with pytest.raises(Untrusted):
        folders[0].experiment()


def test_bytecode_beside_a_file_is_never_run(tmp_path: Path) -> None:
    for name in ("shown", "imported"):
        file = tmp_path / f"{name}.py"
        file.write_text("import imported\n" if name == "shown" else "")
        code = compile("raise SystemExit('bytecode ran')", str(file), "exec")
        (tmp_path / "__pycache__").mkdir(exist_ok=True)
        compiled = _code_to_timestamp_pyc(code, int(file.stat().st_mtime), file.stat().st_size)
        (tmp_path / "__pycache__" / f"{name}.{sys.implementation.cache_tag}.pyc").write_bytes(compiled)
    foreign(tmp_path / "run", None, tmp_path / "shown.py").experiment(trust=True)
    assert sys.modules.pop("imported").__file__ == str(tmp_path / "imported.py")


@pytest.mark.parametrize("change", ["two.py", f"two{EXTENSION_SUFFIXES[0]}", "two/__init__.py", "three.pyc"])
def test_all_that_a_file_imports_counts_wherever_python_would_find_it(change: str, tmp_path: Path) -> None:
    """Neither packages without an __init__.py nor imports from the top, inside of a
    package, hide anything; nor do compiled modules."""
    (tmp_path / "pack" / "inner").mkdir(parents=True)
    (tmp_path / "own.py").write_text("import pack.inner.one")
    (tmp_path / "pack" / "inner" / "one.py").write_text("from pack.two import what\nimport pack.three")
    (tmp_path / "pack" / "two.py").write_text("what = 1")
    config = encode(experiment(Scripted()))
    allow(tmp_path, named(config, tmp_path / "own.py"), True)
    allow(tmp_path, named(config, tmp_path / "own.py"), False)
    (tmp_path / "pack" / change).parent.mkdir(exist_ok=True)
    (tmp_path / "pack" / change).write_text("what = 2")
    with pytest.raises(Untrusted, match=rf'runs the code in ".*/pack/{change}"'):
        allow(tmp_path, named(config, tmp_path / "own.py"), False)


def test_the_file_of_a_module_in_a_package_without_an_init_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "place.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    found = named(encode(experiment(Gymnasium(make="wide.place:Own"))))
    assert str(tmp_path / "wide" / "place.py") in found.files


def test_an_extension_module_that_has_changed_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / f"tides_native{EXTENSION_SUFFIXES[0]}"
    module.write_text("once")
    monkeypatch.syspath_prepend(tmp_path)
    expect({str(module): file_digest(module)})
    module.write_text("now")
    with pytest.raises(ImportError, match=r"tides_native.* is not what it was when it was allowed to run"):
        importlib.import_module("tides_native")


def test_what_cannot_be_read_is_not_waited_for(tmp_path: Path) -> None:
    for path in ("/proc/self/mem", "/proc/kmsg"):  # plain files, as they say
        if os.path.isfile(path):
            folder = foreign(
                tmp_path / Path(path).name, {"kind": "SimulatorEnvironment", "path": path}, Path(path)
            )
            with pytest.raises(Untrusted, match=r"runs the code in(.|\n)*|starts "):
                folder.experiment()


@pytest.mark.parametrize("channels", [5, "os:abort", {"a": 1}])
def test_settings_of_a_wrong_type_are_one_error(channels: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"channels must be a list"):
        foreign(tmp_path / "run", {"kind": "SimulatorEnvironment", "channels": channels}).experiment()


def test_what_was_looked_at_is_what_workers_run(tmp_path: Path) -> None:
    """The file changes once it has been looked at: it does so itself, when the main
    process runs it."""
    file, done = tmp_path / "own.py", tmp_path / "done"
    text = (
        f"import os\nif os.path.exists({str(done)!r}):\n    open({str(done)!r}, "
        "'a').write('+')\nopen(__file__, 'a').write('# more')\n"
    )
    file.write_text(text)
    (config := tmp_path / "config").mkdir()
    made = tidemill.train(experiment(Scripted()), launch="inline", run_dir=tmp_path / "run", quiet=True)
    RunFolder.open(made.folder).write_experiment(experiment(Scripted()), file)
    done.touch()
    with pytest.raises(RunError, match=r"own.py is not what it was when it was allowed to run"):
        tidemill.resume(made.folder, launch="processes", limits={"updates": 2}, quiet=True)
    assert done.read_text() == "+" and config.is_dir()  # of the main process alone


def test_a_file_that_was_not_there_does_not_appear_unseen(tmp_path: Path) -> None:
    missing = tmp_path / "missing.py"
    folder = foreign(tmp_path / "run", {"kind": "Gymnasium", "make": f"{missing}:Own"})
    folder.experiment(trust=True)
    missing.write_text("raise SystemExit")
    with pytest.raises(tidemill.TidemillError, match="not what it was"):
        load_file(missing, "make")


def test_a_program_is_looked_at_whenever_it_is_started(tmp_path: Path) -> None:
    program = tmp_path / "sim"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    folder = foreign(tmp_path / "run", {"kind": "SimulatorEnvironment", "path": str(program)})
    folder.experiment(trust=True)
    folder.experiment()
    assert Simulators(path=str(program))._command(0, 0) == (str(program), ())
    program.write_text("#!/bin/sh\ntouch done\n")
    with pytest.raises(Untrusted, match=rf'starts "{program}"'):
        folder.experiment()
    with pytest.raises(SimulatorError, match="is not what it was when it was allowed to run"):
        Simulators(path=str(program))._command(0, 0)
    expect({str(program): file_digest(program)})
    Simulators(path=str(program))._command(0, 0)


def test_who_writes_through_a_link_says_so(tmp_path: Path) -> None:
    run = tidemill.train(experiment(Scripted()), launch="inline", run_dir=tmp_path / "run", quiet=True).folder
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "actor-0.log").symlink_to(victim)
    with pytest.raises(Untrusted, match=r'writes through the link "logs/actor-0.log" to ".*victim"'):
        tidemill.resume(run, limits={"updates": 2})
    assert victim.read_text() == "precious"
    tidemill.load(run)  # writes nothing


def test_an_exported_policy_of_ones_own_class_says_what_it_is_given(tmp_path: Path) -> None:
    file = tmp_path / "policies.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom tidemill import ActorCritic\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Theirs(ActorCritic):\n    note: str = ''\n"
    )
    spaces = Spaces(Box((2,), "float32"), Discrete(2))
    theirs = load_file(file, "test").Theirs
    for note in ("fine-as_it_is", "$(reboot)"):
        text = write_header(theirs(note=note), spaces) | {"policy": "p", "version": "1", "counters": "{}"}
        (tmp_path / "p.safetensors").write_bytes(pack(theirs().build(spaces, 1).parameters(), text))
        if note == "$(reboot)":
            with pytest.raises(
                Untrusted,
                match=r'gives "Theirs", a class of somebody\'s own, these settings: {.*"note": '
                r'"\$\(reboot\)"',
            ):
                tidemill.load(tmp_path / "p.safetensors", file=file)
            assert tidemill.load(tmp_path / "p.safetensors", file=file, trust=True).update == 1
        assert tidemill.load(tmp_path / "p.safetensors", file=file).update == 1
    text = write_header(ActorCritic(hidden=(8,)), spaces) | {"policy": "p", "version": "1", "counters": "{}"}
    (tmp_path / "p.safetensors").write_bytes(
        pack(ActorCritic(hidden=(8,)).build(spaces, 1).parameters(), text)
    )
    assert tidemill.load(tmp_path / "p.safetensors").update == 1  # the library's own: plain settings


def command(run: Path, *words: str, **how: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "tidemill.cli.main", "eval", str(run), "--episodes", "1", *words], **how
    )


def test_the_command_asks_on_a_terminal_alone(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(ENVIRONMENT)
    run = tidemill.train(experiment(Scripted()), launch="inline", run_dir=tmp_path / "run", quiet=True).folder
    content = json.loads((run / CONFIG).read_text())
    content["workers"]["actor"]["environment"] = {"kind": "Gymnasium", "make": f"{file}:Own"}
    (run / CONFIG).write_text(json.dumps(content))
    with command(run, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as silent:
        said = silent.communicate()[1].decode()
    assert (
        silent.returncode == 1
        and said.startswith("error: ")
        and "--trust" in said
        and "Traceback" not in said
        and "[y/N]" not in said
    )
    ours, theirs = pty.openpty()
    try:
        with command(run, stdin=theirs, stdout=subprocess.DEVNULL, stderr=theirs) as asking:
            read, end = b"", time.monotonic() + 60
            while b"[y/N]" not in read and time.monotonic() < end:
                read += os.read(ours, 1000)
            os.write(ours, b"n\n")
            asking.wait(60)
    finally:
        os.close(ours)
        os.close(theirs)
    assert b"own.py:Own" in read and b"Is that to be done" in read and asking.returncode == 1


def test_a_secret_of_this_machine_goes_nowhere_unseen(tmp_path: Path) -> None:
    folder = foreign(tmp_path / "run")
    content = folder.read(CONFIG)
    content["curriculum"] = [
        {"kind": "Stage", "options": {"api_key": f"file:{tmp_path / 'key'}"}, "until": ""}
    ]
    folder.write(CONFIG, content)
    with pytest.raises(Untrusted, match=r'reads "file:.*/key", and hands it to an environment'):
        folder.experiment()
    with pytest.raises(
        Untrusted, match=r'connects to "http://h", and sends it what is in the file "/etc/passwd"'
    ):
        foreign(
            tmp_path / "rest", {"kind": "Rest", "url": "http://h", "token": "file:/etc/passwd"}
        ).experiment()


def test_own_addresses_are_remembered(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", experiment(Rest(url="http://localhost:1")), None)
    assert folder.experiment().experiment == experiment(Rest(url="http://localhost:1"))
