"""Looks an environment server over before a run depends on it: what
`tidemill doctor env URL` prints."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import islice, takewhile
from time import monotonic, perf_counter
from typing import Any

import numpy as np

from tidemill.core.errors import ConfigError, ProtocolFault, RemoteFault, RemoteTimeout, TidemillError
from tidemill.core.step_deadlines import FIRST
from tidemill.remote.host import Host
from tidemill.remote.rest_config import Rest
from tidemill.remote.session import RemoteEnv
from tidemill.testing.check_env import Finding

_REMEMBER = "remember each session's last reply"


def examine(config: Rest, seconds: float = 10.0, most: int = 64) -> Iterator[Finding]:
    """Yield what was found, a check at a time; the last one proposes settings. No finding
    is of level "fail" when the server can be trained on.

    It plays with random actions for about `seconds`, in `most` sessions at a time at
    most.
    """
    try:
        host = config.host()
    except ConfigError as error:
        yield Finding("server", "fail", str(error))
        return
    about = host.description
    idle = f"closed when idle for {about.idle_seconds:g} s" if about.idle_seconds else "never closed as idle"
    yield Finding(
        "server",
        "ok",
        f"{about.environment}, protocol {about.version}; {about.max_sessions or 'any number of'} sessions, "
        f"{idle}",
    )
    try:
        replies = _replies(host)
        yield replies
        if replies.level == "fail":
            return
        yield _repeats(host, seconds / 5)
        yield _determinism(host, seconds / 5)
        latency = _Latency(host, seconds / 5)
        yield latency.finding
        yield from _concurrency(host, latency, seconds / 2, most)
    except TidemillError as error:
        cure = "see the server's own log; what was found above holds"
        if isinstance(error, RemoteTimeout):
            cure = (
                f"if it is only slow, look again with --deadline {10 * (config.deadline_s or 30):g}, and "
                f"train with --set workers.actor.deadline_s=SECONDS; else {cure}"
            )
        yield Finding("calls", "fail", str(error), cure)


def _replies(host: Host) -> Finding:
    """See that a reset and a step are answered with all that they must have."""
    env = RemoteEnv(host)
    try:
        env.reset(seed=0)
        env.step(next(_actions(host, 0)))
    except ProtocolFault as error:
        return Finding("replies", "fail", str(error), "see docs/rest.md")
    finally:
        env.close()
    return Finding(
        "replies", "ok", "a reset and a step were answered with all that they must have, as the spaces say"
    )


def _actions(host: Host, seed: int) -> Iterator[Any]:
    """Yield random actions, the same for the same seed."""
    env = RemoteEnv(host)
    env.action_space.seed(seed)
    while True:
        yield env.action_space.sample()


class _RepeatFault(Exception):
    """What the server does wrong with calls that are sent twice: a finding's level,
    message and cure."""


def _repeats(host: Host, seconds: float) -> Finding:
    """Send resets and steps twice, one after the other and, where the server may see
    that, both at a time: each must count once."""
    env = RemoteEnv(host)
    try:
        return Finding("repeats", "ok", _call_twice(env, seconds))
    except _RepeatFault as fault:
        return Finding("repeats", *fault.args)
    finally:
        env.close()


def _call_twice(env: RemoteEnv, seconds: float) -> str:
    """Return what a lost reply costs where all is well."""
    host = env.session.host
    promised = host.description.repeats
    actions, until = _actions(host, 0), monotonic() + seconds
    env.reset(seed=0)
    _reset_twice(env, promised)
    if promised == "applied":
        raise _RepeatFault(
            "warn",
            "a step that is sent twice is applied twice, so that each lost reply costs its episode",
            'have the server remember its last reply ("repeats", docs/rest.md)',
        )
    rounds = 0
    while promised == "remembered" and rounds < 20 and (not rounds or monotonic() < until):
        rounds, action = rounds + 1, next(actions)
        told = _both(env, lambda each, action=action: each.step(action))  # type: ignore[misc]
        _compare(told, f"step {env.session.step}")
        if told[0][2] or told[0][3]:
            _reset_twice(env, promised)
    return _repeat_step(env, promised, actions)


def _reset_twice(env: RemoteEnv, promised: str) -> None:
    """Send resets twice, at the same time where the server may see that, then one after
    the other."""
    try:
        if promised == "remembered":
            _compare(_both(env, lambda each: each.reset()), "a reset")
        with _twin(env) as twin:
            first, again = env.reset(), twin.reset()
    except RemoteFault as error:
        refused = f"a reset that was sent twice was refused: {error}"
        raise _RepeatFault("warn", refused, "answer it as before while no step was taken") from error
    if promised == "remembered" and not _equal(first[0], again[0]):
        raise _RepeatFault(
            "fail", "a reset that was sent twice was answered otherwise the second time", _REMEMBER
        )


@contextmanager
def _twin(env: RemoteEnv) -> Iterator[RemoteEnv]:
    """Another client of the same session, which sends the same calls."""
    twin = RemoteEnv(env.session.host)
    twin.session = copy(env.session)
    try:
        yield twin
    finally:
        twin.session.name = ""  # it is the other's
        twin.close()


def _both(env: RemoteEnv, do: Callable[[RemoteEnv], Any]) -> list[Any]:
    """Do the same as two clients of one session at the same time; return what both were
    told, or the fault that either raised."""
    told: list[Any] = [None, None]

    def act(number: int, each: RemoteEnv) -> None:
        try:
            told[number] = do(each)
        except RemoteFault as error:
            told[number] = error

    with _twin(env) as twin:
        thread = threading.Thread(target=act, args=(1, twin), daemon=True)
        thread.start()
        act(0, env)
        thread.join()
    return told


def _compare(told: list[Any], what: str) -> None:
    """Raise `_RepeatFault` unless two calls at the same time were answered the same."""
    what += " that was sent again while the first was under way was"
    cure = "wait for the first call to end, and answer both alike"
    if error := next((each for each in told if isinstance(each, RemoteFault)), None):
        raise _RepeatFault("fail", f"{what} not answered the same: {error}", cure)
    if not _equal(*(each[:-1] for each in told)):  # all but info
        raise _RepeatFault("fail", f"{what} answered otherwise", cure)


def _repeat_step(env: RemoteEnv, promised: str, actions: Iterator[Any]) -> str:
    """Send a step again after its reply has come; return what a lost reply costs."""
    first = env.step(next(actions))
    try:
        again = env.repeat()
        if promised == "refused":
            raise _RepeatFault(
                "fail",
                "the server says that it refuses a step sent twice, and answered it",
                'mend its "repeats"',
            )
        if not _equal(first, again):
            raise _RepeatFault(
                "fail", "a step that was sent twice was answered otherwise the second time", _REMEMBER
            )
        if not (first[2] or first[3]):
            env.step(next(actions))  # fails if the server counted two
    except RemoteFault as error:
        if promised == "refused":
            return "a step that was sent twice was refused the second time: a lost reply costs its episode"
        what = f"a step that was sent twice was not answered the same: {error}"
        raise _RepeatFault("fail", what, _REMEMBER) from error
    return (
        "resets and steps that were sent twice, also at the same time, were done once, and answered the "
        "same: lost replies cost nothing"
    )


def _determinism(host: Host, seconds: float) -> Finding:
    envs, until, ticks = [RemoteEnv(host), RemoteEnv(host)], monotonic() + seconds, 0
    try:
        first, second = (_observations_and_steps(env, _actions(host, 1)) for env in envs)
        if host.description.max_sessions == 1:  # one after the other
            until = monotonic() + seconds / 2
            before = [next(first), *takewhile(lambda _: monotonic() < until, islice(first, 300))]
            envs[0].close()
            pairs, until = zip(before, second, strict=False), math.inf
        else:
            pairs = zip(first, second, strict=True)
        for ticks, told in enumerate(pairs):
            if not _equal(*told):
                return Finding(
                    "determinism",
                    "warn",
                    f"the same seed and actions gave something else after {ticks} steps",
                    "seed all random numbers from reset's seed; without that, runs cannot be repeated",
                )
            if (ticks and monotonic() > until) or ticks >= 300:
                break
        return Finding(
            "determinism", "ok", f"the same seed and actions gave the same {ticks} steps in two sessions"
        )
    finally:
        for env in envs:
            env.close()


def _observations_and_steps(env: RemoteEnv, actions: Iterator[Any]) -> Iterator[Any]:
    """Yield what resets and steps tell: the first observation, then a step each."""
    yield env.reset(seed=7)[0]
    while True:
        told = env.step(next(actions))[:4]
        over = told[2] or told[3]
        yield (*told, env.reset()[0]) if over else told


def _timed_calls(
    env: RemoteEnv, actions: Iterator[Any], seed: int | None = None
) -> Iterator[tuple[bool, float]]:
    """Play for ever; yield of each call whether it was a step, and its seconds."""
    over = True
    while True:
        since, resets = perf_counter(), over
        if resets:
            env.reset(seed=seed)
            over, seed = False, None
        else:
            _, _, terminated, truncated, _ = env.step(next(actions))
            over = terminated or truncated
        yield not resets, perf_counter() - since


class _Latency:
    """Of resets and steps in one session."""

    def __init__(self, host: Host, seconds: float) -> None:
        env, actions, until = RemoteEnv(host), _actions(host, 2), monotonic() + seconds
        resets: list[float] = []
        steps: list[float] = []
        try:
            spent = host.budget.spent
            for stepped, took in _timed_calls(env, actions, seed=3):
                (steps if stepped else resets).append(took)
                if steps and (monotonic() >= until or len(steps) >= 2000):
                    break
        finally:
            env.close()
        self.steps, self.slowest = np.quantile(steps, (0.5, 0.95, 0.99)), max(*resets, *steps)
        tried = host.budget.spent - spent
        self.finding = Finding(
            "latency",
            "ok" if not tried else "warn",
            f"step {_ms(self.steps[0])} (95 %: {_ms(self.steps[1])}, 99 %: {_ms(self.steps[2])}), reset "
            f"{_ms(float(np.median(resets)))}, slowest call {_ms(self.slowest)}; {tried} of "
            f"{len(steps) + len(resets)} calls were tried again",
            "see why calls fail: the network, or the server's limits" if tried else "",
        )


def _concurrency(host: Host, latency: _Latency, seconds: float, most: int) -> Iterator[Finding]:
    """Play in 1, 2, 4, … sessions at a time, and in as many as the server takes, until
    that makes it no quicker."""
    limit = host.description.max_sessions
    last = min(most, limit or most)
    counts = [1 << power for power in range(last.bit_length()) if 1 << power < last] + [last]
    if latency.slowest > seconds / len(counts):  # each of them takes a reset and a step at least
        counts = [count for number, count in enumerate(counts) if number % 3 == 0 or count == last]
    rates: dict[int, float] = {}
    slow, cause = 0.0, ""
    for count in counts:
        rate, slowest, failed, played = _rate(host, count, seconds / len(counts))
        if failed:
            cause = failed
            if played > max(rates, default=0):  # it takes so many, whatever it says
                rate, slowest, failed, _ = _rate(host, played, seconds / len(counts))
                if not failed:
                    rates[played], slow = rate, max(slow, slowest)
            break
        rates[count], slow = rate, max(slow, slowest)
        if len(rates) > 2:
            first, second, third = list(rates.values())[-3:]
            if third < 1.1 * second and second < 1.1 * first:
                break
    if not rates:
        yield Finding("at a time", "fail", cause, "see the server's own log")
        return
    if cause:
        *_, gone, _ = _rate(host, 1, 0.0)
        if gone:
            yield Finding(
                "at a time",
                "fail",
                f"the server answers no more, not even one session: {gone}",
                "see the server's own log, and start it anew",
            )
            return
        limit = max(rates)
    top = max(rates.values())
    best = next(count for count, rate in rates.items() if rate >= 0.9 * top)
    yield Finding(
        "at a time",
        "warn" if cause else "ok",
        "steps/s by sessions: "
        + ", ".join(f"{count}: {rate:{',.0f' if rate >= 10 else '.2g'}}" for count, rate in rates.items())
        + (f"; with more: {cause}" if cause else ""),
        f"stay at {limit} sessions, evaluations included" if cause else "",
    )
    longest = _round(4 * max(latency.slowest, slow))
    given = f", deadline_s={longest:g}" if longest > FIRST else ""  # else what follows from steps will do
    yield Finding("proposal", "ok", f"{_slots(best, limit, most)}; Rest(url=…{given})")


def _slots(best: int, limit: int, most: int) -> str:
    """Say how many slots: an evaluation (`evaluation_steps`) plays in a session besides,
    which is one of `limit`, if there is one (0: none)."""
    said = f"{best} slot{'s' if best > 1 else ''}"
    if best == limit:
        return (
            f"{said}, or {best - 1} with evaluation_steps"
            if best > 1
            else f"{said}, and no evaluation_steps: there is no session for them"
        )
    return f"{said} (more may help still: try --most {4 * most})" if best == most else said


def _rate(host: Host, count: int, seconds: float) -> tuple[float, float, str, int]:
    """Return steps per second in `count` sessions at a time, the slowest call, what
    failed, and how many sessions nothing failed in."""
    envs, until = [RemoteEnv(host) for _ in range(count)], monotonic() + seconds
    steps, slowest, causes = [0] * count, [0.0] * count, [""] * count
    began = perf_counter()

    def play(lane: int) -> None:
        try:
            for stepped, took in _timed_calls(envs[lane], _actions(host, lane)):
                steps[lane] += stepped
                slowest[lane] = max(slowest[lane], took)
                if steps[lane] and monotonic() >= until:
                    break
        except TidemillError as error:
            causes[lane] = str(error)

    def each(do: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=do, args=(lane,), daemon=True) for lane in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    each(play)
    rate = sum(steps) / (perf_counter() - began)
    each(lambda lane: envs[lane].close())
    return rate, max(slowest), next((cause for cause in causes if cause), ""), causes.count("")


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(np.array_equal(left, right))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _round(seconds: float) -> float:
    """Round up to one digit: 0.23 → 0.3."""
    size = 10.0 ** np.floor(np.log10(seconds))
    return float(np.ceil(seconds / size) * size)
