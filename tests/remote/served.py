"""Servers for tests: real ones, on loopback, whose faults come where a test says."""

import dataclasses
import socket
from contextlib import contextmanager

import gymnasium
import msgspec
import numpy as np

from tidemill.remote.fault_injection import Fault, Faults
from tidemill.remote.rest_config import Rest
from tidemill.remote.server import Server
from tidemill.remote.server_sessions import Sessions


class Ledger(gymnasium.Env):
    """An observation says which episode and step it is of, a reward what was done:
    nothing can be mistaken for anything else."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, length=6, raises_at=None, nan_at=None, reward_nan_at=None):
        self.length = length
        self.raises_at = raises_at
        self.nan_at = nan_at
        self.reward_nan_at = reward_nan_at
        self.episode, self.step_, self.seeded = -1, 0, -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.seeded = seed
        self.episode, self.step_ = self.episode + 1, 0
        return self.observe(), {"seed": self.seeded}

    def step(self, action):
        self.step_ += 1
        if self.step_ == self.raises_at:
            raise ValueError("as the test asks")
        reward = (
            float("nan")
            if self.step_ == self.reward_nan_at
            else 100.0 * self.episode + 10 * self.step_ + action
        )
        return self.observe(), reward, self.step_ >= self.length, False, {}

    def observe(self):
        bad = self.step_ > 0 and self.step_ == self.nan_at
        return np.array([self.episode, self.step_, np.nan if bad else self.seeded % 1000], np.float32)


class Script:
    """Faults by the number of the call (of reset and step, from 0); later calls go
    well."""

    def __init__(self, plan, **settings):
        # which `draw` does not ask, and without which the rest would do nothing
        shares = {"stall": 0.5} if "stall_seconds" in settings else {}
        shares |= {"too_many": 0.5} if "retry_after" in settings else {}
        self.plan, self.faults, self.calls = dict(plan), Faults(**shares, **settings), 0

    def draw(self, path):
        number, self.calls = self.calls, self.calls + 1
        return Fault(self.plan.get(number, ""))


@contextmanager
def port_of_ones_own():
    """A port that is nobody else's, also while no server listens there."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextmanager
def serving(
    make=Ledger,
    faults=None,
    token=None,
    limit=64,
    idle_seconds=300.0,
    left_seconds=10.0,
    max_body_bytes=1 << 20,
):
    sessions = Sessions(make, "Ledger", limit, idle_seconds, left_seconds)
    with port_of_ones_own() as port:
        server = Server(sessions, port=port, token=token, faults=faults, max_body_bytes=max_body_bytes)
        server.start()
        try:
            yield server
        finally:
            server.close()


@contextmanager
def away(server):
    """Nobody answers there meanwhile, and what the server knew is forgotten."""
    server._hang_up()
    server.sessions.forget()
    try:
        yield
    finally:
        server._listen()


def client(server, form="threads", **settings):
    """Calls have time, and none is sent again because the machine is slow."""
    patient = {"deadline_s": 120.0, "attempt_s": 120.0, "retries": 1.0}
    return Rest(url=server.url, form=form, **{**patient, **settings})


@contextmanager
def hurried(session, deadline_s=None, attempt_s=None):
    """Have the session's calls go by this deadline, or be late so soon, meanwhile."""
    host, times = session.host, session.times
    terms, given = host.terms, times.given
    if attempt_s is not None:
        host.terms = dataclasses.replace(terms, attempt_s=attempt_s)
    if deadline_s is not None:
        times.given = deadline_s
    try:
        yield
    finally:
        host.terms, times.given = terms, given


def applied(server):
    return server.sessions.counts().applied


def answering(server, path, change):
    """Have the answers to calls of `path` changed, as plain maps, before they are
    sent."""
    kind, act = server._posts[f"/v1/{path}"]

    def changed(call, caller):
        said = msgspec.to_builtins(act(call, caller), builtin_types=(bytes,))
        change(said)
        return said

    server._posts[f"/v1/{path}"] = kind, changed
