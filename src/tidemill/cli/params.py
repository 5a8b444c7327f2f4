"""What ``tidemill params`` does: lists, tags and exports versions of a run's parameter database."""

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tidemill.core.errors import ConfigError, RunError, did_you_mean
from tidemill.core.query import Query
from tidemill.core.versions import Mean, Version
from tidemill.run.folder import RunFolder

ORDERS = {"tag": "tag NAME VERSION|TAG", "untag": "untag NAME", "export": "export VERSION|TAG FILE"}
_LENGTHS = (("s", 60), ("min", 60), ("h", 24), ("d", 0))


def listing(folder: RunFolder, policy: str | None, where: str | None) -> Table:
    """Return the table of a run's versions, of one policy or all; `where` is a query's text. Newest first unless the query says otherwise."""
    database = folder.database()
    query = Query.parse(where) if where is not None else Query()
    names = [choose(folder, policy)] if policy is not None else database.policies()
    versions = [version for name in names for version in database.query(name, query)]
    if not names:
        raise RunError(f"{folder.path} holds no versions: its trainer has pushed none (database_seconds = None), or an older tidemill made it")
    return _table(versions)


def obey(folder: RunFolder, policy: str | None, words: Sequence[str], force: bool) -> str:
    """Do what the words of the command line say (`ORDERS`), and return what was done."""
    match words:
        case ["tag", name, which]:
            policy = choose(folder, policy)
            return f'"{name}" points to version {folder.database().tag(policy, name, which)} of policy {policy}'
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
    """Return the policy that is meant: the named one, or the only one that has versions."""
    known = folder.database().policies()
    if policy is not None and policy not in known:
        raise RunError(f'{folder.path} holds no versions of a policy "{policy}"; {did_you_mean(policy, known)}')
    if policy is None and len(known) != 1:
        raise RunError(f"{folder.path} holds versions of {len(known)} policies; say which with --policy: {', '.join(known) or 'none'}")
    return policy or known[0]


def _table(versions: list[Version]) -> Table:
    means = dict.fromkeys(name for version in versions for name in version.means)
    table = Table("policy", "version", "age", "env steps", "trained", "tags", *means, box=SIMPLE_HEAD)
    for number, column in enumerate(table.columns):
        column.justify = "left" if number in (0, 5) else "right"
    for version in versions:
        values = version.values()
        table.add_row(
            version.policy,
            str(version.version),
            _length(values["age"]),
            f"{version.counters['env_steps']:,.0f}" if "env_steps" in version.counters else "–",
            _length(version.counters["seconds"]) if "seconds" in version.counters else "–",
            ", ".join(version.tags),
            *(_mean(version.means.get(name)) for name in means),
        )
    return table


def _mean(mean: Mean | None) -> str:
    """Return the mean, half of its 95 % interval, and the number of values."""
    if mean is None:
        return "–"
    margin = "" if mean.margin is None else f" ± {mean.margin:.3g}"
    return f"{mean.mean:,.4g}{margin} (n {mean.count:,})"


def _length(seconds: float) -> str:
    """Return a time in the largest unit of which there is at least one."""
    value = seconds
    for unit, size in _LENGTHS:
        if not size or value < size:
            return f"{value:.0f} {unit}"
        value /= size
    return ""
