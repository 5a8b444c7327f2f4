"""What memory there is, and the refusal of what cannot fit."""

import platform
import subprocess
import sys

import pytest

from tidemill.core import memory
from tidemill.core.errors import ConfigError
from tidemill.core.memory import Need, available, check_memory, resident_bytes, size


def test_needs_that_fit_are_let_pass_and_others_refused_with_the_sums() -> None:
    needs = [
        Need("samples", 600, "2 slots x 300 bytes"),
        Need("batches", 100),
        Need("samples", 600, "2 slots x 300 bytes"),
    ]
    check_memory(needs, 1300)
    with pytest.raises(ConfigError) as caught:
        check_memory([need for need in needs for _ in range(1_000_000)], 1_299_999_999)
    assert str(caught.value).splitlines() == [
        "this needs 1.3 GB of memory, and 1.3 GB are available; make sample_steps, lanes, slots, ring or "
        "count smaller:",
        "  samples: 1.2 GB = 2,000,000 x 2 slots x 300 bytes",
        "  batches: 100 MB",
    ]


def test_sizes_read_well() -> None:
    assert [size(n) for n in (0, 123_456, 9_949_999, 9_950_000, 999_400_000, 999_500_000, 2.13e13)] == [
        "0.0 MB", "0.1 MB", "9.9 MB", "10 MB", "999 MB", "1.0 GB", "21,300.0 GB",
    ]  # fmt: skip


def test_the_tightest_control_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available() > 1600
    monkeypatch.setattr(memory, "free_memory", lambda: 1600)
    assert available() == 1600


HELD = """
from tidemill.core.memory import resident_bytes
before = resident_bytes()[0]
kept = bytearray(b"x" * 50_000_000)
print(resident_bytes()[0] - before)
"""


def test_a_process_knows_what_it_holds() -> None:
    """One in which no other test has allocated and freed anything."""
    assert available() > 0 and resident_bytes()[0] > 0
    said = subprocess.run([sys.executable, "-c", HELD], check=True, capture_output=True, text=True).stdout
    assert 45_000_000 < int(said) < 60_000_000


FREED = """
import resource, sys
import numpy as np
from tidemill.core.memory import keep_freed, resident_bytes

if sys.argv[1] == "kept":
    keep_freed()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.empty(50_000_000, np.uint8)[::4096] = 1
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
np.empty(700_000_000, np.uint8)[::4096] = 1
print(resident_bytes()[0])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_what_a_process_frees_it_can_keep() -> None:
    """Up to so much: what was needed once only is no loss for good."""
    ways = ("kept", "given back")
    said = {
        way: subprocess.run(
            [sys.executable, "-c", FREED, way], check=True, capture_output=True, text=True
        ).stdout
        for way in ways
    }
    faults, bytes_held = zip(*(map(int, said[way].split()) for way in ways), strict=True)
    assert faults[0] < 5 < faults[1]
    assert max(bytes_held) < 300_000_000
