"""Code that the user names: ``module:NAME`` and ``FILE.py:NAME``. Only names that a user
typed get here, never those of a checkpoint.

What loads never trains: a process that works for a run, and whoever loads a file of the
user's, refuses to begin a run. Workers are started without the working directory among
their places of modules (`python -P`); the main process's places travel with the job, and
come last.
"""

import ast
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
)
from importlib.util import spec_from_file_location
from itertools import accumulate, chain, islice
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.core.untrusted_files import open_plain, read_plain


def load_attribute(name: str, setting: str) -> Any:
    """Return what ``module:NAME`` or ``FILE.py:NAME`` names. Raises `ConfigError`,
    beginning with `setting`, when there is no such thing."""
    source, colon, attribute = name.rpartition(":")
    if not colon or not source or not attribute:
        raise ConfigError(f'{setting} "{name}" must have the form "module:NAME" or "FILE.py:NAME"')
    if name in _HERE:
        return _HERE[name]
    if only_here([name]):
        raise ConfigError(f"{setting}: {why_only_here(name)}")
    module = load_file(Path(source), setting) if source.endswith(".py") else import_module(source, setting)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(
            f'{setting}: {source} has no "{attribute}"; {did_you_mean(attribute, _names_of(module))}'
        ) from None


def _names_of(module: ModuleType) -> list[str]:
    """Return the public names of a module, without what it has only imported, where it
    has others."""
    names = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    own = [
        name
        for name, value in names.items()
        if not isinstance(value, ModuleType)
        and (not isinstance(value, (type, FunctionType)) or value.__module__ == module.__name__)
    ]
    return own or list(names)


def import_module(name: str, setting: str) -> ModuleType:
    """Import a module of the user's; what fails inside it is reported as its own
    error."""
    try:
        with _loading(name):
            return importlib.import_module(name)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            cure = "install it, or name its folder in PYTHONPATH"
            if Path(error.name.replace(".", "/")).is_dir() or Path(f"{error.name}.py").is_file():
                cure = (
                    "the working directory, where there is one, is not looked into: start with PYTHONPATH=., "
                    "or name a file, FILE.py:NAME"
                )
            raise ConfigError(f'{setting}: there is no module "{error.name}"; {cure}') from None
        raise ConfigError(
            f'{setting}: importing "{name}" needs the module "{error.name}", which is not installed: pip '
            f"install {error.name}"
        ) from error
    except Exception as error:
        raise ConfigError(f'{setting}: importing "{name}" failed: {type(error).__name__}: {error}') from error


def load_file(path: Path, setting: str) -> ModuleType:
    """Run a Python file of the user's as a module, once per process, and return it. What
    lies beside it can be imported meanwhile and after, where nothing that is installed
    has that name."""
    if not path.is_file():
        raise ConfigError(f"{setting}: there is no file {path}")
    name = f"tidemill_file_{path.stem}_{sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    _FILES.paths[name] = path
    _add_path(str(path.resolve().parent))
    try:
        with _loading(str(path)):
            return importlib.import_module(name)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error
    except (Exception, SystemExit) as error:
        cure = (
            f"; put what ends it under {GUARD}, since it is run for what it defines"
            if isinstance(error, SystemExit)
            else ""
        )
        raise ConfigError(
            f"{setting}: running {path} failed: {type(error).__name__}: {error}{cure}"
        ) from error


# ---- what only loads -------------------------------------------------------------------

GUARD = 'if __name__ == "__main__":'
_STATE = threading.local()
_WORKER = False


@contextmanager
def _loading(what: str) -> Iterator[None]:
    before = getattr(_STATE, "loading", "")
    _STATE.loading = before or what
    try:
        yield
    finally:
        _STATE.loading = before


def begin_to_work() -> None:
    """Say that this process works for a run of another one, and so begins none."""
    global _WORKER
    _WORKER = True


def refuse_while_loading(call: str) -> None:
    """Raise `ConfigError` while a file or module of the user's is loaded for what it
    defines, and in worker processes: a run that is begun there would load it again in its
    own workers, and so on."""
    what = getattr(_STATE, "loading", "")
    if what or _WORKER:
        where = (
            f"{what} is loaded for what it defines, as every worker process does,"
            if what
            else "a worker process runs code of yours"
        )
        raise ConfigError(
            f"{call} is called while {where} and would begin a run in the run; put the call under  {GUARD}"
        )


# ---- code that is given as it is -------------------------------------------------------

if TYPE_CHECKING:
    Code = Any
else:
    Code = str
"""The type of settings that name code of the user's: "module:NAME", "FILE.py:NAME", or
the class or function itself, which is kept by such a name (see `name_of_code`)."""

_HERE: dict[str, Any] = {}


def name_of_code(code: Any) -> Any:
    """Return what a class or function of the user's is called, as `load_attribute` takes
    it; anything else as it is. In this process it is that very object. One without a name
    that other processes could look up is known in this one alone (`only_here`)."""
    if not callable(code):
        return code
    module = getattr(code, "__module__", None) or ""
    qualname = getattr(code, "__qualname__", None) or f"<{type(code).__name__}>"
    holder = sys.modules.get(module)
    file = getattr(holder, "__file__", None)
    name = f"{module}:{qualname}"
    if holder is None or getattr(holder, qualname, None) is not code:
        stem, number = name if "<" in name else f"{module}:<{qualname}>", 1
        name = stem
        while _HERE.get(name, code) is not code:
            number += 1
            name = f"{stem}#{number}"
    elif (
        file is not None
        and file.endswith(".py")
        and os.path.isfile(file)
        and (module == "__main__" or module in _FILES.paths)
    ):
        name = f"{os.path.abspath(file)}:{qualname}"
    _HERE[name] = code
    return name


def only_here(names: Iterable[str]) -> list[str]:
    """Return those of `names` that only the process which defined them can have: of
    notebooks and prompts, lambdas, and what functions define."""
    return [
        name
        for name in names
        if name.startswith("__main__:") or ("<" in name and not name.rpartition(":")[0].endswith(".py"))
    ]


def only_here_in(config: Any) -> list[str]:
    """Return the names of code of this process alone (see `only_here`) that an encoded
    configuration holds."""
    match config:
        case str():
            return only_here([config] if config in _HERE else [])
        case Mapping():
            return [name for value in config.values() for name in only_here_in(value)]
        case list():
            return [name for value in config for name in only_here_in(value)]
    return []


def why_only_here(name: str) -> str:
    """Return one sentence on a name that `only_here` returns."""
    kind = (
        "a lambda, or made inside of a function" if "<" in name else "defined in a notebook, or at a prompt"
    )
    return (
        f'"{name}" is {kind}, and no other process has it: define it at the top of a file, and name it by '
        "FILE.py:NAME (or import it from there)"
    )


_TRAVELLED: list[str] = []


def own_path() -> list[str]:
    """Return where this process looks for modules: what worker processes are told, which
    do not look into the working directory."""
    return [os.path.abspath(place) for place in sys.path]


def environment_of_ours(**more: str) -> dict[str, str]:
    """Return this process's environment variables and `more` for a Python of our own: an
    empty place in PYTHONPATH, which means the working directory and is mostly there by
    mistake (``$PYTHONPATH:/more``), is left out."""
    found = {**os.environ, **more}
    if "PYTHONPATH" in found:
        found["PYTHONPATH"] = os.pathsep.join(filter(None, found["PYTHONPATH"].split(os.pathsep)))
    return found


def travel(path: Iterable[str]) -> None:
    """Look there, too, for what is nowhere else: neither in this process's own places nor
    beside a file of the user's."""
    _TRAVELLED[:] = [place for place in path if place not in sys.path]
    sys.path.extend(_TRAVELLED)


def _add_path(folder: str) -> None:
    """Look into the folder of a user's file: after what is installed, and before what has
    travelled."""
    if folder in _TRAVELLED and folder in sys.path:
        sys.path.remove(folder)
        _TRAVELLED.remove(folder)
    if folder not in sys.path:
        sys.path.insert(
            min((sys.path.index(place) for place in _TRAVELLED if place in sys.path), default=len(sys.path)),
            folder,
        )


class _Source(SourceFileLoader):
    """Reads a file of the user's once, and runs what it read: never bytecode that lies
    beside it, which may say something else. Where its digest is expected, another one is
    an error."""

    def get_code(self, fullname: str) -> CodeType:
        data = self.get_data(self.path)
        if not is_expected(Path(self.path), sha256(data).hexdigest()):
            raise ImportError(_changed(self.path))
        code: CodeType = self.source_to_code(data, self.path)
        return code


def _changed(path: str) -> str:
    return f"{path} is not what it was when it was allowed to run; see what has changed it, and start again"


class _Files(MetaPathFinder):
    """Lets Python import the user's files, so that a thread which asks for one that
    another thread is running waits until it is whole."""

    def __init__(self) -> None:
        self.paths: dict[str, Path] = {}
        self.digests: dict[str, str] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self.paths:
            file = str(self.paths[fullname])
            return spec_from_file_location(fullname, file, loader=_Source(fullname, file))
        spec = PathFinder.find_spec(fullname, path, target) if self.digests else None
        if spec is None or spec.origin is None or os.path.realpath(spec.origin) not in self.digests:
            return None
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Source(fullname, spec.origin)
        elif not is_expected(Path(spec.origin)):
            raise ImportError(_changed(spec.origin))
        return spec


_FILES = _Files()
sys.meta_path.insert(0, _FILES)


def expect(digests: Mapping[str, str]) -> None:
    """From now on this process runs these files only while they have these digests (""
    for one that is not there), by their resolved paths."""
    _FILES.digests.update(digests)


def is_expected(file: Path, digest: str | None = None) -> bool:
    """False where another digest is expected of `file` than `digest`, by itself the one
    that it has now."""
    expected = _FILES.digests.get(os.path.realpath(file))
    return expected is None or expected == (file_digest(file) if digest is None else digest)


def _tables(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every table of settings in an encoded configuration, itself included."""
    if isinstance(config, Mapping):
        yield config
        config = list(config.values())
    for value in config if isinstance(config, list) else ():
        yield from _tables(value)


_LONGEST = 5000


def without_arguments(call: str) -> str:
    """Return NAME, module:NAME or FILE.py:NAME without the arguments in brackets that may
    come after it."""
    if len(call) > _LONGEST:  # which takes the square of it to look through
        return call
    found = re.fullmatch(r"(.+?:[^:()]+|[^:()]+)(\(.*\))?", call, re.DOTALL)
    return found[1].strip() if found else call


def _named(table: Mapping[str, Any]) -> list[str]:
    """Return what the settings called ``make`` and ``wrap`` name."""
    wrappers = table.get("wrap")
    names = [table.get("make"), *(wrappers if isinstance(wrappers, (list, tuple)) else [])]
    return [without_arguments(name) for name in names if isinstance(name, str)]


def named_files(config: Any) -> list[str]:
    """Return every FILE.py that the settings called ``make`` and ``wrap`` name
    (``FILE.py:NAME``) in an encoded configuration, each once."""
    names = [name for table in _tables(config) for name in _named(table)]
    files = (name.rpartition(":")[0] for name in names)
    return list(dict.fromkeys(file for file in files if file.endswith(".py")))


def with_files_moved(config: Any, moved: Mapping[str, str]) -> Any:
    """Return an encoded configuration in which the settings called ``make`` and ``wrap``
    name other files: `moved` has the new one of each."""

    def new(name: Any) -> Any:
        file = without_arguments(name).rpartition(":")[0] if isinstance(name, str) else ""
        return moved[file] + name[len(file) :] if file in moved else name

    if isinstance(config, Mapping):
        found = {key: with_files_moved(value, moved) for key, value in config.items()}
        found |= {key: new(found[key]) for key in ("make",) if key in found}
        if isinstance(wrappers := found.get("wrap"), list):
            found["wrap"] = [new(name) for name in wrappers]
        return found
    return [with_files_moved(value, moved) for value in config] if isinstance(config, list) else config


def named_modules(config: Any) -> list[str]:
    """Return the files of the modules that settings called ``make``, ``wrap`` and ``id``
    name (``module:NAME``) in an encoded configuration, where they are found without
    running anything: a package is its ``__init__.py``, or what of it is named."""
    found: dict[str, None] = {}
    for table in _tables(config):
        for name in (*_named(table), table.get("id")):
            module = name.partition(":")[0] if isinstance(name, str) and ":" in name else ""
            if all(part.isidentifier() for part in module.split(".")):
                found.update(dict.fromkeys(module_file(module)))
    return list(found)


def module_file(name: str) -> list[str]:
    """Return the file of a module, [] where it is not found without running anything: a
    package is its ``__init__.py``."""
    package, _, rest = name.partition(".")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return []
    # several where a package has no __init__.py
    folders = (spec.submodule_search_locations or ()) if rest else ()
    places = (p for folder in folders for p in module_places(os.path.join(folder, *rest.split("."))))
    return list(islice(filter(os.path.isfile, chain(places, [spec.origin or ""])), 1))


def module_places(place: str | Path) -> list[str]:
    """Return the files that Python may find for a module at `place`, in its order: a
    package's, and its own by their suffixes."""
    suffixes = (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES, *BYTECODE_SUFFIXES)
    return [os.path.join(place, "__init__.py"), *(f"{place}{suffix}" for suffix in suffixes)]


def own_code(files: Iterable[str | Path]) -> dict[Path, str]:
    """Return the Python files that are there, and those of the user's own that they
    import, and these in turn, each with its digest; nothing is run.

    What is installed, in Python or beside it, is not the user's own, and what is imported
    by other means than an import statement is not seen. A file that cannot be read has a
    digest that no file has.
    """
    found: dict[Path, str] = {}
    waiting = [Path(file).resolve() for file in files]
    folders = {file.parent for file in waiting}  # which are looked into once these files run
    while waiting:
        file = waiting.pop().resolve()
        # folders that may not be entered are passed over
        if file not in found and os.path.isfile(file) and os.access(file, os.R_OK):
            data, found[file] = b"", ""
            with suppress(OSError):
                data = read_plain(file, links=True)
                found[file] = sha256(data).hexdigest()
            waiting += (
                []
                if is_installed(file)
                else [place for place in _imported(file, data, folders) if not is_installed(place)]
            )
    return found


@lru_cache(maxsize=4096)  # a question of names alone, and short runs ask of the same ones
def is_installed(file: Path) -> bool:
    """True for what was installed, and for Python's own and this library: no code of the
    user's."""
    return not {"site-packages", "dist-packages"}.isdisjoint(file.parts) or any(
        file.is_relative_to(place) for place in _INSTALLED
    )


def is_users_file(file: str) -> bool:
    """True of a file that is there, and was not installed: a user's own code."""
    return os.path.isfile(file) and not is_installed(Path(file).resolve())


_INSTALLED = (Path(__file__).resolve().parents[1], Path(sysconfig.get_path("stdlib")))
_parsing = threading.Lock()  # Python's own parser counts how deep it is for all threads together


@lru_cache(maxsize=256)  # short runs look at the same files again and again
def _import_statements(data: bytes) -> frozenset[tuple[int, str]]:
    """Return what a file that holds `data` imports, packages of modules included: the
    level of the import, 0 for an absolute one, and the name."""
    try:
        with _parsing:
            tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # too deep for the parser
        return frozenset()
    found = set[tuple[int, str]]()
    for node in ast.walk(tree):
        level = 0
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            level, above = node.level, f"{node.module}." if node.module else ""
            names = [above[:-1], *(above + alias.name for alias in node.names)]
        else:
            continue
        for whole in filter(None, names):
            found |= {(level, prefix) for prefix in accumulate(whole.split("."), "{}.{}".format)}
    return frozenset(found)


def _imported(file: Path, data: bytes, folders: Iterable[Path]) -> Iterator[Path]:
    """Where the modules that `file`, which holds `data`, imports may lie: beside it,
    where relative imports say, in `folders`, or anywhere on the path."""
    for level, name in _import_statements(data):
        above_it = file.parents[min(max(level, 1), len(file.parents)) - 1]
        *packages, module = name.split(".")
        for folder in {above_it} if level else {above_it, *folders}:
            place = folder.joinpath(*packages)
            if not packages or place.is_dir():
                yield from map(Path, filter(os.path.isfile, module_places(place / module)))
        yield from map(Path, module_file(name) if not level else ())


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, as hex digits; "" of what is empty, cannot be read,
    or is no plain file."""
    with suppress(OSError, ValueError), open_plain(path, links=True) as file:
        if os.fstat(file.fileno()).st_size:  # what the system makes up may have no end
            return hashlib.file_digest(file, "sha256").hexdigest()
    return ""
