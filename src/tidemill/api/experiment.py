"""The experiment: all that a run is, as plain typed data. Nothing in it knows where it
will run.

An experiment names policies, groups of workers, and limits. Workers name the streams they
hold ends of; equal names are joined::

    Experiment(
        name="cartpole",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(environment=Gymnasium(id="CartPole-v1")),
            "trainer": Trainer(algorithm=PPO()),
        },
        limits=Limits(mean_return=475.0, steps=600_000),
    )
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeVar

from tidemill.api.conditions import PROGRESS, check_measured, episode_metrics
from tidemill.api.control_messages import Adopt
from tidemill.api.curriculum import Stage, check_curriculum
from tidemill.api.edges import Edge, Port, Role, derive_edges, group_of, spare_edges
from tidemill.api.limits import Limits
from tidemill.api.policy import PolicyConfig
from tidemill.api.worker import WorkerConfig
from tidemill.core.config import Config, check_name, check_several, layout_setting
from tidemill.core.errors import ConfigError, did_you_mean, returned
from tidemill.store.versions import RESERVED

W = TypeVar("W", bound=WorkerConfig)


@dataclass(frozen=True, kw_only=True)
class Experiment(Config):
    """An experiment is all that a run is, as plain typed data: policies, the workers that
    play and train them, and when the run ends. It does not know where it will run.

    name: name of the experiment; its runs' folders are called after it
    policies: configurations of the policies, by the name that workers call them by
    workers: configurations of the groups of workers, by the group's name
    limits: when the run ends
    together: names of groups whose workers share a process (or thread) and take turns in
        it: actor-0 with trainer-0, actor-1 with trainer-1, and so on; a worker whose
        number no other group has is alone. So every core both gathers and trains, or all
        gather and one trains then; and an actor that waits for its trainer's leave to
        step (`ReplayTrainer`) has it at once
    curriculum: the stages that environments go through, in order; none: their resets are
        given nothing. The last one is what is trained for: `evaluate` and `play` are in
        that
    exact_resume: whether a resumed run goes on as if it had never ended, in every bit: a
        checkpoint is a cut through all workers then, with what actors have in hand, their
        environments and random streams. For runs inline, and for those in lockstep
        (`Trainer.max_policy_lag` = 0); what cannot be cut so is refused. Layouts are as
        given then
    seed: the root of every random stream
    """

    name: str
    policies: dict[str, PolicyConfig]
    workers: dict[str, WorkerConfig]
    limits: Limits = field(default_factory=Limits)
    together: tuple[str, ...] = layout_setting(())
    curriculum: tuple[Stage, ...] = ()
    exact_resume: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("experiment", self.name)
        check_several("together", self.together)
        check_several("curriculum", self.curriculum)
        for name in self.policies:
            check_name("policy", name)
        for name in self.workers:
            check_name("worker", name)
        if self.seed < 0:
            raise ConfigError(f"seed = {self.seed} must not be negative")

    def members(self) -> Iterator[tuple[str, WorkerConfig]]:
        """Yield (name, configuration) of every single worker: ``actor-0``, ``actor-1``,
        …"""
        for group, config in self.workers.items():
            for index in range(config.count):
                yield f"{group}-{index}", config

    def math_threads(self, names: Iterable[str]) -> int:
        """Return how many threads numeric libraries may use in a process that has these
        workers."""
        members = dict(self.members())
        return max(members[name].math_threads for name in names)

    def groups(self, kind: type[W]) -> dict[str, W]:
        """Return the groups of workers of one kind, in order: name → configuration."""
        return {name: config for name, config in self.workers.items() if isinstance(config, kind)}

    def processes(self) -> list[list[str]]:
        """Return the workers that share a process, for each process, in order."""
        counts = {group: self.workers[group].count for group in self.together}
        shared = [
            [f"{group}-{i}" for group, count in counts.items() if i < count]
            for i in range(max(counts.values(), default=0))
        ]
        return [
            [name] for name, config in self.members() if name.rpartition("-")[0] not in self.together
        ] + shared

    def ends(self) -> Iterator[tuple[str, Port]]:
        """Yield the ends of streams of every single worker, as (worker, port)."""
        for name, config in self.members():
            for port in returned(config.ports(), Sequence, config.ports):
                yield name, returned(port, Port, config.ports)

    def ends_of(self, stream: str, role: Role) -> Iterator[tuple[str, Port]]:
        """Yield the ends that are `role` of `stream`, as (worker, port)."""
        return ((name, port) for name, port in self.ends() if (port.stream, port.role) == (stream, role))

    def holders(self, stream: str, role: Role) -> list[str]:
        """Return the workers that hold `role` of `stream`, in order."""
        return list(dict.fromkeys(name for name, _ in self.ends_of(stream, role)))

    def sources(self, stream: str) -> set[str]:
        """Return sample `stream` and those that are sent on into it, from whomever."""
        sent = [pair for config in self.workers.values() for pair in config.forwards().items()]
        found = {stream}
        for _ in sent:
            found |= {taken for into, taken in sent if into in found}
        return found

    def in_lockstep(self, stream: str) -> dict[str, str]:
        """Return who consumes sample `stream` in lockstep with its producers: worker →
        the policy that it trains, "" for one that trains none."""
        return {name: port.policy for name, port in self.ends_of(stream, "consume") if port.lockstep}

    def lag_bounded(self, stream: str) -> bool:
        """True when a consumer of sample `stream`, or of what it is sent on into, drops
        rows that are too many versions behind."""
        into = {
            into
            for config in self.workers.values()
            for into, taken in config.forwards().items()
            if taken == stream
        }
        return any(port.lag_bounded for _, port in self.ends_of(stream, "consume")) or any(
            map(self.lag_bounded, into)
        )

    def trained(self) -> list[str]:
        """Return the policies that are trained."""
        return list(dict.fromkeys(port.stream for _, port in self.ends() if port.role == "publish"))

    def granting(self, stream: str) -> list[Port]:
        """Return the ports by which trainers grant the producers of sample `stream` their
        steps."""
        return [port for _, port in self.ends_of(stream, "grant")]

    def edges(self) -> list[Edge]:
        """Return every channel and cell of the experiment. Raises `ConfigError` for a
        stream that lacks an end, or that cannot be shared so."""
        return derive_edges(list(self.ends()))

    def spare_edges(self) -> list[Edge]:
        """Return the channels over which what was asked of a policy worker is asked of
        another one, once that has no life left. None of a run that resumes exactly, which
        ends then."""
        return [] if self.exact_resume else spare_edges(list(self.ends()), self.edges())

    def forwarders(self) -> list[list[str]]:
        """Return the workers that send samples of others on: first those who take from
        none of these, then those who take from the first, and so on. Raises `ConfigError`
        where samples would go round in a circle."""
        waiting = {name: config.forwards() for name, config in self.members() if config.forwards()}
        levels = []
        while waiting:
            filled = {into for forwards in waiting.values() for into in forwards}
            level = [name for name, forwards in waiting.items() if not filled.intersection(forwards.values())]
            if not level:
                circle = ", ".join(
                    f'{name} from "{taken}" into "{into}"'
                    for name, forwards in waiting.items()
                    for into, taken in forwards.items()
                )
                raise ConfigError(
                    f"samples are sent round in a circle ({circle}); let one of them fill a stream that "
                    "leads to a trainer"
                )
            levels.append(level)
            waiting = {name: forwards for name, forwards in waiting.items() if name not in level}
        return levels

    def samples_at_once(self, worker: str, stream: str) -> Fraction:
        """Return how many samples are filled at a time for a consumer of `stream`: one by
        each outlet of an actor, whose samples it may share with others of its group. What
        comes through workers that send samples on counts as many as they take for it."""
        configs = dict(self.members())
        edges = [edge for edge in self.edges() if edge.name.startswith("samples/")]
        takers = Counter((edge.name.rpartition("/")[0], group_of(edge.targets[0])) for edge in edges)

        def arriving(worker: str, stream: str) -> Fraction:
            total = Fraction(0)
            for edge in edges:
                if edge.name.startswith(f"samples/{stream}/") and edge.targets[0] == worker:
                    taken = configs[edge.source].forwards().get(stream)
                    filled = Fraction(1) if taken is None else arriving(edge.source, taken)
                    total += filled / takers[edge.name.rpartition("/")[0], group_of(worker)]
            return total

        return arriving(worker, stream)

    def recorded(self, policy: str) -> set[str]:
        """Return the names of all that the parameter database gets to know of versions of
        `policy`."""
        groups = {group_of(holder) for role in ("store", "draw") for holder in self.holders(policy, role)}
        return {*RESERVED, *(name for group in groups for name in self.workers[group].records())}

    def awaited(self, policy: str) -> dict[str, int]:
        """Return what must be recorded of versions of `policy` before it is trained any
        further: name → after how many updates each."""
        groups = dict.fromkeys(group_of(holder) for holder in self.holders(policy, "draw"))
        return {
            name: updates for group in groups for name, updates in self.workers[group].awaited(policy).items()
        }

    def adoption(self, policy: str, known: Mapping[str, float]) -> Adopt | None:
        """See `WorkerConfig.adoption`."""
        told = (config.adoption(policy, known) for config in self.workers.values())
        return next(filter(None, told), None)

    def players(self) -> dict[tuple[str, int], tuple[str, ...]]:
        """Return the names under which finished episodes are counted: (group, index of
        the agent spec) → names. These are the policy ("" where there is only one) and,
        where several specs play that policy, also POLICY/AGENTS."""
        played = {
            (group, number): who
            for group, config in self.workers.items()
            for number, who in config.plays().items()
        }
        policies = {policy for policy, _ in played.values()}
        found: dict[tuple[str, int], tuple[str, ...]] = {}
        for (group, number), (policy, match) in played.items():
            agents = [_plain(other) for which, other in played.values() if which == policy]
            own = _plain(match) if agents.count(_plain(match)) == 1 else f"{group}/{number}"
            found[group, number] = (
                policy if len(policies) > 1 else "",
                *([f"{policy}/{own}"] if len(agents) > 1 else []),
            )
        return found

    def episode_names(self) -> list[str]:
        """Return the names under which episodes count (see `players`), each once."""
        return list(dict.fromkeys(who for names in self.players().values() for who in names)) or [""]

    def judged(self) -> list[str]:
        """Return those of `episode_names` that `Limits.mean_return` applies to; the first
        one that reaches it ends the run. Empty without that limit."""
        limits, names = self.limits, self.episode_names()
        if limits.mean_return is None:
            return []
        policies = [name for name in names if "/" not in name]
        if limits.return_of in names or limits.return_of not in (
            "",
            "any",
            *(policy for policy, _ in self._played()),
        ):
            return [limits.return_of]
        return policies if limits.return_of == "any" else [""]

    def _played(self) -> set[tuple[str, str]]:
        return {who for config in self.workers.values() for who in config.plays().values()}

    def check_judged(self) -> None:
        """Raise `ConfigError` for a limit of the mean return that could be of several
        policies, or is of none."""
        names = self.episode_names()
        for who in self.judged():
            if who in names:
                continue
            several = ", ".join(f'"{name}"' for name in names if name)
            if not who:
                raise ConfigError(
                    f"limits.mean_return = {self.limits.mean_return:g} (--stop-at-return) could be of "
                    f'several: {several}; say of which by limits.return_of (--return-of), or "any" for the '
                    "first that reaches it"
                )
            known = [*(name for name in names if name), *(policy for policy, _ in self._played()), "any"]
            raise ConfigError(
                f'limits.return_of = "{who}" is nobody whose episodes are counted; {did_you_mean(who, known)}'
            )

    def measured_by_several(self) -> set[str]:
        """Return the names of what several groups of workers measure, trainers aside: in
        the metrics the group stands before them."""
        told = Counter(
            name
            for config in self.workers.values()
            if not config.limited
            for name in set(config.measures() or ())
        )
        return {name for name, count in told.items() if count > 1}

    def check_conditions(self, updates: Collection[str] | None = None) -> None:
        """Raise `ConfigError` for a stage that could never end, or a condition on what
        nobody measures (see `tidemill.api.conditions`). Where nobody knows that before
        the first update, it is looked at with what `updates` return."""
        limited = [name for name, config in self.workers.items() if config.limited]
        told = {
            group: config.measures()
            for group, config in self.workers.items()
            if limited == [group] or not config.limited
        }
        several = self.measured_by_several()
        names = {
            f"{group}/{name}" if name in several else name
            for group, measures in told.items()
            for name in measures or ()
        }
        episode_names = {name for who in self.episode_names() for name in episode_metrics(who)}
        known = (
            None
            if None in told.values() and updates is None
            else {*PROGRESS, *episode_names, *(updates or ()), *names}
        )
        check_curriculum(self.curriculum, known)
        check_measured("limits.until", self.limits.until, known)

    def check(self) -> None:
        """Raise `ConfigError` for names that lead nowhere, before anything is started."""
        of_policies = ("publish", "subscribe", "sum", "store", "draw")
        for name, port in self.ends():
            if port.role in of_policies and port.stream not in self.policies:
                raise ConfigError(
                    f'{name} uses policy "{port.stream}", which the experiment lacks; '
                    f"{did_you_mean(port.stream, self.policies)}"
                )
            check_name("stream", port.stream)
        if not any(config.limited for config in self.workers.values()):
            raise ConfigError(
                "the experiment has no trainer, so nothing would ever end it; add one to workers"
            )
        for group in self.together:
            if group not in self.workers:
                raise ConfigError(
                    f'together names "{group}", which is no group of workers; '
                    f"{did_you_mean(group, self.workers)}"
                )
        if len(set(self.together)) < len(self.together):
            raise ConfigError(f"together = {self.together}: these groups must be different")
        self.check_judged()
        self.check_conditions()
        for group, config in self.workers.items():
            for policy, query in config.queries():
                try:
                    query.check(self.recorded(policy))
                except ConfigError as error:
                    cure = (
                        "An Evaluation of the policy adds NAME/return and NAME/length, and with `drawn` "
                        "NAME/win_rate, NAME/elo and NAME/beats"
                    )
                    raise ConfigError(
                        f'{group} draws versions of policy "{policy}": {error}. {cure}'
                    ) from None
        self.edges()
        self.forwarders()
        for config in self.workers.values():
            config.check(self)


def _plain(match: str) -> str:
    """Return the regular expression of an agent spec as a part of a metric's name."""
    return re.sub(r"\W+", "_", match, flags=re.ASCII).strip("_") or "all"
