"""Strict, frozen configurations that are saved with each run and name their own kind.

A family is a `Config` subclass (say `PolicyConfig`); a member is a subclass of it, found
again by its `kind` (the class name). Decoding refuses unknown keys and lossy casts and
says where. Nothing here builds anything: `build()` of the members does.
"""

import contextlib
import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from importlib import import_module
from numbers import Integral, Real
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.core.foreign_names import FOREIGN_NAMES, WITHOUT_NAMES
from tidemill.core.secrets import shown

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


def check_name(what: str, name: str) -> None:
    """Raise `ConfigError` unless `name` may name a run, a policy, a worker or a
    stream."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f'{what} "{name}" is not a name: use 1 to 64 of letters, digits, ".", "_" and "-", not beginning '
            "with a dot"
        )


INF = "inf"
"""What stands for infinity in plain data: JSON has no number for it."""
WHEN, IDLE = "when", "idle"  # in the metadata of a field: see `acting`
LAYOUT = "layout"  # in the metadata of a field: see `layout_setting`


def layout_setting(default: Any) -> Any:
    """Return a field that says how many parts an experiment has, or where they run: who
    sets it has chosen a layout."""
    return dataclasses.field(default=default, metadata={LAYOUT: True})


@functools.cache
def _check_settings(kind: type) -> None:
    """Raise `ConfigError` where a setting of a configuration hides one of its methods."""
    for each in dataclasses.fields(kind):
        for base in kind.__mro__:
            hidden = vars(base).get(each.name)
            if isinstance(hidden, (types.FunctionType, classmethod)) and each.name not in getattr(
                base, "__dataclass_fields__", ()
            ):
                raise ConfigError(
                    f"setting {each.name} of {kind.__name__} hides the method {base.__name__}.{each.name}(): "
                    "name it otherwise"
                )


def acting(default: Any, when: Callable[[Any], bool], idle: str, layout: bool = False) -> Any:
    """Return a field that acts only where `when`, asked of the configuration, is true.
    Elsewhere any value but `default` (or what it returns, if it is a class) is refused,
    since it would have no effect; `idle` says where that is, as "without a ratio".
    `layout` marks it as `layout_setting` does."""
    metadata = {WHEN: when, IDLE: idle} | ({LAYOUT: True} if layout else {})
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The base of all configurations. Subclass with ``@dataclass(frozen=True,
    kw_only=True)``; check values in `__post_init__`, raise `ConfigError`, and call
    `super().__post_init__()`. A setting that acts under a condition only is declared by
    `acting`.

    `retired`: settings that there were once, each with the default that it had and what
    to do instead. `renamed`: settings that are called something else now, old names with
    the new ones. Saved configurations may hold either.
    """

    retired: ClassVar[Mapping[str, tuple[Any, str]]] = {}
    renamed: ClassVar[Mapping[str, str]] = {}

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        for name in settings:
            if name in cls.retired or name in cls.renamed:
                raise ConfigError(_gone(cls, name))
            known = cls.__dataclass_fields__
            if (name in FOREIGN_NAMES or name in WITHOUT_NAMES) and name not in known:
                raise ConfigError(f"{cls.__name__} has no setting {name}; {did_you_mean(name, known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        kind: Any = type(self)  # mypy takes a class for something without a hash
        _check_settings(kind)
        for each in dataclasses.fields(self):
            known, value = _choices(each.type), getattr(self, each.name)
            if known and value not in known:
                raise ConfigError(
                    f'{each.name} = "{value}" is not known; take one of {", ".join(map(str, known))}'
                )
            if WHEN in each.metadata and not each.metadata[WHEN](self):
                self.refuse_idle(each.name, each.metadata[IDLE])

    def check_least(self, otherwise: str = "", /, **least: float) -> None:
        """Raise `ConfigError` for a setting, None aside, that is no number of its type,
        or below the `least` that it can be; `otherwise` names what to do instead."""
        for name, number in least.items():
            if (value := getattr(self, name)) is None:
                continue
            whole = "whole " * self._is_whole(name)
            kind: Any = Integral if whole else Real
            if not isinstance(value, kind):
                raise ConfigError(f"{name} = {value!r} must be a {whole}number, at least {number}")
            if not value >= number:
                raise ConfigError(f"{name} = {value} must be at least {number}{otherwise}")

    @classmethod
    def _is_whole(cls, name: str) -> bool:
        hint = cls.__dataclass_fields__[name].type
        return {int, float} & {hint, *typing.get_args(hint)} == {int}

    def check_above_zero(self, *names: str) -> None:
        """Raise `ConfigError` for a setting, None aside, that is not a number above 0."""
        self.check_deadlines(*names)
        for name in names:
            if getattr(self, name) == math.inf:
                raise ConfigError(f"{name} = inf must be finite{self._or_null(name)}")

    def check_deadlines(self, *names: str) -> None:
        """Raise `ConfigError` for a setting, None aside, that is neither a number above 0
        nor inf: any time."""
        for name in names:
            if isinstance(value := getattr(self, name), str):
                raise ConfigError(f"{name} = {value!r} must be a number above 0{self._or_null(name)}")
            if value is not None and not value > 0:
                raise ConfigError(f"{name} = {value} must be above 0{self._or_null(name)}")

    def _or_null(self, name: str) -> str:
        """Return words for a setting that may be None."""
        return ", or null" * (type(None) in typing.get_args(typing.get_type_hints(type(self))[name]))

    def check_shares(self, *names: str) -> None:
        """Raise `ConfigError` for a setting that is not between 0 and 1."""
        for name in names:
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ConfigError(f"{name} = {value} must be between 0 and 1")

    def refuse_idle(self, name: str, why: str) -> None:
        """Raise `ConfigError` if the setting `name` is not its default though it has no
        effect; `why` says so, and may name another cure."""
        each = next(each for each in dataclasses.fields(self) if each.name == name)
        usual = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        if (value := getattr(self, name)) != usual:
            raise ConfigError(
                f"{type(self).__name__}: {name} = {value!r} has no effect {why}; leave it out, or change that"
            )

    @classmethod
    def of_today(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return what describes today what an earlier version may have saved as `data` of
        this kind: of another kind, with settings by other names."""
        return data

    def replace(self, **changes: Any) -> Self:
        """Return a copy with the named fields changed (checked again)."""
        return dataclasses.replace(self, **changes)


def _choices(hint: Any) -> tuple[Any, ...]:
    """Return the values of a setting of this type where they are listed: a `Literal`, or
    one, with bool beside it or not, or None; else ()."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    parts = typing.get_args(hint)
    if {int, float, str}.intersection(parts):  # other values besides
        return ()
    choices = [value for part in parts for value in _choices(part)]
    if bool in parts:
        choices += [True, False]
    return (*choices, None) if len(choices) > 2 * (bool in parts) and type(None) in parts else ()


def _gone(cls: type[Config], name: str) -> str:
    now = f"it is called {cls.renamed[name]}" if name in cls.renamed else cls.retired[name][1]
    return f"{cls.__name__} has no setting {name} any more: {now}"


def check_counts(**counts: int) -> None:
    """Raise `ConfigError` unless every number is at least 1; names are what the user
    calls them."""
    for name, number in counts.items():
        if number < 1:
            raise ConfigError(f"{name} = {number} must be at least 1")


def check_several(setting: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is a tuple (or a list, which is read as one), as
    where its comma was forgotten."""
    if not isinstance(value, (tuple, list)):
        raise ConfigError(
            f"{setting} = {value!r} must be a tuple; write {setting}=(…,), with the comma, where it has one "
            "member only"
        )


C = TypeVar("C", bound=Config)

homes: dict[str, str] = {}
"""The modules of configurations that are imported when one is first named, by kind."""


def members(family: type[Config]) -> dict[str, type[Config]]:
    """Return every subclass of `family` that is imported, itself included, by kind. A
    user's own class comes before one of the library."""
    found = {family.__name__: family}
    for child in sorted(
        family.__subclasses__(), key=lambda kind: not kind.__module__.startswith("tidemill.")
    ):
        found.update(members(child))
    return found


def member(family: type[Config], kind: str) -> type[Config] | None:
    """Return the subclass of `family` called `kind`, imported if need be; None if there
    is none."""
    known = members(family)
    if kind in homes and kind not in known:
        import_module(homes[kind])
        known = members(family)
    return known.get(kind)


def encode(value: Any, path: str = "experiment") -> Any:
    """Return `value` as plain data (dict, list, str, int, float, bool, None) that
    `decode` turns back into an equal value.

    Raises `ConfigError` for what plain data cannot hold, such as a lambda.
    """
    if isinstance(value, Config):
        fields = {
            f.name: encode(getattr(value, f.name), f"{path}.{f.name}") for f in dataclasses.fields(value)
        }
        for f in dataclasses.fields(value):
            if fields[f.name] == math.inf and "float" in str(f.type):
                fields[f.name] = INF
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, Mapping):
        return {str(k): encode(v, f"{path}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(v, f"{path}[{i}]") for i, v in enumerate(value)]
    if getattr(value, "shape", None) == ():  # a number of numpy's
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, type) and issubclass(value, Config):
        raise ConfigError(
            f"{path} is the class {value.__name__} itself; write {value.__name__}(…), with its settings"
        )
    what = "a function" if callable(value) else f"a {type(value).__name__}"
    raise ConfigError(
        f"{path} is {what} ({shown(path, value)}); an experiment is plain data that other processes must be "
        'able to read. Name it instead, as "module:NAME" or "FILE.py:NAME"'
    )


def decode(family: type[C], data: Any, path: str = "experiment") -> C:
    """Return the member of `family` that `data` (as made by `encode`, or read from JSON
    or YAML) describes.

    Raises `ConfigError` naming the path, the value and the nearest known name when a key
    is unknown or a type does not fit.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} must be a table of settings, not {data!r}")
    kind = data.get("kind", family.__name__)
    cls = member(family, kind) if isinstance(kind, str) else None
    if cls is None:
        for module in homes.values():
            import_module(module)
        kinds = members(family)
        raise ConfigError(
            f'{path}.kind: no {family.__name__} is called "{kind}"; '
            f"{did_you_mean(str(kind), kinds.keys() - {family.__name__} or kinds)}"
        )
    try:
        hints = typing.get_type_hints(cls)
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        raise ConfigError(f"{path}: the type of a setting of {kind} cannot be read: {error}") from None
    names = [f.name for f in dataclasses.fields(cls)]
    for key in data:
        if key in cls.retired or key in cls.renamed:
            raise ConfigError(f"{path}.{key}: {_gone(cls, key)}")
        if key != "kind" and key not in names:
            raise ConfigError(f'{path}.{key}: {kind} has no setting "{key}"; {did_you_mean(str(key), names)}')
    values = {k: _decode_value(hints[k], v, f"{path}.{k}") for k, v in data.items() if k != "kind"}
    needed = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing := [name for name in needed if name not in values]:
        raise ConfigError(
            f"{path}: a {kind} needs {' and '.join(missing)}; it has {', '.join(values) or 'nothing'}"
        )
    try:
        return typing.cast(C, cls(**values))
    except ConfigError as error:
        raise error if path in str(error) else ConfigError(f"{path}: {error}") from None
    except TypeError as error:
        raise ConfigError(f"{path}: {error}") from None


def brought_up_to_date(data: Any, path: str = "experiment") -> tuple[Any, list[str]]:
    """Return plain data that an earlier version may have saved as this one would save it:
    of the kinds that there are now (`Config.of_today`), with settings by the names that
    they have now, without those that are retired since; and what to tell of these that
    were set to something else than their default."""
    told: list[str] = []
    if isinstance(data, list):
        parts = [brought_up_to_date(value, f"{path}[{i}]") for i, value in enumerate(data)]
        return [part for part, _ in parts], [text for _, texts in parts for text in texts]
    if not isinstance(data, dict):
        return data, told
    cls, kept, before = Config, {}, None
    while data.get("kind") != before:  # the kind that it is now may have changed, too
        before = data.get("kind")
        cls = member(Config, str(before)) or Config
        data = cls.of_today(data)
    for name, value in data.items():
        if name in cls.retired:
            told += (
                [f"{path}.{name} = {value!r} is left out: {_gone(cls, name)}"]
                if value != cls.retired[name][0]
                else []
            )
            continue
        now = cls.renamed.get(name, name)
        kept[now], texts = brought_up_to_date(value, f"{path}.{now}")
        told += texts
    return kept, told


def _decode_value(hint: Any, value: Any, path: str) -> Any:
    origin, args, other = typing.get_origin(hint), typing.get_args(hint), ""
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        some = [a for a in args if a is not type(None)]
        if len(some) == 1:
            return _decode_value(some[0], value, path)
        if (known := _choices(hint)) and value not in known:
            raise ConfigError(f"{path} = {value!r}; {did_you_mean(str(value), map(str, known))}")
        words = [word for a in some if typing.get_origin(a) is typing.Literal for word in typing.get_args(a)]
        if words and isinstance(value, str) and str not in some and value not in words:
            others = [repr(word) for word in words] + ["null"] * (type(None) in args)
            raise ConfigError(f"{path} = {value!r}; take a number, or {', '.join(others)}")
        configs = [a for a in some if isinstance(a, type) and issubclass(a, Config)]
        if configs and (len(configs) == len(some) or isinstance(value, Mapping)):
            return decode(configs[0], value, path)
        if configs:  # a number, or a configuration in its place
            hint = typing.Union[tuple(a for a in args if a not in configs)]  # noqa: UP007
            told = ", ".join(each.name for each in dataclasses.fields(configs[0]))
            other = f"; or a table of {configs[0].__name__} ({told})"
    elif isinstance(hint, type) and issubclass(hint, Config):
        return decode(hint, value, path)
    elif origin in (dict, Mapping) or getattr(origin, "__name__", "") == "Mapping":
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} must be a table, not {value!r}")
        return {k: _decode_value(args[1], v, f"{path}.{k}") for k, v in value.items()}
    elif origin is typing.Literal:
        if value not in args:
            raise ConfigError(f"{path} = {value!r}; {did_you_mean(str(value), args)}")
        return value
    elif origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{path} must be a list, not {value!r}")
        return tuple(_decode_value(args[0], v, f"{path}[{i}]") for i, v in enumerate(value))
    if hint is float and value in (INF, "Infinity"):
        return math.inf
    try:
        return msgspec.convert(value, hint, strict=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # half of a letter, as JSON can have it
        raise ConfigError(
            f"{path} = {shown(path, value)}: {str(error)[0].lower()}{str(error)[1:]}{other}"
        ) from None


_PYTHON = {"True": True, "False": False, "None": None}


def read_setting(text: str) -> Any:
    """Return what `text` of a command line stands for: JSON where it is JSON, True, False
    and None as Python writes them, else the text."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return _PYTHON.get(text, text)


def set_path(config: C, path: str, text: str) -> C:
    """Return `config` with the field at dotted `path` set to what `read_setting` makes of
    `text`.

    >>> set_path(experiment, "workers.trainer.algorithm.epochs", "4")  # doctest: +SKIP
    """
    value = read_setting(text)
    data = encode(config)
    node, parts = data, path.split(".")
    for depth, part in enumerate(parts):
        here = ".".join(parts[:depth]) or type(config).__name__
        key: Any = part
        if isinstance(node, list):
            if not part.isdigit() or int(part) >= len(node):
                raise ConfigError(
                    f'--set {path}: {here} is a list of {len(node)}; "{part}" is not one of its places'
                )
            key = int(part)
        elif not isinstance(node, dict):
            raise ConfigError(f'--set {path}: {here} is {node!r}, which has no "{part}" inside')
        elif part in (cls := member(Config, str(node.get("kind"))) or Config).retired or part in cls.renamed:
            raise ConfigError(f"--set {path}: {_gone(cls, part)}")
        elif part not in node and not (depth == len(parts) - 1 and _is_open(config, parts[:-1])):
            raise ConfigError(
                f'--set {path}: {here} has no "{part}"; '
                f"{did_you_mean(part, (k for k in node if k != 'kind'))}"
            )
        if depth < len(parts) - 1:
            node = node[key]
    node[key] = value
    try:
        return decode(type(config), data, "experiment")
    except ConfigError:
        if not isinstance(value, (int, float)) and text not in _PYTHON:
            raise
        with contextlib.suppress(ConfigError):  # a string that looks like a number or a bool
            node[key] = text
            return decode(type(config), data, "experiment")
        raise


def _is_open(config: Any, parts: list[str]) -> bool:
    """True when the value at `parts` is a free table (a mapping field), into which new
    keys may be put."""
    for part in parts:
        config = (
            config[int(part)]
            if isinstance(config, tuple)
            else config[part]
            if isinstance(config, Mapping)
            else getattr(config, part)
        )
    return isinstance(config, Mapping)
