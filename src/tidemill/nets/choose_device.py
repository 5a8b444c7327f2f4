"""Which device a worker's policy computes on. Imports torch only where there may be a
GPU.

A device belongs to a worker (`Trainer.device`, `PolicyWorkers.device`), not to a policy:
so actors act on the CPU while a GPU trains.
"""

import re
from pathlib import Path

from tidemill.core.errors import ConfigError

# the last: Windows' Linux
_DRIVER = Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg")


def check_device(device: str) -> None:
    """Raise `ConfigError` unless `device` names one."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ConfigError(
            f'device = "{device}" is not known; take "cpu", "cuda" (a GPU), "cuda:1" (a certain one) or '
            '"auto" (a GPU if there is one)'
        )


def choose_device(device: str, number: int) -> str:
    """Return "cpu" or the name of a GPU ("cuda:1") for worker `number` of its group:
    "cuda" and "auto" spread a group over all GPUs.

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
