"""The wheel, as an index has it: installed alone, somewhere else."""

import os
import re
import subprocess
import sys
import sysconfig
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

import pytest
from tests.made_once import made_once, shared_folder

ROOT = Path(__file__).parents[1]


def build(folder, compiler):
    """Return the wheel that is made in `folder` where the compiler is this script."""
    script = folder / "its-cc"
    script.write_text(f"#!/bin/sh\n{compiler}\n")
    script.chmod(0o755)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT],
        env={**os.environ, "CC": str(script)},
        check=True,
        timeout=240,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Its native core is compiled without optimisation, in a tenth of the time."""
    folder = shared_folder(tmp_path_factory) / "wheel"
    (built,) = made_once(folder, lambda there: build(there, 'exec cc "$@" -O0')).glob("*.whl")
    return built


def test_the_metadata_say_who_what_and_under_which_licence_and_no_link_leads_into_a_checkout(wheel):
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(archive.read(name).decode())
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    assert (
        metadata["License-Expression"] == "MIT"
        and metadata["License-File"] == "LICENSE"
        and len(licences) == 1
    )
    assert (
        metadata["Author"]
        and metadata["Keywords"]
        and {"Homepage", "Documentation", "Changelog"}
        == {url.split(",")[0] for url in metadata.get_all("Project-URL")}
    )
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    links = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    home = next(url.split(", ")[1] for url in metadata.get_all("Project-URL") if url.startswith("Homepage"))
    inside = [link.removeprefix(f"{home}/") for link in links if link.startswith(f"{home}/")]
    assert len(inside) > 20 and all(link.startswith(("#", "https://")) for link in links)
    assert not [link for link in inside if not (ROOT / link.partition("#")[0]).exists()]


def test_a_wheel_whose_compiler_failed_says_what_it_said(tmp_path):
    built = build(tmp_path, 'echo "this compiler is broken" >&2; exit 1')
    with ZipFile(built) as archive:
        archive.extractall(tmp_path / "site")
    told = subprocess.run(
        [sys.executable, "-c", "from tidemill.native.library import unavailable; print(unavailable('auto'))"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    ).stdout
    assert str(tmp_path) in told and "failed: this compiler is broken); with a C compiler that works" in told


def test_what_the_readme_types_works_from_the_wheel_alone(wheel, tmp_path):
    """Its packages are those of this environment; the checkout is not on the path."""
    there = tmp_path / "site"
    with ZipFile(wheel) as archive:
        archive.extractall(there)
    script = (
        "import sys, tidemill, tidemill.cli.entry; assert tidemill.__file__.startswith(sys.argv.pop(1)); "
        "tidemill.cli.entry.main()"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(there), sysconfig.get_paths()["purelib"]]),
    }

    def tidemill(*words: str) -> str:
        command = [sys.executable, "-c", script, str(there), *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=240
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    copied = {Path(line).name for line in tidemill("examples").split()}
    assert copied == {file.name for file in (ROOT / "examples").glob("*.py")}
    told = tidemill(
        "train",
        "examples/own_environment.py:experiment",
        "--max-steps",
        "4000",
        "--run-dir",
        "run",
        "--layout",
        "given",
    )
    assert re.search(r"status +completed", told)
    assert "mean" in tidemill("eval", "run", "--episodes", "5")
    sources = tidemill("simulator", "sources", "simulators").split()
    assert any(line.endswith("tidemill.h") for line in sources) and any(
        line.endswith("World.cs") for line in sources
    )
    tidemill("params", "run", "export", "latest", "policy.safetensors")
    code = (
        "import numpy, tidemill; assert tidemill.load('policy.safetensors').act(numpy.zeros(3, "
        "numpy.float32)) in range(3)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=240)
