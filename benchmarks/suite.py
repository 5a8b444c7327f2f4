"""`make results`: how well and how fast the defaults learn over a suite of tasks, beside
the tuned presets and beside Stable-Baselines3, with its own defaults and with rl-zoo's
settings.

    python benchmarks/suite.py                        # everything: hours on two cores
    python benchmarks/suite.py FrozenLake-v1 Hopper-v5 --seeds 2
    python benchmarks/suite.py --contenders default   # ours alone
    python benchmarks/suite.py --estimate             # what is left, and its hours
    python benchmarks/suite.py --report               # the page alone

Every run has one process of one thread, and two go side by side. A run's line is written
to docs/results/suite/TASK.json as soon as it has ended, so that a suite that was cut goes
on; a line made with other settings, or another number of steps, is made anew. The file
holds all settings of its lines, so that a line stays where a setting is new and has its
default, and goes where a default is another. A run that fails is told in the page, and
tried again.

A return is the mean of the last 100 training episodes' (of all, while there are fewer),
as the environment gives it: not clipped, not normalised, with exploration. The same for
all contenders. Then the final policy plays some episodes without exploration. A score is
(return - random) / (reference - random), at the task's last step. Of several agents a
return is the mean of theirs.
"""

import argparse
import hashlib
import importlib
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import date
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from compare import HERE, ONE_THREAD, ROOT, Failed, command, machine, prepare
from suite_scores import difference_interval, interquartile_mean, score, scores_interval

RESULTS = ROOT / "docs" / "results" / "suite"
PAGE = ROOT / "docs" / "results" / "suite.md"
SECONDS = PAGE.with_name("suite-seconds.png")
POINTS = 20  # of a curve
PLAYED = 10  # episodes of the final policy, without exploration
PATIENCE = 300  # seconds for them: such a policy may never end an episode
WELL = 0.9  # of the reference's score: the default learns as well

OWN = ("default", "preset")
CONTENDERS = {
    "default": "Tidemill, its default",
    "preset": "Tidemill, tuned preset",
    "sb3": "Stable-Baselines3, its defaults",
    "zoo": "Stable-Baselines3, rl-zoo's settings",
}


@dataclass(frozen=True)
class Task:
    """One environment that is trained for so many env steps.

    chosen: whether defaults were chosen by looking at it; they are judged on the others
    zoo: rl-zoo's name of the task, where it is another; "" where it has no settings for
        it
    wrapper: what Stable-Baselines3 needs around it, as rl-zoo has it
    measured: what our records call its returns
    requirements: what Stable-Baselines3 needs to be installed
    """

    name: str
    steps: int
    kind: str
    chosen: bool
    algorithm: str = "ppo"
    zoo: str | None = None
    wrapper: str = ""
    measured: str = "return/mean"
    requirements: str = "suite"

    @property
    def seeds(self) -> int:
        """Number of runs of each contender: more where one takes minutes at most."""
        return 5 if self.kind in ("classic control", "toy text") else 3

    @property
    def label(self) -> str:
        """What the task is called in files and tables."""
        return self.name.replace("/", "-").removeprefix("pettingzoo:") + (
            "" if self.algorithm == "ppo" else f"-{self.algorithm}"
        )

    def environment(self) -> Any:
        """Return our configuration of it: MiniGrid's is its picture, as a run is told to
        take where it is asked for the whole, with a mission in words."""
        from tidemill.presets.environment_names import environment_from

        return environment_from(self.name, wrap=["minigrid-image"] if self.kind == "MiniGrid" else ())


def _mujoco(name: str, steps: int, chosen: bool, zoo: str | None = None) -> Task:
    return Task(f"{name}-v5", steps, "MuJoCo", chosen, zoo=f"{name}-v4" if zoo is None else zoo)


def _atari(game: str, chosen: bool) -> Task:
    """A step is the agent's, of four frames; Stable-Baselines3 takes a quarter of an hour
    for so many. Rewards are clipped, and the score counts."""
    wrapper = "stable_baselines3.common.atari_wrappers.AtariWrapper"
    name = f"ALE/{game}-v5"
    return Task(name, 150_000, "Atari", chosen, "ppo", "atari", wrapper, "info/score", "suite_more")


def _pettingzoo(module: str, steps: int, chosen: bool) -> Task:
    """Several agents, one policy for all; Stable-Baselines3 takes them as lanes, which
    supersuit makes of them."""
    return Task(f"pettingzoo:{module}", steps, "PettingZoo", chosen, zoo="", requirements="suite_more")


FLAT = "minigrid.wrappers.FlatObsWrapper"
TASKS = (
    Task("CartPole-v1", 100_000, "classic control", True),
    Task("Acrobot-v1", 100_000, "classic control", False),
    Task("Pendulum-v1", 100_000, "classic control", True),
    Task("MountainCar-v0", 100_000, "classic control", False),
    Task("MountainCarContinuous-v0", 50_000, "classic control", False),
    Task("FrozenLake-v1", 100_000, "toy text", True, zoo=""),
    Task("Taxi-v4", 200_000, "toy text", False, zoo=""),
    Task("CliffWalking-v1", 100_000, "toy text", False, zoo=""),
    Task("LunarLander-v3", 300_000, "Box2D", True),
    Task("LunarLanderContinuous-v3", 300_000, "Box2D", False),
    Task("BipedalWalker-v3", 300_000, "Box2D", False),
    _mujoco("Hopper", 200_000, True),
    _mujoco("Walker2d", 200_000, True),
    _mujoco("HalfCheetah", 200_000, False),
    _mujoco("Ant", 200_000, False),
    _mujoco("Humanoid", 200_000, False),
    _mujoco("Swimmer", 200_000, False),
    _mujoco("Reacher", 200_000, True, "Reacher-v2"),
    _mujoco("InvertedPendulum", 100_000, True, "InvertedPendulum-v2"),
    _mujoco("InvertedDoublePendulum", 200_000, False, "InvertedDoublePendulum-v2"),
    _mujoco("Pusher", 200_000, True, ""),
    _mujoco("HumanoidStandup", 200_000, False, "HumanoidStandup-v2"),
    Task("MiniGrid-Empty-5x5-v0", 50_000, "MiniGrid", True, zoo="MiniGrid-Empty-Random-5x5-v0", wrapper=FLAT),
    Task("MiniGrid-DoorKey-5x5-v0", 100_000, "MiniGrid", False, wrapper=FLAT),
    Task("MiniGrid-FourRooms-v0", 200_000, "MiniGrid", False, wrapper=FLAT),
    Task("MinAtar/Breakout-v1", 200_000, "MinAtar", True, zoo=""),
    Task("MinAtar/Asterix-v1", 200_000, "MinAtar", False, zoo=""),
    Task("MinAtar/Freeway-v1", 200_000, "MinAtar", True, zoo=""),
    Task("MinAtar/Seaquest-v1", 200_000, "MinAtar", False, zoo=""),
    Task("MinAtar/SpaceInvaders-v1", 200_000, "MinAtar", False, zoo=""),
    _atari("Pong", True),
    _atari("Breakout", False),
    _atari("Seaquest", False),
    _pettingzoo("mpe2.simple_spread_v3", 100_000, True),
    _pettingzoo("pettingzoo.sisl.multiwalker_v9", 100_000, False),
    _pettingzoo("pettingzoo.sisl.pursuit_v5", 50_000, False),
    Task("CartPole-v1", 50_000, "from a replay memory", True, "dqn"),
    Task("MountainCar-v0", 120_000, "from a replay memory", False, "dqn"),
    Task("Acrobot-v1", 100_000, "from a replay memory", True, "dqn"),
    Task("LunarLander-v3", 100_000, "from a replay memory", False, "dqn"),
    Task("Pendulum-v1", 20_000, "from a replay memory", True, "sac"),
    Task("MountainCarContinuous-v0", 50_000, "from a replay memory", False, "sac"),
    Task("LunarLanderContinuous-v3", 50_000, "from a replay memory", True, "sac"),
    Task("Hopper-v5", 30_000, "from a replay memory", False, "sac", zoo="Hopper-v4"),
    Task("HalfCheetah-v5", 30_000, "from a replay memory", True, "sac", zoo="HalfCheetah-v4"),
)
NOT_RUN = {
    "BipedalWalkerHardcore": "rl-zoo trains it for 10 to 100 million steps",
    "Stable-Baselines3's defaults on Atari": "10 epochs in minibatches of 64 take over an hour a run",
}


# ---- runs ------------------------------------------------------------------------------


def experiment_of(task: Task, contender: str) -> Any:
    """Return the experiment of our contender: what the algorithm has for any environment
    of the kind, or for the task's name, None where that has none of its own."""
    from tidemill.presets.experiments import presets_of

    environment = task.environment()
    presets = presets_of(task.algorithm)
    general = presets.kinds.get(type(environment), presets.general)
    found = presets.find(task.name, environment)
    if contender == "preset" and found is general:
        return None
    return (general if contender == "default" else found)(task.name, environment)


def settings_of(task: Task, contender: str) -> Any:
    """Return all that a run's return follows from but its seed: configurations, texts and
    numbers, in lists; None where the contender has no settings for the task."""
    if contender in OWN:
        experiment = experiment_of(task, contender)
        if experiment is None:
            return None
        return [task.steps, experiment.replace(limits=type(experiment.limits)(), seed=0)]
    if contender == "zoo" and task.zoo == "":
        return None
    if contender == "sb3" and task.kind == "Atari":
        return None  # `NOT_RUN` says why
    files = sorted((HERE / "peers" / "requirements").glob(f"{task.requirements}.*"))
    texts = [file.read_text() for file in files]
    return [task.steps, [contender, task.zoo, task.wrapper, task.algorithm, *texts]]


def told(value: Any) -> Any:
    """Return settings as JSON has them, those with their defaults, too."""
    if is_dataclass(value):
        given = {field.name: told(getattr(value, field.name)) for field in fields(value)}
        return {"kind": type(value).__name__, **given}
    if isinstance(value, Mapping):
        return {name: told(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [told(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def unchanged(then: Any, value: Any) -> bool:
    """Return whether what `told` said `then` is said of `value` now, but for settings
    that there were not, and that have their defaults."""
    if is_dataclass(value):
        given = {field.name: field for field in fields(value)}
        if (
            not isinstance(then, dict)
            or then.get("kind") != type(value).__name__
            or set(then) - {*given, "kind"}
        ):
            return False
        return all(
            unchanged(then[name], getattr(value, name))
            if name in then
            else getattr(value, name)
            == (field.default_factory() if field.default_factory is not MISSING else field.default)
            for name, field in given.items()
        )
    if isinstance(value, Mapping):
        return (
            isinstance(then, dict)
            and set(then) == set(value)
            and all(unchanged(then[name], each) for name, each in value.items())
        )
    if isinstance(value, list | tuple):
        return (
            isinstance(then, list)
            and len(then) == len(value)
            and all(unchanged(old, each) for old, each in zip(then, value, strict=True))
        )
    return bool(then == told(value))


def digest_of(settings: Any) -> str:
    """Return a short name of what `told` said."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def train_own(task: Task, contender: str, seed: int) -> dict[str, Any]:
    """Train our contender in this process; return curve and seconds."""
    import tidemill
    from tidemill.metrics.json_lines import read_metrics

    experiment = experiment_of(task, contender)
    with tempfile.TemporaryDirectory(prefix="suite-") as folder:
        run, begun = Path(folder) / "run", time.process_time()
        tidemill.train(
            experiment,
            steps=task.steps,
            seed=seed,
            launch="inline",
            layout="given",
            run_dir=run,
            quiet=True,
            log=[],
        )
        used = time.process_time() - begun
        records = [record for record in read_metrics(run) if task.measured in record]
        if not records:
            raise SystemExit(f"no episode of {task.name} ended in {task.steps:,} steps")
        evaluation = played(run)
    places, values = zip(*((r["step"], r[task.measured]) for r in records), strict=True)
    at = np.linspace(0, task.steps, POINTS + 1)[1:]
    return {
        "curve": [round(float(value), 4) for value in np.interp(at, places, values)],
        "evaluation": evaluation,
        "seconds": round(records[-1]["time/seconds"], 1),
        "core_seconds": round(used, 1),
    }


def played(run: Path) -> float | None:
    """Return the mean return of the final policy without exploration; None where it ended
    no episodes in good time."""
    import tidemill

    def ring(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(PATIENCE)
    try:
        return round(tidemill.evaluate(run, PLAYED, quiet=True).mean, 4)
    except TimeoutError:
        return None
    finally:
        signal.alarm(0)


def random_return(task: Task, episodes: int = 20, most: int = 10_000) -> float:
    """Return the mean return of episodes of uniformly drawn actions; one without an end
    is cut after so many steps."""
    import gymnasium

    environment = task.environment()
    environment.build(1, 0).close()  # registers it
    if task.kind == "PettingZoo":
        return _random_team(importlib.import_module(environment.make).parallel_env(), episodes)
    env = environment.scored().make_one() if task.kind == "Atari" else gymnasium.make(task.name)
    env.action_space.seed(0)
    returns = []
    for episode in range(episodes):
        env.reset(seed=episode)
        total = 0.0
        for _ in range(most):
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total += float(reward)
            if terminated or truncated:
                break
        returns.append(total)
    env.close()
    return statistics.mean(returns)


def _random_team(env: Any, episodes: int) -> float:
    """Return the mean over agents and episodes of the returns of random actions."""
    totals = []
    for agent in env.possible_agents:
        env.action_space(agent).seed(0)
    for episode in range(episodes):
        env.reset(seed=episode)
        total = dict.fromkeys(env.possible_agents, 0.0)
        while env.agents:
            _, rewards, *_ = env.step({agent: env.action_space(agent).sample() for agent in env.agents})
            for agent, reward in rewards.items():
                total[agent] += float(reward)
        totals += total.values()
    env.close()
    return statistics.mean(totals)


@dataclass(frozen=True)
class Run:
    """A run that is to be done."""

    task: Task
    contender: str
    seed: int
    settings: Any  # as of `told`

    def do(self) -> dict[str, Any]:
        """Train in a process of its own; return its line. Raises `Failed`."""
        deadline = 1800 + self.task.steps / 10  # three times what a quiet machine takes, and more
        words = [self.task.label, self.contender, str(self.seed)]
        if self.contender in OWN:
            program = [sys.executable, str(HERE / "suite.py"), "--run", *words]
        else:
            told = {
                "name": self.task.name,
                "zoo": self.task.zoo or self.task.name,
                "wrapper": self.task.wrapper,
                "algorithm": self.task.algorithm,
                "steps": self.task.steps,
                "points": POINTS,
                "played": PLAYED,
                "patience": PATIENCE,
                "tuned": self.contender == "zoo",
                "seed": self.seed,
            }
            python = prepare(self.task.requirements, "the suite's references")
            program = [str(python), str(HERE / "peers" / "suite.py"), json.dumps(told)]
        output = command(program, deadline, **ONE_THREAD, TIDEMILL_NATIVE="require")
        line: dict[str, Any] = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
        return line | {
            "settings": digest_of(self.settings),
            "steps": self.task.steps,
            **{key: machine()[key] for key in ("features", "processor")},
            "commit": commit(),
            "date": f"{date.today()}",
        }


def commit() -> str:
    """Return the commit that is measured, with a + where files differ from it."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unknown"


Lines = dict[str, dict[str, Any]]  # contender → seed → line


def read(task: Task) -> dict[str, Any]:
    """Return what the task's file has; a new one where there is none."""
    file = RESULTS / f"{task.label}.json"
    return json.loads(file.read_text()) if file.exists() else {"task": task.label, "runs": {}}


def write(task: Task, found: Mapping[str, Any]) -> None:
    """Write the task's file, whole or not at all, with the settings of its lines."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    told_of = {line.get("settings") for runs in found["runs"].values() for line in runs.values()}
    kept = {name: each for name, each in found.get("settings", {}).items() if name in told_of}
    found = {**found, "settings": kept}
    file = RESULTS / f"{task.label}.json"
    new = file.with_suffix(".new")
    new.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    new.replace(file)


def left(tasks: Sequence[Task], contenders: Sequence[str], seeds: int | None) -> Iterator[Run]:
    """Yield the runs that no line tells of yet, seed by seed, so that a suite that is cut
    has every task once before it has one twice. `seeds`: of each task; None: its own
    number."""
    known = {
        (task.label, contender): settings_of(task, contender) for task in tasks for contender in contenders
    }
    for seed in range(1, (seeds or max(task.seeds for task in tasks)) + 1):
        for task in tasks:
            if seed > (seeds or task.seeds):
                continue
            found = read(task)
            for contender in contenders:
                settings = known[task.label, contender]
                line = found["runs"].get(contender, {}).get(str(seed), {"failed": ""})
                then = found.get("settings", {}).get(line.get("settings"))
                if settings is not None and ("failed" in line or not unchanged(then, settings)):
                    yield Run(task, contender, seed, told(settings))


def seconds_of(run: Run) -> float:
    """Return how long a run takes on a core of its own: as long as the other seeds have
    had one, or by the usual speed."""
    lines = read(run.task)["runs"].get(run.contender, {}).values()
    taken = [line.get("core_seconds", line["seconds"]) / line["steps"] for line in lines if "seconds" in line]
    usual = {"ppo": 1 / 5_000, "dqn": 1 / 2_500, "sac": 1 / 100}[run.task.algorithm]
    slower = 1 if run.contender in OWN else {"ppo": 6, "dqn": 4, "sac": 1.3}[run.task.algorithm]
    if run.task.kind == "Atari":
        usual, slower = 1 / 500, min(slower, 3)
    return run.task.steps * (statistics.mean(taken) if taken else usual * slower) + 5


def go_through(runs: Sequence[Run], beside: int) -> None:
    """Do the runs, so many at a time, and write each line as soon as it is known."""
    lock, started, done = Lock(), time.monotonic(), 0
    for requirements in sorted({run.task.requirements for run in runs if run.contender not in OWN}):
        prepare(requirements, "the suite's references")  # before two runs would at once

    def one(run: Run) -> None:
        nonlocal done
        begun = time.monotonic()
        try:
            line = run.do()
        except Failed as failure:
            line = {"failed": str(failure), "settings": digest_of(run.settings), "steps": run.task.steps}
        with lock:
            found = read(run.task)
            if "random" not in found and run.contender in OWN and "failed" not in line:
                found["random"] = round(random_return(run.task), 4)
            found["runs"].setdefault(run.contender, {})[str(run.seed)] = line
            found.setdefault("settings", {})[line["settings"]] = run.settings
            write(run.task, found)
            done += 1
            what = line.get("failed") or f"{line['curve'][-1]:,.2f}"
            print(
                f"{done} of {len(runs)}, {time.monotonic() - started:,.0f} s: {run.task.label}, "
                f"{run.contender}, seed {run.seed}: {what} ({time.monotonic() - begun:,.0f} s)",
                flush=True,
            )

    with ThreadPoolExecutor(beside) as pool:
        list(pool.map(one, runs))


# ---- the page --------------------------------------------------------------------------


def finals(found: Mapping[str, Any], contender: str) -> list[float]:
    """Return the last returns of a contender's seeds."""
    lines = found["runs"].get(contender, {}).values()
    return [line["curve"][-1] for line in lines if "curve" in line]


def rows_of(tasks: Sequence[Task]) -> Iterator[tuple[Task, dict[str, Any], dict[str, float]]]:
    """Yield each task with a result, its file, and our default's scores by reference."""
    for task in tasks:
        found = read(task)
        if "random" not in found:
            continue
        ours = finals(found, "default")
        scores = {
            other: score(interquartile_mean(ours), found["random"], interquartile_mean(values))
            for other in ("sb3", "zoo")
            if ours and (values := finals(found, other))
        }
        yield task, found, scores


def report(tasks: Sequence[Task] = TASKS) -> str:
    """Return the page: tables, what they come to, and what was not run."""
    rows = list(rows_of(tasks))
    lines = [
        "# The suite: what is learnt by default",
        "",
        "Made by `make results`, one process of one thread a run, two side by side; a figure is the "
        "interquartile mean over seeds (their number in brackets) of the mean return of the last 100 "
        "training episodes at the task's last step. *Score*: of our default, (return - random) / "
        "(reference - random), *no scale* where the reference is no better than random. "
        "*Difference*: to rl-zoo's settings, or SB3's where it has "
        f"none, with 95 % intervals. *Played*: what final policies return without exploration, {PLAYED} "
        "episodes of each seed.",
        "",
    ]
    for chosen, title in (
        (False, "Tasks that judge the defaults"),
        (True, "Tasks that the defaults were chosen on"),
    ):
        lines += [
            f"## {title}",
            "",
            "| task | algorithm | steps | random | default | preset | SB3 | rl-zoo | score beside SB3 "
            "| beside rl-zoo | difference of default; of preset | played: default, SB3 "
            "| steps of a core-second: default, SB3 |",
            "|---" * 13 + "|",
        ]
        for task, found, scores in rows:
            if task.chosen is chosen:
                lines.append(_row(task, found, scores))
        lines.append("")
    lines += ["## What it comes to", "", *_in_all(rows)]
    failed = [
        f"* {task.label}, {CONTENDERS[contender]}, seed {seed}: {line['failed']}"
        for task in tasks
        for contender, seeds in read(task)["runs"].items()
        for seed, line in seeds.items()
        if "failed" in line
    ]
    lines += ["", "## Failed runs", "", *failed] if failed else []
    lines += ["", "## Not run", "", *(f"* {what}: {why}" for what, why in NOT_RUN.items()), ""]
    without = [task.label for task in tasks if "random" not in read(task)]
    if without:
        lines[-1:] = [f"* not yet: {', '.join(without)}", ""]
    if rows:
        lines += ["![curves](suite.png)", "", f"![curves against seconds]({SECONDS.name})", ""]
    return "\n".join(lines)


def _in_all(rows: Sequence[tuple[Task, dict[str, Any], dict[str, float]]]) -> Iterator[str]:
    """Yield what the rows come to: of the default on tasks that judge it, and of
    presets."""
    judged = [(found, scores) for task, found, scores in rows if not task.chosen]
    for other, title in (("sb3", "Stable-Baselines3's defaults"), ("zoo", "rl-zoo's settings")):
        compared = [(found, scores[other]) for found, scores in judged if other in scores]
        known = [(found, value) for found, value in compared if math.isfinite(value)]
        if not known:
            continue
        values = [value for _, value in known]
        well = sum(value >= WELL for value in values)
        each = [_scores(found, other) for found, _ in known]
        low, high = scores_interval(each)
        beyond = len(compared) - len(known)
        note = f" On {beyond} more these are no better than random actions: no scale." if beyond else ""
        yield (
            f"* Beside {title}, on {len(values)} tasks that judge: median score "
            f"{statistics.median(values):.2f}, at least {WELL} on {well} ({well / len(values):.0%}); "
            f"interquartile mean of {sum(map(len, each))} runs {interquartile_mean(np.concatenate(each)):.2f}"
            f" ({low:.2f} … {high:.2f}: over our seeds, the reference taken as it is, of one seed mostly)."
            f"{note}"
        )
        behind = [task.label for task, _, scores in rows if scores.get(other, math.nan) < WELL]
        if behind:
            yield f"* Behind {title} (a score below {WELL}), on all tasks: {', '.join(behind)}."
    intervals = [
        difference_interval(ours, others)
        for _, found, _ in rows
        if len(ours := finals(found, "preset")) > 1
        and len(others := finals(found, "zoo") or finals(found, "sb3")) > 1
    ]
    if intervals:
        well = sum(high >= 0 for _, high in intervals)
        yield (
            f"* Tuned presets are not surely behind the reference (the interval of the difference is not "
            f"wholly below 0) on {well} of {len(intervals)} tasks."
        )


def _scores(found: Mapping[str, Any], other: str) -> list[float]:
    """Return the score of each run of our default."""
    reference = interquartile_mean(finals(found, other))
    return [score(value, found["random"], reference) for value in finals(found, "default")]


def _row(task: Task, found: Mapping[str, Any], scores: Mapping[str, float]) -> str:
    def cell(contender: str) -> str:
        values = finals(found, contender)
        return f"{interquartile_mean(values):,.2f} ({len(values)})" if values else "–"

    def speed(contender: str) -> str:
        lines = [line for line in found["runs"].get(contender, {}).values() if "core_seconds" in line]
        return (
            f"{statistics.median(line['steps'] / line['core_seconds'] for line in lines):,.0f}"
            if lines
            else "–"
        )

    def plays(contender: str) -> str:
        lines = found["runs"].get(contender, {}).values()
        values = [line["evaluation"] for line in lines if line.get("evaluation") is not None]
        return f"{interquartile_mean(values):,.2f} ({len(values)})" if values else "–"

    def beside(contender: str) -> str:
        ours, others = finals(found, contender), finals(found, "zoo") or finals(found, "sb3")
        if min(len(ours), len(others)) < 2:
            return "–"
        low, high = difference_interval(ours, others)
        return f"{low:,.1f} … {high:,.1f}"

    shown = [
        "–" if other not in scores else f"{scores[other]:.3f}" if math.isfinite(scores[other]) else "no scale"
        for other in ("sb3", "zoo")
    ]
    cells = [task.name, task.algorithm, f"{task.steps:,}", f"{found['random']:,.2f}"]
    cells += [cell(contender) for contender in CONTENDERS]
    cells += [*shown, f"{beside('default')}; {beside('preset')}"]
    cells += [f"{plays('default')}, {plays('sb3')}", f"{speed('default')}, {speed('sb3')}"]
    return f"| {' | '.join(cells)} |"


def draw(tasks: Sequence[Task], file: Path, against: str = "steps") -> None:
    """Draw each task's curves, all contenders in one panel, against env "steps", or
    against "seconds" of its one core, which a busy machine makes no longer: of a run, and
    so of a contender's middle, all steps are taken to have lasted equally long."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    shown = [task for task in tasks if read(task)["runs"]]
    across = 5
    down = -(-len(shown) // across)
    figure = Figure(figsize=(3.2 * across, 2.5 * down), dpi=90, layout="constrained")
    panels = np.atleast_1d(figure.subplots(down, across)).ravel()
    for panel, task in zip(panels, shown, strict=False):
        runs = read(task)["runs"]
        shares = np.linspace(0, 1, POINTS + 1)[1:]
        for number, (contender, title) in enumerate(CONTENDERS.items()):
            lines = [line for line in runs.get(contender, {}).values() if "curve" in line]
            if not lines:
                continue
            curves = [line["curve"] for line in lines]
            taken = statistics.median(line.get("core_seconds", line["seconds"]) for line in lines)
            at = shares * (taken if against == "seconds" else task.steps / 1_000)
            middle = [interquartile_mean(values) for values in zip(*curves, strict=True)]
            panel.plot(at, middle, color=f"C{number}", label=title)
            panel.fill_between(at, np.min(curves, 0), np.max(curves, 0), color=f"C{number}", alpha=0.15, lw=0)
        panel.set_title(task.label, fontsize=9)
        if against == "seconds":
            panel.set_xscale("log")
            panel.xaxis.set_major_formatter("{x:g}")
            panel.xaxis.set_minor_formatter(NullFormatter())
        panel.tick_params(labelsize=7)
    for panel in panels[len(shown) :]:
        panel.set_axis_off()
    handles = {
        text: handle
        for panel in panels
        for handle, text in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4)
    axis = "seconds of a run's one core" if against == "seconds" else "thousand env steps"
    figure.supxlabel(f"{axis}; bands: lowest and highest seed", fontsize=9)
    figure.savefig(file)


def main() -> None:
    """Do what was asked for, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="names or kinds of tasks; all by default")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--seeds", type=int, help="of each task; 3 by default, 5 of the cheapest")
    parser.add_argument("--beside", type=int, default=2, help="runs at a time")
    parser.add_argument("--estimate", action="store_true", help="say what is left to run, and end")
    parser.add_argument("--report", action="store_true", help="write the page from what there is, and end")
    parser.add_argument("--run", nargs=3, metavar=("TASK", "CONTENDER", "SEED"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        label, contender, seed = asked.run
        (task,) = (task for task in TASKS if task.label == label)
        print(json.dumps(train_own(task, contender, int(seed))))
        return
    names = set(asked.tasks)
    tasks = [task for task in TASKS if not names or names & {task.name, task.label, task.kind}]
    if unknown := names - {name for task in TASKS for name in (task.name, task.label, task.kind)}:
        known = ", ".join(task.label for task in TASKS)
        raise SystemExit(f"no task {', '.join(sorted(unknown))}; there are {known}")
    if not asked.report:
        runs = list(left(tasks, asked.contenders, asked.seeds))
        hours = sum(map(seconds_of, runs)) / asked.beside / 3600
        print(f"{len(runs)} runs are left, {hours:.1f} hours with {asked.beside} at a time", flush=True)
        if asked.estimate:
            return
        go_through(runs, asked.beside)
    PAGE.write_text(report())
    draw(TASKS, PAGE.with_suffix(".png"))
    draw(TASKS, SECONDS, "seconds")
    print(f"written: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
