"""Workers that compute on GPUs stand where their GPUs are, and too few of these are named
before anything starts."""

from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from tests.hosts.hosts import needs_namespaces
from tests.launchers.host_launchers import TwoGpus, allowed
from tests.launchers.test_agents import Told, told  # noqa: F401  (a fixture)
from tests.launchers.test_hosts import agents_of, experiment
from tests.run.watching import wait_until

from tidemill import Experiment, train
from tidemill.api.launcher import Job
from tidemill.core.errors import ConfigError, RunError
from tidemill.launchers.hosts import order_of
from tidemill.launchers.known_agents import Share
from tidemill.launchers.placement import gpu_numbers, place

CORES = {"runner": 2, "b": 2, "c": 8}


def on(devices: Mapping[str, str], trainers: int = 1, servers: int = 0) -> Experiment:
    made = experiment(trainers=trainers, servers=servers, lag=None)
    workers = {
        name: config.replace(device=devices[name]) if name in devices else config
        for name, config in made.workers.items()
    }
    return made.replace(workers=workers)


def test_what_computes_on_gpus_stands_where_they_are() -> None:
    made = on({"trainer": "cuda", "server": "cuda"}, trainers=3, servers=1)
    places = place(made, CORES, gpus={"b": 3, "c": 1})
    assert places == {
        "actor-0": "c",  # with most cores left, once the trainers have theirs
        "actor-1": "c",
        "trainer-0": "b",  # the first that has what it computes on
        "trainer-1": "b",
        "trainer-2": "c",  # by now as many are left there, and more cores
        "server-0": "b",  # whoever asks it
    }
    assert gpu_numbers(made, places) == {"trainer-0": 0, "trainer-1": 1, "trainer-2": 0, "server-0": 2}


def test_a_first_trainer_stays_with_a_runner_that_has_its_gpu_and_others_spread() -> None:
    made = on({"trainer": "cuda"}, trainers=3)
    gpus = {"runner": 2, "b": 2}
    places = place(made, CORES, gpus=gpus)
    assert [places[f"trainer-{i}"] for i in range(3)] == ["runner", "b", "runner"]
    assert gpu_numbers(made, places) == {"trainer-0": 0, "trainer-1": 0, "trainer-2": 1}
    assert set(place(on({"trainer": "auto"}, trainers=3), CORES, gpus=gpus).values()) == {"runner", "c"}


def test_gpus_that_are_named_may_be_shared_and_are_left_to_whom_names_them() -> None:
    made = on({"trainer": "cuda", "server": "cuda:0"}, servers=2)
    places = place(made, {"runner": 4}, gpus={"runner": 2})
    assert gpu_numbers(made, places) == {"trainer-0": 1}
    with pytest.raises(ConfigError, match=r'server-0 \(device = "cuda:0"\) needs number 0, and host runner'):
        place(made, {"runner": 4}, gpus={"runner": 1})
    with pytest.raises(ConfigError, match=r"needs number 2, and host runner has 2;"):
        place(on({"trainer": "cuda:2"}), {"runner": 4}, gpus={"runner": 2})


def test_workers_of_one_process_have_their_gpus_together() -> None:
    made = on({"trainer": "cuda", "server": "cuda"}, servers=1).replace(together=("trainer", "server"))
    assert place(made, CORES, gpus={"b": 1, "c": 2})["trainer-0"] == "c"
    said = r'trainer-0 \(device = "cuda"\) and server-0 \(device = "cuda"\) need 2 of their own'
    with pytest.raises(ConfigError, match=said):
        place(made, CORES, gpus={"b": 1, "c": 1})


def test_where_the_user_says_there_must_be_gpus_too() -> None:
    made = on({"trainer": "cuda"}, trainers=2)
    assert place(made, CORES, {"trainer-1": "c"}, gpus={"b": 1, "c": 1})["trainer-1"] == "c"
    said = (
        r"--place on b: more GPUs are asked for than there are: trainer-1 .* needs one of its own, and host "
        r"runner has none; host b has 1, which trainer-0 took; host c has 9; take hosts that have more"
    )
    with pytest.raises(ConfigError, match=said):
        place(made, CORES, {"trainer": "b"}, gpus={"b": 1, "c": 9})


def test_what_hosts_have_they_tell_and_too_few_are_named(tmp_path: Path) -> None:
    if why := allowed():
        needs_namespaces(why)
    made = on({"trainer": "cuda"}, trainers=3)
    said = (
        r"more GPUs are asked for than there are: trainer-2 \(device = \"cuda\"\) needs one of its own, and "
        r"host runner has none; host b has 2, which trainer-0 and trainer-1 took; take hosts"
    )
    with pytest.raises(ConfigError, match=said):
        train(made, launch=TwoGpus, layout="given", run_dir=tmp_path / "run", quiet=True)
    wait_until(lambda: not agents_of(psutil.Process().children(recursive=True)), 60, "no agent is left")
    assert not (tmp_path / "run").exists()


def test_who_moves_takes_a_gpu_that_nobody_has_there(told: Told) -> None:  # noqa: F811
    launcher, shares = TwoGpus(), told.agents.shares
    launcher._agents = told.agents
    launcher.places = {"trainer-0": "runner", "trainer-1": "b", "trainer-2": "c"}
    launcher._job = Job(on({"trainer": "cuda"}, trainers=3), None, None, None)
    shares["c"] = Share("c", told.meet("c", None))
    shares["c"].agent.home = "c"
    launcher._number_gpus(["b", "c"])
    assert launcher._job.gpus == dict.fromkeys(launcher.places, 0)
    shares["c"].agent = told.meet("c#1", "b")  # host b has both shares now
    launcher._number_gpus(["c"])
    order = order_of(launcher._job, launcher.places, "c", {}, {}, "")
    assert launcher._job.gpus["trainer-1"] == 0 and order.gpus == {"trainer-2": 1}
    shares["b"].agent = None
    launcher._number_gpus(["c"])
    assert launcher._job.gpus == {"trainer-0": 0, "trainer-2": 0}


def test_who_must_have_a_gpu_takes_also_one_that_somebody_has_who_need_not() -> None:
    made = on({"trainer": "cuda", "server": "auto"}, trainers=2, servers=1)
    homes = dict.fromkeys(("trainer-0", "trainer-1", "server-0"), "b")
    taken = {"trainer-1": 0, "server-0": 1}
    assert gpu_numbers(made, homes, taken) == {**taken, "trainer-0": 1}


def test_a_lost_share_goes_only_where_its_gpus_are(told: Told) -> None:  # noqa: F811
    agents = told.agents
    lost = agents.shares["gone"] = Share("gone", None)
    agents.cores, agents.gpus = {"runner": 9, "b": 1, "gone": 1}, {"runner": 1, "b": 1, "gone": 1}
    agents._devices = {"runner": ["cuda:0", "cpu"], "b": ["auto"], "gone": ["cuda"]}
    agents._on_folder = {"gone": ""}
    assert agents._holder_for(lost) == "b"  # the runner has the cores, and its GPU is taken
    agents._devices["gone"] = ["cpu", "auto"]
    assert agents._holder_for(lost) == "runner"
    agents._devices |= {"gone": ["cuda"], "b": ["cuda"]}
    with pytest.raises(
        RunError, match="no host is left that can have the workers of host gone, which need GPUs"
    ):
        agents._holder_for(lost)
    agents._engine.restarts = True
    assert agents._holder_for(lost) == ""  # its own host may come back
