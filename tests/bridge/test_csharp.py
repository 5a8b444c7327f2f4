"""The simulator's end in C#, compiled with Mono: the same behaviour as the others' (test
by test), and what is its own."""

import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import numpy as np
import psutil
import pytest
from tests.bridge.conftest import CSHARP, CSHARP_PAGE
from tests.bridge.raw_trainer import CLOSE, RESET, RawTrainer

from tidemill.bridge.protocol.samplers import Uniform
from tidemill.bridge.protocol.side_channels import (
    Channels,
    EngineSettings,
    EnvironmentParameters,
    FloatProperties,
    RawBytes,
    SideChannel,
    Statistics,
)
from tidemill.bridge.protocol.specs import ActionTuple
from tidemill.bridge.trainer_side.simulator import Simulator
from tidemill.core.errors import PeerLost, SimulatorError

LAYOUTS = ("0", "0.3.0", "0.3.2")


@pytest.fixture
def trainer(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RawTrainer]:
    """A trainer by the letter of a layout, "0" unless the test is parametrized."""
    made = RawTrainer(tmp_path, getattr(request, "param", "0"))
    yield made
    made.close()


def output(csharp: Path, name: str, *arguments: object) -> str:
    return subprocess.run(
        [csharp / name, *map(str, arguments)], check=True, capture_output=True, text=True
    ).stdout


def steps(simulator: Simulator, count: int) -> None:
    for _ in range(count):
        simulator.step()


def test_a_world_that_is_killed_leaves_no_file_of_monos(csharp: Path) -> None:
    with Simulator(csharp / "trivial") as simulator:
        simulator.reset()
        assert simulator._process is not None
        number = simulator._process.pid
        psutil.Process(number).kill()
        with pytest.raises(PeerLost, match="SIGKILL"):
            steps(simulator, 2)
    assert not Path(f"/dev/shm/mono.{number}").exists()


def test_every_asset_of_the_package_has_a_meta_file_with_an_id_of_its_own() -> None:
    hidden = [
        path
        for path in CSHARP.rglob("*")
        if any(part.endswith("~") for part in path.relative_to(CSHARP).parts)
    ]
    assets = {path for path in CSHARP.rglob("*") if path not in hidden and path.suffix != ".meta"}
    metas = {path for path in CSHARP.rglob("*.meta") if path not in hidden}
    assert {Path(f"{asset}.meta") for asset in assets} == metas
    ids = [line for meta in metas for line in meta.read_text().splitlines() if line.startswith("guid: ")]
    assert len(set(ids)) == len(metas) and all(len(line) == len("guid: ") + 32 for line in ids)


@pytest.mark.parametrize(("world", "mean"), [("reach", 1.99), ("corridor", 0.92)])
def test_sample_worlds_run_on_their_heuristic_without_a_trainer(
    csharp: Path, world: str, mean: float
) -> None:
    words = output(csharp, world, "--episodes", 200).split()
    assert float(words[2]) == pytest.approx(mean, abs=0.02)
    assert int(words[4]) >= 200
    assert (
        output(csharp, world, "--episodes", 200, "--seed", 7) != " ".join(words) + "\n" or world == "corridor"
    )


def test_the_example_of_the_page_runs(csharp: Path) -> None:
    # without a trainer it goes on, frame after frame
    with subprocess.Popen([csharp / "game"], stdout=subprocess.PIPE, text=True) as alone:
        assert alone.stdout is not None
        actions = [alone.stdout.readline() for _ in range(3)]
        alone.kill()
    assert actions == ["7 does -1 0\n"] * 3
    parameters, statistics = EnvironmentParameters(), Statistics()
    parameters.set("gravity", 1.5)
    with Simulator(csharp / "game", channels=Channels([parameters, statistics])) as simulator:
        simulator.reset()
        decisions, terminals = simulator.get_steps("walkers")
        assert (
            list(decisions.agent_id) == [7]
            and list(terminals.agent_id) == [8]
            and decisions.obs[1].shape == (1, 8, 8, 1)
        )
        assert (
            decisions.obs[0].tolist() == [[1, 2, 3]]
            and decisions.reward[0] == 0.5
            and terminals.reward[0] == 1
        )
        simulator.step()
        assert statistics.tally.take()["height"] == ("average", 3 * 3.5, 3)


def test_the_pages_jobs_compile(csharp: Path, tmp_path: Path, csharp_compiler: str) -> None:
    (tmp_path / "Jobs.cs").write_text(CSHARP_PAGE.read_text().split("```csharp\n")[2].split("```")[0])
    library = f"-out:{tmp_path}/jobs.dll"
    subprocess.run(
        [
            csharp_compiler,
            "-unsafe",
            "-warnaserror",
            "-t:library",
            f"-r:{csharp}/Tidemill.dll",
            library,
            tmp_path / "Jobs.cs",
        ],
        check=True,
    )


def test_the_short_example_compiles(csharp: Path, tmp_path: Path, csharp_compiler: str) -> None:
    short = CSHARP_PAGE.with_name("simulators.md").read_text().split("```csharp\n")[1].split("```")[0]
    (tmp_path / "Line.cs").write_text(f"using Tidemill; class Line {{ static void Main() {{ {short} }} }}")
    subprocess.run([csharp_compiler, f"-r:{csharp}/Tidemill.dll", tmp_path / "Line.cs"], check=True)


def scripted(name: str, seen: np.ndarray) -> ActionTuple:
    """What the worlds' heuristics do, from observations alone."""
    if name == "reach":
        return ActionTuple(np.clip(seen[:, :2] / 0.1, -1, 1).astype(np.float32))
    right = seen[:, 7] > 0
    there = np.where(right, seen[:, 6], seen[:, 0]) > 0
    return ActionTuple(
        discrete=np.stack([np.where(there, 0, np.where(right, 2, 1)), there], axis=1).astype(np.int32)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("world", "mean"), [("reach", 1.99), ("corridor", 0.92)])
def test_a_scripted_trainer_plays_the_sample_worlds(
    csharp: Path, world: str, mean: float, layout: str
) -> None:
    statistics = Statistics()
    rewards, ends = 0.0, 0
    with Simulator(csharp / world, layout=layout, channels=Channels([statistics])) as simulator:
        simulator.reset()
        for _ in range(400):
            decisions, terminals = simulator.get_steps(world)
            rewards += decisions.reward.sum() + terminals.reward.sum()
            ends += len(terminals)
            if world == "corridor":
                cells = decisions.obs[0]
                ends_of = cells[:, 0] + cells[:, 6] > 0
                zero = np.zeros(len(cells), bool)
                assert np.array_equal(
                    decisions.action_mask[0], np.stack([zero, cells[:, 0] > 0, cells[:, 6] > 0], axis=1)
                )
                assert np.array_equal(decisions.action_mask[1], np.stack([zero, ~ends_of], axis=1))
            simulator.set_actions(world, scripted(world, decisions.obs[0]))
            simulator.step()
    assert ends >= 200
    assert rewards / ends == pytest.approx(mean, abs=0.1)
    if world == "reach":
        how, total, count = statistics.tally.take()["reach/steps"]
        assert how == "average" and count >= ends and 1 <= total / count <= 50


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_masks_ends_and_actions_arrive_as_they_were_set(csharp: Path, layout: str) -> None:
    hybrid = layout == "0.3.2"
    with Simulator(csharp / "probe", ["echo", str(int(hybrid))], layout=layout) as simulator:
        simulator.reset()
        names = ["flat", "branchy", "both"][: 2 + hybrid]
        assert list(simulator.behavior_specs) == names
        spec = simulator.behavior_specs["branchy"]
        assert spec.max_agents == 4 and [o.shape for o in spec.observation_specs] == [(2,), (2, 3), (2, 2, 2)]
        assert tuple(spec.action_spec.branches) == (3, 2) and spec.action_spec.continuous_size == 0
        last: dict[tuple[str, int], list[float]] = {}
        for tick in range(7):
            for name in names:
                decisions, terminals = simulator.get_steps(name)
                ended = 5 + tick % 3
                assert sorted(decisions.agent_id) == sorted({5, 6, 7} - {ended} | {100 + tick})
                assert list(terminals.agent_id) == [ended] and list(terminals.interrupted) == [tick % 2 == 1]
                for steps in (decisions, terminals):
                    for row, agent in enumerate(steps.agent_id):
                        assert steps.reward[row] == np.float32(tick + np.float32(agent / 100))
                        assert list(steps.obs[0][row]) == last.get((name, agent), [0, 0])
                        first = np.float32(1000 * tick + 10 * agent)
                        assert np.allclose(
                            steps.obs[1][row].ravel(), first + np.arange(6) + 0.1, atol=2e-3, rtol=0
                        )
                        assert np.allclose(
                            steps.obs[2][row].ravel(), first + np.arange(8) + 0.2, atol=2e-3, rtol=0
                        )
                sizes = simulator.behavior_specs[name].action_spec.branches
                for row, agent in enumerate(decisions.agent_id):
                    if sizes:
                        forbidden = [a == (tick + agent) % sizes[0] and agent < 100 for a in range(sizes[0])]
                        assert list(decisions.action_mask[0][row]) == forbidden
                agents = decisions.agent_id
                continuous = (agents[:, None] + np.arange(2) / 4 + tick).astype(np.float32)[
                    :, : 2 if name == "flat" else int(name == "both")
                ]
                discrete = np.stack([(agents + tick) % 2, agents // 2 % 2], axis=1).astype(np.int32)[
                    :, : len(sizes)
                ]
                simulator.set_actions(name, ActionTuple(continuous, discrete))
                for row, agent in enumerate(agents):
                    last[name, agent] = [*continuous[row], *discrete[row]]
            simulator.step()


def test_a_hybrid_world_is_refused_where_the_layout_has_one_kind_of_actions(csharp: Path) -> None:
    with (
        pytest.raises(SimulatorError) as caught,
        Simulator(csharp / "probe", ["echo", "1"], layout="0") as simulator,
    ):
        simulator.reset()
    assert "0.3.2" in str(caught.value)


def test_what_jobs_hold_has_no_references(csharp: Path) -> None:
    lines = output(csharp, "probe", "blittable").splitlines()
    assert lines[:-1] == [
        f"{name} True unmanaged" for name in ("JobWorld", "JobRequest", "JobAction", "TellJob", "HearJob")
    ]
    assert lines[-1] == "Request world: World"  # that the test would see one


@pytest.mark.parametrize("trainer", LAYOUTS[1:], indirect=True)
def test_jobs_tell_and_hear_from_parallel_threads(csharp: Path, trainer: RawTrainer) -> None:
    agents = 203
    trainer.start(csharp / "probe", "jobs", str(agents))
    if trainer.layout != "0.3.2":  # it has both kinds of actions
        trainer.give()
        assert "layout 0.3.0 takes one kind" in trainer.end()[2]
        return
    done = np.zeros((agents, 2))
    for tick in range(20):
        group = trainer.step()["jobs"]
        asks, ends = group.decisions, group.ends
        assert sorted(asks.ids) == list(range(0, agents, 2)) and sorted(ends.ids) == list(range(1, agents, 2))
        for rows in (asks, ends):
            ids = np.array(rows.ids)
            assert np.array_equal(rows.rewards, ids + 0.5)
            assert np.array_equal(rows.obs[0], np.stack([ids, np.full(len(ids), tick)], axis=1))
            seen = 6 * ids[:, None] + np.arange(6)
            if tick and rows is asks:
                seen = np.concatenate([seen[:, :4], done[ids]], axis=1)
            assert np.array_equal(rows.obs[1].reshape(-1, 6), seen.astype(np.float32))
        assert ends.interrupted == [agent % 3 == 0 for agent in ends.ids]
        assert np.array_equal(asks.masks.reshape(-1, 3), np.eye(3)[np.array(asks.ids) % 3])
        continuous, discrete = np.array(asks.ids)[:, None] + tick, np.array(asks.ids)[:, None] % 3
        trainer.act(group, continuous, discrete)
        done[asks.ids] = np.concatenate([continuous, discrete], axis=1)


def test_what_a_job_gets_wrong_is_an_error_of_the_next_exchange(csharp: Path) -> None:
    lines = output(csharp, "probe", "job-mistakes").splitlines()
    assert lines[0] == "1 7"
    said = [
        "one more was requested (agent 2)",
        "one more has ended (agent 3)",
        "an exchange before",
        "observation 1 of agent 4; there are 1",
        "another number of values than 3",
        "agent 4, which has ended",
        "branch 0 does not have",
        "number 0 of action 5, which is not there",
    ]
    for text, line, actions in zip(said, lines[1::2], lines[2::2], strict=True):
        assert text in line and actions == "0"


def test_the_sample_of_jobs_plays(csharp: Path) -> None:
    words = output(csharp, "drift", "--episodes", 300).split()
    assert float(words[2]) == pytest.approx(0.96, abs=0.03) and int(words[4]) >= 300
    with Simulator(csharp / "drift", ["--agents", "40"], layout="0.3.2") as simulator:
        simulator.reset()
        for _ in range(40):
            decisions, terminals = simulator.get_steps("drift")
            assert sorted([*decisions, *terminals]) == list(range(40))
            simulator.set_actions(
                "drift", ActionTuple(np.sign(decisions.obs[0][:, 1:] - decisions.obs[0][:, :1]))
            )
            simulator.step()
            if len(terminals):
                assert not terminals.interrupted.any() and (terminals.reward == 1).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_may_appear_at_every_step(csharp: Path, layout: str) -> None:
    with Simulator(csharp / "probe", ["late", "20"], layout=layout) as simulator:
        simulator.reset()
        for step in range(25):
            specs = simulator.behavior_specs
            assert len(specs) in (min(step + 1, 20), min(step + 2, 20))
            for number, name in enumerate(specs):
                assert name == f"w{number}"
                decisions, _ = simulator.get_steps(name)
                assert list(decisions.agent_id) == [number] and decisions.obs[0].item() == 1000 + number
            simulator.step()


def test_200_changes_of_the_file_in_one_run_and_the_first_that_cannot_be_made_is_told(csharp: Path) -> None:
    with Simulator(csharp / "probe", ["late", "300"]) as simulator:
        steps(simulator, 200)
        assert len(simulator.behavior_specs) >= 200
        with pytest.raises(SimulatorError, match="cannot grow any more"):
            steps(simulator, 100)


def test_requests_from_eight_threads_each_have_a_row_of_their_own(csharp: Path) -> None:
    with Simulator(csharp / "probe", ["threads", "1000"]) as simulator:
        simulator.reset()
        for _ in range(10):
            decisions, _ = simulator.get_steps("many")
            order = np.argsort(decisions.agent_id)
            assert np.array_equal(decisions.agent_id[order], np.arange(1000))
            assert np.array_equal(decisions.reward, decisions.agent_id)
            assert np.array_equal(decisions.obs[0], np.repeat(decisions.agent_id[:, None], 3, axis=1))
            simulator.step()


class Text(SideChannel):
    """A channel of one's own."""

    def __init__(self) -> None:
        super().__init__("11112222-3333-4444-5555-666677778888", 2000)
        self.came: list[bytes] = []

    def receive(self, data: bytes) -> None:
        self.came.append(data)


@pytest.mark.parametrize("framing", ["uuid", "type"])
@pytest.mark.parametrize("layout", ["0", "0.3.2"])
def test_side_channels_in_both_framings(csharp: Path, layout: str, framing: str) -> None:
    raw, text = RawBytes(UUID("aaaabbbb-cccc-dddd-eeee-ffff00001111"), 7), Text()
    nobodys = RawBytes(UUID(int=5), 8)
    engine = EngineSettings()
    parameters = EnvironmentParameters()
    properties = FloatProperties()
    statistics = Statistics()
    channels = Channels([raw, text, nobodys, engine, parameters, properties, statistics], framing=framing)
    with Simulator(
        csharp / "probe", ["channels", str(int(framing == "type"))], layout=layout, channels=channels
    ) as simulator:
        simulator.reset()
        raw.take()
        long = bytes(range(256)) * 40
        raw.send(long)
        nobodys.send(b"?")
        text.send(b"abc")
        engine.set(width=640, height=480, quality_level=3, time_scale=2.5, target_frame_rate=60)
        parameters.set("speed", 0.25)
        parameters.set("size", Uniform(3.0, 3.0), seed=4)
        properties.set("gravity", -9.5)
        simulator.step()
        told = raw.take()
        simulator.step()
        told += raw.take()
        assert long in told and text.came == [b"cba"]
        words = told[-1].decode().split()
        assert words[:4] == ["640x480", "3", "2.5", "60"]
        assert {"speed=0.25", "size=3", "gravity=-9.5", "unknown=1"} <= set(words)
        came = statistics.tally.take()
        assert (
            came["before"] == ("most_recent", 5.0, 1) and came["ticks"][0] == "sum" and came["ticks"][2] >= 3
        )
        assert properties.get("tick", -1) >= 2


def test_a_trainer_of_another_make_is_served_in_naps(csharp: Path, tmp_path: Path) -> None:
    trainer = RawTrainer(tmp_path, known=False)
    trainer.start(csharp / "trivial")
    for command in (RESET, 0, 0):
        trainer.step(command)
    assert [file.name for file in tmp_path.iterdir()] == [trainer.path.name]
    trainer.give(CLOSE)
    assert trainer.end()[0] == 0
    assert list(tmp_path.iterdir()) == []


# Offset, form, value, part of the message, whether it is looked at again at a later turn.
HOSTILE = {
    "0": [
        (0, "i", 21, "length 21", False),
        (0, "i", 2**31 - 1, "length 2147483647", False),
        (4, "i", 1, "no layout", False),
        (10, "i", 3, "capacity 3", False),
        (10, "i", -1, "capacity -1", False),
        (10, "i", 2**31 - 1, "capacity 2147483647", False),
        (14, "i", 1, "holds 1 bytes", True),
        (14, "i", -1, "holds -1 bytes", True),
        (14, "i", 2**31 - 1, "holds 2147483647 bytes", True),
        (18, "i", 1, "1 groups", False),
        (18, "i", -1, "-1 groups", False),
        (8, "B", 2, "turn is 2", True),
        (9, "B", 4, "command is 4", True),
        (9, "B", 2, "cannot be opened", True),
    ],
    "0.3.2": [
        (4, "i", 4, "no layout", False),
        (8, "i", 3, "no layout", False),
        (16, "i", 0, "names body 0", True),
        (16, "i", -1, "names body -1", True),
        (16, "i", 200, "cannot be opened", True),
        (16, "i", 256, "names body 256", True),
        (20, "i", 21, "says 21", False),
        (20, "i", 3, "has room for 3 bytes", False),
        (20, "i", -1, "has room for -1 bytes", False),
        (20, "i", 2**31 - 1, "says 2147483647", False),
        (24, "i", 1, "groups take 1", False),
        (24, "i", -1, "groups take -1", False),
    ],
}


@pytest.mark.parametrize(
    ("layout", "offset", "form", "value", "message", "later"),
    [
        (layout, *row[:4], later)
        for layout, rows in HOSTILE.items()
        for row in rows
        for later in ((False, True) if row[4] else (False,))
    ],
)
def test_numbers_that_cannot_be_are_an_error_and_not_a_read_outside(
    csharp: Path, tmp_path: Path, layout: str, offset: int, form: str, value: int, message: str, later: bool
) -> None:
    trainer = RawTrainer(tmp_path, layout)
    if later:
        trainer.start(csharp / "trivial")
        trainer.step()
    struct.pack_into(f"<{form}", trainer.head, offset, value)
    if (layout, offset) != ("0", 8):
        trainer.give(value if (layout, offset) == ("0", 9) else 0)
    if not later:
        trainer.start(csharp / "trivial")
    code, _, told = trainer.end()
    assert code == 1 and message in told


@pytest.mark.parametrize(
    ("world", "bits", "message"),
    [
        ("reach", 0x7FC00000, "for agent"),
        ("reach", 0x7F800000, "for agent"),
        ("corridor", 3, "branch 0, which has 3 actions"),
        ("corridor", 2**32 - 1, "is -1"),
    ],
)
def test_actions_that_cannot_be_are_told_with_their_agent(
    csharp: Path, trainer: RawTrainer, world: str, bits: int, message: str
) -> None:
    trainer.start(csharp / world)
    actions = trainer.step()[world].actions_at
    struct.pack_into("<2I", trainer.body, actions, bits, bits)
    trainer.give()
    code, _, told = trainer.end()
    assert code == 1 and message in told and f"'{world}'" in told


def test_a_file_that_the_trainer_changed_is_checked_again(csharp: Path, trainer: RawTrainer) -> None:
    """The trainer's new file has room for a longer side channel, and groups that nobody
    registered."""
    trainer.start(csharp / "trivial")
    trainer.step()
    trainer.grow(44)
    struct.pack_into("<i", trainer.head, trainer.groups_at - 4, 2)
    trainer.give()
    code, _, told = trainer.end()
    assert code == 1 and "2 groups" in told


@pytest.mark.parametrize(
    ("layout", "others"), [*((layout, []) for layout in LAYOUTS), ("0", ["memory.txt", "thesis"])]
)
def test_the_trainers_death_ends_the_simulator_and_its_folder_but_for_what_is_not_the_bridges(
    csharp: Path, tmp_path: Path, layout: str, others: list[str]
) -> None:
    folder = tmp_path / "tidemill-of-a-trainer"
    folder.mkdir()
    for name in others:
        (folder / name).touch()
    trainer = RawTrainer(folder, layout)
    trainer.start(csharp / "trivial")
    trainer.step()
    assert {"memory.trainer", "memory.simulator"} < {file.name for file in folder.iterdir()}
    trainer.lock.close()  # as the kernel does when a process ends
    assert trainer.end()[0] == 0
    assert sorted(path.name for path in folder.iterdir()) == others if others else not folder.exists()


@pytest.mark.parametrize("reason", ["closed", "died"])
@pytest.mark.parametrize("trainer", LAYOUTS, indirect=True)
def test_who_requests_nothing_takes_resets_and_notices_that_the_trainer_has_left(
    csharp: Path, trainer: RawTrainer, reason: str
) -> None:
    trainer.start(csharp / "probe", "idle")
    trainer.give(RESET)
    assert trainer.process is not None and trainer.process.stdout is not None
    assert trainer.process.stdout.readline() == "reset\n"
    if reason == "closed":
        trainer.give(CLOSE)
    else:
        trainer.lock.close()
    code, told, _ = trainer.end()
    assert code == 0 and reason in told


@pytest.mark.parametrize("trainer", ["0", "0.3.2"], indirect=True)
def test_a_second_simulator_at_one_trainer_is_refused_and_disturbs_nobody(
    csharp: Path, trainer: RawTrainer
) -> None:
    trainer.start(csharp / "trivial")
    trainer.step()
    second = subprocess.run(
        [csharp / "trivial", "--memory-path", trainer.first], capture_output=True, text=True
    )
    assert second.returncode == 1 and "Another simulator" in second.stderr
    assert list(trainer.step()["trivial"].decisions.ids) == list(range(10))
    assert Path(f"{trainer.first}.simulator").exists()


def test_the_mark_of_a_simulator_that_died_is_taken_over(csharp: Path, trainer: RawTrainer) -> None:
    mark = Path(f"{trainer.first}.simulator")
    mark.write_text("1\n")
    trainer.start(csharp / "trivial")
    trainer.step()
    assert trainer.process is not None and mark.read_text() == f"{trainer.process.pid}\n"
    assert mark.stat().st_mode & 0o777 == trainer.path.stat().st_mode & 0o777 == 0o600


def test_a_simulator_sleeps_while_the_trainer_thinks(csharp: Path, trainer: RawTrainer) -> None:
    trainer.start(csharp / "trivial")
    trainer.step()
    assert trainer.process is not None
    seen, begun = psutil.Process(trainer.process.pid), time.monotonic()
    before = sum(seen.cpu_times()[:2])
    time.sleep(1)
    assert sum(seen.cpu_times()[:2]) - before < 0.3 * (time.monotonic() - begun)


def test_a_deadline_that_was_set_is_told(csharp: Path, trainer: RawTrainer) -> None:
    trainer.start(csharp / "probe", "deadline")
    code, _, told = trainer.end()
    assert code == 3 and told.startswith("DeadlineException: ")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_simulator_that_closes_is_told_from_one_that_died(csharp: Path, layout: str) -> None:
    with (
        Simulator(csharp / "probe", ["closes", "3"], layout=layout) as simulator,
        pytest.raises(PeerLost, match="closed"),
    ):
        steps(simulator, 10)


def test_the_heuristic_acts_without_a_trainer(csharp: Path) -> None:
    lines = output(csharp, "probe", "heuristic").splitlines()
    assert lines == [
        *["True False there is no trainer"] * 2,
        "clever 4 3 0",
        "clever 9 7 1",
        "still 1 0 0",
        "4 9 4 9",
        "0 4",
    ]


def test_every_mistake_is_told_by_what_is_wrong(csharp: Path) -> None:
    lines = output(csharp, "probe", "mistakes").splitlines()
    parts = [
        *["room for 2 agents"] * 2,
        "has 3 values, not 2",
        "no observation 1",
        "needs 3 values from 2 on",
        "from -1 on",
        "no branch 1",
        "its mask 1 values",
        "no action 2",
        "agent 2 has ended",
        "no world 'smal'; there are: small",
        "a world 'small' already",
        *["1 to 63 ASCII characters"] * 3,
        "maxAgents is 0",
        "a size of observation 0 is 0",
        "one to three sizes",
        "observation 0 is too large",
        *["2 GiB"] * 2,
        "continuousSize is -1",
        "branch 1 has 0 actions",
        "until the next exchange",
        "until the next exchange",
        "from 0 to 0",
        "--memory-path is the last word",
        "/nowhere/at/all cannot be opened",
        "not ASCII",
    ]
    assert len(lines) == len(parts)
    for line, part in zip(lines, parts, strict=True):
        assert part in line and (line.startswith("BridgeException: ") or part == "from 0 to 0")


@pytest.mark.parametrize("trainer", LAYOUTS, indirect=True)
def test_agents_that_only_a_reset_makes_come_after_a_first_answer_without_any(
    csharp: Path, trainer: RawTrainer
) -> None:
    trainer.start(csharp / "probe", "born")
    assert trainer.step()["born"].decisions.ids == []
    assert trainer.step(RESET)["born"].decisions.ids == [1]
    assert trainer.step()["born"].decisions.ids == [1]
    trainer.give(CLOSE)
    assert trainer.end()[0] == 0
