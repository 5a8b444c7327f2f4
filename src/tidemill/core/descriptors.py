"""How many descriptors a process may have open."""

import os

from tidemill.core.errors import TooManyFiles

_SPARE = 60  # for what is opened for a while
_MOST_LOOKED_AT = 1 << 16


def allow_descriptors(more: int, what: str, fewer: str) -> None:
    """Raise this process's limit of open descriptors, where it is too low for so many
    more, to twice what is needed, if that may be. `what`: what they are of. `fewer`: how
    the user comes to need fewer. Raises `TooManyFiles` where it may not be raised so
    far."""
    import resource  # no module of every system's

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        opened = len(os.listdir("/proc/self/fd"))
    except OSError:  # there is no /proc, or not even that can be opened
        opened = sum(map(_is_open, range(soft if 0 <= soft < _MOST_LOOKED_AT else _MOST_LOOKED_AT)))
    needed = opened + more + _SPARE
    if 0 <= hard < needed:
        raise TooManyFiles(
            f"this needs {needed:,} open files ({more:,} of {what}, {opened:,} that are open, {_SPARE} to "
            f"spare), and {hard:,} are allowed; {fewer}, or have the limit raised: ulimit -Hn"
        )
    if soft < needed:
        most = 2 * needed  # some are closed a while after others that take their place were opened
        resource.setrlimit(resource.RLIMIT_NOFILE, (most if hard < 0 else min(most, hard), hard))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
