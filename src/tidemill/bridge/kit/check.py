"""The conformance kit: plays a simulator, whoever made it, and says point by point
whether it does its part of the bridge."""

from collections.abc import Sequence

from tidemill.bridge.kit.check_points import POINTS, Findings, Point, SimulatorUnplayable
from tidemill.bridge.kit.trial_trainer import Program
from tidemill.bridge.kit.trials import TRIALS
from tidemill.bridge.protocol.side_channels import Framing
from tidemill.core.errors import ConfigError, did_you_mean


def check_simulator(
    program: Program, seconds: float = 5.0, framing: Framing = "uuid", only: Sequence[str] = ()
) -> list[Point]:
    """Play a simulator and return all points, or those named in `only`.

    seconds: of plain play, in which late groups, ends, masks and so on are waited for;
        what does not happen then is "not seen"
    framing: of the side channels' messages
    """
    for name in only:
        if name not in POINTS:
            raise ConfigError(f'there is no point "{name}", {did_you_mean(name, POINTS)}')
    if not seconds > 0:
        raise ConfigError(f"seconds = {seconds} must be above 0")
    found = Findings()
    for trial, points in TRIALS.items():
        if only and not set(points) & set(only):
            continue
        try:
            trial(program, found, seconds, framing)
        except SimulatorUnplayable:
            if found.point("start").verdict == "fail":
                break
    return [found.point(name) for name in POINTS if not only or name in only]
