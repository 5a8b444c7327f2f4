"""Rows of whole episodes tell who played the others in them: `others.version` and
`others.policy`, against rows made the slow way."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.workers.arena import Arena
from tests.workers.world import Known, Marked, Seat, World

from tidemill import Drawn, Fixed, Newest
from tidemill.api.control_messages import Episodes, Facts
from tidemill.streams import sources
from tidemill.workers.actor import Actors, AgentSpec, match_agents

A, B = "samples/a/actor-0/0", "samples/b/actor-0/0"


def told(world: World, edge: str, sample: dict[str, np.ndarray]) -> tuple[Any, ...]:
    """Return lane, agent and episode of a sample's row, and what it says of the
    others."""
    row = {name: array[0, 0] for name, array in sample.items()}
    lane, agent, episode = (int(value) for value in row["obs"][:3])
    return lane, agent, episode, row["others.version"].tolist(), row["others.policy"].tolist()


def seats_of(world: World) -> dict[tuple[int, int], Seat]:
    """Return every seat, by lane and agent."""
    actors, groups = world.actors, match_agents(Marked.built[0].agents, world.actors.agents)
    asked = {identity: versions for policy in Known.built for identity, versions in policy.asked.items()}
    return {
        (lane, agent): Seat(
            actors.environment,
            spec,
            group,
            lane,
            agent,
            0,
            0,
            world.policies.index(spec.policy),
            asked,
            False,
        )
        for spec, group in zip(actors.agents, groups, strict=True)
        for agent in group
        for lane in range(actors.lanes)
    }


def acted(seat: Seat, episode: int, before: float = np.inf) -> list[int]:
    """Return the versions of the seat's actions in one episode, those of ticks before
    `before`."""
    while len(seat.episodes) <= episode:
        seat.play()
    return [row["version"] for row in seat.episodes[episode][:-1] if row["obs"][-1][4] < before]


def end(seat: Seat, episode: int) -> int:
    """Return the tick in which the seat's episode is over."""
    env = seat.environment
    return min(int(env.length(seat.lane, episode)), int(env.death(seat.lane, seat.agent, episode)))


@pytest.mark.parametrize(("turns", "same_step"), [(1, False), (2, False), (1, True)])
def test_rows_tell_which_versions_played_the_others(turns: int, same_step: bool) -> None:
    """Agents that die, lanes that end at different times, versions that change in the
    middle of episodes; two policies, three agents."""
    environment = Marked(agents=3, shortest=3, longest=9, deaths=True, turns=turns, same_step=same_step)
    specs = (
        AgentSpec(match="red_1", policy="p", samples="a", mode="concise"),
        AgentSpec(policy="q", samples="b", mode="concise"),
    )
    world = World(Actors(environment=environment, agents=specs, lanes=3, slots=50))
    world.begin()
    for turn in range(45):
        if turn % 3 == 0:
            world.publish()
        world.poll()
        world.drain()
    columns = {A: [0, 2], B: [1]}  # the agents that the other spec matches
    seats = seats_of(world)
    found = {"one": 0, "changed": 0}
    for edge, others in columns.items():
        for sample in world.got[edge]:
            lane, agent, episode, versions, policies = told(world, edge, sample)
            assert policies == [world.policies.index("q" if other != 1 else "p") for other in others]
            over = end(seats[lane, agent], episode)
            for other, version in zip(others, versions, strict=True):
                played = set(acted(seats[lane, other], episode, over))
                place = (
                    f"{edge}: lane {lane}, agent {agent}, episode {episode}: {version}, and {other} played "
                    f"{played}"
                )
                if len(played) == 1 and version != -1:
                    assert {version} == played, place
                    found["one"] += 1
                elif len(played) > 1:
                    assert version == -1, place
                    found["changed"] += 1
                else:  # the version changed after the agent's last action, while its episode was open
                    assert turns > 1 or not played, place
    assert min(found.values()) > 20, found


def test_between_its_first_row_and_its_first_answer_a_seat_is_played_by_no_version() -> None:
    """Neither by that of the episode before: another may end while an agent has had no
    turn yet."""
    specs = (
        AgentSpec(match="red_0", policy="p", samples="a", mode="concise"),
        AgentSpec(policy="q", samples="b", mode="concise"),
    )
    world = World(Actors(environment=Marked(agents=2), agents=specs, lanes=1, slots=50))
    world.begin()
    agent, target = world.actor.order.agents[1][1], world.actor.order.targets[0]
    for _ in range(2):
        assert target.all_done()
        target.reset()
        target.observe()
        assert agent.acting.tolist() == [-1]
        while not target.all_done():
            world.actor._flush(1)
            target.step()
            target.observe()
        assert agent.acting.tolist() == [0]


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LOOK", 0.0)


def played(arena: Arena, polls: int = 12) -> dict[int, list[tuple[int, int]]]:
    """Let the actor play and return, for each target, the versions of each episode that
    it sent: its own and its opponent's."""
    actor = arena.build("actor-0")
    actor._configure(Facts())
    actor.start()
    consumers = [
        arena.ends["keeper-0"][0].consumer(e.name) for e in arena.edges if e.name.startswith("samples/")
    ]
    found: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(consumers))}
    for _ in range(polls):
        actor._poll()
        for number, consumer in enumerate(consumers):
            assert consumer.attach()
            while (views := consumer.take()) is not None:
                found[number].append((int(views["version"][0, 0]), int(views["others.version"][0, 0, 0])))
                assert views["last_version"][0, 0] == views["version"][0, 0]
                consumer.release()
    return found


def against(parameters: Any, lanes: int = 1, ring: int = 1, same_step: bool = False, **spec: Any) -> Actors:
    opponent = AgentSpec(match="red_1", parameters=parameters, samples=None, **spec)
    environment = Marked(agents=2, shortest=3, longest=5, same_step=same_step)
    return Actors(
        environment=environment,
        lanes=lanes,
        ring=ring,
        slots=8,
        agents=(AgentSpec(match="red_0", mode="concise", samples="a"), opponent),
    )


@pytest.mark.usefixtures("no_waiting")
def test_each_target_of_one_lane_draws_anew_with_each_episode(tmp_path: Path) -> None:
    arena = Arena(tmp_path, {"actor": against(Drawn(), ring=3)}, ("a",))
    arena.push(*range(10))
    games = played(arena)
    opponents = {target: [opponent for _, opponent in rows] for target, rows in games.items()}
    assert all(len(rows) > 10 for rows in opponents.values())
    assert -1 not in {opponent for rows in opponents.values() for opponent in rows}, (
        "nobody was changed within a game"
    )
    assert all(len(set(rows)) > 5 for rows in opponents.values())
    assert len({tuple(rows) for rows in opponents.values()}) == 3, "each target draws for itself"
    assert {own for rows in games.values() for own, _ in rows} == {0}
    assert {message.spec for message in arena.told("actor-0") if isinstance(message, Episodes)} == {0}, (
        "opponents' returns are not the run's"
    )


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("same_step", [False, True])
def test_other_targets_draw_with_each_sample(tmp_path: Path, same_step: bool) -> None:
    """Many lanes, or ones that begin again by themselves: parameters change while games
    go on, and rows tell."""
    arena = Arena(
        tmp_path, {"actor": against(Drawn(), lanes=1 if same_step else 4, same_step=same_step)}, ("a",)
    )
    arena.push(*range(10))
    opponents = [opponent for _, opponent in played(arena, 20)[0]]
    assert len(set(opponents)) > (1 if same_step else 2)


def test_what_is_no_version_of_the_run_has_no_number(tmp_path: Path) -> None:
    """Or the games of a file's policy would be put down to the version that happens to
    have its number."""
    other = Arena(tmp_path / "elsewhere", {"actor": against(Newest())}, ("a",))
    other.push(7)
    other.database.export("policy", 7, tmp_path / "7.safetensors")
    for parameters, version in ((Fixed(), 0), (Fixed(file=str(tmp_path / "7.safetensors")), 7)):
        arena = Arena(tmp_path / str(version), {"actor": against(parameters)}, ("a",))
        arena.push(*range(8))
        (games,) = played(arena).values()
        assert len(games) > 10 and {opponent for _, opponent in games} == {-1}
        assert version in {policy.version for policy in Known.built}
