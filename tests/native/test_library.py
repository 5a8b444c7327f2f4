"""The kernels are chosen by TIDEMILL_NATIVE, and what cannot be had is said by name."""

import platform
import shutil
import subprocess
import time

import pytest

import tidemill
from tidemill import ActorCritic, Gymnasium, Limits, RecurrentActorCritic
from tidemill.api.environment import AgentInfo
from tidemill.api.policy import PolicyConfig
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.core.config import decode, encode
from tidemill.core.errors import ConfigError, RunError
from tidemill.layouts.auto_layout import lay_out
from tidemill.layouts.probe import measure_arithmetic
from tidemill.native import build as building
from tidemill.native import library as native
from tidemill.native.build import CannotCompile, build
from tidemill.nets.native_actor_critic import NativeActorCritic
from tidemill.nets.numpy_actor_critic import NumpyActorCritic
from tidemill.presets.ppo import ppo

SPACES = Spaces(Box((3,), "float32"), Discrete(2))


@pytest.fixture(autouse=True)
def _chosen_anew():
    for cached in (native.choose, native.named):
        cached.cache_clear()
    yield
    for cached in (native.choose, native.named):
        cached.cache_clear()


def test_by_default_and_when_off_numpy_computes(monkeypatch):
    for value in (None, "", "off"):
        monkeypatch.delenv(native.VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(native.VARIABLE, value)
        assert native.asked_for("off") is None
        assert ActorCritic().build(SPACES, 0).network.kernels is None


def test_an_instruction_set_is_taken_that_is_asked_for(monkeypatch, library):
    monkeypatch.setattr(native, "BUILT", library)
    monkeypatch.setenv(native.VARIABLE, "baseline")
    assert ActorCritic().build(SPACES, 0).network.kernels.instruction_set == "baseline"
    monkeypatch.setenv(native.VARIABLE, "require")
    assert native.asked_for("off").instruction_set in native.INSTRUCTION_SETS


def test_a_wish_that_is_not_known_is_refused(monkeypatch):
    monkeypatch.setenv(native.VARIABLE, "sse9")
    with pytest.raises(ConfigError, match='TIDEMILL_NATIVE = "sse9" is not known; take one of off, baseline'):
        native.asked_for("off")


def test_without_the_library_numpy_computes_and_says_so_and_require_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "BUILT", tmp_path / "libkernels.so.1")
    monkeypatch.setenv(native.VARIABLE, "baseline")
    with pytest.warns(RuntimeWarning, match=r"numpy computes the networks: .* was not built"):
        assert native.asked_for("off") is None
    monkeypatch.setenv(native.VARIABLE, "require")
    with pytest.raises(ConfigError, match=r"TIDEMILL_NATIVE = require, but .* was not built"):
        native.asked_for("off")


def test_an_instruction_set_that_the_processor_lacks_is_named(library, monkeypatch):
    monkeypatch.setattr(native, "INSTRUCTION_SETS", ("baseline", "avx2", "avx512", "later"))
    with pytest.raises(native.NativeUnavailable, match="this processor lacks later; there is baseline"):
        native.Kernels(library, "later")


def test_kernels_of_other_sources_are_refused_by_name(monkeypatch, library):
    monkeypatch.setattr(native, "digest", lambda: 0x99)
    with pytest.raises(native.NativeUnavailable, match=r"was built of other sources .* and 99\); run"):
        native.Kernels(library)


def test_each_source_and_flag_has_another_digest(monkeypatch, tmp_path):
    found = {building.digest()}
    for file in building.SOURCES[0].parent.glob("*.[ch]"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(building, "__file__", str(tmp_path / "build.py"))
    monkeypatch.setattr(building, "SOURCES", [tmp_path / each.name for each in building.SOURCES])
    assert building.digest() in found  # wherever they lie
    files = sorted(tmp_path.glob("*.[ch]"))
    assert len(files) == len(building.SOURCES) + 4
    for file in files:
        file.write_bytes(file.read_bytes() + b"\n")
        found.add(building.digest())
    for name, more in (
        ("FLAGS", " -g"),
        ("BASELINE", " -g"),
        ("X86", {"later": "-mlater"}),
        ("UNFUSED", {"dqn.c": ""}),
    ):
        was = getattr(building, name)
        monkeypatch.setattr(building, name, was + more if isinstance(was, str) else was | more)
        found.add(building.digest())
    assert len(found) == 1 + len(files) + 4


def test_an_installation_without_sources_has_its_core_all_the_same(monkeypatch, library):
    def gone():
        raise FileNotFoundError("kernels.c")

    monkeypatch.setattr(native, "digest", gone)
    assert native.Kernels(library).best in native.INSTRUCTION_SETS


def test_a_library_without_the_kernels_of_now_is_refused_by_name(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    source, old = tmp_path / "old.c", tmp_path / "old.so"
    source.write_text("long tidemill_instruction_sets(void) { return 3; }")
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(old)], check=True, timeout=120)
    with pytest.raises(native.NativeUnavailable, match=r"was built of other sources"):
        native.Kernels(old)


def test_an_instruction_set_that_the_compiler_does_not_know_is_left_out(monkeypatch, tmp_path, capfd):
    if shutil.which("cc") is None or platform.machine() != "x86_64":
        pytest.skip("there is no C compiler for x86-64")
    monkeypatch.setitem(building.X86, "avx512", "-mavx99")
    build(tmp_path, "-O0")
    assert "The kernels are built without avx512" in capfd.readouterr().err
    kernels = native.Kernels(tmp_path / building.LIBRARY, "baseline")
    assert kernels.best in ("baseline", "avx2")
    if kernels.processor == "avx512":
        with pytest.raises(native.NativeUnavailable, match="the library was built without avx512; there is"):
            native.Kernels(tmp_path / building.LIBRARY, "avx512")


def test_a_file_that_is_no_library_is_refused_by_name(tmp_path):
    broken = tmp_path / "libkernels.so.1"
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
    monkeypatch.setattr(building, "SOURCES", [broken])
    with pytest.raises(CannotCompile, match=r"broken.c:1:22: error"):
        build(tmp_path)
    assert not list(tmp_path.glob("*.so*"))
    with pytest.raises(
        native.NativeUnavailable, match=r"was not built \(.*broken.c:1:22: error.*\); with a C"
    ):
        native.Kernels(tmp_path / building.LIBRARY)
    monkeypatch.undo()
    build(tmp_path, "-O0")
    assert native.Kernels(tmp_path / building.LIBRARY) and not (tmp_path / building.WHY).exists()


def test_the_library_has_the_digest_of_its_sources(library):
    assert native.Kernels(library, "baseline").digest() == building.digest()


def test_a_policy_s_setting_names_the_instruction_set_and_the_variable_goes_before(monkeypatch, library):
    monkeypatch.setattr(native, "BUILT", library)
    monkeypatch.delenv(native.VARIABLE, raising=False)
    config = decode(PolicyConfig, encode(ActorCritic(native="baseline")))
    assert config.build(SPACES, 0).network.kernels.instruction_set == "baseline"
    monkeypatch.setenv(native.VARIABLE, "off")
    assert config.build(SPACES, 0).network.kernels is None


def test_a_setting_that_cannot_be_had_is_refused_with_cause_and_cure(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "BUILT", tmp_path / "libkernels.so.1")
    monkeypatch.delenv(native.VARIABLE, raising=False)
    with pytest.raises(
        ConfigError, match=r'native = "avx2", but .* was not built .* TIDEMILL_NATIVE=off has'
    ):
        ActorCritic(native="avx2").build(SPACES, 0)
    with pytest.raises(ConfigError, match='native = "sse9" is not known; take one of off, auto'):
        ActorCritic(native="sse9")


def test_what_a_core_trained_is_played_by_numpy_where_it_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "BUILT", tmp_path / "libkernels.so.1")
    assert ActorCritic(native="avx2").to_play() == ActorCritic(native="off")
    assert ActorCritic(native="off").to_play() == ActorCritic(native="off")


def test_nothing_is_open_of_images_and_memories_but_the_type_of_convolutions():
    images = Spaces(Box((84, 84, 1), "uint8", (0,), (255,)), Discrete(2))
    assert ActorCritic(convolutions="auto").alternatives(images)[0].native == "auto"
    assert ActorCritic().alternatives(images) == (ActorCritic(),)
    assert RecurrentActorCritic().alternatives(SPACES) == (RecurrentActorCritic(),)


def test_a_setting_without_effect_is_refused():
    images = Spaces(Box((84, 84, 1), "uint8", (0,), (255,)), Discrete(2))
    for config, spaces in (
        (RecurrentActorCritic(native="baseline"), SPACES),
        (ActorCritic(native="baseline"), images),
    ):
        with pytest.raises(ConfigError, match="native = 'baseline' has no effect with images or a memory"):
            config.build(spaces, 0)


def test_a_run_keeps_to_the_core_that_it_names(monkeypatch, library, tmp_path, capsys):
    monkeypatch.setattr(native, "BUILT", library)
    monkeypatch.delenv(native.VARIABLE, raising=False)
    experiment = ppo("x", Gymnasium(id="CartPole-v1"), lanes=4)
    policies = {name: each.replace(native="baseline") for name, each in experiment.policies.items()}
    run = tidemill.train(
        experiment.replace(policies=policies, limits=Limits(steps=2048)),
        run_dir=tmp_path / "run",
        launch="inline",
    )
    assert "the native core (baseline) computes policy" in capsys.readouterr().out
    monkeypatch.setattr(native, "BUILT", tmp_path / "libkernels.so.1")
    native.named.cache_clear()
    with pytest.raises((ConfigError, RunError), match='native = "baseline", but'):
        tidemill.resume(run.folder, limits={"steps": 4096})
    monkeypatch.setattr(native, "BUILT", library)
    native.named.cache_clear()
    assert tidemill.resume(run.folder, limits={"steps": 4096}).summary.status == "completed"


def automatic():
    experiment = ppo("x", Gymnasium(id="CartPole-v1"), lanes=4)
    policies = {name: each.replace(native="auto") for name, each in experiment.policies.items()}
    return experiment.replace(policies=policies)


def test_auto_is_decided_by_measurement_and_written_into_the_configuration(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.setattr("tidemill.layouts.auto_layout.SECONDS", 240)  # also on a busy machine
    laid_out = lay_out(automatic(), None)
    (policy,) = laid_out.experiment.policies.values()
    assert policy.native in native.choices() and f"native = {policy.native}" in laid_out.note


def test_auto_is_what_the_variable_says_and_numpy_where_the_core_is_missing(monkeypatch, library, tmp_path):
    monkeypatch.setattr(native, "BUILT", library)
    monkeypatch.setenv(native.VARIABLE, "baseline")
    assert [each.native for each in ActorCritic(native="auto").alternatives(SPACES)] == ["baseline"]
    monkeypatch.delenv(native.VARIABLE)
    assert len(ActorCritic(native="auto").alternatives(SPACES)) == 2
    monkeypatch.setattr(native, "BUILT", tmp_path / "libkernels.so.1")
    assert [each.native for each in ActorCritic(native="auto").alternatives(SPACES)] == ["off"]
    assert ActorCritic(native="auto").build(SPACES, 0).network.kernels is None


def test_the_cheaper_of_numpy_and_the_core_is_taken(monkeypatch, library):
    """What is slept for is not cheap."""
    monkeypatch.setattr(native, "BUILT", library)
    monkeypatch.delenv(native.VARIABLE, raising=False)
    agents = [AgentInfo("agent", SPACES)]
    for slow in (NumpyActorCritic, NativeActorCritic):
        with monkeypatch.context() as patched:
            begin = slow.begin

            def late(self, *args, begin=begin):
                end = time.process_time() + 0.003
                while time.process_time() < end:
                    pass
                return begin(self, *args)

            patched.setattr(slow, "begin", late)
            found = measure_arithmetic(automatic(), agents)
            ((chosen,),) = (each.values() for each in found.decided.values())
            assert (chosen == "off") == (slow is NativeActorCritic)
