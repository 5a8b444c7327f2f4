"""What is shown and recorded of a run's hosts."""

import dataclasses
import io

import pytest
from rich.console import Console
from tests.run.test_live_view import LATER, frame

from tidemill import Actors, Gymnasium, Trainer
from tidemill.algorithms.ppo import PPO
from tidemill.api.edges import Edge
from tidemill.api.launcher import EdgeFigures, HostFigures
from tidemill.run import host_watch
from tidemill.run.host_places import HostPlace, crowded, places_of, table_of_places
from tidemill.run.host_table import table_of_hosts
from tidemill.run.host_watch import EdgeView, HostView, HostWatch
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


def test_workers_of_a_lost_host_stand_where_they_live() -> None:
    own = HostFigures(("trainer-0",), 2, gpus=1, home="runner")
    moved, lost = HostFigures(("actor-0",), 4, home="runner"), HostFigures(("actor-1",), 4, lost="it is gone")
    places = places_of({"runner": own, "b": moved, "c": lost})
    assert places == {
        "runner": HostPlace(2, 1, ["trainer-0", "actor-0"]),
        "b": HostPlace(4, 0, []),
        "c": HostPlace(4, 0, []),
    }
    assert shown({"b": HostView(1, 4, elsewhere="runner")})[1].startswith("b, on runner ")


def test_many_workers_and_hosts_are_told_shortly() -> None:
    actors = [f"actor-{number}" for number in (0, 1, 2, 3, 5, 7, 8)]
    few = {"runner": HostPlace(2, 0, ["trainer-0"]), "b": HostPlace(16, 8, actors)}
    assert table_of_places(few).splitlines() == [
        "host     cores   GPUs   workers",
        "runner       2      0   trainer-0",
        "b           16      8   actor-0 … 3, actor-5, actor-7, actor-8",
    ]
    lines = table_of_places({f"h{i}": HostPlace(4, 1, ["a-0", "a-1"]) for i in range(25)}).splitlines()
    assert len(lines) == 21 and lines[-1].split() == ["6", "others", "24", "6", "12", "workers"]


def test_hosts_with_too_few_cores_are_named() -> None:
    processes = [["trainer-0", "actor-0"], ["actor-1"], ["actor-2"], ["judge-0"]]
    places = {
        "runner": HostPlace(0, 0, ["judge-0"]),
        "b": HostPlace(2, 0, ["trainer-0", "actor-0", "actor-1"]),
    }
    assert crowded(places, processes) == ""  # a runner's without cores for workers
    places["b"] = HostPlace(1, 0, ["trainer-0", "actor-0", "actor-1", "actor-2"])
    told = "host b has 1 core for 3 processes (trainer-0, actor-0 … 2): they share its cores"
    assert crowded(places, processes).startswith(told)


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
    told["b"] = HostFigures(("actor-0", "actor-1", "trainer-0"), 4, 10_000_000, 0, 100, 0.025, 3, at=7.0)
    watch.look(members)
    now[0] += 0.5
    told["b"] = told["b"]._replace(sent_bytes=18_000_000, received_bytes=1_000_000, said=140, at=9.0)
    watch.look(members)  # too soon
    assert watch.hosts["b"].sent == 0.0
    for _ in range(2):  # by the host's own clock, and as long as it has told nothing since
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
    assert watch.places == {"b": HostPlace(4, 0, [])}  # they live nowhere
    now[0] += 2.0
    told["b"] = HostFigures((), 4, 5, 5, 1, at=20.0)  # another agent has its place, and begins at 0
    watch.look(members)
    assert (watch.hosts["b"].sent, watch.hosts["b"].said) == (0.0, 0.0)


def test_an_edge_is_awaited_while_something_is_under_way_and_both_ends_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, told = [100.0], dict[str, HostFigures]()
    monkeypatch.setattr(host_watch, "awake", lambda: now[0])
    config = Actors(environment=Gymnasium(id="CartPole-v1"))
    members = {
        name: Member(config, None, shares={"wait": wait})  # type: ignore[arg-type]
        for name, wait in (("actor-0", 0.75), ("actor-1", 0.0), ("trainer-0", 0.5), ("judge-0", 1.0))
    }
    samples = [
        Edge(f"samples/s/actor-{i}/0/trainer-0", "channel", f"actor-{i}", ("trainer-0",)) for i in (0, 1)
    ]
    weights = Edge("parameters/p/trainer-0", "cell", "trainer-0", ("actor-0", "actor-1", "judge-0"))
    watch = HostWatch(lambda: dict(told))
    for at, seconds, nbytes in ((0.0, 0.0, 0), (2.0, 1.8, 1_000_000)):
        flow = EdgeFigures(nbytes, seconds)
        told["runner"] = HostFigures(("trainer-0", "judge-0"), 2, edges={(weights, "b"): flow}, at=at)
        told["b"] = HostFigures(
            ("actor-0", "actor-1"), 2, edges=dict.fromkeys(((e, "runner") for e in samples), flow), at=at
        )
        now[0] += 2.0
        watch.look(members)
    assert watch.hosts["b"].edges == (EdgeView("samples/s", "runner", 1.0, 0.5),)
    assert watch.hosts["runner"].edges == (EdgeView("parameters/p", "b", 0.5, 0.5),)  # judge-0 is not there
    assert {name: value for name, value in watch.metrics().items() if name.startswith("edge/")} == {
        "edge/samples/s/b/runner/mb_per_second": 1.0,
        "edge/samples/s/b/runner/awaited": 0.5,
        "edge/parameters/p/runner/b/mb_per_second": 0.5,
        "edge/parameters/p/runner/b/awaited": 0.5,
    }
    told["b"] = told["b"]._replace(
        edges={(edge, "runner"): EdgeFigures(9_000_000, 2.0) for edge in samples}, at=4.0
    )
    now[0] += 2.0
    watch.look(members)
    (edge,) = watch.hosts["b"].edges  # all of a second came at once: no line is full
    assert edge.sent == 8.0 and edge.awaited == pytest.approx(0.1)


def test_the_edge_that_holds_up_is_named_else_the_busiest() -> None:
    quick, slow = EdgeView("samples/s", "runner", 9.5, 0.1), EdgeView("answers/i", "c", 0.25, 0.83)
    _, b, c, d = shown(
        {
            "b": HostView(1, 2, edges=(quick, slow)),
            "c": HostView(1, 2, edges=(quick, dataclasses.replace(slow, awaited=0.2))),
            "d": HostView(1, 2, lost="its agent has ended"),
        }
    )
    assert b.endswith("answers/i → c 0.25 MB/s, awaited 83%")
    assert c.endswith("–   samples/s → runner 9.5 MB/s")
    assert d.split(maxsplit=1) == ["d", "gone: its agent has ended"]
    folded = shown({f"h{i}": HostView(1, 2, edges=(quick, slow)) for i in range(3)}, 2)
    assert folded[0].endswith("busiest edge") and folded[-1].endswith("awaited 83%")
