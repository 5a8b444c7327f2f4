"""When a call is sent, sent again, or given up: without any input or output, so that both
forms of the client do the same.

A plan is a generator: it yields what is to be done (`Send`, `Sleep`, `HANG_UP`), is sent
what came of it, and returns the call's result or raises a `RemoteFault`. What a plan may
do is bounded by the call's total deadline, by the host's retry budget, and by its
breaker.

What was sent is waited for until the deadline, however slow it is. Where an answer is
late, and the server takes repeats, the same is sent on another connection, too, and
whichever answers first counts: so a server may be slow, and a reply may be lost without
anybody being told.
"""

import asyncio
import math
import random
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeVar

import msgspec

from tidemill.core.clock import awake
from tidemill.core.errors import (
    ProtocolFault,
    RemoteFault,
    RemoteTimeout,
    RemoteUnavailable,
    ReplyLost,
    SessionLost,
)
from tidemill.core.step_deadlines import MORE_TIME
from tidemill.envs.space_values import brief
from tidemill.remote.call_limits import Breaker, Budget, CallTimes
from tidemill.remote.wire import ENCODINGS, Problem, decode, misread

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds before the first retry, and before any

ANY_TIME = 1e8  # seconds of a call that has no deadline: sockets take no infinity

Again = Literal["late", "lost", "never"]
"""When the same request may be sent again though an earlier one may have arrived: while
that one is still under way; only once its connection is gone; never."""

T = TypeVar("T")


class Send(NamedTuple):
    """The plan asks to send a request, and to take its answer within `seconds`. Without
    one after `late` seconds `repeat` is asked, once, whether the same is to be sent on
    another connection, too."""

    method: str
    path: str
    body: bytes
    content_type: str
    seconds: float
    late: float = math.inf
    repeat: Callable[[], bool] | None = None


@dataclass(frozen=True)
class Sleep:
    """The plan asks to wait so long."""

    seconds: float


@dataclass(frozen=True)
class HangUp:
    """The plan asks to close the connection: what else comes on it is not to be read."""


HANG_UP = HangUp()


class HttpAnswer(NamedTuple):
    """A whole answer, `seconds` after its request was sent."""

    status: int
    content_type: str
    retry_after: float
    body: bytes
    seconds: float

    @property
    def settles(self) -> bool:
        """True when this is the call's end, whatever comes of another request for the
        same: no refusal that says "not now", nor one as out of order, which a server may
        give to a repeat of what it is still at."""
        return self.status not in (409, 429, 502, 503, 504)


class NoAnswer(NamedTuple):
    """No whole answer came. `sent` is False where nothing of the request can have
    arrived; `late` is True where nothing is known to have failed: the time was over."""

    cause: str
    sent: bool = True
    late: bool = False

    @property
    def settles(self) -> bool:
        """False, see `HttpAnswer`."""
        return False


Plan = Generator[Send | Sleep | HangUp, HttpAnswer | NoAnswer | None, T]


class TimeLimit(NamedTuple):
    """A call has so many seconds, with all its retries and pauses, and so `until` then;
    see `within`."""

    seconds: float
    until: float


def within(seconds: float) -> TimeLimit:
    """Return the limit of a call that begins now."""
    seconds = min(seconds, ANY_TIME)
    return TimeLimit(seconds, awake() + seconds)


@dataclass(frozen=True)
class CallTerms:
    """The terms of calls to one host.

    attempt_s: seconds after which an answer is late; None: as the call's `CallTimes` says
    """

    url: str
    attempt_s: float | None
    breaker: Breaker
    budget: Budget


def call(
    terms: CallTerms,
    what: str,
    request: Send,
    kind: Callable[..., T],
    again: Again,
    pace: CallTimes,
    limit: TimeLimit,
    stale: Callable[[T], str | None] = lambda _: None,
    applied: Callable[[Problem], bool] = lambda _: False,
) -> Plan[T]:
    """Plan a call that answers a `kind`.

    what: names the call in messages: "step 3 of episode 0 in session …"
    pace: of calls like this one
    stale: says why a result is none of this call's (an answer that was sent twice, say),
        or None
    applied: True when a refusal as out of order says that the server has applied this
        very call
    """
    where = f"{terms.url}: {what}"
    terms.budget.earn()
    tries, repeats, doubt, why = 0, 0, False, "the host's breaker was open all the while"

    def repeat() -> bool:
        nonlocal repeats
        may = terms.budget.spend(spare=True)
        repeats += may
        return may

    while True:
        left = limit.until - awake()
        if left <= 0:
            raise RemoteTimeout(
                f"{where}: no answer within {limit.seconds:.4g} s (deadline_s), in {tries} "
                f"tr{'y' if tries == 1 else 'ies'}; last: {why}. See whether the server is up and quick "
                f"enough (tidemill doctor env URL), or {MORE_TIME}"
            )
        if (seconds := terms.breaker.wait()) > 0:
            yield Sleep(min(seconds, left))
            continue
        told, tries = False, tries + 1
        late = (terms.attempt_s or pace.late(limit.seconds)) if again == "late" else math.inf
        try:
            reply = yield Send(
                request.method, request.path, request.body, request.content_type, left, late, repeat
            )
            told = True
        finally:
            if not told:
                terms.breaker.gave_up()
        pause, cost = 0.0, 1
        if isinstance(reply, HttpAnswer) and reply.status == 200:
            terms.breaker.succeeded()
            pace.took(reply.seconds)
            try:
                result: T = decode(reply.body, reply.content_type, kind)
            except (msgspec.DecodeError, RecursionError) as error:
                yield HANG_UP
                raise ProtocolFault(
                    f"{where}: what was answered is not of the protocol: "
                    f"{misread(reply.body, reply.content_type, error)}"
                ) from None
            reason = stale(result)
            if reason is None:
                return result
            yield HANG_UP
            doubt, why = True, reason
        elif isinstance(reply, HttpAnswer):
            why = _refused(terms, where, reply, applied)
            problem = problem_of(reply)
            pause = reply.retry_after
            # Who says "too many", or is still at the call before, is well, and paces by
            # himself who asks: others may need the retries.
            cost = int(reply.status != 429 and (problem is None or problem.error != "busy"))
            doubt = doubt or problem is None
        else:
            assert isinstance(reply, NoAnswer)
            if reply.late:
                pace.took(left)
                terms.breaker.gave_up()
                raise RemoteTimeout(
                    f"{where}: no answer within {limit.seconds:.4g} s (deadline_s), though it was waited "
                    "for all the while"
                    + (f", and it was sent again after {late:.3g} s (attempt_s)" if repeats else "")
                    + (f"; the try before: {why}" if tries > 1 else "")
                    + f". The server is slower than that, or hangs: {MORE_TIME}; tidemill doctor env URL "
                    "tells what calls take; or see why the server does not answer"
                )
            terms.breaker.failed()
            doubt, why = doubt or reply.sent, reply.cause
        if doubt and again == "never":
            raise ReplyLost(
                f"{where}: it may have been applied, and its reply is lost ({why}). This server says that it "
                "would apply it again, so that the episode is given up; a server that remembers its last "
                'reply, or checks step numbers, loses nothing ("repeats", docs/rest.md)'
            )
        if not terms.budget.spend(cost):
            raise RemoteUnavailable(
                f"{where}: failed in {tries} tr{'y' if tries == 1 else 'ies'} ({why}), and the host's retry "
                "budget is used up; see what the server says, or raise retries"
            )
        pause = max(pause, random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(tries - 1, 20))))
        yield Sleep(max(0.0, min(pause, limit.until - awake())))


def problem_of(reply: HttpAnswer) -> Problem | None:
    """Return what a server of the protocol tells; None where something else answered."""
    with suppress(msgspec.DecodeError, RecursionError):
        problem: Problem = decode(reply.body, reply.content_type, Problem)
        return problem
    return None


def _refused(terms: CallTerms, where: str, reply: HttpAnswer, applied: Callable[[Problem], bool]) -> str:
    """Return why a refusal is worth another try, and raise otherwise."""
    problem = problem_of(reply)
    why = (
        f"{reply.status} {problem.error}: {problem.message}"
        if problem is not None
        else f"{reply.status} {brief(reply.body[:80])}"
    )
    if reply.status == 504:  # of a proxy that has not waited as long as we do
        terms.breaker.gave_up()
        return f"{why}: what stands before the server gives calls up after a time of its own; raise that"
    if reply.status in (502, 503) and (problem is None or problem.error != "busy"):
        terms.breaker.failed()
        return why
    terms.breaker.succeeded()
    if reply.status in (429, 502, 503):
        return why
    if problem is None:
        raise ProtocolFault(
            f"{where}: answered {why}, which is not of the protocol; see that url names an environment "
            "server (docs/rest.md)"
        )
    if problem.error == "unknown_session":
        raise SessionLost(f"{where}: {problem.message}")
    if problem.error == "out_of_order" and applied(problem):
        raise ReplyLost(
            f"{where}: was applied, and its reply is lost: the server does not keep replies, so that the "
            "episode is given up"
        )
    cure = {
        "unauthorized": "set token, or TIDEMILL_TOKEN, to what the server was started with",
        "too_large": "let the server take larger bodies (--max-body-bytes)",
        "environment_raised": "see the server's environment",
        "out_of_order": "a session belongs to one client; see that nobody else uses it",
    }.get(problem.error, "see docs/rest.md")
    raise RemoteFault(f"{where}: answered {why}; {cure}")


def answer(status: int, headers: list[tuple[bytes, bytes]], body: bytes, seconds: float) -> HttpAnswer:
    """Return an answer with what its headers say."""
    found = {name.lower(): value.decode("latin1") for name, value in headers}
    content_type = found.get(b"content-type", "").partition(";")[0].strip().lower()
    try:
        retry_after = min(3600.0, max(0.0, float(found.get(b"retry-after", "0"))))
    except ValueError:  # a date
        retry_after = 0.0
    return HttpAnswer(
        status, content_type if content_type in ENCODINGS else "application/json", retry_after, body, seconds
    )


class BlockingSender(Protocol):
    """What carries out a plan, blocking."""

    def send(self, wanted: Send) -> HttpAnswer | NoAnswer:
        """Send a request and return what came of it."""

    def pause(self, seconds: float) -> None:
        """Wait so long."""

    def hang_up(self) -> None:
        """Close the connection."""


class AsyncSender(Protocol):
    """The same on an event loop."""

    async def send(self, wanted: Send) -> HttpAnswer | NoAnswer:
        """Send a request and return what came of it."""

    async def hang_up(self) -> None:
        """Close the connection."""


def drive(plan: Plan[T], connection: BlockingSender) -> T:
    """Carry out a plan, blocking."""
    reply: HttpAnswer | NoAnswer | None = None
    try:
        while True:
            wanted = plan.send(reply)
            reply = None
            if isinstance(wanted, Send):
                reply = connection.send(wanted)
            elif isinstance(wanted, Sleep):
                connection.pause(wanted.seconds)
            else:
                connection.hang_up()
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        plan.close()


async def drive_async(plan: Plan[T], connection: AsyncSender) -> T:
    """Carry out a plan on an event loop."""
    reply: HttpAnswer | NoAnswer | None = None
    try:
        while True:
            wanted = plan.send(reply)
            reply = None
            if isinstance(wanted, Send):
                reply = await connection.send(wanted)
            elif isinstance(wanted, Sleep):
                await asyncio.sleep(wanted.seconds)
            else:
                await connection.hang_up()
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        plan.close()
