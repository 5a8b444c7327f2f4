"""Modules that have moved are found by their old names, and say the new ones."""

import subprocess
import sys
from importlib import import_module

import pytest

import tidemill  # noqa: F401  the finder comes with the package
from tidemill.core.moved import GONE, MOVED, RENAMED, Gone


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_imports_the_module_of_the_new_name(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is called {MOVED[old]} now"):
        assert import_module(old) is import_module(MOVED[old])
    assert import_module(MOVED[old]).__name__ == MOVED[old]


@pytest.mark.parametrize(("module", "old"), [(module, old) for module in RENAMED for old in RENAMED[module]])
def test_an_old_name_in_a_module_is_what_the_new_one_is(module: str, old: str) -> None:
    found, (place, _, new) = import_module(module), RENAMED[module][old].rpartition(":")
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is called {place or module}.{new} now"):
        assert getattr(found, old) is getattr(import_module(place or module), new)
    with pytest.raises(AttributeError, match="never_there"):
        found.never_there  # noqa: B018


@pytest.mark.parametrize(("module", "old"), [(module, old) for module in GONE for old in GONE[module]])
def test_a_name_that_is_gone_says_what_to_do_instead(module: str, old: str) -> None:
    with pytest.raises(ImportError, match=f"{module}.{old} is gone; .*(experiment_for|presets_of|PPO\\(\\))"):
        exec(f"from {module} import {old}", {})


def test_a_method_that_is_gone_says_what_to_take_instead() -> None:
    class Policy:
        act_rows = Gone("client(rows)")

    with pytest.raises(AttributeError, match=r"Policy\.act_rows is gone; take client\(rows\)"):
        Policy().act_rows()
    assert not hasattr(Policy, "act_rows")


def test_a_module_of_a_package_that_moved_is_the_same_module() -> None:
    with pytest.warns(DeprecationWarning, match="tidemill.remote.session now"):
        assert import_module("tidemill.envs.rest.session") is import_module("tidemill.remote.session")


def test_an_unknown_module_is_still_unknown() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"tidemill\.bridge\.nothing"):
        import_module("tidemill.bridge.nothing")


def test_the_warning_names_the_line_that_imports() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from tidemill.bridge.channels import Channels; print(Channels.__module__)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "tidemill.bridge.protocol.side_channels\n"
