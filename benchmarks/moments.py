"""What a run survives at each of its moments: a short run gets one fault each, at a
random moment of its start-up, of an evaluation, as it writes a checkpoint, as it ends, or
at any.

    python benchmarks/moments.py --times 4        # each fault at 20 moments, five kinds

Faults are those of `soak.py`. It prints how many runs came to their limit all the same,
and how the others ended.
"""

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from fault_rows.runs import left_behind, processes
from faulty import FAULTS, Run, apart

SHORT = 100  # updates of a run that gets one fault
MOMENTS = ("start", "evaluation", "saving", "ending", "any")


def at_moment(moment: str, fault: str, draw: random.Random) -> str:
    """Have a fault at some moment of a short run. Return how that ended, in words."""
    with tempfile.TemporaryDirectory() as name:
        run, whose, update = (
            Run(Path(name), apart, "--set", f"limits.updates={SHORT}"),
            "",
            draw.randint(5, SHORT // 2),
        )
        if moment == "start":
            run.wait_for(lambda: processes(run.main.pid))
            time.sleep(draw.uniform(0.0, 1.5))
        elif moment == "evaluation":
            run.wait_for(lambda: run.newest().get("update", 0) >= 5)
            time.sleep(draw.uniform(0.0, 1.5))
            whose = draw.choice(["judge", "evaluation"])
        elif moment == "saving":
            run.wait_for(lambda: run.newest().get("update", 0) >= update)
            run.wait_for(lambda: [*run.path.glob("checkpoints/policy/.update-*")])
            whose = "trainer"
        elif moment == "ending":
            run.wait_for(lambda: run.newest().get("update", 0) >= SHORT - 5)
            time.sleep(draw.uniform(0.0, 0.3))
        else:
            run.wait_for(lambda: run.newest().get("update", 0) >= 2 * update)
        run.suffer(fault, draw, whose)
        status = run.end(asks=False)
        left = left_behind(run.folder)
        clean = "" if left == "0 processes, 1 files" else f", and left {left}"
        output = (run.folder / "output.txt").read_text().strip().splitlines()
        updates = run.newest().get("update", 0)
        if status == 0 and updates == SHORT:
            return f"came to its limit{clean}"
        why = next((line for line in reversed(output) if "rror" in line), output[-1] if output else "")
        return f"status {status} after {updates:.0f} updates{clean}: {why[:200]}"


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--times", type=int, default=4, help="each fault at so many moments of each kind")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=FAULTS)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    for moment in MOMENTS:
        for fault in given.faults:
            ends = Counter(at_moment(moment, fault, draw) for _ in range(given.times))
            told = "; ".join(f"{count} {end}" for end, count in ends.most_common())
            print(f"{moment:<10} {fault:<5} {told}", flush=True)


if __name__ == "__main__":
    main()
