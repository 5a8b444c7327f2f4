"""Tests of what root alone can do to a machine: mount disks, make control groups and
containers."""

import os
from typing import NoReturn

import pytest


def needs_root(why: str) -> NoReturn:
    """Skip a test, or fail it where continuous integration asks for it."""
    if os.environ.get("TIDEMILL_REQUIRE_ROOT") == "1":
        pytest.fail(f"TIDEMILL_REQUIRE_ROOT=1, and {why}")
    pytest.skip(why)
