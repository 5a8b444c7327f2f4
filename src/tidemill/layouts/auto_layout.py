"""Lays experiments out: measures what their parts cost here (once: the costs are kept)
and says in words what follows.

Costs lie in $XDG_CACHE_HOME/tidemill (~/.cache/tidemill), a file for each experiment's
parts on each kind of host. Of several hosts each kind is measured, by one of it.

Batches keep their lanes and their samples' length, so that what is learnt stays what it
was. Where a ratio has actor and trainer wait for each other nothing is measured: they
take turns in one process.
"""

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from tidemill.api.experiment import Experiment
from tidemill.api.launcher import GivenHost, HostKind, ProbeAnswer
from tidemill.api.policy import PolicyConfig
from tidemill.core.config import decode, encode
from tidemill.core.cores import cores
from tidemill.core.errors import ConfigError, RunError
from tidemill.core.forgiving_output import printable
from tidemill.core.private_files import private, private_folder
from tidemill.core.secrets import hide, known, mask
from tidemill.core.user_code_loading import named_files, named_modules, own_code
from tidemill.envs.fault_tolerant import Slots
from tidemill.launchers.kinds import own_kind
from tidemill.launchers.measuring import order_of, read_answer
from tidemill.launchers.measuring import probe as measure_here
from tidemill.layouts.choice import choose, pace
from tidemill.layouts.costs import Costs
from tidemill.layouts.experiment_layout import apply, by_turns, layout_of, of_layout, why_unchanged
from tidemill.layouts.layout import Layout, parse
from tidemill.layouts.memory_plan import check_least_memory
from tidemill.layouts.probe import SECONDS
from tidemill.native.library import INSTRUCTION_SETS
from tidemill.nets.choose_device import choose_device
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.trainer_config import Trainer, TrainerConfig

LAYOUT = "layout.json"
AUTO, GIVEN, MEASURE = "auto", "given", "measure"
FORMAT = 7  # of the probe: costs of another one are measured anew
Measure = Callable[[Sequence[str], Experiment, Path | None, float], Mapping[str, ProbeAnswer]]
"""What has other hosts measure: `Launcher.measure`."""
_LARGEST = 10_000  # bytes of a file of costs
_NAMED = 3  # hosts of a kind that a note names


class KindCosts(msgspec.Struct, frozen=True):
    """What was measured of a kind of host.

    processor: its name
    hosts: names of the run's hosts of this kind
    costs: what the experiment's parts cost there
    pace: seconds in which an actor does an env step on a core there, as it is laid out
    """

    processor: str
    hosts: list[str]
    costs: Costs
    pace: float


@dataclass(frozen=True)
class LaidOut:
    """An experiment as it is run.

    layout: what it was laid out to, None where it is as it was given
    costs: what that follows from, None where nothing was measured
    note: one line for people, "" where there is nothing to tell
    kinds: what it follows from on several hosts: of each kind, by its digest
    """

    experiment: Experiment
    layout: Layout | None = None
    costs: Costs | None = None
    note: str = ""
    kinds: Mapping[str, KindCosts] = field(default_factory=dict)

    @property
    def paces(self) -> dict[str, float]:
        """See `Job`."""
        return {digest: kind.pace for digest, kind in self.kinds.items()}

    def plain(self) -> dict[str, Any]:
        """Return what a run keeps of it, as plain data."""
        return {
            "layout": self.layout and str(self.layout),
            "costs": msgspec.to_builtins(self.costs),
            "told": self.note,
            **({"kinds": msgspec.to_builtins(self.kinds)} if self.kinds else {}),
        }


def kept_paces(record: Any) -> dict[str, float]:
    """Return `LaidOut.paces` of what a run keeps; none where it says nothing of that."""
    with suppress(msgspec.ValidationError, AttributeError):
        kinds = msgspec.convert(record.get("kinds", {}), dict[str, KindCosts])
        return {digest: kind.pace for digest, kind in kinds.items() if kind.pace > 0}
    return {}


def lay_out(
    experiment: Experiment,
    source: Path | None,
    layout: str = AUTO,
    fixed: Collection[str] = (),
    processes: bool = True,
    hosts: Sequence[GivenHost] = (),
    measure: Measure | None = None,
) -> LaidOut:
    """Return the experiment laid out, and what its policies leave undecided decided.

    source: the file that it came from
    layout: "auto": as its costs on this machine advise; "measure": the same, from costs
        measured anew; "given": as it is; or a layout's text
    fixed: paths of the settings that the user made; where they are a matter of layout,
        the experiment stays as it is
    processes: whether workers get processes, for which alone anything is measured
    hosts: this machine first; none: it is alone. On several all gather, and several
        train where that pays in spite of sums that cross the network, and all hosts see
        the run's folder, of whose checkpoints each trainer may have need
    measure: has other hosts measure
    """
    if experiment.exact_resume and layout in (AUTO, MEASURE):  # costs differ from run to run
        layout = GIVEN
    found = _lay_out(experiment, source, layout, fixed, processes, hosts, measure)
    if found.costs is None and processes and layout != GIVEN and _measurable(experiment):
        try:
            found = replace(found, costs=_costs_here(experiment, source, hosts, layout == MEASURE))
        except RunError as error:
            note = f"undecided settings stay so, since costs could not be measured: {error}"
            return replace(found, note="; ".join(filter(None, (found.note, note))))
    if found.costs is None or not (words := found.costs.decisions()):
        return found
    return replace(
        found,
        experiment=decided(found.experiment, found.costs),
        note="; ".join(filter(None, (found.note, words))),
    )


def _lay_out(
    experiment: Experiment,
    source: Path | None,
    layout: str,
    fixed: Collection[str],
    processes: bool,
    hosts: Sequence[GivenHost],
    measure: Measure | None,
) -> LaidOut:
    if layout == GIVEN:
        return LaidOut(experiment)
    if layout not in (AUTO, MEASURE):
        return _as_chosen(experiment, parse(layout), of_layout(experiment, fixed))
    if not processes:
        return LaidOut(experiment)
    if (laid_out := by_turns(experiment, fixed)) is not experiment:
        return LaidOut(
            laid_out,
            note="layout: 1 process, an actor and a trainer by turns, since steps wait for what they owe to "
            "be trained",
        )
    if why := why_unchanged(experiment, fixed):
        return LaidOut(experiment, note=f"layout: as given, since {why}")
    try:
        costs = _costs_here(experiment, source, hosts, layout == MEASURE)
        of_kind = _costs_of_kinds(experiment, source, costs, hosts, measure, layout == MEASURE)
    except RunError as error:
        return LaidOut(experiment, note=f"layout: as given, since its costs could not be measured: {error}")
    several, own = len(hosts) > 1, hosts[0].cores if hosts else cores()
    elsewhere = [of_kind[host.kind.digest] for host in hosts[1:] for _ in range(host.cores)]
    shared = all(host.sees for host in hosts)
    able = msgspec.structs.replace(costs, parallel=costs.parallel and shared)
    found = choose(experiment, able, own, elsewhere, max(1, len(hosts)))
    count = own + len(elsewhere)
    kinds = {
        digest: KindCosts(
            next(host.kind.processor for host in hosts if host.kind.digest == digest),
            [host.name for host in hosts if host.kind.digest == digest],
            each,
            pace(found, each),
        )
        for digest, each in of_kind.items()
    }
    others = "".join(
        f"; {_named(kind.hosts)} ({printable(kind.processor)}): {kind.costs.acting(found.lanes)}"
        for kind in [*kinds.values()][1:]
    )
    where = f"{count} core{'s' * (count > 1)}{f' of {len(hosts)} hosts' * several}"
    note = f"layout: {found.words()} ({costs.words(found.lanes)}{others}; {where}; again: --layout {found})"
    return LaidOut(apply(experiment, found), found, costs, note, kinds)


def _named(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:_NAMED]) + f" and {len(hosts) - _NAMED} more" * (len(hosts) > _NAMED)


def _measurable(experiment: Experiment) -> bool:
    """Return whether a measurement can decide what policies leave undecided: they are
    trained by one group of trainers, of one group of actors, on cores. What a server
    or slots step for a replay memory is not stepped for a measurement."""
    actors, trainers = experiment.groups(ActorConfig), experiment.groups(TrainerConfig)
    undecided = any(policy.undecided for policy in experiment.policies.values())
    if not undecided or len(actors) != 1 or len(trainers) != 1:
        return False
    ((actor,), (trainer,)) = actors.values(), trainers.values()
    if not isinstance(trainer, Trainer):
        return not (actor.environment.remote or isinstance(actor.environment, Slots))
    return (choose_device("auto", 0) if trainer.device == "auto" else trainer.device) == "cpu"


def decided(experiment: Experiment, costs: Costs) -> Experiment:
    """Return the experiment with the settings of its policies that `costs` decided."""
    policies = {
        name: decode(PolicyConfig, {**encode(experiment.policies[name]), **settings})
        for name, settings in costs.decided.items()
    }
    return experiment.replace(policies={**experiment.policies, **policies})


def check_layout(layout: str) -> None:
    """Raise `ConfigError` for what is neither a word that `lay_out` takes nor a layout's
    text."""
    if layout not in (AUTO, GIVEN, MEASURE):
        parse(str(layout))


def _as_chosen(experiment: Experiment, layout: Layout, besides: list[str]) -> LaidOut:
    if besides:
        raise ConfigError(f"--layout {layout}: {besides[0]} was set besides; say it in one place")
    laid_out, given = apply(experiment, layout), layout_of(experiment)
    note = f"layout: {layout.words()}, as told"
    if layout.rows != given.rows:
        note += (
            f"; a batch has {layout.rows:,} rows, not {given.rows:,} as the experiment has it, and it may "
            "learn otherwise"
        )
    return LaidOut(laid_out, layout, None, note)


# ---- costs -----------------------------------------------------------------------------

_BFLOAT16 = {"avx512_bf16", "ONEDNN_MAX_CPU_ISA=None"}  # of a host's kind that computes in it


def _costs_here(experiment: Experiment, source: Path | None, hosts: Sequence[GivenHost], anew: bool) -> Costs:
    """Return the costs on this machine. Where the native core is to compute layers, they
    are those of an instruction set that all hosts have, and convolutions are computed in
    bfloat16 only where all hosts have that: all compute the same bits."""
    costs = costs_of(experiment, source, anew)
    least = [host.kind.native[-1] for host in hosts]
    order = ("off", *INSTRUCTION_SETS)
    everywhere = all({*host.kind.instructions} >= _BFLOAT16 for host in hosts)

    def of_all(name: str, value: str) -> str:
        if name == "native" and least:
            return min(value, *least, key=order.index)
        return "float32" if (name, value) == ("convolutions", "bfloat16") and not everywhere else value

    common = {
        policy: {name: of_all(name, value) for name, value in settings.items()}
        for policy, settings in costs.decided.items()
    }
    if common == costs.decided:
        return costs
    settled = msgspec.structs.replace(costs, decided=common)
    of_settled = costs_of(decided(experiment, settled), source, anew)
    return msgspec.structs.replace(of_settled, decided=common)


def _costs_of_kinds(
    experiment: Experiment,
    source: Path | None,
    costs: Costs,
    hosts: Sequence[GivenHost],
    measure: Measure | None,
    anew: bool,
) -> dict[str, Costs]:
    """Return the costs on each kind of host, by its digest, this machine's first, which
    are `costs`; those of others as kept from an earlier time, or measured on the first
    host of the kind. Raises `RunError` and `ConfigError`, naming the host."""
    if not hosts:
        return {}
    made, found = decided(experiment, costs), {hosts[0].kind.digest: costs}
    to_measure: dict[str, GivenHost] = {}
    for host in hosts:
        digest = host.kind.digest
        kept = None if anew or digest in found else _read(_file(made, source, host.kind))
        if kept is not None:
            found[digest] = kept
        elif digest not in found:
            to_measure.setdefault(digest, host)
    if not to_measure:
        return found
    assert measure is not None
    answers = measure([host.name for host in to_measure.values()], made, source, SECONDS)
    for digest, host in to_measure.items():
        try:
            measured = _read_costs(answers[host.name], made)
        except (ConfigError, RunError) as error:
            raise type(error)(f"on host {host.name}: {error}") from None
        found[digest] = msgspec.structs.replace(measured, decided={})  # it was told what is decided
        _write(_file(made, source, host.kind), found[digest])
    return found


def costs_of(experiment: Experiment, source: Path | None, anew: bool = False) -> Costs:
    """Return what the experiment's parts cost, as kept from an earlier time, or measured.
    Raises `RunError` when that fails, and `ConfigError` for what cannot be made, or a
    batch that is too large for this machine."""
    path = _file(experiment, source, own_kind())
    costs = None if anew else _read(path)
    if costs is None:
        check_least_memory(experiment)
        costs = probe(experiment, source)
        _write(path, costs)
    return costs


def cache() -> Path:
    """Return the folder of kept costs."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(home) if os.path.isabs(home) else Path("~/.cache").expanduser()) / "tidemill"
    except RuntimeError:  # nobody's home: nothing can be kept there
        return Path(os.devnull) / "tidemill"


def _file(experiment: Experiment, source: Path | None, kind: HostKind) -> Path:
    """Return where costs on a kind of host are kept, named by all that they depend on."""
    content = hide(encode(experiment))
    names = (*named_files(content), *named_modules(content), *([str(source)] if source else []))
    about = {
        "format": FORMAT,
        "policies": content["policies"],
        "workers": content["workers"],
        "files": sorted((path.name, digest) for path, digest in own_code(names).items()),
        "kind": kind.digest,
    }
    return cache() / f"{sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()}.json"


def _read(path: Path) -> Costs | None:
    """Return the costs in a file; None when there is none, or anything is wrong with
    it."""
    if not os.path.isfile(path):  # a pipe would be waited for
        return None
    with suppress(OSError, msgspec.MsgspecError, ValueError), open(path, "rb") as file:
        return msgspec.json.decode(file.read(_LARGEST), type=Costs)
    return None


def _write(path: Path, costs: Costs) -> None:
    """Keep costs; where that cannot be, they are measured again next time."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        private_folder(path.parent)
        try:
            with open(aside, "xb", opener=private) as file:
                file.write(msgspec.json.encode(costs))
            aside.rename(path)
        finally:
            aside.unlink(missing_ok=True)


def probe(experiment: Experiment, source: Path | None) -> Costs:
    """Measure what the experiment's parts cost, in a process of its own (`probe`).
    Raises `RunError` when that fails, or takes too long, and `ConfigError` for what
    cannot be made."""
    return _read_costs(measure_here(order_of(experiment, source), SECONDS), experiment)


def _read_costs(measured: ProbeAnswer, experiment: Experiment) -> Costs:
    """Return the costs that a measurement has found. Raises as `probe`."""
    secrets = known(encode(experiment))
    try:
        return msgspec.convert(read_answer(measured), Costs)
    except (ConfigError, RunError) as error:
        raise type(error)(printable(mask(str(error), secrets))) from None  # it may be of another host
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise RunError(f"they make no sense: {error}") from None
