"""Configurations as files: what ``tidemill train --print-config`` prints, and
``--config FILE`` reads."""

import json
import sys
from pathlib import Path

from tidemill.api.experiment import Experiment
from tidemill.core.config import brought_up_to_date, decode, encode
from tidemill.core.errors import ConfigError
from tidemill.core.secrets import check_revealed, hide
from tidemill.core.untrusted_files import read_json, read_plain
from tidemill.core.user_code_loading import expect, load_file
from tidemill.run.trust import Trust, allow, named


def config_text(experiment: Experiment, source: Path | None) -> str:
    """Return `experiment` as JSON, without secrets, and with the file `source` that its
    own classes come from."""
    content = {"source": str(source.resolve()) if source else None, "experiment": hide(encode(experiment))}
    return json.dumps(content, indent=2)


def read_config(path: Path, trust: Trust = False) -> tuple[Experiment, Path | None]:
    """Return the experiment in the file, and the file that its own classes come from.

    Code, programs and addresses that the file names are run or asked only where this user
    has had that done before, or trusts it. Raises `ConfigError` for what is no
    configuration, and `Untrusted`.
    """
    try:
        content = read_json(read_plain(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--config {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if not isinstance(content, dict) or not isinstance(content.get("experiment"), dict):
        raise ConfigError(f"--config {path} is no configuration; tidemill train … --print-config prints one")
    given, config = content.get("source"), content["experiment"]
    source = Path(given) if isinstance(given, str) else None
    found = named(config, source)
    allow(path, found, trust)
    check_revealed(config)
    expect(found.files)
    if source is not None:
        load_file(source, f"--config {path}: source")
    config, told = brought_up_to_date(config)
    for text in told:
        print(f"note: {path}: {text}", file=sys.stderr)
    return decode(Experiment, config), source
