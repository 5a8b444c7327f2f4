"""The world "reach", whose process dies or hangs when a fault says so (`taken.py`)."""

import os
import signal
import time

from taken import taken

from tidemill.bridge.worlds.game import play
from tidemill.bridge.worlds.reach import Reach


class Faulty(Reach):
    """The world "reach" that takes faults."""

    def tick(self) -> None:
        match taken():
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(1e6)
        super().tick()


if __name__ == "__main__":
    play(Faulty)
