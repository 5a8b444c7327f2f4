"""Exchanges per second over the simulator bridge: turns alone, and the trainer's loop of
read, set actions, step.

    python benchmarks/bridge.py [--seconds 2] [--layouts 0,0.3.2] [--python] [--csharp]

The simulator does nothing (`native/trivial.c`, compiled here with cc; with --python and
--csharp the same in these, too). Both sides are pinned: to one core together, or to a
core each. A figure is the best of five runs of so many seconds, since other programs only
make it slower, beside the median.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tidemill import bridge
from tidemill.bridge import ActionTuple, Bridge, Simulator, World

SIZES = ((10, 4), (1000, 32))
RUNS = 5


def trivial(agents, size):
    """The Python simulator: everybody asks, all at once, and nothing changes."""
    joined = Bridge()
    world = joined.add(World("trivial", agents, [(size,)], 2))
    ids, obs, reward = np.arange(agents), np.ones((agents, size), np.float32), np.zeros(agents, np.float32)
    world.request_decisions(ids, reward, [obs])
    while joined.exchange():
        world.request_decisions(ids, reward, [obs])


def programs(folder, with_python, with_csharp):
    """Give (name, executable, arguments for a size)."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is not None:
        native = Path(bridge.__file__).parent / "native"
        program = folder / "trivial"
        subprocess.run(
            [compiler, "-std=c99", "-O2", "-pthread", str(native / "trivial.c"), "-o", str(program), "-lm"],
            check=True,
        )
        yield "C", program, lambda agents, size: ["--agents", str(agents), "--size", str(size)]
    if with_csharp:
        subprocess.run(
            [
                "sh",
                str(Path(bridge.__file__).parent / "csharp" / "Build~" / "build.sh"),
                str(folder / "csharp"),
            ],
            check=True,
        )
        yield (
            "C# (Mono)",
            folder / "csharp" / "trivial",
            lambda agents, size: ["--agents", str(agents), "--size", str(size)],
        )
    if with_python or compiler is None:
        script = folder / "trivial.py"
        script.write_text(
            f"#!{sys.executable}\nimport runpy, sys\nsys.argv[0] = {__file__!r}\nrunpy.run_path(sys.argv[0], "
            "run_name='__main__')\n"
        )
        script.chmod(0o700)
        yield "Python", script, lambda agents, size: ["--trivial", str(agents), str(size)]


def started(program, arguments, layout, cores):
    """Start the simulator on the last of the cores, and stay on the first."""
    os.sched_setaffinity(0, {cores[-1]})
    simulator = Simulator(program, arguments, layout=layout)
    os.sched_setaffinity(0, {cores[0]})
    return simulator


def loop(simulator, seconds):
    """Return exchanges per second of the trainer's loop."""
    simulator.reset()
    name = next(iter(simulator.behavior_specs))
    action = ActionTuple(np.zeros((len(simulator.get_steps(name)[0]), 2), np.float32))
    done, begun = 0, time.perf_counter()
    while (now := time.perf_counter()) < begun + seconds:
        for _ in range(100):
            simulator.get_steps(name)
            simulator.set_actions(name, action)
            simulator.step()
        done += 100
    return done / (now - begun)


def turns(simulator, seconds):
    """Return exchanges per second where the trainer neither reads nor writes: handing
    over and waiting alone."""
    memory, done, begun = simulator._memory, 0, time.perf_counter()
    while (now := time.perf_counter()) < begun + seconds:
        for _ in range(100):
            memory.hand_over(0)
            memory.receive(simulator._look)
        done += 100
    return done / (now - begun)


def row(name, program, arguments, layout, size, cores, seconds):
    """Measure one row of the table."""
    with started(program, arguments(*size), layout, cores) as simulator:
        rates = [loop(simulator, seconds) for _ in range(RUNS)]
        alone = max(turns(simulator, seconds / 2) for _ in range(RUNS))
    where = "one each" if len(cores) > 1 else "one together"
    agents, floats = size
    return (
        f"| {name} | {layout} | {agents:,} × {floats} | {where} | {alone:,.0f} | {max(rates):,.0f} | "
        f"{statistics.median(rates):,.0f} |"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--layouts", default="0")
    parser.add_argument("--python", action="store_true")
    parser.add_argument("--csharp", action="store_true")
    parser.add_argument("--trivial", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory-path", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trivial:
        trivial(*given.trivial)
        return
    cores = sorted(os.sched_getaffinity(0))
    print(
        "| simulator | layout | agents × floats | cores | turns alone /s | read, set actions, step /s | "
        "median |"
    )
    print("|---|---|---|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for name, program, arguments in programs(Path(folder), given.python, given.csharp):
            for layout in given.layouts.split(","):
                for size in SIZES:
                    for some in [cores[:1], [cores[0], cores[-1]]][: len(cores)]:
                        print(row(name, program, arguments, layout, size, some, given.seconds), flush=True)
    os.sched_setaffinity(0, cores)


if __name__ == "__main__":
    main()
