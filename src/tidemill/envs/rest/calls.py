"""When a call is sent, sent again, or given up: without any input or output, so that both forms of the client do the same.

A plan is a generator: it yields what is to be done (`Send`, `Pause`, `HANG_UP`), is sent what came of it, and returns the call's result or raises a
`RemoteFault`. What a plan may do is bounded by the call's total deadline, by the host's retry budget, and by its breaker.
"""

import asyncio
import random
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Protocol, TypeVar

import msgspec

from tidemill.core.errors import RemoteFault, RemoteTimeout, RemoteUnavailable, ReplyLost, SessionLost
from tidemill.envs.leaves import brief
from tidemill.envs.rest.wire import ENCODINGS, Problem, decode

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds before the first retry, and before any

T = TypeVar("T")


@dataclass(frozen=True)
class Send:
    """Send a request, and take its answer within `seconds`."""

    method: str
    path: str
    body: bytes
    content_type: str
    seconds: float


@dataclass(frozen=True)
class Pause:
    """Wait so long."""

    seconds: float


@dataclass(frozen=True)
class HangUp:
    """Close the connection: what else comes on it is not to be read."""


HANG_UP = HangUp()


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    content_type: str
    retry_after: float
    body: bytes


@dataclass(frozen=True)
class Lost:
    """No whole answer came. `sent` is False where nothing of the request can have arrived."""

    cause: str
    sent: bool = True


Plan = Generator[Send | Pause | HangUp, Answer | Lost | None, T]


class Breaker:
    """Of one host. After `limit` failures in a row nothing is sent for a while but one trial at a time; whatever answers closes it again. Used by
    many threads."""

    def __init__(self, limit: int = 5, first: float = 0.1, longest: float = 5.0) -> None:
        """A trial is made `first` seconds after it opened; each that fails doubles that, up to `longest`."""
        self._limit, self._first, self._longest = limit, first, longest
        self._lock = threading.Lock()
        self._failures = 0
        self._next = 0.0  # when a trial may be made
        self._trying = False
        self.opened = 0
        """How often it opened."""

    def wait(self) -> float:
        """Return 0 when a request may be sent now, which `succeeded`, `failed` or `gave_up` must follow, or seconds until it is worth asking."""
        with self._lock:
            if self._failures < self._limit:
                return 0.0
            left = self._next - monotonic()
            if left > 0 or self._trying:
                return max(left, 0.02) * random.uniform(1.0, 1.5)
            self._trying = True
            return 0.0

    def succeeded(self) -> None:
        """The host answered."""
        with self._lock:
            self._failures, self._trying = 0, False

    def failed(self) -> None:
        """The host did not answer, or only that it cannot."""
        with self._lock:
            self._failures += 1
            self._trying = False
            if self._failures >= self._limit:
                self.opened += self._failures == self._limit
                pause = min(self._longest, self._first * 2.0 ** min(30, self._failures - self._limit))
                self._next = monotonic() + pause * random.uniform(0.5, 1.0)

    def gave_up(self) -> None:
        """The request was broken off by whoever sent it."""
        with self._lock:
            self._trying = False


class Budget:
    """Retries as a share of calls: each call earns `share` of one, up to `most`, with which it begins. Used by many threads."""

    def __init__(self, share: float, most: float) -> None:
        self._share, self._most, self._left = share, most, most
        self._lock = threading.Lock()
        self.spent = 0
        """Retries so far."""

    def hold(self, sessions: int) -> None:
        """So many sessions are open: each may need a retry at the same time, when the network fails for a moment."""
        with self._lock:
            self._left += max(0.0, sessions - self._most)
            self._most = max(self._most, sessions)

    def earn(self) -> None:
        """One more call is made."""
        with self._lock:
            self._left = min(self._most, self._left + self._share)

    def spend(self, cost: int = 1) -> bool:
        """Take a retry that costs so much; False when that is not left."""
        with self._lock:
            if self._left < cost:
                return False
            self._left -= cost
            self.spent += 1
            return True


@dataclass(frozen=True)
class Terms:
    """How calls to one host are made.

    deadline   seconds for a call, with all its retries and pauses
    attempt    seconds for one request, where it may be sent again
    """

    url: str
    deadline: float
    attempt: float
    breaker: Breaker
    budget: Budget


def call(
    terms: Terms,
    what: str,
    request: Send,
    kind: Callable[..., T],
    again: bool,
    stale: Callable[[T], str | None] = lambda _: None,
    applied: Callable[[Problem], bool] = lambda _: False,
) -> Plan[T]:
    """Plan a call that answers a `kind`.

    what     names the call in messages: "step 3 of episode 0 in session …"
    again    the same request may be sent again though an earlier one may have arrived
    stale    says why a result is none of this call's (an answer that was sent twice, say), or None
    applied  True when a refusal as out of order says that the server has applied this very call
    """
    where = f"{terms.url}: {what}"
    until = monotonic() + terms.deadline
    terms.budget.earn()
    tries, doubt, why = 0, False, "the host's breaker was open all the while"
    while True:
        left = until - monotonic()
        if left <= 0:
            raise RemoteTimeout(
                f"{where}: no answer within {terms.deadline:g} s (deadline), in {tries} tr{'y' if tries == 1 else 'ies'}; last: {why}. "
                "See whether the server is up and quick enough (tidemill doctor env URL), or raise deadline"
            )
        if (seconds := terms.breaker.wait()) > 0:
            yield Pause(min(seconds, left))
            continue
        told = False
        try:
            said = yield Send(request.method, request.path, request.body, request.content_type, min(left, terms.attempt) if again else left)
            tries += 1
            told = True
        finally:
            if not told:
                terms.breaker.gave_up()
        pause, cost = 0.0, 1
        if isinstance(said, Answer) and said.status == 200:
            terms.breaker.succeeded()
            try:
                result: T = decode(said.body, said.content_type, kind)
            except (msgspec.DecodeError, RecursionError) as error:
                yield HANG_UP
                raise RemoteFault(f"{where}: what was answered is not of the protocol ({error}): {brief(said.body[:80])}; see docs/rest.md") from None
            reason = stale(result)
            if reason is None:
                return result
            yield HANG_UP
            doubt, why = True, reason
        elif isinstance(said, Answer):
            why = _refused(terms, where, said, applied)
            pause = said.retry_after
            cost = int(said.status != 429)  # who says "too many" is well, and paces by himself who asks: others may need the retries
            doubt = doubt or _problem(said) is None
        else:
            assert isinstance(said, Lost)
            terms.breaker.failed()
            doubt, why = doubt or said.sent, said.cause
        if doubt and not again:
            raise ReplyLost(
                f"{where}: it may have been applied, and its reply is lost ({why}). This server says that it would apply it again, so that "
                'the episode is given up; a server that remembers its last reply, or checks step numbers, loses nothing ("repeats", docs/rest.md)'
            )
        if not terms.budget.spend(cost):
            raise RemoteUnavailable(
                f"{where}: failed in {tries} tries ({why}), and the host's retry budget is used up; see what the server says, or raise retries"
            )
        pause = max(pause, random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(tries - 1, 20))))
        yield Pause(max(0.0, min(pause, until - monotonic())))


def _problem(said: Answer) -> Problem | None:
    """What a server of the protocol tells; None where something else answered."""
    with suppress(msgspec.DecodeError, RecursionError):
        problem: Problem = decode(said.body, said.content_type, Problem)
        return problem
    return None


def _refused(terms: Terms, where: str, said: Answer, applied: Callable[[Problem], bool]) -> str:
    """Return why a refusal is worth another try, and raise otherwise."""
    problem = _problem(said)
    why = f"{said.status} {problem.error}: {problem.message}" if problem is not None else f"{said.status} {brief(said.body[:80])}"
    if said.status in (502, 503, 504):
        terms.breaker.failed()
        return why
    terms.breaker.succeeded()
    if said.status == 429:
        return why
    if problem is None:
        raise RemoteFault(f"{where}: answered {why}, which is not of the protocol; see that url names an environment server (docs/rest.md)")
    if problem.error == "unknown_session":
        raise SessionLost(f"{where}: {problem.message}")
    if problem.error == "out_of_order" and applied(problem):
        raise ReplyLost(f"{where}: was applied, and its reply is lost: the server does not keep replies, so that the episode is given up")
    cure = {
        "unauthorized": "set token, or TIDEMILL_TOKEN, to what the server was started with",
        "too_large": "let the server take larger bodies (--max-body-bytes)",
        "environment_raised": "see the server's environment",
        "out_of_order": "a session belongs to one client; see that nobody else uses it",
    }.get(problem.error, "see docs/rest.md")
    raise RemoteFault(f"{where}: answered {why}; {cure}")


def answer(status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> Answer:
    """Return an answer with what its headers say."""
    found = {name.lower(): value.decode("latin1") for name, value in headers}
    content_type = found.get(b"content-type", "").partition(";")[0].strip().lower()
    try:
        retry_after = min(3600.0, max(0.0, float(found.get(b"retry-after", "0"))))
    except ValueError:  # a date
        retry_after = 0.0
    return Answer(status, content_type if content_type in ENCODINGS else "application/json", retry_after, body)


class Blocking(Protocol):
    """What carries out a plan, blocking."""

    def send(self, wanted: Send) -> Answer | Lost:
        """Send a request and return what came of it."""

    def pause(self, seconds: float) -> None:
        """Wait so long."""

    def hang_up(self) -> None:
        """Close the connection."""


class Awaited(Protocol):
    """The same on an event loop."""

    async def send(self, wanted: Send) -> Answer | Lost:
        """Send a request and return what came of it."""

    async def hang_up(self) -> None:
        """Close the connection."""


def drive(plan: Plan[T], connection: Blocking) -> T:
    """Carry out a plan, blocking."""
    said: Answer | Lost | None = None
    try:
        while True:
            wanted = plan.send(said)
            said = None
            if isinstance(wanted, Send):
                said = connection.send(wanted)
            elif isinstance(wanted, Pause):
                connection.pause(wanted.seconds)
            else:
                connection.hang_up()
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        plan.close()


async def drive_async(plan: Plan[T], connection: Awaited) -> T:
    """Carry out a plan on an event loop."""
    said: Answer | Lost | None = None
    try:
        while True:
            wanted = plan.send(said)
            said = None
            if isinstance(wanted, Send):
                said = await connection.send(wanted)
            elif isinstance(wanted, Pause):
                await asyncio.sleep(wanted.seconds)
            else:
                await connection.hang_up()
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        plan.close()
