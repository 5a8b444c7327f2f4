"""The simulator's ends in other languages, as files that a simulator's author takes
along: a C header, a C# package, and example worlds of both."""

import filecmp
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tidemill.core.errors import ConfigError

_BRIDGE = Path(__file__).parents[1]
LANGUAGES = ("native", "csharp")  # folders of the bridge


def source_files() -> Iterator[Path]:
    """Yield the files, as paths relative to `sources_folder()`."""
    for language in LANGUAGES:
        for path in sorted((_BRIDGE / language).rglob("*")):
            if path.is_file():
                yield path.relative_to(_BRIDGE)


def sources_folder() -> Path:
    """Return where they lie in the installed package: `native/tidemill.h` and the C
    examples, `csharp/` and its examples."""
    return _BRIDGE


def copy_sources(folder: Path) -> list[Path]:
    """Copy the files into `folder`, as folders `native` and `csharp`; see
    `copy_files`."""
    return copy_files(_BRIDGE, list(source_files()), folder)


def copy_files(root: Path, files: Sequence[Path], folder: Path) -> list[Path]:
    """Copy `files`, paths relative to `root`, into `folder` (made if need be); return the
    copies' paths.

    Files that are there already and equal stay; a ConfigError names one that differs, and
    then nothing was copied.
    """
    for file in files:
        target = folder / file
        if target.exists() and not (target.is_file() and filecmp.cmp(root / file, target, shallow=False)):
            raise ConfigError(
                f"{target} exists and differs from the file of this version; move it away, or choose another "
                "folder"
            )
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / file, folder / file)
    return [folder / file for file in files]
