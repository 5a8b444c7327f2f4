"""The kernels are chosen by TIDEMILL_NATIVE, and what cannot be had is said by name."""

import shutil

import pytest

from tidemill import ActorCritic
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.core.errors import ConfigError
from tidemill.native import build as building
from tidemill.native import library as native
from tidemill.native.build import CannotCompile, build

SPACES = Spaces(Box((3,), "float32"), Discrete(2))


@pytest.fixture(autouse=True)
def _chosen_anew():
    native.choose.cache_clear()
    yield
    native.choose.cache_clear()


def test_by_default_and_when_off_numpy_computes(monkeypatch):
    for value in (None, "", "off"):
        monkeypatch.delenv(native.VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(native.VARIABLE, value)
        assert native.asked_for() is None
        assert ActorCritic().build(SPACES, 0).network.kernels is None


def test_an_instruction_set_is_taken_that_is_asked_for(monkeypatch, library):
    monkeypatch.setattr(native, "BUILT", library)
    monkeypatch.setenv(native.VARIABLE, "baseline")
    assert ActorCritic().build(SPACES, 0).network.kernels.instruction_set == "baseline"
    monkeypatch.setenv(native.VARIABLE, "require")
    assert native.asked_for().instruction_set in native.INSTRUCTION_SETS


def test_a_wish_that_is_not_known_is_refused(monkeypatch):
    monkeypatch.setenv(native.VARIABLE, "sse9")
    with pytest.raises(ConfigError, match='TIDEMILL_NATIVE = "sse9" is not known; take one of off, baseline'):
        native.asked_for()


def test_without_the_library_numpy_computes_and_says_so_and_require_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "BUILT", tmp_path / "kernels.so")
    monkeypatch.setenv(native.VARIABLE, "baseline")
    with pytest.warns(RuntimeWarning, match=r"numpy computes the networks: .* was not built"):
        assert native.asked_for() is None
    monkeypatch.setenv(native.VARIABLE, "require")
    with pytest.raises(ConfigError, match=r"TIDEMILL_NATIVE = require, but .* was not built"):
        native.asked_for()


def test_an_instruction_set_that_the_processor_lacks_is_named(library, monkeypatch):
    monkeypatch.setattr(native, "INSTRUCTION_SETS", ("baseline", "avx2", "avx512", "later"))
    with pytest.raises(
        native.NativeUnavailable, match="this processor cannot run later; it can run baseline"
    ):
        native.Kernels(library, "later")


def test_kernels_of_another_version_are_refused_by_name(monkeypatch, library):
    monkeypatch.setattr(native, "VERSION", 99)
    with pytest.raises(
        native.NativeUnavailable, match=r"has version 1 of the kernels, and this .* version 99"
    ):
        native.Kernels(library)


def test_a_file_that_is_no_library_is_refused_by_name(tmp_path):
    broken = tmp_path / "kernels.so"
    broken.write_bytes(b"\x7fELF nothing")
    with pytest.raises(native.NativeUnavailable, match="cannot be loaded"):
        native.Kernels(broken)


def test_what_the_compiler_says_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(CannotCompile, match="no-such-compiler cannot be run"):
        build(tmp_path)
    monkeypatch.delenv("CC")
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    broken = tmp_path / "broken.c"
    broken.write_text("int f(void) { return nothing; }")
    monkeypatch.setattr(building, "SOURCE", broken)
    with pytest.raises(CannotCompile, match=r"broken.c:1:22: error"):
        build(tmp_path)
    assert not list(tmp_path.glob("*.so"))


def test_version_numbers_of_both_sides_are_one(library):
    assert native.Kernels(library, "baseline").version() == native.VERSION
