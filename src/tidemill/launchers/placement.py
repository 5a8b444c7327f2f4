"""The placement: on which host each worker lives."""

from collections.abc import Mapping

from tidemill.api.edges import group_of, number
from tidemill.api.experiment import Experiment
from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.workers.actor_config import ActorConfig


def place(
    experiment: Experiment,
    hosts: Mapping[str, int],
    chosen: Mapping[str, str] | None = None,
    paces: Mapping[str, float] | None = None,
) -> dict[str, str]:
    """Return the host of each worker, by its name. `hosts`: the cores of each, the
    runner's first. `chosen`: what the user has said of workers or groups, by name.
    `paces`: seconds of an actor's env step on hosts, of those that were measured; others
    are taken for as slow as the slowest. Raises `ConfigError` for what cannot be.

    Workers of one process stay together. The first trainers of each group, evaluation,
    populations and buffers stand with the runner, which has the run's folder; further
    equal trainers, and actors, go to the fastest hosts that have cores left, where most
    are left, a process each; policy workers where most of those are that ask them.
    """
    runner, paces = next(iter(hosts)), paces or {}
    slowest = max(paces.values(), default=0.0)
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
    said = _hosts_said(experiment, hosts, chosen or {})
    for names in experiment.processes():
        if names[0] in said:
            free[said[names[0]]] -= 1
            places |= dict.fromkeys(names, said[names[0]])
        elif all(name in askers for name in names):
            serve.append(names)
        else:
            (with_runner if any(map(stays, names)) else spread).append(names)
    for names in with_runner:
        free[runner] -= 1
        places |= dict.fromkeys(names, runner)
    for names in spread:
        host = max(
            free, key=lambda host: (free[host] > 0, -paces.get(host, slowest) * (free[host] > 0), free[host])
        )
        free[host] -= 1
        places |= dict.fromkeys(names, host)
    for names in serve:
        found = [places[asker] for name in names for asker in askers[name] if asker in places]
        host = max(hosts, key=found.count) if found else runner
        places |= dict.fromkeys(names, host)
    return {name: places[name] for name in configs}


def _hosts_said(
    experiment: Experiment, hosts: Mapping[str, int], chosen: Mapping[str, str]
) -> dict[str, str]:
    """Return the host of each worker of whose process the user has said it. Raises
    `ConfigError`."""
    workers = [name for name, _ in experiment.members()]
    known = list(dict.fromkeys([*map(group_of, workers), *workers]))
    for name, host in chosen.items():
        if name not in known:
            raise ConfigError(f"--place {name}={host}: there is no such worker; {did_you_mean(name, known)}")
        if host not in hosts:
            raise ConfigError(f"--place {name}={host}: there is no such host; {did_you_mean(host, hosts)}")
    said: dict[str, str] = {}
    for names in experiment.processes():
        found = {name: chosen.get(name, chosen.get(group_of(name), "")) for name in names}
        if len(places := set(filter(None, found.values()))) > 1:
            raise ConfigError(
                f"--place: {', '.join(f'{name}={host}' for name, host in found.items() if host)}, and they "
                "share a process; place them together"
            )
        said |= dict.fromkeys(names, *places) if places else {}
    return said
