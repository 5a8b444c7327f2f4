"""The placement: on which host each worker lives, and which of its GPUs it takes."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count

from tidemill.api.edges import Edge, group_of, number
from tidemill.api.experiment import Experiment
from tidemill.api.worker import WorkerConfig
from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.policy import PolicyWorkers
from tidemill.workers.trainer_config import TrainerConfig

_NAMED = 8  # hosts that an error names


def place(
    experiment: Experiment,
    hosts: Mapping[str, int],
    chosen: Mapping[str, str] | None = None,
    paces: Mapping[str, float] | None = None,
    gpus: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """Return the host of each worker, by its name. `hosts`: the cores of each, the
    runner's first. `chosen`: what the user has said of workers or groups, by name.
    `paces`: seconds of an actor's env step on hosts, of those that were measured; others
    are taken for as slow as the slowest. `gpus`: of each host that has any. Raises
    `ConfigError` for what cannot be.

    Workers of one process stay together. The first trainers of each group, evaluation,
    populations and buffers stand with the runner, which has the run's folder; further
    equal trainers, and actors, go to the fastest hosts that have cores left, where most
    are left, a process each; policy workers where most of those are that ask them or, in
    lockstep, where they answer by the newest version (`_Lockstep`); actors whose steps an
    exact trainer grants stand with it for that very reason. What computes on GPUs goes
    only where its GPUs are: a first trainer to the first such host, a further one to that
    with most GPUs left.
    """
    paces = paces or {}
    slowest = max(paces.values(), default=0.0)
    configs, free = dict(experiment.members()), dict(hosts)
    taken = _Gpus(configs, {host: (gpus or {}).get(host, 0) for host in hosts})
    edges = experiment.edges()
    lockstep, granted = _Lockstep(edges, configs), _granted_in_turn(edges, configs)
    askers = lockstep.askers

    def stays(worker: str) -> bool:
        sums = any(port.role == "sum" for port in configs[worker].ports())
        return not isinstance(configs[worker], ActorConfig) and not (sums and number(worker))

    def leaders_of(names: Sequence[str]) -> list[str]:
        return [*filter(None, map(granted.get, names)), *lockstep.leaders(names)]

    def follows(names: Sequence[str]) -> bool:
        led = lockstep.answers_others(names) or not granted.keys().isdisjoint(names)
        return led and {*leaders_of(names)}.isdisjoint(names)

    places: dict[str, str] = {}

    def stand(names: Sequence[str], host: str) -> None:
        taken.take(names, host)
        places.update(dict.fromkeys(names, host))

    with_runner, spread = list[list[str]](), list[list[str]]()
    led, serve = list[list[str]](), list[list[str]]()
    said = _hosts_said(experiment, hosts, chosen or {})
    for names in experiment.processes():
        if names[0] in said:
            (host,) = taken.able(names, said[names[0]])
            free[host] -= 1
            stand(names, host)
        elif all(name in askers for name in names):
            serve.append(names)
        elif follows(names):
            led.append(names)
        else:
            (with_runner if any(map(stays, names)) else spread).append(names)
    for names in with_runner:
        host = taken.able(names)[0]
        free[host] -= 1
        stand(names, host)
    for names in sorted(spread, key=lambda names: not taken.devices(names)):
        on_gpus = bool(taken.devices(names))
        host = max(
            taken.able(names),
            key=lambda host: (
                taken.left(host) if on_gpus else 0,
                free[host] > 0,
                -paces.get(host, slowest) * (free[host] > 0),
                free[host],
            ),
        )
        free[host] -= 1
        stand(names, host)
    for names in led:
        able = taken.able(names)
        with_them = [places[trainer] for trainer in leaders_of(names)]
        host = next((host for host in with_them if host in able), able[0])
        free[host] -= 1
        stand(names, host)
    for names in serve:
        found = [places[asker] for name in names for asker in askers[name] if asker in places]
        able = taken.able(names)
        found = lockstep.hosts(names, places) or found
        stand(names, max(able, key=found.count) if found else able[0])
    lockstep.check(places)
    for name, trainer in granted.items():
        if places[name] != places[trainer]:
            raise ConfigError(
                f"{name} stands on host {places[name]}, {trainer} on {places[trainer]}: with exact = True "
                "each step is chosen by the version that was just published, which may not be there yet; "
                "let both stand on one host (--place)"
            )
    return {name: places[name] for name in configs}


def gpu_numbers(
    experiment: Experiment, homes: Mapping[str, str], taken: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the number of the GPU of its host that each worker takes whose device leaves
    open which (see `Context.gpu`), by name: one that no other of the host names, or takes
    before it. `homes`: the hosts of those that live. `taken`: what some of these have
    already, and keep."""
    devices = {name: device_of(config) for name, config in experiment.members() if name in homes}
    numbers = dict(taken or {})
    for host in dict.fromkeys(homes.values()):
        mine = {name: device for name, device in devices.items() if homes[name] == host}
        # who must have one chooses first, also one that somebody has who need not
        for device, before in (("cuda", ("cuda",)), ("auto", ("cuda", "auto"))):
            gone = _named(mine.values())
            gone |= {numbers[name] for name, each in mine.items() if name in numbers and each in before}
            left = (number for number in count() if number not in gone)
            for name, each in mine.items():
                if each == device and name not in numbers:
                    numbers[name] = next(left)
    return numbers


def device_of(config: WorkerConfig) -> str:
    """Return what a worker computes on: "cpu", or what its `device` says."""
    return config.device if isinstance(config, TrainerConfig | PolicyWorkers) else "cpu"


def needs_gpu(devices: Iterable[str]) -> bool:
    """Return whether any of these devices is a GPU for certain."""
    return any(device.startswith("cuda") for device in devices)


def fit(devices: Sequence[str], gpus: int) -> bool:
    """Return whether so many GPUs are enough for the devices of workers: one for each
    "cuda", and those that are named ("cuda:1"), which several may share."""
    named = _named(devices)
    return max(named, default=-1) < gpus and len(named) + devices.count("cuda") <= gpus


def _named(devices: Iterable[str]) -> set[int]:
    return {int(device[5:]) for device in devices if device.startswith("cuda:")}


def _granted_in_turn(edges: Iterable[Edge], configs: Mapping[str, WorkerConfig]) -> dict[str, str]:
    """Return the trainer that grants steps in turn (`ReplayTrainer.exact`) to each worker
    that is granted them so."""
    return {
        edge.targets[0]: edge.source
        for edge in edges
        if edge.name.startswith("credits/")
        and any(port.role == "grant" and port.in_turn for port in configs[edge.source].ports())
    }


class _Lockstep:
    """The policy workers that are asked in lockstep (`Trainer.max_policy_lag` = 0).

    An actor that was given its sample back is to be answered by the version that was
    published before. A policy worker on the trainer's host has that. On another host it
    may not have come yet; only what the trainer itself gives back there waits for it
    (`Crossing`), so that a policy worker may stand where all stand that ask it, if none
    of them sends its samples to an equal trainer of that one.

    askers: the workers that ask each policy worker
    """

    def __init__(self, edges: Iterable[Edge], configs: Mapping[str, WorkerConfig]) -> None:
        self.askers: dict[str, list[str]] = {}
        self._publishers: dict[str, set[str]] = {}  # of the versions that each policy worker plays
        takers: dict[str, set[str]] = {}  # of each worker's samples
        for edge in edges:
            kind = edge.name.split("/")[0]
            if kind == "requests":
                self.askers.setdefault(edge.targets[0], []).append(edge.source)
            elif kind == "samples":
                takers.setdefault(edge.source, set()).update(edge.targets)
            elif kind == "parameters" and any(port.lockstep for port in configs[edge.source].ports()):
                for reader in edge.targets:
                    self._publishers.setdefault(reader, set()).add(edge.source)
        self._givers = {  # who gives samples back to those that ask each policy worker
            name: set().union(*(takers.get(asker, set()) for asker in asking))
            for name, asking in self.askers.items()
        }

    def hosts(self, names: Sequence[str], places: Mapping[str, str]) -> list[str]:
        """Return the hosts of the trainers with which these policy workers, of one
        process, have to stand; none where they may stand with those that ask them."""
        wrong = [name for name in names if name in self._publishers and not self._may_be_asked(name, places)]
        return [places[trainer] for name in wrong for trainer in sorted(self._publishers[name])]

    def leaders(self, names: Sequence[str]) -> list[str]:
        """Return the trainers whose versions any of these workers plays."""
        return sorted(set().union(*(self._publishers.get(name, set()) for name in names)))

    def answers_others(self, names: Sequence[str]) -> bool:
        """Return whether others than these workers, of one process, ask any of them."""
        asked = [name for name in names if name in self._publishers and name in self.askers]
        return any(not {*self.askers[name]} <= {*names} for name in asked)

    def _may_be_asked(self, name: str, places: Mapping[str, str]) -> bool:
        """Return whether a policy worker may stand with those that ask it."""
        together = len({places.get(asker, "") for asker in self.askers[name]}) == 1
        return together and self._givers[name] <= self._publishers[name]

    def check(self, places: Mapping[str, str]) -> None:
        """Raise `ConfigError` for a policy worker that would answer by an old version."""
        for name, trainers in self._publishers.items():
            if (asking := self.askers.get(name)) is None:
                continue  # an actor, which plays by itself
            theirs, host = sorted({places[trainer] for trainer in trainers}), places[name]
            with_askers = self._may_be_asked(name, places) and places[asking[0]] == host
            if theirs != [host] and not with_askers:
                raise ConfigError(
                    f"{name} stands on host {host}, {' and '.join(sorted(trainers))} on "
                    f"{' and '.join(theirs)}: with max_policy_lag = 0 it is to answer by the version that "
                    "was just published, and may not have it there; let both stand on one host (--place), "
                    'and share its GPU where both need one (device = "cuda:0"), or allow some lag'
                )


class _Gpus:
    """The GPUs of hosts, and which workers have taken them."""

    def __init__(self, configs: Mapping[str, WorkerConfig], gpus: Mapping[str, int]) -> None:
        self._devices = {
            name: device for name, config in configs.items() if needs_gpu([device := device_of(config)])
        }
        self._gpus = gpus
        self._takers: dict[str, list[str]] = {host: [] for host in gpus}

    def devices(self, names: Sequence[str]) -> list[str]:
        """Return the GPUs that workers must have, as they say it."""
        return [self._devices[name] for name in names if name in self._devices]

    def take(self, names: Sequence[str], host: str) -> None:
        """Note that workers stand on a host."""
        self._takers[host] += [name for name in names if name in self._devices]

    def left(self, host: str) -> int:
        """Return how many GPUs of a host nobody has taken."""
        devices = self.devices(self._takers[host])
        return self._gpus[host] - len(_named(devices)) - devices.count("cuda")

    def able(self, names: Sequence[str], said: str = "") -> list[str]:
        """Return which hosts have the GPUs left that workers of one process need, of all
        or of the one that the user has `said`. Raises `ConfigError` where none has."""
        needed = self.devices(names)
        found = [
            host
            for host in ([said] if said else self._gpus)
            if not needed or fit(self.devices(self._takers[host]) + needed, self._gpus[host])
        ]
        if found:
            return found
        needing = [f'{name} (device = "{self._devices[name]}")' for name in names if name in self._devices]
        raise ConfigError(
            f"{f'--place on {said}: ' if said else ''}more GPUs are asked for than there are: "
            f"{' and '.join(needing)} {'needs' if len(needing) == 1 else 'need'} {_words(needed)}, and "
            f"{self._have()}; take hosts that have more (see CUDA_VISIBLE_DEVICES there), fewer workers with "
            'a GPU of their own, device = "cuda:0" for those that are to share one, or "cpu"'
        )

    def _have(self) -> str:
        """Return what hosts have, in words."""
        words = [
            f"host {host} has {gpus or 'none'}"
            + (f", which {' and '.join(takers)} took" if (takers := self._takers[host]) else "")
            for host, gpus in self._gpus.items()
        ]
        more = len(words) - _NAMED
        return "; ".join(words[:_NAMED] + ([f"{more} more have too few"] if more > 0 else []))


def _words(devices: Sequence[str]) -> str:
    named, own = [f"number {number}" for number in sorted(_named(devices))], devices.count("cuda")
    words = ["one of its own" if own == 1 else f"{own} of their own"] if own else []
    return " and ".join([*named, *words])


def draws(config: WorkerConfig) -> bool:
    """Return whether a worker reads the run's parameter database."""
    return any(port.role == "draw" for port in config.ports())


def needs_folder(experiment: Experiment, workers: Collection[str]) -> str:
    """Return why a host that has these workers must see the run's folder, "" where it
    need not."""
    mine = {name: config for name, config in experiment.members() if name in workers}
    trainers = [name for name, config in mine.items() if isinstance(config, TrainerConfig)]
    write = [name for name, config in mine.items() if draws(config) and not isinstance(config, ActorConfig)]
    if experiment.exact_resume:
        return "with exact_resume all workers save there"
    if trainers:  # also in later lives
        return f"{', '.join(trainers)} must read checkpoints"
    return f"{', '.join(write)} must write into it" if write else ""


def check_placed(experiment: Experiment, chosen: Mapping[str, str]) -> None:
    """Raise `ConfigError` where something is placed that the experiment has not."""
    workers = [name for name, _ in experiment.members()]
    known = list(dict.fromkeys([*map(group_of, workers), *workers]))
    for name, host in chosen.items():
        if name not in known:
            raise ConfigError(f"--place {name}={host}: there is no such worker; {did_you_mean(name, known)}")


def _hosts_said(
    experiment: Experiment, hosts: Mapping[str, int], chosen: Mapping[str, str]
) -> dict[str, str]:
    """Return the host of each worker of whose process the user has said it. Raises
    `ConfigError`."""
    check_placed(experiment, chosen)
    for name, host in chosen.items():
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
