"""Requests that say whose they are, answers that echo it, and channels over the real
shared transport."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tidemill.api.stream import Answer, Requests
from tidemill.core.memory import MemfdSegment
from tidemill.core.schema import Field
from tidemill.transports.shared import EventBell
from tidemill.transports.slots import SlotConsumer, SlotProducer

OBSERVATION = {"obs": Field((2,), "float32")}
STATE = {"state.h": Field((), "float32")}
ANSWER = {"action": Field((), "int64")}
ROWS = 4


def request(identity: int, rows: int) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Arrays that say whose they are: row i of request 7 is 7·10 + i."""
    numbers = identity * 10 + np.arange(rows)
    return (
        {"obs": np.stack([numbers, -numbers], 1).astype(np.float32)},
        {"state.h": numbers.astype(np.float32)},
        numbers % 2 == 1,
    )


def echo(requests: Sequence[Requests]) -> dict[str, Any]:
    """The answers: each row's own number and, as the next state, the number and a
    half."""
    for r in requests:
        assert (r.observation["obs"][:, 0] == -r.observation["obs"][:, 1]).all()
        assert (r.observation["obs"][:, 0] == r.state["state.h"]).all()
        assert len(r.deterministic) == r.rows
    numbers = np.concatenate([r.observation["obs"][:, 0] for r in requests]).astype(np.int64)
    assert (np.concatenate([r.deterministic for r in requests]) == (numbers % 2 == 1)).all()
    return {"action": numbers, "state.h": numbers.astype(np.float32) + 0.5}


def check(answer: Answer, identity: int, rows: int, version: int | None = None) -> None:
    """Assert that the answer is that to `request(identity, rows)`."""
    expected = identity * 10 + np.arange(rows)
    assert (answer.fields["action"][:rows] == expected).all()
    assert (answer.fields["state.h"][:rows] == expected + 0.5).all()
    if version is not None:
        assert answer.version == version


@contextmanager
def descriptors(memory: int, bells: int) -> Iterator[tuple[list[int], list[int]]]:
    """So many memfds and eventfds, closed in the end."""
    made = [os.memfd_create("fuzz") for _ in range(memory)], [os.eventfd(0) for _ in range(bells)]
    try:
        yield made
    finally:
        for descriptor in [*made[0], *made[1]]:
            os.close(descriptor)


def sending(segment: int, wake: int) -> SlotProducer:
    """The sending end over a memfd, which rings an eventfd."""
    return SlotProducer(MemfdSegment(segment), EventBell(wake))


def receiving(segment: int, wake: int) -> SlotConsumer:
    """The receiving end."""
    return SlotConsumer(MemfdSegment(segment), EventBell(wake))
