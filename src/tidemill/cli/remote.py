"""The command that serves an environment over HTTP (`tidemill serve-env`)."""

import signal
from collections.abc import Mapping
from typing import Any

from tidemill.core.errors import ConfigError
from tidemill.presets.environment_names import environment_from


def serve(
    what: str,
    kwargs: Mapping[str, Any],
    host: str,
    port: int,
    token: str | None,
    max_sessions: int,
    max_body_bytes: int,
    idle_seconds: float,
    left_seconds: float,
    faults: Mapping[str, str],
) -> None:
    """Serve the environment that `what` names until Ctrl-C, then print what was done.
    Raises `ConfigError`."""
    environment = environment_from(what, kwargs)
    try:
        from tidemill.remote.fault_injection import Faults, FaultSampler
        from tidemill.remote.server import Server
        from tidemill.remote.server_sessions import Sessions
    except ImportError as error:
        raise ConfigError(
            'serving environments needs a package that is not installed: pip install "tidemill[rest]" '
            f"({error})"
        ) from error
    dice = FaultSampler(Faults.from_words(dict(faults))) if faults else None
    sessions = Sessions(environment.make_one, what, max_sessions, idle_seconds, left_seconds)
    server = Server(sessions, host, port, token or None, max_body_bytes, dice).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    asked = "asks for a token" if token else "no token: every user of this machine can reach it"
    print(f"{what} at {server.url} ({asked}); train with: tidemill train {server.url}", flush=True)
    try:
        server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        counts = sessions.counts()
        server.close()
    print(
        f"{counts.opened:,} sessions, {counts.resets:,} resets, {counts.applied:,} steps applied, "
        f"{counts.repeated:,} replies given again"
    )
