"""How long is it from the command to the first finished update, with costs measured anew
and with kept ones?

    python benchmarks/start.py [--runs 5] [CartPole-v1 HalfCheetah-v5 ...]

Seconds of `tidemill train WHAT` for one update: until the update is written down (as the
folder's file of metrics tells), and until the command has ended. The cache of costs is
one of its own, empty at first. The package's bytecode is there, as pip leaves it: with
PYTHONDONTWRITEBYTECODE set, each process would compile what it imports.
"""

import argparse
import compileall
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tidemill


def start(what: str, folder: Path) -> tuple[float, float]:
    """Return the seconds to the first update, and those of the whole command."""
    began = time.time()
    words = ["train", what, "--run-dir", "run", "--set", "limits.updates=1"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    subprocess.run(
        [sys.executable, "-m", "tidemill.cli.entry", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        check=True,
    )
    ended = time.time()
    metrics = folder / "run" / "metrics.jsonl"
    updated = metrics.stat().st_mtime
    (folder / "run").rename(folder / f"run-{ended}")
    return updated - began, ended - began


def main() -> None:
    """Print a line per experiment."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=["CartPole-v1", "HalfCheetah-v5", "ALE/Pong-v5"])
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    compileall.compile_dir(Path(tidemill.__file__).parent, quiet=1)
    print(
        f"{'s, median of ' + str(given.runs):24} {'first, measured':>16} {'whole':>7} "
        f"{'first, from cache':>18} {'whole':>7}"
    )
    for what in given.what:
        found = []
        for _ in range(given.runs):
            with tempfile.TemporaryDirectory() as folder:
                found.append([*start(what, Path(folder)), *start(what, Path(folder))])
        first, whole, again, all_again = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{what:24} {first:16.2f} {whole:7.2f} {again:18.2f} {all_again:7.2f}", flush=True)


if __name__ == "__main__":
    main()
