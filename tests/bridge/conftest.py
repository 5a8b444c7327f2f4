"""Compilers of the simulator's ends, and the C programs that the tests drive."""

import os
import shutil
import subprocess
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from tests.made_once import made_once, shared_folder

from tidemill.bridge.world_side.language_files import sources_folder

Build = Callable[..., Path]
CSHARP = sources_folder() / "csharp"
CSHARP_PAGE = Path(__file__).parents[2] / "docs" / "simulators-csharp.md"
STRICT = ("-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror")


def _compiler(name: str, package: str) -> str:
    """Return the program's path; without it the test skips, or fails where continuous
    integration asks for it."""
    if found := shutil.which(name):
        return found
    text = f"{name} is missing (Debian package {package})"
    if os.environ.get("TIDEMILL_REQUIRE_COMPILERS"):
        pytest.fail(f"{text}, and TIDEMILL_REQUIRE_COMPILERS is set")
    pytest.skip(text)


@pytest.fixture(scope="session")
def c_compiler() -> str:
    return _compiler("gcc", "gcc, libc6-dev")


@pytest.fixture(scope="session")
def csharp_compiler() -> str:
    return _compiler("mcs", "mono-mcs")


@pytest.fixture(scope="session")
def mono() -> str:
    return _compiler("mono", "mono-runtime")


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory)


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="session")
def build_c(c_compiler: str, programs: Path) -> Build:
    """Compile a C file, once and for each set of flags, with all warnings being errors:
    `build_c(file, *flags)` → the program."""

    def build(file: Path, *flags: str) -> Path:
        inputs = [f"-I{sources_folder() / 'native'}", str(file)]
        words = [c_compiler, *STRICT, *flags, *inputs, "-pthread", "-lm", "-o"]
        name = f"{file.stem}-{sha256(' '.join(words).encode()).hexdigest()[:16]}"
        return made_once(programs / name, lambda folder: run(*words, folder / file.stem)) / file.stem

    return build


@pytest.fixture(scope="session")
def native(build_c: Build) -> Build:
    """Compile a shipped example: `native("reach", *flags)` → the program."""
    return lambda name, *flags: build_c(sources_folder() / "native" / f"{name}.c", *(flags or ("-O1",)))


@pytest.fixture(scope="session")
def csharp(csharp_compiler: str, mono: str, programs: Path) -> Path:
    """The folder with the C# worlds, the tests' probe and the page's example as
    programs."""

    def make(folder: Path) -> None:
        run("sh", CSHARP / "Build~" / "build.sh", folder)
        game = folder / "Game.cs"
        game.write_text(CSHARP_PAGE.read_text().split("```csharp\n")[1].split("```")[0])
        strict = (csharp_compiler, "-langversion:7.2", "-unsafe", "-warnaserror")
        for name, source in (("probe", Path(__file__).with_name("Probe.cs")), ("game", game)):
            program = folder / name
            run(*strict, f"-r:{folder}/Tidemill.dll", f"-out:{program}.exe", source)
            program.write_text(f'#!/bin/sh\nMONO_DISABLE_SHARED_AREA=1 exec "{mono}" "{program}.exe" "$@"\n')
            program.chmod(0o755)

    return made_once(programs / "csharp", make)
