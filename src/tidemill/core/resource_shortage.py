"""What the system refuses because it has run out of something, or allows no more of it:
in words, with what mends that."""

import errno
import os
import sys
from contextlib import suppress

from tidemill.core.errors import message_of, place


def why(error: BaseException) -> str:
    """Return what a system's error says, and the cure where something has run out.
    Python's word for a thread that cannot be started is such an error, too, as is a want
    of memory."""
    text = message_of(error)
    if wants_memory(error):
        return f"{text}{_more(errno.ENOMEM)}".removeprefix(": ")
    if isinstance(error, RuntimeError):
        return f"{text}{_more(errno.EAGAIN)}" if "can't start new thread" in text else text
    if not isinstance(error, OSError):
        return text
    more = _more(error.errno)
    if error.errno == errno.ENOSPC and _lacks_inodes(error.filename):
        more = ": no inode is left (df -i), so that space alone does not help: remove files there"
    return f"{error.strerror or text}{more}"


def _lacks_inodes(file: object) -> bool:
    """True where the disk of a file may take no other one, though space is free. Of a
    full disk some file systems tell both, since they make inodes of free space."""
    with suppress(OSError, TypeError, ValueError):
        found = os.statvfs(os.path.dirname(os.fspath(file)) or ".")  # type: ignore[call-overload]
        return found.f_files > 0 and found.f_favail == 0 < found.f_bavail
    return False


def cause_of(error: Exception) -> str:
    """Return what a user reads of what a launcher has raised: of the system's errors what
    they say and of which file, of others where they come from, too."""
    if isinstance(error, OSError) or why(error) != str(error):
        file = getattr(error, "filename", None)
        return f"{why(error)}: {file}" if file else why(error)
    return f"{type(error).__name__}: {error}{place(error)}"


def wants_memory(error: BaseException) -> bool:
    """True of a want of memory, in Python's words or in torch's."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and (type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in message_of(error))
    )


def _more(number: int | None) -> str:
    match number:
        case errno.EAGAIN:
            return (
                f": no more processes or threads are allowed{_allowed('NPROC')}; end others of yours, make a "
                "count smaller, or raise it: ulimit -u"
            )
        case errno.EMFILE:
            return f": no more files may be open{_allowed('NOFILE')}; raise it: ulimit -n"
        case errno.EFBIG:
            return (
                f": no file or piece of shared memory may be larger{_allowed('FSIZE')}; raise it: ulimit -f "
                "unlimited"
            )
        case errno.ENOMEM:
            return (
                f": no more memory is given{_allowed('AS')}; make lanes or counts smaller, end others, or "
                "raise ulimit -v where that is set"
            )
    return ""


def _allowed(name: str) -> str:
    """Return how much that is, where there is a limit of this process."""
    if sys.platform == "win32":
        return ""
    import resource

    soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
    unit = " bytes" if name in ("FSIZE", "AS") else ""
    return "" if soft == resource.RLIM_INFINITY else f" (the limit is {soft:,}{unit})"
