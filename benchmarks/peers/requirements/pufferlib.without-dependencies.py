"""Builds PufferLib for the processor and without its own games, whose build loads raylib
from the network. Its setup.py has a variable for the latter (`NO_OCEAN`), and then lacks
a name, which it finds here among Python's own."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps")
# It asks for gymnasium below 1.0, which has no HalfCheetah-v5; with this version all that
# is used here works.
PACKAGES = ("gymnasium==1.4.0", "gym==0.26.2", "pufferlib==3.0.0")
AT_START = """
import builtins, shutil
builtins.c_extension_paths, which = [], shutil.which
shutil.which = lambda name, *more, **named: None if name == "nvcc" else which(name, *more, **named)
"""

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "sitecustomize.py").write_text(AT_START)
    environment = {**os.environ, "NO_OCEAN": "1", "PYTHONPATH": folder}
    subprocess.run([*PIP, "--no-build-isolation", *PACKAGES], check=True, env=environment)
