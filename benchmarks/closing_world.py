"""The example world "reach", for `moments.py`: it closes its bridge in the midst of a
run, or keeps the turn for ever, where a file `close`, or `keep`, lies in a folder, which
is its argument."""

import sys
import time
from pathlib import Path

from tidemill.bridge import Bridge
from tidemill.bridge.protocol.side_channels import Channels, EnvironmentParameters, Statistics
from tidemill.bridge.worlds.reach import Reach

LOOK_EVERY = 16  # exchanges


def taken(fault: Path) -> bool:
    """Take a fault, unless another simulator was before this one."""
    try:
        fault.unlink()
    except FileNotFoundError:
        return False
    return True


def main(faults: Path) -> None:
    """Play until the trainer closes, or a fault comes."""
    parameters, statistics = EnvironmentParameters(), Statistics()
    game, exchanges = Reach(1, parameters, statistics), 0
    bridge = Bridge(channels=Channels([parameters, statistics]), on_reset=game.reset)
    bridge.add(game.world)
    game.reset()
    game.tick()
    while bridge.exchange():
        game.tick()
        exchanges += 1
        if exchanges % LOOK_EVERY == 0:
            if taken(faults / "keep"):
                time.sleep(1e6)
            if taken(faults / "close"):
                break
    bridge.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
