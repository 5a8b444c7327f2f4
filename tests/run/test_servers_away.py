"""Runs whose server is away for a while: that costs faults of the budget, and not the
run, which can be ended meanwhile."""

import os
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from tests.remote import test_openenv
from tests.remote.served import away, client, port_of_ones_own, serving
from tests.run.test_same_words import experiment, restarts, told
from tests.run.test_supervisor import process_of
from tests.run.watching import wait_until

import tidemill
from tidemill import Gymnasium, Limits
from tidemill.core.clock import awake
from tidemill.core.errors import ConfigError, EnvironmentAway, EnvironmentFault, RunError
from tidemill.envs import lane_restarts
from tidemill.envs.lane_restarts import LaneRestarts, Remaking
from tidemill.remote.call_limits import Breaker
from tidemill.remote.rest_config import Rest
from tidemill.run import ending
from tidemill.run.control_socket import tell
from tidemill.run.events import read_events
from tidemill.run.run_state import RunState
from tidemill.store.checkpoint import checkpoints, read_newest
from tidemill.training.train import resume
from tidemill.workers.actor_environments import EnvironmentsAgain

PATIENCE = 120.0  # seconds


class Walk(gymnasium.Env):
    """So many steps long."""

    length = 4

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, self.steps == self.length, False, {}


class Connecting(Walk):
    """It connects to this address as it is reset."""

    address = ("127.0.0.1", 0)

    def reset(self, *, seed=None, options=None):
        socket.create_connection(self.address).close()
        return super().reset(seed=seed, options=options)


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Pauses are short, and calls are soon given up."""
    monkeypatch.setattr(lane_restarts, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(lane_restarts, "LONGEST_PAUSE", 0.03)
    monkeypatch.setattr("tidemill.remote.host._known", {})
    monkeypatch.setattr("tidemill.remote.host.START_SECONDS", 0.01)
    monkeypatch.setattr("tidemill.remote.host.Breaker", partial(Breaker, first=0.001, longest=0.001))
    monkeypatch.setattr("tidemill.remote.calls.FIRST_PAUSE", 0.001)
    monkeypatch.setattr("tidemill.remote.calls.LONGEST_PAUSE", 0.001)


@pytest.fixture
def tries(monkeypatch):
    """The faults of all tries that failed as something was made anew."""
    seen: list[Exception] = []
    failed = Remaking.failed

    def noted(remaking, fault):
        failed(remaking, fault)
        seen.append(remaking.fault)

    monkeypatch.setattr(Remaking, "failed", noted)
    return seen


@contextmanager
def a_server(kind):
    """Yield an environment of this kind, and a context in which its server is away."""
    with ExitStack() as stack:
        if kind != "openenv":
            server = stack.enter_context(serving(Walk))
            yield client(server, form=kind, retries=0.0), partial(away, server)
            return
        port = stack.enter_context(port_of_ones_own())
        served = [ExitStack()]
        played, _ = served[0].enter_context(test_openenv.serving(port=port))

        @contextmanager
        def closed():
            served[0].close()
            try:
                yield
            finally:
                served[0].enter_context(test_openenv.serving(port=port))

        stack.callback(served[0].close)
        yield played, closed


class Absence:
    """Called with each record of a run: takes the server away once, and `then` is called
    in a thread once `over`; then the server is back."""

    def __init__(self, gone, over, then=lambda: None):
        self._gone, self._over, self._then = gone, over, then
        self.thread = None

    def __call__(self, record, control):
        if self.thread is None:
            context = self._gone()
            context.__enter__()
            self.thread = threading.Thread(target=self._end, args=(context,))
            self.thread.start()

    def _end(self, context):
        try:
            wait_until(self._over, PATIENCE, "it is tried again")
            self._then()
        finally:
            context.__exit__(None, None, None)


def killed_and_tries(actor, path, process):
    """Return a function that kills a process of the run at its first call, and is true
    once the next life of `actor` has tried the server that is away."""
    killed = []

    def tried_again():
        if not killed:
            killed.append(process_of(path, process))
            killed[0].kill()
        return actor.life == 1 and actor.pauses and "nothing answers there" in actor.away

    return tried_again


@pytest.mark.parametrize(
    ("kind", "launch", "exact"),
    [
        ("loop", "inline", True),
        ("threads", "threads", True),
        ("loop", "threads", False),
        ("openenv", "inline", False),
    ],
)
def test_a_run_outlives_a_server_that_is_away(kind, launch, exact, tries, tmp_path):
    with a_server(kind) as (played, gone):
        made = experiment("server", played, 60, lane_restarts=1000, deadline_s=PATIENCE)
        trainer = made.workers["trainer"].replace(max_policy_lag=0)
        made = made.replace(exact_resume=exact, workers={**made.workers, "trainer": trainer})
        absence = Absence(gone, lambda: len(tries) >= 3)
        result = tidemill.train(made, launch=launch, run_dir=tmp_path / "run", quiet=True, on_update=absence)
        absence.thread.join(PATIENCE)
        assert result.summary["status"] == "completed" and result.summary["env_steps"] >= 60
        assert all(isinstance(fault, EnvironmentAway) and fault.pause > 0 for fault in tries)
        texts = told(tmp_path / "run")
        assert any(
            "it is tried again in 0 s, and later after longer pauses (restart " in text for text in texts
        )
        assert restarts(tmp_path / "run") >= 4
    if exact:  # the whole run is as good as any, and can be gone on from
        assert (tmp_path / "run" / "cuts" / "actor-0").exists()


def test_to_wait_for_what_is_away_is_no_stall_and_a_chain_names_it(tries, monkeypatch, tmp_path):
    """How long a stall may last is cut short only while the server is away. The chain is
    looked at until the trainer reports of a time after its update."""
    for name in ("FIRST_PAUSE", "LONGEST_PAUSE"):
        monkeypatch.setattr(lane_restarts, name, 3.0)
    looks, chain = [], ""
    begins = (
        "trainer-0 waits for samples ← actor-0 waits for what its environment connects to, which is away: "
    )
    with a_server("loop") as (played, gone):
        made = experiment("server", played, 60)

        def on_update(record, control):
            stalls, actor = control._controller.stalls, control._controller.state.members["actor-0"]
            stalls.watches["trainer-0"]._most = 2.0 if absence.thread is None else 600.0
            absence(record, control)
            looks.append(lambda: actor.pauses and stalls._explain(["trainer-0"]))

        def named():
            nonlocal chain
            chain = str(looks[0]())
            return chain.startswith(begins) and "nothing answers there" in chain

        absence = Absence(gone, lambda: tries and named())
        result = tidemill.train(
            made, launch="inline", run_dir=tmp_path / "run", quiet=True, on_update=on_update
        )
        absence.thread.join(PATIENCE)
        assert result.summary["status"] == "completed"
    assert chain.startswith(begins) and "nothing answers there" in chain


@contextmanager
def deaf(server):
    """Who listens there meanwhile accepts, and never answers."""
    with away(server), socket.create_server(("127.0.0.1", int(server.url.rpartition(":")[2]))):
        yield


def test_a_try_that_hangs_is_no_stall(monkeypatch, tmp_path):
    """How long a stall may last is cut short only while the server is away."""
    looked = []
    with serving(Walk) as server:
        played = client(server, retries=0.0, deadline_s=3.0)
        made = experiment("server", played, 60, lane_restarts=1000)

        def on_update(record, control):
            stalls, actor = control._controller.stalls, control._controller.state.members["actor-0"]
            if absence.thread is None:
                look, gone = stalls.look, [0]

                def noted():
                    stalls.watches["trainer-0"]._most = 1.0 if actor.pauses else 600.0
                    if actor.pauses:
                        gone[0] = gone[0] or awake()
                        looked.append(awake() - gone[0])
                    look()

                monkeypatch.setattr(stalls, "look", noted)
            absence(record, control)

        absence = Absence(partial(deaf, server), lambda: looked and looked[-1] > 2.0)
        result = tidemill.train(
            made, launch="inline", run_dir=tmp_path / "run", quiet=True, on_update=on_update
        )
        absence.thread.join(PATIENCE)
    assert result.summary["status"] == "completed"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux")
def test_a_trainer_that_hangs_while_a_server_is_away_is_a_stall(monkeypatch, tmp_path):
    monkeypatch.setattr(ending, "CLOSE_DEADLINE", 0.5)
    path, ended = tmp_path / "run", threading.Event()

    def on_update(record, control):
        state, stalls = control._controller.state, control._controller.stalls

        def stopped():
            if not (actor := state.members["actor-0"]).pauses or not actor.away:
                return False
            process_of(path, "trainer-0").suspend()
            stalls.watches["trainer-0"]._most = 0.5
            return True

        if absence.thread is None:
            absence._over, absence._then = stopped, lambda: ended.wait(PATIENCE)
            absence(record, control)

    with serving(Walk) as server:
        absence = Absence(partial(away, server), None)
        made = experiment("server", client(server, retries=0.0), 10**9)
        try:
            with pytest.raises(RunError, match=r"(?s)nothing has progressed for.*trainer-0 is stopped"):
                tidemill.train(
                    made, launch="processes", layout="given", run_dir=path, quiet=True, on_update=on_update
                )
        finally:
            ended.set()
            absence.thread.join(PATIENCE)


@contextmanager
def instead_of(server, reply):
    """Something else answers there meanwhile."""
    stop = threading.Event()

    def serve():
        while not stop.is_set():
            with suppress(OSError), listener.accept()[0] as connection:
                connection.settimeout(1.0)
                connection.recv(1 << 16)
                connection.sendall(reply)

    with away(server), socket.create_server(("127.0.0.1", int(server.url.rpartition(":")[2]))) as listener:
        listener.settimeout(0.05)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


RUBBISH = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 4\r\n\r\nhere"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux")
def test_an_actor_that_dies_while_its_server_is_away_lives_again_once_that_is_back(tmp_path):
    path = tmp_path / "run"

    def on_update(record, control):
        actor = control._controller.state.members["actor-0"]

        if absence.thread is None:
            absence._over = killed_and_tries(actor, path, "actor-0")
            absence(record, control)
        elif not absence.thread.is_alive():
            control.stop("it goes on")

    with serving(Walk) as server:
        absence = Absence(partial(away, server), None)
        made = experiment("server", client(server, retries=0.0), 10**9)
        result = tidemill.train(
            made, launch="processes", layout="given", run_dir=path, quiet=True, on_update=on_update
        )
        absence.thread.join(PATIENCE)
    assert (result.summary["status"], result.summary["reason"]) == ("completed", "it goes on")
    assert [event.worker for event in read_events(path) if event.what == "lives"] == ["actor-0"]
    assert any("it is tried again in" in text and "(restart 1 of at most 5" in text for text in told(path))


@pytest.mark.parametrize("in_thread", [True, False])
def test_what_stays_away_from_a_next_life_of_an_actor_uses_up_its_budget(in_thread):
    with port_of_ones_own() as port:
        build = partial(Rest(url=f"http://127.0.0.1:{port}").build, 1, 0)
        again = EnvironmentsAgain(
            lambda first: (first or build()).close(),
            build if in_thread else None,
            LaneRestarts(3, 600.0, lambda text: None),
            lambda: None,
        )
        with pytest.raises(
            EnvironmentFault, match=r"(?s)nothing answers there.* 3 times within 600 s already"
        ):
            wait_until(again.made, PATIENCE, "the budget is used up")
        assert again.tries >= 3 and again.pauses and "nothing answers there" in again.away


def test_what_answers_in_place_of_a_server_that_a_life_before_had_is_away():
    with serving(Walk) as server:
        build = partial(client(server).build, 1, 0)
        again = EnvironmentsAgain(
            lambda first: first.close(), build, LaneRestarts(9, 600.0, lambda text: None), lambda: None
        )
        with instead_of(server, RUBBISH):
            with pytest.raises(ConfigError, match="is no environment server"):  # which no life had
                build()
            wait_until(lambda: again.made() or again.tries, PATIENCE, "it is tried")
            assert "is no environment server" in again.away
        wait_until(again.made, PATIENCE, "it is back")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux")
@pytest.mark.parametrize("exact", [False, True])
def test_a_run_ends_at_once_whose_actor_and_trainer_wait_for_a_server_in_their_next_life(
    exact, monkeypatch, tmp_path
):
    """One that resumes exactly with its newest cut, from which it goes on later."""
    monkeypatch.setattr(ending, "CLOSE_DEADLINE", PATIENCE)  # longer than a signal's
    path = tmp_path / "run"

    def on_update(record, control):
        actor = control._controller.state.members["actor-0"]
        if absence.thread is None and checkpoints(path / ("cuts/actor-0" if exact else "checkpoints/policy")):
            absence._over = killed_and_tries(actor, path, "actor-0+trainer-0")
            absence._then = lambda: (os.kill(os.getpid(), signal.SIGTERM), ended.wait(PATIENCE))
            absence(record, control)

    ended = threading.Event()
    with serving(Walk) as server:
        absence = Absence(partial(away, server), None)
        made = experiment("server", client(server, retries=0.0), 10**9)
        trainer = made.workers["trainer"].replace(max_policy_lag=0 if exact else None)
        made = made.replace(
            exact_resume=exact,
            workers={**made.workers, "trainer": trainer},
            together=("actor", "trainer"),
        )
        try:
            result = tidemill.train(
                made, launch="processes", layout="given", run_dir=path, quiet=True, on_update=on_update
            )
        finally:
            ended.set()
            absence.thread.join(PATIENCE)
        assert (result.summary["status"], result.summary["reason"]) == ("interrupted", "SIGTERM")
        assert not any("force" in text for text in told(path))
        assert read_newest(path / "checkpoints" / "policy").facts["updates"] == result.summary["updates"]
        steps = result.summary["env_steps"] + 20
        result = resume(path, launch="inline", limits={"steps": steps}, quiet=True, trust=True)
    assert result.summary["status"] == "completed" and result.summary["env_steps"] >= steps


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux")
def test_an_exact_run_at_its_limit_whose_actor_dies_needs_no_server_to_end(monkeypatch, tmp_path):
    """It keeps all that it has trained: to go back would cut its open episodes anyway."""
    path, end, dead = tmp_path / "run", RunState.end, []
    with serving(Walk) as server, ExitStack() as stack:

        def end_and_kill(state, *reason, **how):
            end(state, *reason, **how)
            if not dead:
                dead.append(process_of(path, "actor-0"))
                stack.enter_context(away(server))
                dead[0].kill()

        monkeypatch.setattr(RunState, "end", end_and_kill)
        made = experiment("server", client(server, retries=0.0), None, lane_restarts=1)
        trainer = made.workers["trainer"].replace(max_policy_lag=0)
        made = made.replace(
            exact_resume=True, workers={**made.workers, "trainer": trainer}, limits=Limits(updates=3)
        )
        result = tidemill.train(made, launch="processes", layout="given", run_dir=path, quiet=True)
    assert dead and (result.summary["status"], result.summary["updates"]) == ("completed", 3)
    assert read_newest(path / "checkpoints" / "policy").facts["updates"] == 3
    assert not any(event.what == "went back" for event in read_events(path))


def test_a_resumed_run_waits_for_the_server_that_it_had_before(tries, tmp_path):
    """In a pause of the run it is not tried again."""
    path = tmp_path / "run"
    with serving(Walk) as server:
        played = client(server, retries=0.0)
        made = experiment("server", played, 20, lane_restarts=1000)
        tidemill.train(made, launch="inline", run_dir=path, quiet=True)
        gone = away(server)
        gone.__enter__()

        def tried(text):
            return "nothing answers there" in text and "it is tried again" in text

        def come_back():
            try:
                wait_until(lambda: any(map(tried, told(path))), PATIENCE, "it is tried again")
                tell(path, "pause")
                before = len(tries)
                time.sleep(0.3)  # for which pauses of 0.03 s are long enough
                counts.append(len(tries) - before)
                tell(path, "start")
                wait_until(lambda: len(tries) > before, PATIENCE, "it is tried once more")
            finally:
                gone.__exit__(None, None, None)

        counts, thread = [], threading.Thread(target=come_back)
        thread.start()
        result = resume(path, launch="inline", limits={"steps": 60}, quiet=True)
        thread.join(PATIENCE)
    assert counts == [0]
    assert result.summary["status"] == "completed" and result.summary["env_steps"] >= 60


def test_an_address_where_nobody_ever_was_is_an_error_at_once_and_later_tried_again(
    tries, monkeypatch, tmp_path
):
    made = experiment("loop", Gymnasium(make=Connecting), 20, lane_restarts=3)
    settings = {"launch": "inline", "quiet": True}
    with port_of_ones_own() as port:
        monkeypatch.setattr(Connecting, "address", ("127.0.0.1", port))
        with pytest.raises(RunError, match=r"Connection refused.*Nobody has answered there since the run"):
            tidemill.train(made, run_dir=tmp_path / "never", **settings)
        assert not tries
        with socket.create_server(("127.0.0.1", port), backlog=128):
            tidemill.train(made, run_dir=tmp_path / "run", **settings)
        with pytest.raises(RunError, match=r"Connection refused.*were made anew 3 times"):
            resume(tmp_path / "run", limits={"steps": 60}, trust=True, **settings)
        assert tries


def test_a_replay_memory_without_slots_is_resumed_once_its_server_is_back(tmp_path):
    path = tmp_path / "run"
    with serving(Walk) as server:
        made = experiment("slots", client(server, retries=0.0), 30)
        tidemill.train(made, launch="inline", run_dir=path, quiet=True)

        def tried(text):
            return "nothing answers there" in text and "it is tried again" in text

        def come_back():
            with away(server):
                gone.set()
                wait_until(lambda: any(map(tried, told(path))), PATIENCE, "it is tried again")

        gone, thread = threading.Event(), threading.Thread(target=come_back)
        thread.start()
        assert gone.wait(PATIENCE)
        result = resume(path, launch="inline", limits={"steps": 60}, quiet=True)
        thread.join(PATIENCE)
    assert result.summary["status"] == "completed" and result.summary["env_steps"] >= 60


def test_a_resume_whose_server_is_away_is_refused_by_name_where_the_first_fault_ends_the_run(tmp_path):
    with serving(Walk) as server:
        made = experiment("server", client(server, retries=0.0), 20, lane_restarts=None)
        tidemill.train(made, launch="inline", run_dir=tmp_path / "run", quiet=True)
        with (
            away(server),
            pytest.raises(RunError, match=r"(?s)nothing answers there.*since lane_restarts = None; with a"),
        ):
            resume(tmp_path / "run", launch="inline", limits={"steps": 60}, quiet=True)


@pytest.mark.parametrize(
    ("kind", "ring", "reply"),
    [
        ("loop", 1, b"HTTP/1.1 401 No\r\ncontent-type: text/html\r\ncontent-length: 4\r\n\r\nwho?"),
        ("threads", 2, RUBBISH),
    ],
)
def test_a_server_in_whose_place_something_else_answers_is_away(kind, ring, reply, tries, tmp_path):
    """Also where others that play there hold what is known of the server."""
    with serving(Walk) as server:
        played = client(server, form=kind, retries=0.0)
        made = experiment("server", played, 60, lane_restarts=1000, deadline_s=PATIENCE, ring=ring)
        absence = Absence(partial(instead_of, server, reply), lambda: len(tries) >= 3)
        result = tidemill.train(
            made, launch="inline", run_dir=tmp_path / "run", quiet=True, on_update=absence
        )
        absence.thread.join(PATIENCE)
        assert result.summary["status"] == "completed"
        assert all(isinstance(fault, EnvironmentAway) and fault.pause > 0 for fault in tries)


def test_a_server_that_stays_away_ends_the_run_with_the_first_cause_and_the_last(tries, tmp_path):
    with a_server("loop") as (played, gone):
        made = experiment("server", played, 10_000, lane_restarts=3)
        ended = threading.Event()
        absence = Absence(gone, ended.is_set)
        try:
            with pytest.raises(
                RunError,
                match=r"(?s)step \d+ \(session.*Its actor's lanes were made anew 3 times within 600 s "
                r"already.*the last fault: .*cannot be made anew now.*nothing answers there",
            ):
                tidemill.train(made, launch="inline", run_dir=tmp_path / "run", quiet=True, on_update=absence)
        finally:
            ended.set()
            absence.thread.join(PATIENCE)
        assert 2 <= len(tries) < 20


@pytest.mark.parametrize(("launch", "exact"), [("inline", True), ("threads", True), ("inline", False)])
def test_a_signal_ends_a_run_whose_server_is_away_with_a_checkpoint(
    launch, exact, tries, monkeypatch, tmp_path
):
    """The pause would be longer than all else has. Episodes outlast the run: whenever the
    server goes away, one is open."""
    monkeypatch.setattr(lane_restarts, "FIRST_PAUSE", 1000.0)
    monkeypatch.setattr(Walk, "length", 10_000)
    with a_server("loop") as (played, gone):
        made = experiment("server", played, 10_000, deadline_s=PATIENCE)
        trainer = made.workers["trainer"].replace(max_policy_lag=0)
        made = made.replace(exact_resume=exact, workers={**made.workers, "trainer": trainer})
        absence = Absence(gone, lambda: tries, lambda: os.kill(os.getpid(), signal.SIGINT))
        result = tidemill.train(made, launch=launch, run_dir=tmp_path / "run", quiet=True, on_update=absence)
        absence.thread.join(PATIENCE)
        assert result.summary["status"] == "interrupted"
        updates = result.summary["updates"]
        newest = max(
            int(each.name.split("-")[1]) for each in Path(tmp_path, "run/checkpoints/policy").iterdir()
        )
        assert newest == updates
        steps = result.summary["env_steps"] + 20
        result = resume(tmp_path / "run", launch=launch, limits={"steps": steps}, quiet=True)
        assert result.summary["status"] == "completed" and result.summary["env_steps"] >= steps
        cut = [text for text in told(tmp_path / "run") if "open episodes of 1 of 1 lanes" in text]
        assert len(cut) == exact
