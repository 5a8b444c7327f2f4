"""Measures what an experiment's parts cost on this machine, in a second: a process of its
own, so that what an environment does stays there.

python -P -m tidemill.layouts.probe < order (msgpack)

It steps a few lanes of the real environment. Meanwhile another such process, which it
starts and tells what spaces there are, times the real policy and learner on random rows:
importing torch takes longer than all else. Each answers with one line of JSON: what was
``measured``, or the ``error`` that kept it from measuring, or why the experiment is
`refused`, and ends by itself after `SECONDS`.
"""

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Thread, get_native_id
from time import perf_counter, process_time, sleep
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidemill.api.algorithm import ROW_FIELDS, AlgorithmConfig, DataParallel, Sample
from tidemill.api.environment import AgentInfo, Environment, EnvironmentConfig, Tick
from tidemill.api.experiment import Experiment
from tidemill.api.policy import Policy, PolicyConfig
from tidemill.api.spaces import Discrete, MultiDiscrete, Space, Spaces, leaves, schema_of_space
from tidemill.core.config import decode, encode
from tidemill.core.cores import every_core, keep_to
from tidemill.core.errors import ConfigError, RunError, TidemillError
from tidemill.core.memory import keep_freed
from tidemill.core.schema import Arrays, allocate
from tidemill.core.threads import limit_threads
from tidemill.core.user_code import begin_to_work, load_file, own_path, travel
from tidemill.envs.lanes import LaneLoop
from tidemill.layouts.layout import COLD, Costs, waits
from tidemill.testing.check_env import keep_allowed, sample_actions
from tidemill.transports.local import LocalBell
from tidemill.workers.actor import Actors, AgentSpec, match_agents
from tidemill.workers.environments import seen_by
from tidemill.workers.trainer_config import Trainer

SECONDS = 20  # a probe that takes longer is given up
STEPPING, COMPUTING = 0.25, 0.1  # seconds for the environment; for inference and for training each
# a quarter of that is enough where the mean's standard error is so small a part of it
PRECISE, LEAST = 0.02, 0.25
QUICK = 1e-3  # seconds of a step; slower environments are measured by one lane
BUILDING = 0.15  # seconds that building all lanes may take; else there are fewer
FEW_LANES = 2
LATER = 0.02  # by which a tick may be longer on one core, and that core be enough
LONGEST_NAP = 0.01  # seconds; by then caches are as cold as they get
FEW_ROWS = 64  # trained on first, to see how many there is time for


class Order(msgspec.Struct):
    """What to measure. `agents` is for the process that is told them, and measures
    policies and learner; `runner` the process that it ends with."""

    experiment: dict[str, Any]
    source: str | None
    runner: int
    path: list[str]  # where that one looks for modules
    agents: list[AgentInfo] | None = None


class Arithmetic(msgspec.Struct):
    """What policies and learner cost: see `Costs`."""

    infer: float
    call: float
    train: float
    rows: int
    parallel: bool


def measure(experiment: Experiment, source: str | None = None) -> Costs:
    """Return the costs of an experiment that has one group of actors and one of
    trainers."""
    actors = next(c for c in experiment.workers.values() if isinstance(c, Actors))
    with _other_process() as other:
        env, wall = measure_environment(
            actors,
            lambda agents: _tell(
                other, Order(encode(experiment), source, os.getpid(), own_path(), list(agents))
            ),
        )
        costs = Costs(env=env, wall=wall, **msgspec.structs.asdict(_answer(other)))
    if costs.waits:  # threads are tried on cores that nobody else has
        threaded, one_core = threads_serve(actors.environment)
        costs = msgspec.structs.replace(costs, threaded=threaded, one_core=one_core)
    return costs


def measure_arithmetic(experiment: Experiment, agents: Sequence[AgentInfo]) -> Arithmetic:
    """Return what policies and learner cost where the environment has `agents`."""
    actors = next(c for c in experiment.workers.values() if isinstance(c, Actors))
    trainer = next(c for c in experiment.workers.values() if isinstance(c, Trainer))
    groups = match_agents(agents, actors.agents)
    infer = call = train = 0.0
    parallel = True
    for spec, group in zip(actors.agents, groups, strict=True):
        spaces, config = seen_by(spec, agents[group[0]].spaces), experiment.policies[spec.policy]
        policy = config.build(spaces, 0)
        per_row, per_call = measure_policy(policy, config, spaces, actors.lanes * len(group))
        infer, call = infer + len(group) * per_row, call + per_call
        if trainer.samples in spec.streams and spec.policy == trainer.policy:
            cost, parallel = measure_learner(
                trainer.algorithm, policy, config, spaces, spec, actors.lanes * len(group)
            )
            train += len(group) * cost
    rows = sum(map(len, groups))
    return Arithmetic(infer=infer / rows, call=call, train=train / rows, rows=rows, parallel=parallel)


@contextmanager
def _other_process() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that measures policies and learner once it is told what there is, and has
    imported everything by then."""
    words = [sys.executable, "-P", "-m", "tidemill.layouts.probe"]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as other:
        try:
            yield other
        finally:
            other.kill()


def _tell(other: "subprocess.Popen[bytes]", order: Order) -> None:
    assert other.stdin is not None
    with suppress(BrokenPipeError):  # it is gone, as `_answer` will find
        other.stdin.write(msgspec.msgpack.encode(order))
        other.stdin.close()


def _answer(other: "subprocess.Popen[bytes]") -> Arithmetic:
    assert other.stdout is not None
    return msgspec.convert(read_answer(other.stdout.read(), other), Arithmetic)


def read_answer(answer: bytes, process: "subprocess.Popen[bytes]") -> Any:
    """Return what a probe `process` that answered so has measured. Raises `RunError` with
    what kept it from it, and `ConfigError` where no run can be made of the experiment."""
    if not answer:
        status = process.wait()
        raise RunError(
            f"the process that measures them ended with status {status}"
            + " (too slow)" * (status == -signal.SIGALRM)
        )
    try:
        content = json.loads(answer)
        if "refused" in content:
            raise ConfigError(str(content["refused"]))
        if "error" in content:
            raise RunError(str(content["error"]).splitlines()[0])
        return content["measured"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"they make no sense: {error}") from None


def threads_serve(config: EnvironmentConfig) -> tuple[bool, bool]:
    """Return whether an environment that has the setting can be stepped in threads (one
    that was made for its maker's thread cannot), and whether two lanes take no longer
    when their threads share a core: they do where they compute outside of Python's lock.
    """
    if getattr(config, "threads", None) is None:
        return False, False
    config = config.replace(threads=2)
    try:
        apart = _tick_in_threads(config)
        keep_to(min(os.sched_getaffinity(0)))
        try:
            shared = _tick_in_threads(config)
        finally:
            keep_to(None)
    except Exception:
        # whatever it raises is the answer: it works in its maker's thread, where it was
        # measured
        return False, False
    return True, shared <= apart * (1 + LATER)


def _tick_in_threads(config: EnvironmentConfig) -> float:
    """Return the seconds of a tick of two lanes, the median."""
    with every_core():
        environment, _ = build(config, 2)
    with closing(environment):
        stepping, times = Stepping(environment), [perf_counter()]
        while len(times) < 4 or times[-1] - times[0] < STEPPING:
            stepping.tick()
            times.append(perf_counter())
    return float(np.median(np.diff(times)[1:]))  # the first was a reset


def measure_environment(actors: Actors, tell: Callable[[Sequence[AgentInfo]], None]) -> tuple[float, float]:
    """Return the core seconds and the seconds of a step. `tell` is called with the agents
    as soon as these are known."""
    config = actors.environment
    if getattr(config, "threads", 0):
        config = config.replace(threads=0)
    environment, _ = _build(config, 1, actors.lanes)
    tell(environment.agents)
    stepping = Stepping(environment)
    try:
        for _ in range(3):  # the first step may do what happens once only
            began, steps = perf_counter(), stepping.tick()
            quick = (perf_counter() - began) / max(steps, 1) < QUICK
        lanes = min(actors.lanes, FEW_LANES) if quick else 1
        while lanes > environment.lanes:  # as many as the run will have, if that does not take long
            environment.close()
            environment, seconds = _build(config, lanes, actors.lanes)
            stepping = Stepping(environment)
            lanes = min(actors.lanes, int(lanes * BUILDING / seconds)) if lanes <= FEW_LANES else lanes
        stepping.tick()
        core, wall = timed(stepping.tick, STEPPING)
    finally:
        environment.close()
    if waits(core, wall) and getattr(actors.environment, "threads", None) is not None:
        core -= max(waking(wall - core) - COLD, 0.0)
    return max(core, 1e-9), wall


def waking(seconds: float) -> float:
    """Return the core seconds of a tick of one lane that only sleeps for so long: more
    than `COLD` where others use the cores, whose caches are then colder than those of a
    run whose lanes are awake in turn."""
    from gymnasium.spaces import Discrete as Choice

    def step(_: Any) -> tuple[Any, ...]:
        sleep(min(seconds, LONGEST_NAP))
        return 0, 0.0, False, False, {}

    lane = SimpleNamespace(
        observation_space=Choice(1), action_space=Choice(1), reset=lambda **_: (0, {}), step=step
    )
    stepping = Stepping(LaneLoop([lane], "a lane that sleeps", 0))
    stepping.tick()
    return timed(stepping.tick, STEPPING)[0]


def build(config: EnvironmentConfig, lanes: int) -> tuple[Environment, float]:
    """Return an environment, and the seconds that it took to build."""
    began = perf_counter()
    return config.build(lanes, 0), max(perf_counter() - began, 1e-6)


def _build(config: EnvironmentConfig, lanes: int, own: int) -> tuple[Environment, float]:
    """As `build`. Raises `RunError` for what can be made with the run's `own` number of
    lanes, and not with this one: nothing is wrong with that."""
    try:
        return build(config, lanes)
    except ConfigError as error:
        if lanes != own:
            build(config, own)[0].close()  # raises what the run would be refused for
            raise RunError(str(error)) from None
        raise


class Stepping:
    """Steps an environment with random actions, and resets its lanes as their episodes
    end."""

    def __init__(self, environment: Environment) -> None:
        self._environment, self._rng = environment, np.random.default_rng(0)
        lanes, agents = environment.lanes, environment.agents
        groups: list[list[int]] = []
        # those of equal spaces are stepped together, as one agent spec plays them
        for index, agent in enumerate(agents):
            group = next((group for group in groups if agents[group[0]].spaces == agent.spaces), None)
            if group is None:
                groups.append([index])
            else:
                group.append(index)
        environment.bind(groups)
        self._spaces = [agents[group[0]].spaces for group in groups]
        seats = [lanes * len(group) for group in groups]
        self._actions = [
            [sample_actions(s.action, self._rng, n) for s, n in zip(self._spaces, seats, strict=True)]
            for _ in range(61)
        ]
        self._ticks = [
            Tick.allocate(s.observation, n, environment.info, environment.same_step)
            for s, n in zip(self._spaces, seats, strict=True)
        ]
        self._reset: NDArray[np.bool_] = np.ones(lanes, np.bool_)
        self._ended = [np.ones(n, np.bool_) for n in seats]  # or not yet begun
        self._bell, self._count = LocalBell(), 0
        environment.on_ready(self._bell.ring)

    def tick(self) -> int:
        """Do one tick and return the env steps in it: those of resets are none."""
        environment = self._environment
        steps = environment.lanes - int(np.count_nonzero(self._reset))
        self._count += 1
        actions = self._actions[self._count % len(self._actions)]
        for given, spaces, tick in zip(actions, self._spaces, self._ticks, strict=True):
            if "obs.action_mask" in tick.observation:
                keep_allowed(given, spaces.action, tick.observation["obs.action_mask"], self._rng)
        environment.send(actions, self._reset)
        while not environment.ready():
            self._bell.wait(0.1)
        environment.recv(self._ticks)
        for ended, tick in zip(self._ended, self._ticks, strict=True):
            ends = tick.done | tick.truncated
            ended |= ends
            ended &= ~((tick.present & ~ends) | tick.restarted)
        self._reset = np.logical_and.reduce(
            [ended.reshape(environment.lanes, -1).all(axis=1) for ended in self._ended]
        )
        return steps


def measure_policy(policy: Policy, config: PolicyConfig, spaces: Spaces, rows: int) -> tuple[float, float]:
    """Return the core seconds of answering a row, and those of a call: the line through
    `rows` at a time, and an eighth of them."""
    few = max(1, rows // 8)
    seconds = [answering(policy, config, spaces, n) for n in (few, rows)]
    per_row = (seconds[1] - seconds[0]) / (rows - few) if rows > few else 0.0
    if per_row * rows < seconds[1] / 100:  # chance, or a row alone
        return seconds[1] / rows, 0.0
    return per_row, max(seconds[0] - few * per_row, 0.0)


def answering(policy: Policy, config: PolicyConfig, spaces: Spaces, rows: int) -> float:
    """Return the core seconds of answering `rows` rows at once."""
    observation, state = random_rows(spaces.observation, rows), allocate(config.state(spaces), (rows,))
    out = allocate({**config.answer(spaces), **config.state(spaces)}, (rows,))

    def act() -> int:
        policy.act(observation, state, False, out)
        return 1

    act()
    return timed(act, COMPUTING / 2)[0]


def measure_learner(
    config: AlgorithmConfig,
    policy: Policy,
    policy_config: PolicyConfig,
    spaces: Spaces,
    spec: AgentSpec,
    seats: int,
) -> tuple[float, bool]:
    """Return the core seconds of training on a row, all epochs, and whether equal
    trainers can share the algorithm.

    As many rows as a minibatch has, if there is time, since calls cost the less per row
    the more rows they get.
    """
    calm = {
        name: value for name, value in (("target_kl", None), ("learning_rate", 1e-8)) if hasattr(config, name)
    }
    # so that updates of the same rows again and again lead nowhere
    algorithm = config.replace(**calm).build(policy, 0)
    most, rows = min(int(getattr(config, "minibatch_size", FEW_ROWS)), seats * spec.sample_steps), FEW_ROWS

    def update() -> int:
        algorithm.update([sample], 0.0)
        return trained

    while True:
        sample = make_sample(policy, policy_config, spaces, spec, min(seats, rows), rows)
        trained = int(np.count_nonzero(sample.trained()))
        if rows == FEW_ROWS:
            update()  # what happens once only
        cost, _ = timed(update, COMPUTING if rows >= most else 0.0)
        fits = int(COMPUTING / cost)
        if rows >= most or fits < 2 * trained:
            return cost, isinstance(algorithm, DataParallel)
        rows = min(most, fits)


def make_sample(
    policy: Policy, config: PolicyConfig, spaces: Spaces, spec: AgentSpec, seats: int, rows: int
) -> Sample:
    """Return a sample of `rows` trained rows or a few more: every row of a seat is the
    same but for its reward."""
    observation, state = random_rows(spaces.observation, seats), allocate(config.state(spaces), (seats,))
    out = allocate({**config.answer(spaces), **config.state(spaces)}, (seats,))
    policy.act(observation, state, False, out)
    length = spec.burn_in + -(-rows // seats) + spec.bootstrap
    sample = Sample(
        {
            name: np.broadcast_to(array, (length, *array.shape)).copy()
            for name, array in (out | state | observation).items()
        }
    )
    sample |= allocate(ROW_FIELDS, (length, seats))
    sample["reward"][:] = np.random.default_rng(1).standard_normal((length, seats))
    sample.burn_in, sample.bootstrap = spec.burn_in, spec.bootstrap
    return sample


def random_rows(space: Space, rows: int) -> Arrays:
    """Return random observations: indices in their range, floats standard normal, bits
    all 1 (they may be an action mask) and no byte 0."""
    rng, found = np.random.default_rng(0), {}
    for name, leaf in leaves(space, "obs").items():
        ((_, field),) = schema_of_space(leaf, name).items()
        shape = (rows, *field.shape)
        if "float" in field.dtype:
            found[name] = rng.standard_normal(shape, np.float32).astype(field.dtype)
        else:
            index = isinstance(leaf, (Discrete, MultiDiscrete))
            most = (
                leaf.n
                if isinstance(leaf, Discrete)
                else np.array(leaf.nvec)
                if isinstance(leaf, MultiDiscrete)
                else 2
            )
            found[name] = rng.integers(
                0 if index else 1, 256 if field.dtype == "uint8" else most, shape
            ).astype(field.dtype)
    return found


def timed(work: Callable[[], int], seconds: float) -> tuple[float, float]:
    """Call `work`, which returns the units that it did, until so many seconds have
    passed, or it is known well enough how long a call takes; return the core seconds and
    the seconds of a unit.

    The seconds in which this thread could have gone on, but others had the core, do not
    count, nor those of another that it may have waited for.
    """
    units, times, began, core, before = 0, [perf_counter()], perf_counter(), process_time(), queued()
    while True:
        units += work()
        times.append(perf_counter())
        passed = times[-1] - began
        if units and passed >= seconds * LEAST and (passed >= seconds or _precise(np.diff(times))):
            core = process_time() - core
            delays = {thread: seconds - before.get(thread, 0.0) for thread, seconds in queued().items()}
            delayed = delays.pop(get_native_id(), 0.0) + max(delays.values(), default=0.0)
            return max(core, 1e-9) / units, max(passed - delayed, core, 1e-9) / units


def _precise(times: NDArray[np.float64]) -> bool:
    return len(times) >= 10 and float(times.std(ddof=1)) <= PRECISE * float(times.mean()) * len(times) ** 0.5


def queued() -> dict[int, float]:
    """Return the seconds that each thread of this process has waited for a core, by its
    number; nothing where the system does not say."""
    found = {}
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with (
                suppress(OSError, IndexError, ValueError),
                open(f"/proc/self/task/{thread}/schedstat") as file,
            ):
                found[int(thread)] = int(file.read().split()[1]) * 1e-9
    return found


def main() -> None:
    """Obey standard input (see the module's text)."""
    signal.alarm(SECONDS)  # whatever hangs, this process does not
    gc.set_threshold(10_000)  # as in workers, and so is the next
    keep_freed()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an environment prints is no answer
    limit_threads(1)
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)
    Thread(target=end_with, args=(order.runner,), daemon=True).start()
    begin_to_work()
    travel(order.path)
    try:
        if order.source is not None:
            load_file(Path(order.source), "experiment file")
        experiment = decode(Experiment, order.experiment)
        found = (
            measure(experiment, order.source)
            if order.agents is None
            else measure_arithmetic(experiment, order.agents)
        )
        answer = {"measured": msgspec.to_builtins(found)}
    except ConfigError as error:
        answer = {"refused": str(error)}
    except TidemillError as error:
        answer = {"error": str(error)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
    os._exit(0)  # at once, whatever an environment has left running


def end_with(runner: int) -> None:
    """Wait until whoever started this is gone; end what was begun for it."""
    while os.getppid() == runner:
        sleep(0.2)
    end_session()
    os._exit(1)


def end_session() -> None:
    """End this process with what the environment has started, where it leads a session of
    its own."""
    if os.getsid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
