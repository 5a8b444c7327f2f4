"""The fault of taking all memory that there is."""

import os
from typing import NoReturn


def take_all_memory() -> NoReturn:
    """Take memory until the system kills this process."""
    hoard = []
    while True:
        hoard.append(bytearray(os.urandom(1 << 20)) * 8)
