"""What is shown and recorded of a run's hosts."""

import dataclasses
import io

import pytest
from rich.console import Console
from tests.run.test_live_view import LATER, frame

from tidemill import Actors, Gymnasium, Trainer
from tidemill.algorithms.ppo import PPO
from tidemill.api.launcher import HostFigures
from tidemill.run import host_watch
from tidemill.run.host_table import table_of_hosts
from tidemill.run.host_watch import HostView, HostWatch
from tidemill.run.member import Member


def shown(hosts: dict[str, HostView], most: int = 20) -> list[str]:
    into = Console(file=(file := io.StringIO()), width=140)
    into.print(table_of_hosts(hosts, most))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def many(count: int) -> dict[str, HostView]:
    return {f"h{i}": HostView(3, 4, 1000.0, 0.5, 0.25, 12.0, float(i), i) for i in range(count)}


def test_hosts_have_a_line_each_and_fold_beyond_twenty() -> None:
    assert len(shown(many(20))) == 21
    lines = shown(many(25))
    assert len(lines) == 21 and lines[19].startswith("h18")
    assert lines[-1].split() == ["6", "others", "18", "24", "6,000", "1.5", "3.0", "24.0", "ms", "24"]
    assert shown(many(3), 1)[1].split()[:4] == ["3", "hosts", "9", "12"]


def test_a_host_that_is_gone_says_why() -> None:
    lost = HostView(1, 2, lost="its agent was killed by signal 9; its last output:\nx")
    _, runner, b = shown({"runner": HostView(1, 2, 950.0), "b": lost})
    assert runner.split() == ["runner", "1", "2", "950", "0", "0", "–", "–"]
    assert b.split(maxsplit=1) == ["b", "gone: its agent was killed by signal 9"]


@pytest.mark.parametrize(("width", "height"), [(100, 20), (100, 24), (80, 40)])
def test_a_frame_with_many_hosts_fits_the_terminal(width: int, height: int) -> None:
    workers = tuple(dataclasses.replace(LATER.workers[0], name=f"actor-{i}") for i in range(40))
    crowded = dataclasses.replace(LATER, hosts=many(30), workers=workers)
    assert len(frame(crowded, width, height).splitlines()) <= height
    assert "others" in frame(crowded, width, height) and "actor-0" in frame(crowded, width, height)


def test_rates_are_those_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [100.0], dict[str, HostFigures]()
    monkeypatch.setattr(host_watch, "awake", lambda: now[0])
    actor = Member(Actors(environment=Gymnasium(id="CartPole-v1")), None, rate=500.0)  # type: ignore[arg-type]
    members = {
        "actor-0": actor,
        "actor-1": actor,
        "trainer-0": Member(Trainer(algorithm=PPO()), None, rate=9.0),
    }  # type: ignore[arg-type]
    watch = HostWatch(lambda: dict(told))
    told["b"] = HostFigures(("actor-0", "actor-1", "trainer-0"), 4, 10_000_000, 0, 100, 0.025, 3)
    watch.look(members)
    now[0] += 0.5
    told["b"] = told["b"]._replace(sent_bytes=18_000_000, received_bytes=1_000_000, said=140)
    watch.look(members)  # too soon
    assert watch.hosts["b"].sent == 0.0
    now[0] += 1.5
    watch.look(members)
    assert watch.hosts["b"] == HostView(3, 4, 1000.0, 4.0, 0.5, 20.0, 25.0, 3)
    assert watch.metrics() == {
        "host/b/workers": 3.0,
        "host/b/cores": 4.0,
        "host/b/steps_per_second": 1000.0,
        "host/b/sent_mb_per_second": 4.0,
        "host/b/received_mb_per_second": 0.5,
        "host/b/messages_per_second": 20.0,
        "host/b/round_trip_ms": 25.0,
        "host/b/lag": 3.0,
    }
    now[0] += 2.0
    told["b"] = HostFigures((), 4, 5, 5, 1)  # another agent has its place, and begins at 0
    watch.look(members)
    assert (watch.hosts["b"].sent, watch.hosts["b"].said) == (0.0, 0.0)
