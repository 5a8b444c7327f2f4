"""The settings that a run's folder tells, and names of groups of runs by the settings in
which they differ."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.core.untrusted_files import read_json, read_plain
from tidemill.layouts.auto_layout import LAYOUT
from tidemill.run.folder import CONFIG

Settings = Mapping[str, Any]
"""Path of a setting → its value, plain data; {} of a run whose configuration cannot be
read."""

# what a run of the same settings may have of its own: another seed, and how far it went,
_BESIDES = ("seed", "name", "limits")
_SCHEDULED = ("limits.steps", "limits.updates")  # unless a schedule runs over that
_LAID_OUT = re.compile(
    r"together(\..*)?|workers\.[^.]+\.(count|one_core|lanes|ring|slots|environment\.threads|agents\.\d+\.sample_steps)"
)
_SHOWN = 4  # differences in a line's name


def settings_of(run: Path) -> Settings:
    """Return a run's settings, but for its seed, its name, its limits where no schedule
    depends on them, and the layout where that was chosen for its machine."""
    every = _flat(_read(run / CONFIG))
    kept = _SCHEDULED if any(map(_to_the_end, every.items())) else ()
    found = {
        path: value for path, value in every.items() if path.partition(".")[0] not in _BESIDES or path in kept
    }
    laid_out = _read(run / LAYOUT)
    if laid_out.get("layout") and laid_out.get("costs"):
        found = {path: value for path, value in found.items() if not _LAID_OUT.fullmatch(path)}
    return found


def _to_the_end(setting: tuple[str, Any]) -> bool:
    """True of a setting of a schedule that ends with the run; earlier versions wrote
    "linear"."""
    path, value = setting
    name = path.rpartition(".")[2]
    return value is None if name == "to_step" else name.endswith("_schedule") and value != "constant"


def name_of(run: Path) -> str | None:
    """Return the name of a run's experiment; None where it does not say."""
    name = _read(run / CONFIG).get("name")
    return name if isinstance(name, str) else None


def differences(settings: Sequence[Settings]) -> list[str]:
    """Return for each of several settings what tells it from the others, such as
    "learning_rate=0.001"; "" where nothing does."""
    paths = list(dict.fromkeys(path for each in settings for path in each))
    differing = [
        path
        for path in paths
        if any(path not in each or each[path] != settings[0].get(path) for each in settings)
    ]
    said = [
        ", ".join(
            f"{_short(path, differing)}={_text(each[path])}" for path in differing[:_SHOWN] if path in each
        )
        for each in settings
    ]
    rest = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    return [f"{text or 'without these'}{rest}" if differing else "" for text in said]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(read_plain(path))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of plain data by their paths."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: dict[str, Any] = {}
    for key, part in parts:
        found |= _flat(part, f"{path}.{key}" if path else str(key))
    return found if found or not path else {path: value}


def _short(path: str, others: Sequence[str]) -> str:
    """Return as much of the end of a path as tells it from the others."""
    parts = path.split(".")
    for count in range(1, len(parts)):
        end = ".".join(parts[-count:])
        if not parts[-count].isdigit() and not any(
            other != path and f".{other}".endswith(f".{end}") for other in others
        ):
            return end
    return path


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
