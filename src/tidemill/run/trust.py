"""Trust in folders: a run's folder, or an exported policy, may make run only what this
user has had run before, or now allows.

Such a folder is data, and may come from anybody; but it names files of Python, callables,
programs and addresses. Each of these is a `TrustItem`. What this user trains, and what
was allowed once, is remembered outside of the folder, by digests: of the settings that
name it and, where it is a file, of its place and what it holds now, with all that it
imports of the user's own. The place alone would not do, since a folder that is unpacked
anew has other files at the same one; nor would the content alone, since a file does what
its neighbours say. Of a program that is the executable; not what it loads.

One gate, `RunFolder.experiment` (and `load` for exported policies), reads the
configuration once, asks each kind of environment what it names
(`EnvironmentConfig.outside`; a kind that does not say counts whole), and compares that
with what this user has had done. Only then is the experiment's file run. The digests that
were compared go with the job to whoever imports (`user_code.expect`), so that files are
refused which have changed by then. A training that begins is the user's word: it is
remembered, not checked.
"""

import json
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

from tidemill.api.environment import EnvironmentConfig
from tidemill.api.external_code import Outside, names_nothing, quoted
from tidemill.core.config import Config, member
from tidemill.core.errors import Untrusted
from tidemill.core.secrets import references
from tidemill.core.user_code_loading import file_digest, is_installed, module_file, module_places, own_code

Trust = bool | Callable[[str], bool]
"""The user's word for all that a folder names: given, not given, or asked for with the
text that says what it is."""
_USUAL = "$TIDEMILL_TOKEN"  # which is for servers; where one is connected to, that says so
MOST = 20_000  # things that are remembered; the oldest are forgotten first


@dataclass(frozen=True)
class TrustItem:
    """A trust item is something that a configuration names: what is done with it, in
    words, what it is remembered by, and, of a file, its digest at the moment."""

    does: str
    digest: str
    before: str = ""


@dataclass
class TrustItems:
    """All trust items of a configuration, and the digest that each file has now ("" where
    there is none), by its resolved path."""

    things: list[TrustItem] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)


def named(config: Any, source: Path | None = None, environments: bool = True) -> TrustItems:
    """Return what an encoded configuration names, which nobody has checked, and the file
    `source` that its own classes come from. Without `environments`, for those who build
    none, what these name is left out."""
    found = TrustItems()
    files = {} if source is None else {_real(str(source)): None}
    for table, outside in _outside(config, environments):
        files |= dict.fromkeys(_files(outside.code, source))
        parts = [json.dumps(table, sort_keys=True), outside.does]
        if outside.program:
            path = _real(outside.program)
            found.files[path] = file_digest(Path(path))
            parts += [path, found.files[path]]
            files |= {path: None} if path.endswith(".py") else {}
        found.things.append(TrustItem(outside.does, _digest("settings", *parts)))
    for reference in references(config) if environments else ():
        if reference != _USUAL:
            found.things.append(
                TrustItem(
                    f"reads {quoted(reference)}, and hands it to an environment", _digest("secret", reference)
                )
            )
    found.files |= {path: "" for path in files if not os.path.isfile(path)}
    for file, digest in own_code(filter(os.path.isfile, files)).items():
        found.files[str(file)] = digest
        found.things.append(
            TrustItem(
                f"runs the code in {quoted(str(file))}",
                _digest("code", str(file), digest),
                _digest("file", str(file)),
            )
        )
    return found


def allow(place: Path, found: TrustItems, trust: Trust, given: Collection[Path] = ()) -> None:
    """Return where everything that was `found` at `place` was done before, is of the
    `given` files, or the user trusts it: then it is remembered. Else raise `Untrusted`,
    saying what it is."""
    own = {os.path.realpath(file) for file in given}
    allowed = {_digest("code", file, found.files.get(file, "")) for file in own}
    new = [thing for thing in found.things if thing.digest not in allowed and not _is_known(thing.digest)]
    if new:
        lines = "".join(
            "\n  "
            f"{thing.does}"
            f"{', which has changed since you last had it run' if _is_known(thing.before) else ''}"
            for thing in new
        )
        text = f"{place} names what you have not had done before, and may be somebody else's. It:{lines}"
        if not (trust(text) if callable(trust) else trust):
            unkept = (
                ""
                if _home()
                else f". (It would be asked again each time: nothing can be remembered in {_place()})"
            )
            raise Untrusted(f"{text}\nLook into it, and allow it with --trust (Python: trust=True){unkept}")
    remember(found)


def remember(found: TrustItems) -> None:
    """Note that this user has had this done. Where nothing can be noted, nothing is."""
    home = _home() if found.things else None
    if home is None:
        return
    with suppress(OSError):
        for digest, text in (
            (digest, thing.does)
            for thing in found.things
            for digest in (thing.digest, thing.before)
            if digest
        ):
            with suppress(FileExistsError):  # its name says all, so that it is whole from the first instant
                descriptor = os.open(
                    home / digest, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
                )
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(f"{text}\n")
        kept = list(os.scandir(home))
        if len(kept) > MOST:  # each is asked for its age then alone: that takes long
            kept.sort(key=lambda entry: entry.stat(follow_symlinks=False).st_mtime)
            for entry in kept[:-MOST]:
                os.unlink(entry)


def links(folder: Path) -> list[TrustItem]:
    """Return the links in a run's folder, through which whoever writes there would write
    elsewhere."""
    found = []
    for place, folders, files in os.walk(folder):
        for path in (os.path.join(place, name) for name in (*folders, *files)):
            if os.path.islink(path):
                target = os.readlink(path)
                does = f"writes through the link {quoted(os.path.relpath(path, folder))} to {quoted(target)}"
                found.append(
                    TrustItem(
                        does,
                        _digest(
                            "link", os.path.join(_real(os.path.dirname(path)), os.path.basename(path)), target
                        ),
                    )
                )
    return found


def _outside(config: Any, environments: bool) -> Iterator[tuple[Mapping[str, Any], Outside]]:
    """Yield what each table of settings in an encoded configuration names, with the
    table."""
    if isinstance(config, Mapping) and "kind" in config:
        member(Config, str(config["kind"]))  # imported, if it is the library's
        kinds = [kind for kind in _kinds(Config) if kind.__name__ == config["kind"]]
        own = not kinds or not all(kind.__module__.partition(".")[0] == "tidemill" for kind in kinds)
        if own and not names_nothing(config):
            yield (
                config,
                Outside(
                    f"gives {quoted(config['kind'])}, a class of somebody's own, these settings: "
                    f"{quoted(config)}"
                ),
            )
        for kind in kinds:
            if issubclass(kind, EnvironmentConfig):
                if not environments:
                    return
                yield from ((config, outside) for outside in kind.outside(config))
    if isinstance(config, (Mapping, list)):
        for value in config.values() if isinstance(config, Mapping) else config:
            yield from _outside(value, environments)


def _kinds(family: type[Config]) -> Iterator[type[Config]]:
    for child in family.__subclasses__():
        yield child
        yield from _kinds(child)


def _files(code: str, source: Path | None) -> Sequence[str]:
    """Return the files of the user's own that are run where `code` is imported:
    "FILE.py:NAME", "module:NAME" or "module"."""
    place, colon, _ = code.rpartition(":")
    if place.endswith(".py"):
        return [_real(place)]
    files: list[str] = []
    for name in accumulate((place if colon else code).split("."), "{}.{}".format) if code else ():
        files += module_file(name)
        if source is not None:  # what lies beside it can be imported once it runs
            beside = source.resolve().parent.joinpath(*name.split("."))
            files += filter(os.path.isfile, module_places(beside))
    return [_real(file) for file in files if not is_installed(Path(file))]


def _real(path: str) -> str:
    """Return where a path leads; one that no system has is left as it is."""
    try:
        return os.path.realpath(path)
    except ValueError:
        return path


def _digest(*parts: str) -> str:
    return sha256(json.dumps(parts).encode()).hexdigest()


def _place() -> Path:
    """Where this user's things are noted."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path("~/.config").expanduser()) / "tidemill" / "trusted"


def _home() -> Path | None:
    """Return that place, made where it was not there; None where that cannot be, or
    others could write there."""
    with suppress(OSError, RuntimeError):
        place = _place()
        for folder in (place.parent.parent, place.parent, place):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (place.parent, place):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
                return None
        return place if os.access(place, os.W_OK) else None
    return None


def _is_known(digest: str) -> bool:
    home = _home() if digest else None
    return home is not None and (home / digest).is_file()
