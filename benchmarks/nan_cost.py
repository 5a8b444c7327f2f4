"""What looking for NaN and infinity costs: updates that do, and that do not, by turns.

    python benchmarks/nan_cost.py --pairs 15                  # all: some 8 minutes
    python benchmarks/nan_cost.py sac dqn --pairs 3 --seconds 1

Beside the package as it is there is a copy from which that is taken: in
`tidemill.algorithms` each call of `isfinite` (it is true there), the silence of numpy's
warnings, what is read for that alone, and of torch's step that it may be left out; in the
native core the two steps that are left out. Each pair is a process that has both, one
imported first in every second, and has both do the same updates by turns for `--seconds`,
on one thread, with the batches of `works.py`, PPO also with the smallest minibatches
there, and in torch by the convolutions of Mnih et al. 2015. Told are microseconds of
processor time of an update, and the ratio with / without: its median over the pairs, the
interval that has the true median with 95 % (`pairs.py`), and what that shows: "below 1 %"
where all of it is below `--most`, "above 1 %" where all of it is above, else, and by less
than six pairs, nothing. Ends with 1 if any is above.
"""

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from pairs import interval

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "tidemill"
WITH, WITHOUT = "with", "without"
FEWEST = 6  # pairs of which there is an interval with 95 %
BLOCK = 0.02  # seconds, about, in which one of the two goes on
IN_C = re.compile(r" *if \(!isfinite\(norm\) \|\| !isfinite\(\w+\)\)\n *return [^;]*;\n")
FILES_IN_C = ("descent.c", "kernels.c")
ALIGNED = ("-falign-functions=64", "-falign-loops=64")  # else two lines fewer move all behind them: 4 %


class Blind(ast.NodeTransformer):
    """Takes from modules what looks for numbers that are not finite, and counts that."""

    CALLS = ("_SILENT.copy().run", "isfinite", "np.isfinite", "self._unusable.clamp_")
    STATEMENTS = ("read(", "self._unusable.")
    SILENCE = "np.errstate("

    def __init__(self) -> None:
        self.taken = Counter[str]()

    def missing(self) -> list[str]:
        """Return of what there was none."""
        return [each for each in (*self.CALLS, *self.STATEMENTS, self.SILENCE) if not self.taken[each]]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = ast.unparse(node.func)
        if called not in self.CALLS:
            return node
        self.taken[called] += 1
        if called == "_SILENT.copy().run":
            return ast.Call(node.args[0], node.args[1:], [])
        found: dict[str, ast.expr] = {
            "isfinite": ast.Constant(True),
            "np.isfinite": ast.parse("np.True_", mode="eval").body,
            "self._unusable.clamp_": ast.Constant(None),
        }
        return found[called]

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        for begins in self.STATEMENTS:
            if ast.unparse(node.value).startswith(begins):
                self.taken[begins] += 1
                return ast.Pass()
        return node

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        if not all(ast.unparse(item.context_expr).startswith(self.SILENCE) for item in node.items):
            return node
        self.taken[self.SILENCE] += 1
        return node.body


def blind(files: Iterable[Path]) -> None:
    """Take from these modules what looks for NaN. Errors: SystemExit where any of that is
    found nowhere."""
    made = Blind()
    for file in files:
        parsed = made.visit(ast.parse(file.read_text()))
        file.write_text(ast.unparse(ast.fix_missing_locations(parsed)))
    if missing := made.missing():
        raise SystemExit(f"nothing is called {', '.join(missing)} any more: change this benchmark")


def two_packages(folder: Path) -> None:
    """Put the package into `folder`, with what looks for NaN, and without."""
    for name in (WITH, WITHOUT):
        package = folder / name / "tidemill"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "*.so.1"))
        if name == WITHOUT:
            blind((package / "algorithms").glob("*.py"))
        for file in [package / "native" / each for each in FILES_IN_C] if name == WITHOUT else ():
            text, count = IN_C.subn("", file.read_text())
            if count != 1:
                raise SystemExit(f"{file.name} looks for NaN otherwise: change this benchmark")
            file.write_text(text)
        command = [sys.executable, str(package / "native" / "build.py"), str(package / "native"), *ALIGNED]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def ppo(native: bool, rows: int = 8192, minibatch: int = 2048, epochs: int = 4) -> Callable[[], object]:
    """Return an update of PPO, of CartPole."""
    from learner import make_sample

    from tidemill import PPO, ActorCritic
    from tidemill.api.spaces import Box, Discrete, Spaces
    from tidemill.native.library import choices

    spaces = Spaces(Box((4,), "float32"), Discrete(2))
    config = ActorCritic(native=choices()[-1] if native else "off", normalise_observations=False)
    sample = make_sample(config, spaces, rows // 8, 8)
    algorithm = PPO(
        minibatch_size=minibatch, epochs=epochs, clip_apart=False, learning_rate=1e-4, normalise_returns=False
    )
    return partial(algorithm.build(config.build(spaces, 0), 0).update, [sample], 0)


def ppo_torch() -> Callable[[], object]:
    """Return an update of PPO, of Pong, by convolutions in float32."""
    from learner import make_sample

    from tidemill import PPO, ActorCritic
    from tidemill.api.spaces import Box, Discrete, Spaces

    spaces = Spaces(Box((4, 84, 84), "uint8", (0.0,), (255.0,)), Discrete(6))
    config = ActorCritic(convolutions="float32")
    algorithm = PPO(minibatch_size=32, epochs=1, learning_rate=1e-4)
    sample = make_sample(config, spaces, 8, 8)
    return partial(algorithm.build(config.build(spaces, 0), 0).update, [sample], 0)


def impala() -> Callable[[], object]:
    """Return an update of IMPALA, of CartPole, in numpy."""
    from learner import make_sample

    from tidemill import ActorCritic, Impala
    from tidemill.api.spaces import Box, Discrete, Spaces

    spaces = Spaces(Box((4,), "float32"), Discrete(2))
    config = ActorCritic(native="off", normalise_observations=False)
    algorithm = Impala(minibatch_size=512, clip_apart=False, learning_rate=1e-4, normalise_returns=False)
    sample = make_sample(config, spaces, 256, 8)
    return partial(algorithm.build(config.build(spaces, 0), 0).update, [sample], 0)


def sac() -> Callable[[], object]:
    """Return an update of SAC, of HalfCheetah."""
    from off_policy import CHEETAH, sample_of

    from tidemill import SAC, SquashedGaussian
    from tidemill.native.library import choices

    policy = SquashedGaussian(native=choices()[-1]).build(CHEETAH, 0)
    return partial(SAC().build(policy, 0).update, [sample_of(CHEETAH, 256)], 0)


def td3() -> Callable[[], object]:
    """Return an update of TD3, of HalfCheetah."""
    from off_policy import CHEETAH, sample_of

    from tidemill import TD3, DeterministicActor
    from tidemill.native.library import choices

    policy = DeterministicActor(native=choices()[-1]).build(CHEETAH, 0)
    return partial(TD3().build(policy, 0).update, [sample_of(CHEETAH, 256)], 0)


def dqn() -> Callable[[], object]:
    """Return an update of DQN, of CartPole."""
    from off_policy import CARTPOLE, sample_of

    from tidemill import DQN, QNetwork
    from tidemill.native.library import choices

    policy = QNetwork(hidden=(64, 64), duelling=False, native=choices()[-1]).build(CARTPOLE, 0)
    learner = DQN(double=False, target_steps=1000).build(policy, 0)
    return partial(learner.update, [sample_of(CARTPOLE, 64)], 0)


SMALLEST: dict[str, int] = {"rows": 2048, "minibatch": 64, "epochs": 10}
WORKS: dict[str, Callable[[], Callable[[], object]]] = {
    "ppo-numpy": partial(ppo, False),
    "ppo-numpy-small": partial(ppo, False, **SMALLEST),
    "ppo-native": partial(ppo, True),
    "ppo-native-small": partial(ppo, True, **SMALLEST),
    "ppo-torch": ppo_torch,
    "impala": impala,
    "sac": sac,
    "td3": td3,
    "dqn": dqn,
}


def update_of(place: Path, work: str) -> Callable[[], object]:
    """Return an update of the package in `place`, which has been done once."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tidemill", "learner", "off_policy"):
            del sys.modules[name]
    sys.path.insert(0, str(place))
    try:
        update = WORKS[work]()
        update()
        from tidemill.core.blas_threads import limit_threads

        limit_threads(1)
    finally:
        sys.path.remove(str(place))
    assert Path(sys.modules["tidemill"].__file__ or "").is_relative_to(place)
    return update


def one(place: Path, work: str, seconds: float, order: list[str]) -> dict[str, float]:
    """Return what an update takes with, and without, in seconds of the processor, and the
    ratio of both, done by turns."""
    updates = {name: update_of(place / name, work) for name in order}

    def block(name: str, count: int) -> float:
        update, begun = updates[name], time.process_time()
        for _ in range(count):
            update()
        return (time.process_time() - begun) / count

    count = max(1, round(BLOCK / min(block(name, 10) for name in 3 * order)))
    found: list[dict[str, float]] = []
    until = time.monotonic() + seconds
    while len(found) < 4 or time.monotonic() < until:
        order.reverse()
        found.append({name: block(name, count) for name in order})
    medians = {name: median(each[name] for each in found) for name in order}
    return {**medians, "ratio": median(each[WITH] / each[WITHOUT] for each in found)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("works", nargs="*", choices=[*WORKS, []], default=[], metavar="WORK",
                        help=", ".join(WORKS))  # fmt: skip
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--most", type=float, default=1.01, help="the ratio that must not be excluded")
    parser.add_argument("--one", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        place, work, *order = given.one
        print(json.dumps(one(Path(place), work, given.seconds, order)))
        return 0
    dear = []
    with tempfile.TemporaryDirectory(prefix="tidemill-nan-cost-") as folder:
        two_packages(Path(folder))
        for work in given.works or WORKS:
            pairs: list[dict[str, float]] = []
            while len(pairs) < given.pairs:
                order = [WITH, WITHOUT] if len(pairs) % 2 else [WITHOUT, WITH]
                words = [
                    sys.executable,
                    __file__,
                    "--seconds",
                    str(given.seconds),
                    "--one",
                    folder,
                    work,
                    *order,
                ]
                variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
                done = subprocess.run(words, env=variables, stdout=subprocess.PIPE, text=True, check=True)
                pairs.append(json.loads(done.stdout.splitlines()[-1]))
            low, high = interval([each["ratio"] for each in pairs])
            took = {name: 1e6 * median(each[name] for each in pairs) for name in (WITH, WITHOUT)}
            shown = "above" if low > given.most else "below" if high <= given.most else "not shown"
            shown = "not shown" if len(pairs) < FEWEST else shown
            print(
                f"{work:<16} {took[WITHOUT]:>10,.1f} -> {took[WITH]:>10,.1f} µs   ratio "
                f"{median(each['ratio'] for each in pairs):.4f} [{low:.4f}, {high:.4f}], {len(pairs)} pairs: "
                f"{shown}{'' if shown == 'not shown' else f' {100 * (given.most - 1):.2g} %'}",
                flush=True,
            )
            dear += [work] * (shown == "above")
    return bool(dear)


if __name__ == "__main__":
    sys.exit(main())
