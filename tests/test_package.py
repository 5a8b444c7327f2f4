"""The package as a whole."""

import ast
import inspect
import os
import pkgutil
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import pytest
from tests.run import experiments

import tidemill
from tidemill import public_names
from tidemill.core.config import decode, encode


def test_importing_the_package_and_its_contracts_leaves_torch_out() -> None:
    code = """
import importlib, pkgutil, sys
import tidemill, tidemill.api, tidemill.core
for floor in (tidemill.api, tidemill.core):
    for module in pkgutil.iter_modules(floor.__path__, floor.__name__ + "."):
        importlib.import_module(module.name)
for module in pkgutil.iter_modules(tidemill.__path__, "tidemill."):
    importlib.import_module(module.name)
import tidemill.run.live_view, tidemill.metrics.json_lines, tidemill.trained.plot
print([name for name in ("torch", "tensorboard", "matplotlib", "gymnasium") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


def test_a_command_that_trains_imports_no_library_that_its_workers_alone_need(tmp_path: Path) -> None:
    """An experiment's file needs no gymnasium, TensorBoard's events no TensorBoard."""
    code = """
import sys
from pathlib import Path
from tidemill import LoggedRun
from tidemill.cli import main
from tidemill.metrics.tensorboard import TensorBoard
from tidemill.training import train
from tidemill.training.experiment_from import resolve
resolve(f"{sys.argv[1]}:cartpole", {})
TensorBoard(LoggedRun(Path(sys.argv[2]))).write({"step": 1, "loss": 0.5})
foreign = ("torch", "tensorboard", "google.protobuf", "matplotlib", "gymnasium", "asyncio")
print([name for name in foreign if name in sys.modules])
"""
    words = [sys.executable, "-c", code, experiments.__file__, str(tmp_path)]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1


def test_importing_the_package_imports_none_of_its_rooms_but_configurations() -> None:
    code = """
import sys
import tidemill
dir(tidemill)
ours = {name.split(".")[1] for name in sys.modules if name.startswith("tidemill.")}
foreign = [name for name in ("asyncio", "http", "ssl", "sqlite3", "numpy") if name in sys.modules]
print(sorted(ours), foreign)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout.strip(), result.stderr) == ("['core'] []", "")


def test_a_worker_process_imports_no_simulator_code_no_asyncio_and_no_http() -> None:
    code = """
import sys
import tidemill.launchers.entry
from tidemill import PPO, ActorCritic, Actors, Gymnasium, Trainer
tidemill.launchers.entry._import_ahead()
ours = ("tidemill.bridge", "tidemill.run", "tidemill.remote")
foreign = ("asyncio", "http", "ssl", "rich", "typer", "torch", *ours)
print([name for name in foreign if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


def test_every_public_name_resolves_and_editors_see_the_same_ones() -> None:
    tree = ast.parse(Path(public_names.__file__).read_text())
    imports = {
        alias.asname: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imports.keys() == set(tidemill.__all__) <= set(dir(tidemill))
    for name in imports:
        assert getattr(tidemill, name) is getattr(public_names, name)


def test_dir_shows_nothing_but_public_names() -> None:
    assert {name for name in dir(tidemill) if not name.startswith("__")} == set(tidemill.__all__)


@pytest.mark.parametrize("kind", ["bytecode", "zip"])
def test_public_names_are_known_where_there_is_no_source_file(kind: str, tmp_path: Path) -> None:
    """In an install of bytecode alone, and in a zip, as `zipapp` makes it."""
    source, place = Path(tidemill.__file__).parent, tmp_path / "lib"
    files = [source / "__init__.py", source / "public_names.py", *(source / "core").glob("*.py")]
    for file in files:
        copy = place / "tidemill" / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if kind == "bytecode":
            py_compile.compile(str(file), str(copy.with_suffix(".pyc")), doraise=True)
        else:
            shutil.copy(file, copy)
    if kind == "zip":
        place = Path(shutil.make_archive(str(tmp_path / "lib"), "zip", place))
    code = "import tidemill; print(tidemill.__file__, len(tidemill.__all__), tidemill.ConfigError.__module__)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(place)},
    )
    assert result.stderr == ""
    file, count, module = result.stdout.split()
    assert file.startswith(str(place)) and file.endswith(".pyc" if kind == "bytecode" else ".py")
    assert (int(count), module) == (len(tidemill.__all__), "tidemill.core.errors")


def test_a_configuration_that_nobody_imported_is_decoded_by_its_name() -> None:
    code = """
import sys
from tidemill.api.environment import EnvironmentConfig
from tidemill.core.config import decode
assert "tidemill.envs.vector" not in sys.modules
print(decode(EnvironmentConfig, {"kind": "GymnasiumVector", "id": "CartPole-v1"}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout[:16], result.stderr) == ("GymnasiumVector(", "")


class Stage(tidemill.Stage):
    """A user's own class of a name that the library has, too."""


def test_a_class_of_ones_own_comes_before_the_librarys_of_that_name() -> None:
    assert type(decode(tidemill.Stage, encode(Stage()))) is Stage


def public_methods() -> Iterator[tuple[type, str, Any]]:
    """Yield what every public class of the library defines: methods and properties, each
    with the function that it is made of."""
    for found in pkgutil.walk_packages(tidemill.__path__, "tidemill."):
        module = import_module(found.name)
        for kind in vars(module).values():
            if not inspect.isclass(kind) or kind.__module__ != found.name or kind.__name__.startswith("_"):
                continue
            for name, member in vars(kind).items():
                made_of = member.fget if isinstance(member, property) else member
                made_of = getattr(made_of, "func", getattr(made_of, "__func__", made_of))
                if inspect.isfunction(made_of) and made_of.__module__ == found.name and name[0] != "_":
                    yield kind, name, made_of


def test_a_public_method_without_a_docstring_is_one_of_a_contract_under_its_name_of_today() -> None:
    """A member of a family says nothing of a method that its contract explains. One that
    kept its name when the contract's was changed would never be called."""
    orphans = [
        f"{kind.__module__}.{kind.__qualname__}.{name}"
        for kind, name, function in public_methods()
        if not function.__doc__
        and Protocol not in kind.__bases__
        and not any(name in vars(base) for base in kind.__mro__[1:])
    ]
    assert orphans == []


def test_a_class_knows_which_methods_there_are() -> None:
    assert sum(1 for _ in public_methods()) > 1_000  # the test before looks at something
