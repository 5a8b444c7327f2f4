"""Which device a worker's policy computes on. Imports torch only where there may be a
GPU.

A device belongs to a worker (`Trainer.device`, `PolicyWorkers.device`), not to a policy:
so actors act on the CPU while a GPU trains.
"""

import os
import re
from itertools import takewhile
from pathlib import Path

from tidemill.core.errors import ConfigError

_WINDOWS = Path("/dev/dxg")  # Windows' Linux
_DRIVER = Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), _WINDOWS
_GPUS = (Path("/proc/driver/nvidia/gpus"), "*"), (Path("/dev"), "nvidia[0-9]*")


def check_device(device: str) -> None:
    """Raise `ConfigError` unless `device` names one."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ConfigError(
            f'device = "{device}" is not known; take "cpu", "cuda" (a GPU), "cuda:1" (a certain one) or '
            '"auto" (a GPU if there is one)'
        )


def visible_gpus() -> int:
    """Return how many GPUs this process may use, by what the driver and the environment
    tell (CUDA_VISIBLE_DEVICES, and of Slurm SLURM_GPUS_ON_NODE): torch, which alone knows
    whether it can use them, is not imported."""
    # a container may see what the driver has and be given less, or devices be made late
    told = [count for folder, names in _GPUS if (count := sum(1 for _ in folder.glob(names)))]
    found = min(told) if told else int(_WINDOWS.exists())
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        known = lambda name: (name.isdecimal() and int(name) < found) or name[:4] in ("GPU-", "MIG-")  # noqa: E731
        # what follows one that is not there counts no more
        found = min(found, len(list(takewhile(known, map(str.strip, visible.split(","))))))
    granted = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return min(found, int(granted)) if granted.isdecimal() else found


def choose_device(device: str, number: int) -> str:
    """Return "cpu" or the name of a GPU ("cuda:1"): where `device` leaves open which
    ("cuda", "auto"), that of this `number`, of as many as there are in turn.

    Torch is asked only when a GPU is wanted by name, or when the machine has its driver.
    """
    check_device(device)
    if device == "cpu" or (device == "auto" and not any(path.exists() for path in _DRIVER)):
        return "cpu"
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto" and not count:
        return "cpu"
    if not count:
        why = (
            "this torch was built without CUDA"
            if torch.version.cuda is None
            else "torch finds no GPU (see nvidia-smi and CUDA_VISIBLE_DEVICES)"
        )
        raise ConfigError(
            f'device = "{device}", but {why}; take "cpu", or "auto", which takes a GPU only if there is one'
        )
    index = int(device[5:]) if device.startswith("cuda:") else number % count
    if index >= count:
        raise ConfigError(
            f'device = "{device}", but there are {count} GPUs; take '
            f'{", ".join(f"cuda:{i}" for i in range(count))}, "cuda" or "cpu"'
        )
    return f"cuda:{index}"
