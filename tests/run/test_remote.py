"""Runs whose environments a server plays that goes wrong: nothing is made up, and both
sides' counts agree."""

import threading
from fractions import Fraction
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from tests.remote.served import Ledger, Script, applied, client, serving
from tests.run.test_limited import check_counts, limited, run

from tidemill import Slots
from tidemill.core.errors import TidemillError


class Book(Ledger):
    """For the policy of the limited experiments."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def observe(self):
        return np.append(super().observe(), np.float32(0))


def experiment(server, form, steps, slots=4, **settings):
    environment = Slots(
        environment=client(server, form=form, **settings),
        backoff_s=0.01,
        max_backoff_s=0.1,
        failures=1000,
        window_steps=1000,
    )
    return limited.experiment(environment=environment, slots=slots, steps=steps, ratio="1/4")


@pytest.fixture(autouse=True)
def quick_pauses(monkeypatch):
    monkeypatch.setattr("tidemill.remote.calls.FIRST_PAUSE", 0.001)
    monkeypatch.setattr("tidemill.remote.session.CLOSE_SECONDS", 20.0)


@pytest.mark.parametrize("form", ["threads", "loop"])
def test_a_run_over_a_faulty_server_stores_what_was_told_and_the_server_counts_the_same(
    tmp_path: Path, form: str
) -> None:
    kinds = (
        "reply_lost",
        "unavailable",
        "request_lost",
        "reply_torn",
        "reply_repeated",
        "too_many",
        "session_lost",
        "session_lost",
    )
    rng = np.random.default_rng(0)
    script = Script(
        {int(at): kinds[number % len(kinds)] for number, at in enumerate(rng.choice(300, 80, replace=False))}
    )
    with serving(lambda: Book(length=7), faults=script) as server:
        facts = run(experiment(server, form, steps=200), tmp_path / "run", "threads")
        counts = facts["limiter"]
        check_counts(facts, Fraction(1, 4), 200)
        assert counts["voided"] > 0
        assert counts["committed"] <= applied(server) <= counts["started"]
        assert server.sessions.counts().sessions == 0
    check_rows(facts["memory"], 4, 200)


def check_rows(memory, slots: int, steps: int) -> None:
    """Each stored step's reward says what was done in which step of which episode,
    exactly as its observation; and it follows the one before it."""
    obs = memory["row.obs.npy"].reshape(slots, -1, 4)
    action, reward = (memory[f"row.{name}.npy"].reshape(slots, -1) for name in ("action", "reward"))
    episode, step = obs[..., 0], obs[..., 1]
    told = step > 0
    assert np.count_nonzero(told) == steps
    np.testing.assert_array_equal(reward[told], (100 * episode + 10 * step + action)[told])
    before = np.roll(obs, 1, axis=1)
    np.testing.assert_array_equal(before[told][:, 1], step[told] - 1)
    np.testing.assert_array_equal(np.delete(before[told], 1, axis=1), np.delete(obs[told], 1, axis=1))


def test_a_run_goes_on_when_its_server_starts_anew(tmp_path: Path) -> None:
    with serving(lambda: Book(length=7)) as server:
        stop = threading.Event()

        def restarts() -> None:
            """After each 30 steps: a run that cannot reach its server does not even
            start, and one on a busy machine is to get on in between."""
            played = 0
            while not stop.wait(0.01):
                if (now := applied(server)) >= played + 30:
                    played = now
                    server.restart(0.03)

        thread = threading.Thread(target=restarts)
        thread.start()
        try:
            facts = run(experiment(server, "threads", steps=300), tmp_path / "run", "threads")
        finally:
            stop.set()
            thread.join()
        counts = facts["limiter"]
        assert counts["committed"] == 300 and counts["started"] == 300 + counts["voided"]
        assert 300 <= applied(server) <= counts["started"]
    check_rows(facts["memory"], 4, 300)


def test_more_slots_than_the_server_takes_sessions_are_refused_at_the_start(tmp_path: Path) -> None:
    with serving(lambda: Book(length=7), limit=4) as server:
        for slots, trainer, sums in (
            (
                4,
                {"iteration_steps": 20, "evaluation_steps": 10},
                "; trainer: 1 lane of the evaluation, at least",
            ),
            (5, {}, ""),
        ):
            several = limited.experiment(
                environment=Slots(environment=client(server)), slots=slots, **trainer
            )
            with pytest.raises(
                TidemillError,
                match=rf"5 lanes .*\(actor: count 1 x ring {slots} x 1 lanes{sums}\), and there can be 4: "
                rf".*--slots",
            ):
                run(several, tmp_path / str(slots), "threads")
        assert server.sessions.counts().opened == 0
        run(
            limited.experiment(environment=Slots(environment=client(server)), slots=4, steps=20),
            tmp_path / "run",
            "threads",
        )
