"""The placement: on which host each worker lives."""

from collections.abc import Mapping

from tidemill.api.edges import number
from tidemill.api.experiment import Experiment
from tidemill.workers.actor_config import ActorConfig


def place(experiment: Experiment, hosts: Mapping[str, int]) -> dict[str, str]:
    """Return the host of each worker, by its name. `hosts`: the cores of each, the
    runner's first.

    Workers of one process stay together. The first trainers of each group, evaluation,
    populations and buffers stand with the runner, which has the run's folder; further
    equal trainers, and actors, go where most cores are left, a process each; policy
    workers where most of those are that ask them.
    """
    runner = next(iter(hosts))
    configs, free = dict(experiment.members()), dict(hosts)
    askers: dict[str, list[str]] = {}  # of each policy worker
    for edge in experiment.edges():
        if edge.name.startswith("requests/"):
            askers.setdefault(edge.targets[0], []).append(edge.source)

    def stays(worker: str) -> bool:
        sums = any(port.role == "sum" for port in configs[worker].ports())
        return not isinstance(configs[worker], ActorConfig) and not (sums and number(worker))

    places: dict[str, str] = {}
    with_runner, serve, spread = list[list[str]](), list[list[str]](), list[list[str]]()
    for names in experiment.processes():
        if all(name in askers for name in names):
            serve.append(names)
        else:
            (with_runner if any(map(stays, names)) else spread).append(names)
    for names in with_runner:
        free[runner] -= 1
        places |= dict.fromkeys(names, runner)
    for names in spread:
        host = max(free, key=lambda host: free[host])
        free[host] -= 1
        places |= dict.fromkeys(names, host)
    for names in serve:
        found = [places[asker] for name in names for asker in askers[name] if asker in places]
        host = max(hosts, key=found.count) if found else runner
        places |= dict.fromkeys(names, host)
    return {name: places[name] for name in configs}
