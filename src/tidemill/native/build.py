"""Compiles the kernels, when a wheel is made or the project is installed editable, and by
``python -m tidemill.native.build [FOLDER [FLAGS]]``. Imports nothing of Tidemill: the
build hook runs it by itself."""

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

NAMES = (
    *("kernels.c", "advantages.c", "layers.c", "dqn.c", "squash.c", "descent.c"),
    *("replay.c", "cart_pole.c", "ticks.c", "threads.c"),
)
SOURCES = [Path(__file__).with_name(name) for name in NAMES]
# not NAME.so, which importlib would take for a module of this package
LIBRARY = "libkernels.so.1"
WHY = "not-built.txt"
"""The file, beside where the library would be, that says why it could not be built."""

FLAGS = "-std=c11 -O3 -fPIC -fvisibility=hidden -ffp-contract=fast -fno-math-errno -fno-trapping-math"
BASELINE = "-DISA=baseline -DFIRST"
X86 = {
    "avx2": "-mavx2 -mfma",
    "avx512": "-mavx512f -mavx512vl -mavx512dq -mavx512bw -mfma -mprefer-vector-width=512",
}
"""Flags of each instruction set above what every x86-64 processor has."""
UNFUSED = {"cart_pole.c": "-ffp-contract=off"}
"""Flags of the files whose numbers are the reference's in every bit."""
DEADLINE = 300.0
"""Seconds that the compiler may take for one file, which it compiles in some 5."""


class CannotCompile(Exception):
    """There is no compiler, or it failed; says which and why."""


def digest() -> int:
    """Return a number that stands for what the kernels are made of: their sources, and
    the flags of this file. A library has that of its own, so that an older one is
    noticed."""
    found = hashlib.sha256(f"{FLAGS}{BASELINE}{X86}{UNFUSED}".encode())
    for file in sorted([*SOURCES, *Path(__file__).parent.glob("*.h")]):
        found.update(file.read_bytes())
    return int.from_bytes(found.digest()[:7])  # an int64 that is above 0


def build(folder: Path, *flags: str) -> Path:
    """Compile the kernels for every instruction set of this architecture, with the
    compiler ``$CC`` or cc; return the library, which lies in `folder`. One whose
    flags the compiler does not know is left out, which is said on standard error.
    Raises `CannotCompile`, and leaves there what it says (`WHY`)."""
    try:
        library = _build(folder, flags)
    except CannotCompile as error:
        with suppress(OSError):
            (folder / WHY).write_text(str(error), encoding="utf-8", errors="replace")
        raise
    (folder / WHY).unlink(missing_ok=True)
    return library


def _build(folder: Path, flags: Sequence[str]) -> Path:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    compilations = {"baseline": BASELINE}
    if platform.machine() == "x86_64":
        compilations |= {name: f"-DISA={name} {more}" for name, more in X86.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, more in [*compilations.items()]:
        try:
            _run([*compiler, *more.split(), "-fsyntax-only", "-x", "c", os.devnull])
        except CannotCompile as error:
            if name == "baseline":
                raise
            del compilations[name]
            print(f"The kernels are built without {name}. {error}", file=sys.stderr)
    settings = [*FLAGS.split(), f"-DDIGEST={digest()}", *flags]
    with TemporaryDirectory(dir=folder) as made, ThreadPoolExecutor(os.cpu_count()) as pool:
        commands, objects = [], []
        for (name, more), source in product(compilations.items(), SOURCES):
            objects.append(str(Path(made, f"{source.stem}-{name}.o")))
            its_own = [*more.split(), *UNFUSED.get(source.name, "").split()]
            commands.append([*compiler, *settings, *its_own, "-c", str(source), "-o", objects[-1]])
        list(pool.map(_run, commands))  # which raises what one of them raised
        whole = Path(made, LIBRARY)
        _run([*compiler, *flags, "-shared", "-pthread", *objects, "-lm", "-o", str(whole)])
        return whole.replace(folder / LIBRARY)  # at once: a run that has the old one loaded keeps it


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"{command[0]} cannot be run: {error}") from None
    if done.returncode:
        raise CannotCompile(f"{shlex.join(command)} failed: {done.stderr.strip()[-800:]}")


if __name__ == "__main__":
    where, *more_flags = sys.argv[1:] or [str(Path(__file__).parent)]
    try:
        print(build(Path(where), *more_flags))
    except CannotCompile as error:
        sys.exit(f"The kernels were not built. {error}")
