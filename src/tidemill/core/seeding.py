"""Random streams by name: every part of a run has its own, derived from the run's one
seed."""

from hashlib import sha256


def derive_seed(seed: int, *path: str | int) -> int:
    """Return a 31-bit seed for the part of a run that `path` names, e.g.
    ``derive_seed(1, "actor-0", "target", 3)``.

    Equal arguments give equal seeds on every machine; different paths give unrelated
    ones.
    """
    text = "/".join([str(seed), *map(str, path)])
    return int.from_bytes(sha256(text.encode()).digest()[:4], "little") >> 1
