"""Compilers of the simulator's ends, and the C programs that the tests drive."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.bridge.world_side.language_files import sources_folder

Build = Callable[..., Path]
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
def build_c(c_compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compile a C file, once per session and set of flags, with all warnings being
    errors: `build_c(file, *flags)` → the program."""
    folder = tmp_path_factory.mktemp("c")
    built: dict[tuple[Path, tuple[str, ...]], Path] = {}

    def build(file: Path, *flags: str) -> Path:
        if (file, flags) not in built:
            program = folder / f"{file.stem}-{len(built)}"
            command = [
                c_compiler,
                *STRICT,
                *flags,
                f"-I{sources_folder() / 'native'}",
                str(file),
                "-o",
                str(program),
                "-pthread",
                "-lm",
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
            built[file, flags] = program
        return built[file, flags]

    return build


@pytest.fixture(scope="session")
def native(build_c: Build) -> Build:
    """Compile a shipped example: `native("reach", *flags)` → the program."""
    return lambda name, *flags: build_c(sources_folder() / "native" / f"{name}.c", *(flags or ("-O1",)))


@pytest.fixture(scope="session")
def csharp(csharp_compiler: str, mono: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the C# worlds."""
    folder = tmp_path_factory.mktemp("csharp")
    subprocess.run(
        ["bash", sources_folder() / "csharp" / "Build~" / "build.sh", folder], check=True, capture_output=True
    )
    return folder


@pytest.fixture(scope="session")
def csharp_probe(csharp: Path, csharp_compiler: str, mono: str) -> Path:
    """The tests' C# probe as a program."""
    source, program = Path(__file__).with_name("Probe.cs"), csharp / "probe"
    subprocess.run(
        [
            csharp_compiler,
            "-langversion:7.2",
            "-unsafe",
            "-warnaserror",
            f"-r:{csharp}/Tidemill.dll",
            f"-out:{program}.exe",
            source,
        ],
        check=True,
    )
    program.write_text(f'#!/bin/sh\nMONO_DISABLE_SHARED_AREA=1 exec "{mono}" "{program}.exe" "$@"\n')
    program.chmod(0o755)
    return program
