"""What is said where who computes a policy from now on has other last bits than who
computed its checkpoint."""

import os

from tidemill.api.policy import PolicyConfig
from tidemill.native.library import INSTRUCTION_SETS, VARIABLE, unavailable
from tidemill.nets.native_setting import NUMPY, NativeSetting


def other_bits(before: str, now: str, policy: PolicyConfig) -> tuple[str, str]:
    """Return what differs, and what has `policy` computed as before; ("", "") where
    nothing differs, or is known. `before` and `now`: see `Policy.computed_by`."""
    if not before or not now or before == now:
        return "", ""
    text = f"{_in_words(before)} computed it until then, and {_in_words(now)} does now, with other last bits"
    return text, _cure(before, policy)


def _in_words(name: str) -> str:
    return f"the native core ({name})" if name in INSTRUCTION_SETS else name


def _cure(before: str, policy: PolicyConfig) -> str:
    if before != NUMPY and before not in INSTRUCTION_SETS:
        return f"{before} has it go on as before"
    named = policy.native if isinstance(policy, NativeSetting) else ""
    if VARIABLE in os.environ and named in (("off", "auto") if before == NUMPY else (before,)):
        return f"without the environment variable {VARIABLE} it goes on as before"
    if before == NUMPY:
        return f"{VARIABLE}=off has it go on as before"
    if (why := unavailable(before)) is not None:
        return f"it can go on as before only where {before} is to be had: {why}"
    return f"{VARIABLE}={before} has it go on as before"
