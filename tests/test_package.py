"""The package as a whole."""

import subprocess
import sys


def test_importing_the_package_and_its_contracts_leaves_torch_out() -> None:
    code = """
import importlib, pkgutil, sys
import tidemill, tidemill.api, tidemill.core
for floor in (tidemill.api, tidemill.core):
    for module in pkgutil.iter_modules(floor.__path__, floor.__name__ + "."):
        importlib.import_module(module.name)
for module in pkgutil.iter_modules(tidemill.__path__, "tidemill."):
    importlib.import_module(module.name)
import tidemill.run.live, tidemill.run.metrics, tidemill.run.plot
print([name for name in ("torch", "tensorboard", "matplotlib", "gymnasium") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")
