"""Stepwise agents: every cell of every arrival, compared with rows that are made the slow
way."""

from typing import Any

import numpy as np
import pytest
from tests.workers.world import Known, Marked, Seat, World

from tidemill.core import clock
from tidemill.replay_training.actor_config import ReplayActors


def expected(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The arrivals of one episode, made from its rows: what a row says of its action
    comes with the next one."""
    states = [name for name in rows[0] if name.startswith("state.")]
    led = [name for name in rows[0] if name not in ("obs", "on_reset", "done", "truncated", *states)]
    nothing = {**dict.fromkeys(led, 0), "version": -1, "policy": -1}
    before = [nothing, *rows[:-1]]
    own = ("obs", "on_reset", "done", "truncated", *states)
    return [
        {**{n: row[n] for n in own}, **{n: last[n] for n in led}, "voided": False}
        for row, last in zip(rows, before, strict=True)
    ]


@pytest.mark.parametrize(
    ("settings", "world"),
    [
        ({"lanes": 1, "ring": 1}, {}),
        ({"lanes": 3, "ring": 2}, {"recurrent": True}),
        ({"lanes": 3, "ring": 2, "max_episode_steps": 5}, {}),
        ({"lanes": 2, "ring": 3, "flush_requests": 6}, {"recurrent": True}),
        ({"lanes": 2, "ring": 2}, {"remote": True}),
        ({"lanes": 1, "ring": 4, "stalls": 2}, {}),
        ({"lanes": 1, "ring": 2, "frame_stack": 3}, {}),
    ],
)
def test_every_arrival_holds_what_was_seen_and_what_led_to_it(
    settings: dict[str, Any], world: dict[str, Any]
) -> None:
    stalls, stack = settings.pop("stalls", 0), settings.pop("frame_stack", 1)
    inference = "answers" if world.get("remote") else "inline"
    actors = ReplayActors(
        environment=Marked(stalls=stalls), inference=inference, frame_stack=stack, **settings
    )
    made = World(actors, **world)
    made.begin()
    for number in range(120):
        made.poll()
        for environment in Marked.built:
            if environment.bell is not None:
                environment.bell()
        made.drain()
        if number % 7 == 0:
            made.publish()
    asked = {identity: versions for policy in Known.built for identity, versions in policy.asked.items()}
    limit = settings.get("max_episode_steps", 0)
    (samples,) = made.got.values()
    for target in range(settings["ring"]):
        for lane in range(settings["lanes"]):
            cells = [
                {name: array[0, target * settings["lanes"] + lane] for name, array in sample.items()}
                for sample in samples
            ]
            fillers = [row for row in cells if row["version"] == row["policy"] == -1 and not row["on_reset"]]
            assert not any(
                row[name] for row in fillers for name in ("voided", "done", "truncated", "info_mask")
            )
            columns = [row for row in cells if row["version"] != -1 or row["on_reset"]]
            assert len(columns) > 30
            offset = int(columns[0]["obs"].reshape(-1, columns[0]["obs"].shape[-1])[-1, 0]) - lane
            seat = Seat(
                Marked.built[0].config,
                actors.agents[0],
                [0],
                lane,
                0,
                offset,
                limit,
                0,
                asked,
                bool(world.get("recurrent")),
            )
            wanted: list[dict[str, Any]] = []
            while len(wanted) < len(columns):
                seat.play()
                wanted += expected(seat.episodes[-1])
            for number, (cells, row) in enumerate(zip(columns, wanted, strict=False)):
                assert {*cells} == {*row}
                for name, value in row.items():
                    if name == "obs":
                        frames = cells[name].reshape(-1, cells[name].shape[-1])
                        value = [(*seen, *[1] * (frames.shape[-1] - 5)) for seen in value]
                        np.testing.assert_array_equal(frames, value)
                    else:
                        assert np.array_equal(cells[name], value), (
                            f"lane {lane}, arrival {number}: {name} is {cells[name]}, not {value}"
                        )


def test_an_arrival_leaves_in_the_tick_in_which_it_comes() -> None:
    """Nothing waits for the next action: what was observed is there before it is asked
    for."""
    made = World(ReplayActors(environment=Marked(stalls=10**9), lanes=1, ring=1))
    made.begin()
    made.poll()
    Marked.built[0].looks = 0
    Marked.built[0].bell()
    made.actor._poll()
    made.drain()
    ((first,),) = made.got.values()
    assert first["on_reset"][0, 0] and first["version"][0, 0] == -1 and not first["voided"][0, 0]


def test_what_has_come_by_one_moment_leaves_as_one_row_and_is_asked_for_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def act(self: Known, observation: Any, state: Any, deterministic: Any, out: Any) -> None:
        asked.append(len(observation["obs"]))
        own(self, observation, state, deterministic, out)

    own = Known.act
    monkeypatch.setattr(Known, "act", act)
    made = World(ReplayActors(environment=Marked(), lanes=2, ring=3))
    made.begin()
    Marked.built[1].stalled = True
    made.poll()
    made.drain()
    ((first, *_),) = made.got.values()
    # who has not answered is left out, and holds up nobody
    assert first["on_reset"][0].tolist() == [True, True, False, False, True, True]
    assert asked[0] == 4
    Marked.built[1].stalled = False
    asked.clear()
    made.got.clear()
    Marked.built[1].bell()
    made.poll()
    made.drain()
    ((first, *_),) = made.got.values()
    assert first["on_reset"][0, 2:4].all() and (first["version"][0, [0, 1, 4, 5]] == 0).all()
    assert asked[0] == 6


class Purse:
    """Credits of whoever fills it."""

    steps, finishing, outlived = 0, False, False

    def left(self) -> int:
        return self.steps

    def spend(self, steps: int) -> None:
        self.steps -= steps


def test_who_has_waited_for_credits_goes_before_others_are_received(monkeypatch: pytest.MonkeyPatch) -> None:
    made = World(ReplayActors(environment=Marked(), lanes=1, ring=2))
    made.begin()
    purse = Purse()
    monkeypatch.setattr(made.actor.order, "_credits", purse)
    made.poll()  # resets need none
    first, second = Marked.built
    first.stalled, purse.steps = True, 1
    made.poll()
    made.drain()
    assert purse.steps == 0  # the first is under way, the second waits
    calls: list[str] = []
    for name, environment, call in (("first received", first, "recv"), ("second sent", second, "send")):
        own = getattr(environment, call)
        monkeypatch.setattr(
            environment, call, lambda *given, name=name, own=own: (calls.append(name), own(*given))
        )
    first.stalled, purse.steps = False, 1
    first.bell()
    made.poll()
    assert calls == ["second sent", "first received"]


def test_slots_wait_while_they_are_free_and_have_no_credit_and_not_while_they_step_or_the_process_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, used, stops = 100.0, 0.0, clock._Stops()
    stops.noticing, stops.seen = 1, now
    monkeypatch.setattr(clock, "_stops", stops)
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    monkeypatch.setattr(clock, "process_time", lambda: used)
    made = World(ReplayActors(environment=Marked(), lanes=1, ring=2))
    made.begin()
    gang, purse = made.actor.order, Purse()
    assert gang is not None
    monkeypatch.setattr(gang, "_credits", purse)
    first, second = Marked.built
    made.poll()  # both are reset
    now, used = now + 4, used + 4  # and wait for credits
    assert gang.waited == 4
    now += 3600 + clock.TICK  # stopped
    assert gang.waited == pytest.approx(4 + clock.TICK)
    first.stalled = second.stalled = True
    purse.steps = 2
    made.poll()
    now, used = now + 7, used + 7  # both step, and no credit is left
    made.poll()
    made.drain()
    assert gang.waited == pytest.approx(4 + clock.TICK)
    first.stalled = False
    first.bell()
    made.poll()
    now, used = now + 2, used + 2  # the first has come, and waits; the second steps
    made.poll()
    assert gang.waited == made.actor._stats()["slots/waited"] == pytest.approx(5 + clock.TICK)


def test_a_limit_of_steps_cuts_the_lanes_that_reach_it_and_no_others() -> None:
    made = World(ReplayActors(environment=Marked(), lanes=1, ring=2, max_episode_steps=3))
    made.begin()
    Marked.built[0].stalled = True
    for _ in range(3):
        made.poll()
        made.drain()
    Marked.built[0].stalled = False
    for _ in range(12):
        Marked.built[0].bell()
        made.poll()
        made.drain()
    (samples,) = made.got.values()
    for seat in range(2):
        rows = [{name: array[0, seat] for name, array in sample.items()} for sample in samples]
        lengths, cut = [], 0
        for row in rows:
            if row["info_mask"]:
                lengths.append(int(row["info.length"]))
                cut += bool(row["truncated"])
        assert cut > 0 and max(lengths) <= 3
