"""How workers are joined: the ends of streams that they hold, and the channels and cells
that follow from them.

The edges of each kind of stream:

samples: a channel per producer, outlet and consumer. Every *group* of consumers gets
    every sample (broadcast); within a group each sample goes to one consumer: producers
    are shared out in turn, and one that is left with several consumers serves them in
    turn
inference: two channels per asker and policy, to one server: that with the fewest, so that
    all servers have work; and two spare ones to each other server of that policy
    (`spare_edges`), which ask for memory once one of them is to answer instead
parameters: a cell per trainer of the policy, read by its share of the players
sums: a channel from each of the policy's trainers to each other
credits: a cell from a trainer that limits its producers' steps to each of them
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from tidemill.core.errors import ConfigError, did_you_mean

Role = Literal["produce", "consume", "ask", "serve", "publish", "subscribe", "sum", "store", "draw", "grant"]


@dataclass(frozen=True)
class Port:
    """A port is one end of a stream that a worker holds.

    stream: name of the stream
    role: "produce" or "consume" samples; "ask" or "serve" inference; "publish" or
        "subscribe" to a policy's parameters; "sum" what equal trainers share; "store" or
        "draw" versions in the run's parameter database; "grant" steps to the producers of
        a sample stream
    outlets: number of blocks that a producer fills at a time
    policy: name of the policy that is asked, served, or trained by the samples
    lockstep: of a consumer: its producers are to wait, at each outlet, until their sample
        was given back; of a producer: it can do that
    in_turn: of who grants steps: each outlet gets its next step when all before it were
        dealt with
    gathers: of a producer: it fills one block for all of its outlets, unless its steps
        are granted in turn
    lag_bounded: of a consumer: samples whose rows are too many versions behind are
        dropped
    outlived: of who grants steps: those to whom it does, and who play its policy, may
        live on as it dies, and its next life grants them steps of its own
    """

    stream: str
    role: Role
    outlets: int = 1
    policy: str = ""
    lockstep: bool = False
    in_turn: bool = False
    gathers: bool = False
    lag_bounded: bool = False
    outlived: bool = False

    def __post_init__(self) -> None:
        if self.role not in (roles := get_args(Role)):
            raise ConfigError(f'a port is no end called "{self.role}"; {did_you_mean(str(self.role), roles)}')


@dataclass(frozen=True)
class Edge:
    """An edge is one channel or cell between workers: `source` writes, `targets` read
    (one for a channel)."""

    name: str
    kind: Literal["channel", "cell"]
    source: str
    targets: tuple[str, ...]

    @property
    def stream(self) -> str:
        """What is sent over it, and the stream that it is of: "samples/experience"."""
        return "/".join(self.name.split("/")[:2])

    @property
    def begins_with(self) -> tuple[str, ...]:
        """The workers with each life of which the edge begins anew: who writes it, and of
        credits, before that, who is granted them, since each of its lives counts from
        0."""
        return (self.targets[0], self.source) if self.name.startswith("credits/") else (self.source,)


def ends_by_worker(edges: Iterable[Edge]) -> defaultdict[str, dict[str, tuple[str, ...]]]:
    """Return of which edges each worker holds an end, and which workers are at the other
    end: {worker: {edge's name: others}}, empty for a worker that holds none."""
    found: defaultdict[str, dict[str, tuple[str, ...]]] = defaultdict(dict)
    for edge in edges:
        found[edge.source][edge.name] = edge.targets
        for target in edge.targets:
            found[target][edge.name] = (edge.source,)
    return found


End = tuple[str, Port]
"""A worker's name and a port of it."""

_ENDS: dict[str, tuple[Role, Role]] = {
    "credits": ("grant", "produce"), "samples": ("produce", "consume"), "inference": ("ask", "serve"),
    "parameters": ("publish", "subscribe"), "sums": ("sum", "sum"), "versions": ("store", "draw"),
}  # fmt: skip
_FAMILY: dict[Role, str] = {role: family for family, roles in _ENDS.items() for role in roles} | {
    "produce": "samples"
}


def number(worker: str) -> int:
    """Return a worker's number in its group."""
    return int(worker.rpartition("-")[2])


def group_of(worker: str) -> str:
    """Return the name of a worker's group."""
    return worker.rpartition("-")[0]


def derive_edges(ends: Sequence[End]) -> list[Edge]:
    """Return every channel and cell that joins `ends`. Raises `ConfigError` for a stream
    that lacks an end, or that cannot be shared so."""
    streams = dict.fromkeys((_FAMILY[port.role], port.stream) for _, port in ends)
    _check_overlap(ends)
    ordered = {port.stream for _, port in ends if port.in_turn}
    in_turn = {worker for worker, port in ends if port.role == "produce" and port.stream in ordered}
    edges: list[Edge] = []
    # parameters last: who plays them gets them from whom its samples go to
    for family, stream in sorted(streams, key=lambda each: each[0] == "parameters"):
        sources, targets = (
            [(w, p) for w, p in ends if (p.stream, p.role) == (stream, role)] for role in _ENDS[family]
        )
        if family in ("parameters", "versions") and not targets:
            continue  # a trainer whose policy nobody plays: legal
        if not sources or not targets:
            raise ConfigError(_lacking(family, stream, sources, targets, ends))
        if family == "versions":
            continue  # through files
        sources = [(w, replace(p, outlets=1) if p.gathers and w not in in_turn else p) for w, p in sources]
        if family == "parameters":
            edges += _join_parameters(stream, sources, targets, edges)
            continue
        join = {
            "samples": _join_samples, "inference": _join_inference, "sums": _join_sums,
            "credits": _join_credits,
        }[family]  # fmt: skip
        edges += join(stream, sources, targets)
    return edges


def inference_edges(stream: str, asker: str, policy: str, spare: str = "") -> tuple[str, str]:
    """Return the names of the edges over which an asker sends requests, and is answered;
    of the `spare` ones to that server."""
    pair = f"{stream}/{asker}/{policy}"
    return (
        (f"spare-requests/{pair}/{spare}", f"spare-answers/{pair}/{spare}")
        if spare
        else (f"requests/{pair}", f"answers/{pair}")
    )


def spare_edges(ends: Sequence[End], edges: Sequence[Edge]) -> list[Edge]:
    """Return the channels from each asker to all servers of a policy but the one that
    `edges`, which join `ends`, have for it."""
    servers = {edge.name: edge.targets for edge in edges if edge.name.startswith("requests/")}
    spare = []
    for asker, port in ends:
        if port.role != "ask":
            continue
        laid = servers[inference_edges(port.stream, asker, port.policy)[0]]
        served = "serve", port.stream, port.policy
        for server, other in ends:
            if server not in laid and (other.role, other.stream, other.policy) == served:
                requests, answers = inference_edges(port.stream, asker, port.policy, server)
                spare.append(Edge(requests, "channel", asker, (server,)))
                spare.append(Edge(answers, "channel", server, (asker,)))
    return spare


def _names(ends: Iterable[End]) -> str:
    return ", ".join(dict.fromkeys(worker for worker, _ in ends))


def _check_overlap(ends: Sequence[End]) -> None:
    """A parameter stream is named by its policy, and may be called like another; samples
    and requests must not be taken for each other."""
    samples, inference = (
        {p.stream: w for w, p in ends if _FAMILY[p.role] == family} for family in ("samples", "inference")
    )
    for stream in samples.keys() & inference.keys():
        raise ConfigError(
            f'"{stream}" is a sample stream ({samples[stream]}) and an inference stream '
            f"({inference[stream]}) at once; give one of them another name"
        )


def _lacking(family: str, stream: str, sources: list[End], targets: list[End], ends: Sequence[End]) -> str:
    if family == "versions":
        return (
            f'{_names(targets)} draws policy "{stream}" from the parameter database, but no trainer stores '
            "its versions there; add a trainer of it, or set the database_seconds of the one that there is"
        )
    missing, present = _ENDS[family] if not sources else _ENDS[family][::-1]
    does, wanted = (f"{role}es" if role == "publish" else f"{role}s" for role in (present, missing))
    known = [port.stream for _, port in ends if port.role == missing]
    return f'{family} stream "{stream}": {_names(sources or targets)} {does} it, but nobody {wanted} it; ' + (
        did_you_mean(stream, known) if known else f'add a worker that {wanted} "{stream}"'
    )


def _join_samples(stream: str, sources: list[End], targets: list[End]) -> list[Edge]:
    producers, consumers = dict(sources), list(dict(targets))
    if both := [worker for worker in consumers if worker in producers]:
        raise ConfigError(
            f'{", ".join(both)} produces sample stream "{stream}" and consumes it, too; give what it sends '
            "on another name"
        )
    groups = {
        group_of(consumer): [c for c in consumers if group_of(c) == group_of(consumer)]
        for consumer in consumers
    }
    for group in groups.values():
        if dict(targets)[group[0]].lockstep:
            _check_lockstep(stream, sources, group)
    edges = []
    for i, (producer, port) in enumerate(producers.items()):
        for outlet in range(port.outlets):
            for group in groups.values():
                share = group[i :: len(producers)] if len(producers) < len(group) else [group[i % len(group)]]
                edges += [
                    Edge(f"samples/{stream}/{producer}/{outlet}/{consumer}", "channel", producer, (consumer,))
                    for consumer in share
                ]
    return edges


def _check_lockstep(stream: str, sources: list[End], trainers: list[str]) -> None:
    where = f'sample stream "{stream}"'
    for producer, port in sources:
        if not port.lockstep:
            raise ConfigError(
                f"{trainers[0]} has max_policy_lag = 0, which needs producers that wait for it, and "
                f"{producer}, which produces {where}, does not; take samples straight from actors, or allow "
                "some lag"
            )
    if len(dict(sources)) < len(trainers):
        raise ConfigError(
            f"{', '.join(trainers)} have max_policy_lag = 0, so that each of them needs samples for each "
            f"update, and only {_names(sources)} produces {where}; let there be at least as many producers "
            "as trainers, or allow some lag"
        )


def _join_inference(stream: str, sources: list[End], targets: list[End]) -> list[Edge]:
    serves: dict[str, set[str]] = {}
    for server, port in targets:
        serves.setdefault(server, set()).add(port.policy)
    load = dict.fromkeys(serves, 0)
    edges = []
    for asker, port in sources:
        able = [server for server, policies in serves.items() if port.policy in policies]
        if not able:
            others = "; ".join(f"{server} serves {_quoted(policies)}" for server, policies in serves.items())
            raise ConfigError(
                f'{asker} asks stream "{stream}" for policy "{port.policy}", but {others} there; add it to '
                "their policies, or ask another stream"
            )
        # the least busy; among equals, who can do nothing else
        server = min(able, key=lambda name: (load[name], len(serves[name])))
        load[server] += 1
        requests, answers = inference_edges(stream, asker, port.policy)
        edges.append(Edge(requests, "channel", asker, (server,)))
        edges.append(Edge(answers, "channel", server, (asker,)))
    asked = {port.policy for _, port in sources}
    for server, policies in serves.items():
        if unasked := sorted(policies - asked):
            raise ConfigError(
                f'{server} serves policy "{unasked[0]}" on inference stream "{stream}", but '
                f"{_names(sources)} asks for {_quoted(asked)} there; take it out of its policies, or let an "
                "agent spec ask for it"
            )
    if idle := [server for server, count in load.items() if not count]:
        raise ConfigError(
            f'inference stream "{stream}" is asked by {_names(sources)}, and {", ".join(idle)} would never '
            "be asked anything: each asker is served by one policy worker for each policy; let there be "
            "fewer policy workers, or more actors"
        )
    return edges


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in sorted(names))


def _join_parameters(
    stream: str, sources: list[End], targets: list[End], edges: Sequence[Edge]
) -> list[Edge]:
    """Return the cells of a policy. `edges`: those that samples go over, among others."""
    if len({group_of(worker) for worker, _ in sources}) > 1:
        raise ConfigError(
            f'policy "{stream}" is published by {_names(sources)}; one group of trainers per policy'
        )
    # Equal trainers publish the same weights, each to its share of those who play them:
    # to those whose samples it takes, and who answer these, so that over hosts, too, who
    # is given a sample back has the version that was published before.
    trainers = [source for source, _ in sources]
    takers: dict[str, str] = {}
    for edge in edges:
        if edge.stream.startswith("samples/") and edge.targets[0] in trainers:
            takers.setdefault(edge.source, edge.targets[0])
    for edge in edges:
        if edge.stream.startswith("requests/") and edge.source in takers:
            takers.setdefault(edge.targets[0], takers[edge.source])
    shares: dict[str, dict[str, None]] = {trainer: {} for trainer in trainers}
    for target, _ in targets:
        shares[takers.get(target, trainers[number(target) % len(trainers)])][target] = None
    return [
        Edge(f"parameters/{stream}/{trainer}", "cell", trainer, tuple(players))
        for trainer, players in shares.items()
        if players
    ]


def _join_sums(stream: str, sources: list[End], targets: list[End]) -> list[Edge]:
    return [
        Edge(f"sums/{stream}/{a}/{b}", "channel", a, (b,)) for a, _ in sources for b, _ in targets if a != b
    ]


def _join_credits(stream: str, sources: list[End], targets: list[End]) -> list[Edge]:
    return [Edge(f"credits/{stream}/{a}/{b}", "cell", a, (b,)) for a, _ in sources for b in dict(targets)]
