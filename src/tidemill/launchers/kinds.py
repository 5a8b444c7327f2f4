"""The kind of this host: what the costs of work on it depend on."""

import importlib.metadata
import os
import platform
from contextlib import suppress
from pathlib import Path

from tidemill.api.launcher import HostKind
from tidemill.core.cores import cores
from tidemill.native.library import VARIABLE, choices

HOLD_BACK = (
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS"),
    *("OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", VARIABLE),
)
_PACKAGES = ("tidemill", "numpy", "torch", "gymnasium", "ale-py", "mujoco")


def own_kind() -> HostKind:
    """Return the kind of this host, as this process may use it."""
    return HostKind(
        processor(),
        tuple(instructions()),
        tuple(choices()),
        cores(),
        platform.python_version(),
        {name: _version(name) for name in _PACKAGES},
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """Return the processor's name."""
    return _cpu_info("model name") or platform.processor() or platform.machine()


def instructions() -> list[str]:
    """Return what numeric libraries choose their kernels by: the processor's features,
    and the environment variables that hold them back."""
    features = _cpu_info("flags", "Features").split()
    return [*features, *(f"{name}={os.environ.get(name)}" for name in HOLD_BACK)]


def _cpu_info(*names: str) -> str:
    """Return what Linux says of a processor under one of these names; "" where it says
    nothing."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(names)).partition(": ")[2]
    return ""
