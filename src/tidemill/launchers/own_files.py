"""The files that a host keeps for a run whose own it does not see."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from time import monotonic

import msgspec

from tidemill.core.temporary_folders import temporary_folder
from tidemill.core.user_code_loading import file_digest, with_files_moved
from tidemill.hosts.orders import SentExperiment
from tidemill.launchers.log_files import KEPT_BYTES

MOST_LOGGED_BYTES = 10 << 20
"""The most bytes of a log that are told to the runner."""
_LOG_S = 0.5  # seconds between two looks into logs
_LOG_BYTES = 1 << 16  # that are told at once


def has_files(code: Mapping[str, bytes]) -> bool:
    """True where this host has all these files, each as it is given."""
    return all(file_digest(Path(path)) == sha256(data).hexdigest() for path, data in code.items())


class OwnFiles:
    """The files that a host keeps for a run whose own it does not see: the user's code,
    and what workers write. They are in a folder of the agent's, and go with it."""

    def __init__(self) -> None:
        self._folder = temporary_folder()
        self.logs = Path(self._folder.name, "logs")
        self.run = Path(self._folder.name, "run")
        """The folder that is the run's for workers who draw versions."""
        self._read: dict[Path, int] = {}  # how far logs were read,
        self._told: dict[Path, int] = {}  # and the bytes that were told of them
        self._next = 0.0

    def carry(self, sent: SentExperiment) -> SentExperiment:
        """Write down the user's files, and return the experiment with their new
        places."""
        root = Path(self._folder.name, "code")
        moved = {path: str(root / Path(path).relative_to("/")) for path in sent.code}
        for path, data in sent.code.items():
            Path(moved[path]).parent.mkdir(parents=True, exist_ok=True)
            Path(moved[path]).write_bytes(data)
        experiment = json.dumps(with_files_moved(json.loads(sent.experiment), moved))
        places = [str(root / Path(place).relative_to("/")) for place in sent.path]
        return msgspec.structs.replace(
            sent,
            experiment=experiment,
            source=None if sent.source is None else moved.get(sent.source, sent.source),
            path=[*filter(os.path.isdir, places), *sent.path],
            files={os.path.realpath(moved.get(path, path)): digest for path, digest in sent.files.items()},
        )

    def written(self, all_of_it: bool) -> Iterator[tuple[str, bytes]]:
        """Yield what workers have written since the last call, by the log's name: now and
        then, and some of it, unless `all_of_it` is asked for."""
        if (monotonic() < self._next and not all_of_it) or not self.logs.is_dir():
            return
        self._next = monotonic() + _LOG_S
        for path in self.logs.iterdir():
            told, most = self._told.get(path, 0), MOST_LOGGED_BYTES if all_of_it else _LOG_BYTES
            with suppress(OSError), path.open("rb") as file:
                at = self._read.get(path, 0)
                if at > file.seek(0, os.SEEK_END):  # its middle was taken out
                    at = KEPT_BYTES
                file.seek(at)
                if text := file.read(min(most, MOST_LOGGED_BYTES - told)):
                    self._read[path], self._told[path] = at + len(text), told + len(text)
                    yield path.name, text

    def close(self) -> None:
        """Remove them."""
        self._folder.cleanup()
