"""Lays experiments out: measures what their parts cost here (once: the costs are kept)
and says in words what follows.

Costs lie in $XDG_CACHE_HOME/tidemill (~/.cache/tidemill), a file for each experiment's
parts on each machine.

Batches keep their lanes and their samples' length, so that what is learnt stays what it
was. Where a ratio has actor and trainer wait for each other nothing is measured: they
take turns in one process.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from tidemill.api.experiment import Experiment
from tidemill.api.policy import PolicyConfig
from tidemill.core.config import decode, encode
from tidemill.core.cores import cores
from tidemill.core.errors import ConfigError, RunError
from tidemill.core.killed_processes import await_end
from tidemill.core.private_files import private, private_folder
from tidemill.core.secrets import hide, known, mask
from tidemill.core.user_code_loading import named_files, named_modules, own_code
from tidemill.envs.fault_tolerant import Slots
from tidemill.launchers.processes import kill_session
from tidemill.layouts.cost_measurement import order_of, start
from tidemill.layouts.layout import (
    Costs,
    Layout,
    apply,
    by_turns,
    choose,
    layout_of,
    of_layout,
    parse,
    why_unchanged,
)
from tidemill.layouts.memory_plan import check_least_memory
from tidemill.layouts.probe import SECONDS, read_answer
from tidemill.native.library import VARIABLE, choices
from tidemill.nets.choose_device import choose_device
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.trainer_config import Trainer, TrainerConfig

LAYOUT = "layout.json"
AUTO, GIVEN, MEASURE = "auto", "given", "measure"
FORMAT = 7  # of the probe: costs of another one are measured anew
HOLD_BACK = (
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS"),
    *("OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", VARIABLE),
)
_LARGEST = 10_000  # bytes of a file of costs


@dataclass(frozen=True)
class LaidOut:
    """An experiment as it is run.

    layout: what it was laid out to, None where it is as it was given
    costs: what that follows from, None where nothing was measured
    note: one line for people, "" where there is nothing to tell
    """

    experiment: Experiment
    layout: Layout | None = None
    costs: Costs | None = None
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """Return what a run keeps of it, as plain data."""
        return {
            "layout": self.layout and str(self.layout),
            "costs": msgspec.to_builtins(self.costs),
            "told": self.note,
        }


def lay_out(
    experiment: Experiment,
    source: Path | None,
    layout: str = AUTO,
    fixed: Collection[str] = (),
    processes: bool = True,
    hosts: Sequence[int] = (),
) -> LaidOut:
    """Return the experiment laid out, and what its policies leave undecided decided.

    source: the file that it came from
    layout: "auto": as its costs on this machine advise; "measure": the same, from costs
        measured anew; "given": as it is; or a layout's text
    fixed: paths of the settings that the user made; where they are a matter of layout,
        the experiment stays as it is
    processes: whether workers get processes, for which alone anything is measured
    hosts: cores of each host, this machine's first; by itself this machine's alone. On
        several one trainer learns, and all gather: trainers would wait for sums that
        cross the network
    """
    if experiment.exact_resume and layout in (AUTO, MEASURE):  # costs differ from run to run
        layout = GIVEN
    found = _lay_out(experiment, source, layout, fixed, processes, hosts or (cores(),))
    if found.costs is None and processes and layout != GIVEN and _measurable(experiment):
        try:
            found = replace(found, costs=costs_of(experiment, source, anew=layout == MEASURE))
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
    hosts: Sequence[int],
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
        costs = costs_of(experiment, source, anew=layout == MEASURE)
    except RunError as error:
        return LaidOut(experiment, note=f"layout: as given, since its costs could not be measured: {error}")
    count, several = sum(hosts), len(hosts) > 1
    found = choose(experiment, msgspec.structs.replace(costs, parallel=costs.parallel and not several), count)
    where = f"{count} core{'s' * (count > 1)}{f' of {len(hosts)} hosts' * several}"
    note = f"layout: {found.words()} ({costs.words(found.lanes)}; {where}; again: --layout {found})"
    return LaidOut(apply(experiment, found), found, costs, note)


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


def costs_of(experiment: Experiment, source: Path | None, anew: bool = False) -> Costs:
    """Return what the experiment's parts cost, as kept from an earlier time, or measured.
    Raises `RunError` when that fails, and `ConfigError` for what cannot be made, or a
    batch that is too large for this machine."""
    path = cache() / f"{_key(experiment, source)}.json"
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


def _key(experiment: Experiment, source: Path | None) -> str:
    """Return a name for all that the costs depend on."""
    content = hide(encode(experiment))
    names = (*named_files(content), *named_modules(content), *([str(source)] if source else []))
    about = {
        "format": FORMAT,
        "policies": content["policies"],
        "workers": content["workers"],
        "files": sorted((path.name, digest) for path, digest in own_code(names).items()),
        "processor": processor(),
        "instructions": instructions(),
        "native": choices(),
        "cores": cores(),
        "python": platform.python_version(),
        "packages": {
            name: _version(name) for name in ("tidemill", "numpy", "torch", "gymnasium", "ale-py", "mujoco")
        },
    }
    return sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """Return the processor's name."""
    return _cpu_info("model name") or platform.processor() or platform.machine()


def instructions() -> list[str]:
    """Return what numeric libraries choose their kernels by: the processor's features,
    and the environment variables that hold them back."""
    features = _cpu_info("flags", "Features").split()
    return [*features, *(f"{name}={os.environ.get(name)}" for name in HOLD_BACK)]


def _cpu_info(*names: str) -> str:
    """Return what Linux says of a processor under one of these names; "" where it says
    nothing."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(names)).partition(": ")[2]
    return ""


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
    process = start("tidemill.layouts.probe", subprocess.DEVNULL, str(SECONDS))
    try:
        answer, _ = process.communicate(order_of(experiment, source), SECONDS + 1)
    except subprocess.TimeoutExpired:
        raise RunError(f"no answer after {SECONDS} s") from None
    finally:
        kill_session(process.pid)
        await_end(process, "the process that measures costs")
    secrets = known(encode(experiment))
    try:
        return msgspec.convert(read_answer(answer, process), Costs)
    except (ConfigError, RunError) as error:
        raise type(error)(mask(str(error), secrets)) from None
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise RunError(f"they make no sense: {error}") from None
