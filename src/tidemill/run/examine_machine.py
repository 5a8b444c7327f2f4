"""What this machine has for training, and what it lacks: ``tidemill doctor``."""

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import tidemill
from tidemill.bridge.protocol.files import folders_of_the_dead, remove_folders_of_the_dead
from tidemill.core.control_groups import free_processes, memory_kills, processors
from tidemill.core.cores import cores
from tidemill.core.memory import available, size
from tidemill.core.run_marks import end_left_alone, left_alone
from tidemill.core.temporary_folders import folders_left
from tidemill.native.library import INSTRUCTION_SETS, VARIABLE, choices, unavailable
from tidemill.testing.check_env import Finding

LITTLE_MEMORY = 2 << 30  # bytes: less than a run of a few processes with torch takes
LITTLE_SHARED = 64 << 20  # bytes of /dev/shm: what a container has by itself
FEW_FILES = 4096  # that may be open: a run of some hundred workers needs more
FEW_PROCESSES = 200  # and threads, that may be started besides: a worker has a dozen
BUSY = 0.5  # processes that would compute now, for each core
_DRIVER = Path("/proc/driver/nvidia/version")
EXTRAS = {
    "atari": "ale_py",
    "box2d": "Box2D",
    "envpool": "envpool",
    "hosts": "zmq",
    "minatar": "minatar",
    "minigrid": "minigrid",
    "mujoco": "mujoco",
    "openenv": "websockets",
    "pettingzoo": "mpe2",
    "plot": "matplotlib",
    "popgym": "popgym",
    "ray": "ray",
    "rest": "httpx",
    "video": "imageio_ffmpeg",
    "wandb": "wandb",
}
"""Extras of Tidemill, and a module that each brings."""


def examine_machine(mend: bool = False) -> Iterator[Finding]:
    """Yield what there is to tell of this machine, each with what mends it. With `mend`,
    end and remove first what runs of this user have left that are over."""
    yield Finding(
        "versions",
        "ok",
        f"Tidemill {tidemill.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}, {platform.machine()}",
    )
    yield _cores()
    yield _load()
    yield _memory()
    if sys.platform.startswith("linux"):
        yield from _shared_memory()
        yield _files()
        yield _processes()
        yield from _leftovers(mend)
    yield _core_of_c()
    yield _blas()
    yield from _torch()
    yield from _extras()


def _cores() -> Finding:
    quota, machine = processors(), os.cpu_count() or 1
    limits = [f"{machine} in the machine"]
    if hasattr(os, "sched_getaffinity") and (own := len(os.sched_getaffinity(0))) < machine:
        limits.append(f"{own} by affinity")
    if quota is not None:
        limits.append(f"{quota:g} by the quota of a control group")
    return Finding("cores", "ok", f"{cores()} ({', '.join(limits)})")


def _load() -> Finding:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > BUSY * cores():
        return Finding(
            "load",
            "warn",
            f"{load:.1f} processes computed in the last minute, beside {cores()} cores",
            "end other programs, or leave them cores: taskset -c 0 tidemill train …",
        )
    return Finding("load", "ok", f"{load:.1f} processes computed in the last minute")


def _memory() -> Finding:
    free, kills = available(), memory_kills()
    text = f"{size(free)} can be filled"
    if kills.here:
        return Finding(
            "memory",
            "warn",
            f"{text}; the system has killed {kills.here:,} processes of this control group for want of it",
            "give the container more (--memory), or make lanes, slots or counts smaller",
        )
    if free < LITTLE_MEMORY:
        return Finding("memory", "warn", text, "end other programs, or give the container more (--memory)")
    return Finding("memory", "ok", text)


def _shared_memory() -> Iterator[Finding]:
    with suppress(OSError):
        found = os.statvfs("/dev/shm")
        free = found.f_bavail * found.f_frsize
        text = f"{size(free)} free in /dev/shm, where simulators exchange observations"
        if free < LITTLE_SHARED:
            cure = "mount -o remount,size=1G /dev/shm; of a container: --shm-size=1g"
            yield Finding("shared memory", "warn", text, cure)
        else:
            yield Finding("shared memory", "ok", text)
        return
    yield Finding("shared memory", "warn", "there is no /dev/shm", "mount -t tmpfs tmpfs /dev/shm")


def _files() -> Finding:
    import resource  # no module of every system's

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{'any number of' if hard == resource.RLIM_INFINITY else f'{hard:,}'} open files"
    if 0 <= hard < FEW_FILES:
        cure = (
            "as root: ulimit -Hn 65536, or a line in /etc/security/limits.conf (* hard nofile 65536); of a "
            "service LimitNOFILE=, of a container --ulimit nofile=65536"
        )
        return Finding("limits", "warn", text, cure)
    return Finding("limits", "ok", text)


def _processes() -> Finding:
    import resource  # no module of every system's

    _, user = resource.getrlimit(resource.RLIMIT_NPROC)
    free = free_processes()
    text = f"{'any number of' if user == resource.RLIM_INFINITY else f'{user:,}'} processes and threads"
    if free is not None:
        text += f" of this user, {free:,} more in this control group"
        if free < FEW_PROCESSES:
            cure = "give the container more (--pids-limit=-1), or the service (TasksMax=infinity)"
            return Finding("threads", "warn", text, cure)
    return Finding("threads", "ok", text)


def _core_of_c() -> Finding:
    if (why := unavailable("auto")) is None:
        if (chosen := choices()[-1]) == "off":
            wish = os.environ[VARIABLE]
            cause = f", but {unavailable(wish)}" if wish in INSTRUCTION_SETS else ""
            text = f"numpy computes the networks: {VARIABLE} = {wish}{cause}"
            return Finding("native core", "warn", text, f"unset {VARIABLE}")
        return Finding("native core", "ok", f"networks computed by {chosen}")
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    cure = f"{sys.executable} -m tidemill.native.build"
    if compiler is None:
        cure = f"install a compiler (apt install gcc), then: {cure}"
    return Finding("native core", "warn", f"numpy computes the networks, several times slower: {why}", cure)


def _blas() -> Finding:
    import numpy as np
    from threadpoolctl import threadpool_info

    libraries = [
        f"{found['internal_api']} {found.get('version') or ''} ({found['num_threads']} threads)"
        for found in threadpool_info()
        if found.get("user_api") == "blas"
    ]
    text = f"numpy {np.__version__} by {', '.join(libraries)}"
    if not libraries:
        cure = "pip install --force-reinstall numpy"
        return Finding("numpy", "warn", f"numpy {np.__version__} without a known BLAS", cure)
    return Finding("numpy", "ok", text)


def _torch() -> Iterator[Finding]:
    driver = next(iter(_read(_DRIVER).splitlines()), "")
    try:
        import torch
    except Exception as error:  # whatever a broken installation raises
        yield Finding(
            "torch", "fail", f"it cannot be imported: {error}", "pip install --force-reinstall torch"
        )
        return
    cuda = torch.version.cuda
    text = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    if driver and cuda is None:
        cure = "pip install torch (its own index has builds for CUDA)"
        yield Finding("torch", "warn", f"{text}: built without CUDA, beside a driver ({driver})", cure)
        return
    yield Finding("torch", "ok", text)
    if cuda is None:
        yield Finding("GPU", "ok", "none: no driver, and torch is built without CUDA")
    elif not torch.cuda.is_available():
        cure = "install the driver, or let the container have the device (--gpus all)"
        yield Finding(
            "GPU", "warn" if driver else "ok", f"none that torch {cuda} can use", cure if driver else ""
        )
    else:
        names = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
        yield Finding("GPU", "ok", f"{', '.join(names)}; CUDA {cuda}; {driver}")


def _extras() -> Iterator[Finding]:
    lacking = [extra for extra, module in EXTRAS.items() if importlib.util.find_spec(module) is None]
    if lacking:
        names = ", ".join(lacking)
        yield Finding(
            "extras", "ok", f"not installed: {names}", f'pip install "tidemill[{",".join(lacking)}]"'
        )
    else:
        yield Finding("extras", "ok", "all are installed")


def _leftovers(mend: bool) -> Iterator[Finding]:
    """Workers whose run is gone, memory files of simulators whose trainer is, folders of
    temporary files, and runs that are kept in the temporary directory, which stay."""
    if ended := end_left_alone() if mend else []:
        told = f"ended {len(ended)} workers, or what they started, whose run was gone"
        yield Finding("processes", "ok", f"{told}: {' '.join(map(str, ended))}")
    if alone := left_alone():
        pids = " ".join(map(str, alone))
        yield Finding(
            "processes",
            "warn",
            f"{len(alone)} workers, or what they started, live whose run is gone: {pids}",
            f"kill -9 {pids}",
        )
    elif not ended:
        yield Finding("processes", "ok", "no worker lives, nor what one started, whose run is gone")
    exchanged = folders_of_the_dead()
    if mend:
        remove_folders_of_the_dead()
    for folder in exchanged:
        told = f"{folder}, what a trainer that is gone and its simulator exchanged"
        cure = f"rm -r {folder} (the next run with a simulator does it, too)"
        yield _removed("memory files", told, folder, cure)
    try:
        left, temporary = folders_left(), Path(tempfile.gettempdir())
    except OSError as error:
        cure = "export TMPDIR=FOLDER, one in which there is room and in which you may write"
        yield Finding("temporary files", "warn", str(error.strerror), cure)
        return
    for folder in left:
        if mend:
            shutil.rmtree(folder, ignore_errors=True)
        told = f"{folder}, temporary files of a process that is gone"
        yield _removed("temporary files", told, folder, f"rm -r {folder}")
    kept = [
        path
        for path in temporary.glob("tidemill-*")
        if (path / "checkpoints").is_dir() and path.lstat().st_uid == os.getuid()
    ]
    for path in kept:
        yield Finding(
            "kept run",
            "warn",
            f"{path} has the last weights of a run whose folder took no more",
            f"tidemill resume {path}, or move it; rm -r {path} if it is not needed",
        )


def _removed(name: str, told: str, folder: Path, cure: str) -> Finding:
    if folder.exists():
        return Finding(name, "warn", f"there is {told}", cure)
    return Finding(name, "ok", f"removed {told}")


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""
