"""Which Tidemill this is."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import tidemill
from tidemill.core.own_version import own_version

SAYS = "from tidemill.core.own_version import own_version; print(own_version())"


def said(path: Path) -> str:
    """Return what the Tidemill in a folder says of itself."""
    command = ["env", f"PYTHONPATH={path}", sys.executable, "-P", "-c", SAYS]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_a_copy_is_the_same_whatever_was_compiled_there_and_another_source_is_not(tmp_path: Path) -> None:
    there = tmp_path / "tidemill"
    shutil.copytree(
        Path(tidemill.__file__).parent, there, ignore=shutil.ignore_patterns("__pycache__", "*.so*")
    )
    (there / "core" / ".#clock.py").symlink_to("what an editor has locked")
    (there / "examples").mkdir()
    (there / "examples" / "one.py").write_text("of an installed package\n")
    assert re.fullmatch(r"\d+\.\d+\.\d+ \([0-9a-f]{10}\)", own_version()) and said(tmp_path) == own_version()
    with (there / "algorithms" / "ppo.py").open("a") as file:
        file.write("\n")
    assert said(tmp_path) != own_version()
