"""What ``tidemill params`` does: lists, tags and exports versions of a run's parameter
database."""

from collections.abc import Sequence
from math import floor, log10
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tidemill.core.errors import ConfigError, RunError, did_you_mean
from tidemill.run.folder import RunFolder
from tidemill.store.query import Query
from tidemill.store.versions import Mean, Version

ORDERS = {"tag": "tag NAME VERSION|TAG", "untag": "untag NAME", "export": "export VERSION|TAG FILE"}
_LENGTHS = (("s", 60), ("min", 60), ("h", 24), ("d", 0))


def listing(folder: RunFolder, policy: str | None, where: str | None, width: int) -> Table:
    """Return the table of a run's versions, of one policy or all; `where` is a query's
    text. Newest first unless the query says otherwise.

    Means come with half of their 95 % intervals. What does not fit into `width` columns
    leaves these out first, then what matters least.
    """
    database = folder.database()
    query = Query.parse(where) if where is not None else Query()
    names = [choose(folder, policy)] if policy is not None else database.policies()
    versions = [version for name in names for version in database.query(name, query)]
    if not names:
        raise RunError(
            f"{folder.path} holds no versions: its trainer has pushed none (database_seconds = None), or an "
            "older tidemill made it"
        )
    several = len({version.policy for version in versions}) > 1
    facts = ["policy", "version", "age", "env steps", "trained", "tags"]
    fewer = [name for name in facts if name != "trained" and (several or name != "policy")]
    means = sorted({name for version in versions for name in version.means})
    fewest = [name for name in means if not name.endswith("/length")]
    tables = [
        _table(versions, facts, means, True),
        _table(versions, facts, means, False),
        _table(versions, fewer, means, False),
    ]
    fitting = [table for table in tables if Console(width=10_000).measure(table).maximum <= width]
    return fitting[0] if fitting else _table(versions, fewer, fewest, False, one_below_another=True)


def obey(folder: RunFolder, policy: str | None, words: Sequence[str], force: bool) -> str:
    """Do what the words of the command line say (`ORDERS`), and return what was done."""
    match words:
        case ["tag", name, which]:
            policy = choose(folder, policy)
            return (
                f'"{name}" points to version {folder.database().tag(policy, name, which)} of policy {policy}'
            )
        case ["untag", name]:
            policy = choose(folder, policy)
            folder.database().untag(policy, name)
            return f'policy {policy} has no tag "{name}" any more'
        case ["export", which, file]:
            policy = choose(folder, policy)
            if Path(file).exists() and not force:
                raise ConfigError(f"{file} exists already; name another file, or replace it with --force")
            version = folder.database().export(policy, which, Path(file))
            return f'{file}: version {version} of policy {policy}; load it by tidemill.load("{file}")'
        case [order, *_] if order in ORDERS:
            raise ConfigError(f"write: tidemill params {folder.path} {ORDERS[order]}")
    raise ConfigError(f'params cannot "{words[0]}"; {did_you_mean(words[0], ORDERS)}')


def choose(folder: RunFolder, policy: str | None) -> str:
    """Return the policy that is meant: the named one, or the only one that has
    versions."""
    known = folder.database().policies()
    if policy is not None and policy not in known:
        raise RunError(
            f'{folder.path} holds no versions of a policy "{policy}"; {did_you_mean(policy, known)}'
        )
    if policy is None and len(known) != 1:
        raise RunError(
            f"{folder.path} holds versions of {len(known)} policies; say which with --policy: "
            f"{', '.join(known) or 'none'}"
        )
    return policy or known[0]


def _table(
    versions: list[Version],
    facts: list[str],
    means: list[str],
    margins: bool,
    one_below_another: bool = False,
) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    widest = max((len(tag) + 1 for version in versions for tag in version.tags), default=0)
    for name in facts:
        if name == "tags":
            table.add_column("\ntags", min_width=widest, max_width=widest if one_below_another else None)
        else:
            table.add_column(f"\n{name}", justify="left" if name == "policy" else "right", no_wrap=True)
    group = ""
    for name in means:
        before, _, last = name.rpartition("/")
        # a group's name stands over its first
        table.add_column(f"{before if before != group else ''}\n{last}", justify="right", no_wrap=True)
        group = before
    for version in versions:
        known = {
            "policy": version.policy,
            "version": str(version.version),
            "age": _length(version.values()["age"]),
            "env steps": f"{version.counters['env_steps']:,.0f}" if "env_steps" in version.counters else "–",
            "trained": _length(version.counters["seconds"]) if "seconds" in version.counters else "–",
            "tags": ", ".join(version.tags),
        }
        table.add_row(
            *(known[name] for name in facts), *(_mean(version.means.get(name), margins) for name in means)
        )
    return table


def _mean(mean: Mean | None, margins: bool) -> str:
    """Return the mean and half of its 95 % interval, which has two digits."""
    if mean is None:
        return "–"
    if not mean.margin:
        return f"{mean.mean:,.4g}"
    digits = max(1 - floor(log10(mean.margin)), 0)
    return f"{mean.mean:,.{digits}f}" + (f" ± {mean.margin:,.{digits}f}" if margins else "")


def _length(seconds: float) -> str:
    """Return a time in the largest unit of which there is at least one."""
    value = seconds
    for unit, size in _LENGTHS:
        if not size or value < size:
            return f"{value:.0f} {unit}"
        value /= size
    return ""
