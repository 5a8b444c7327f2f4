"""The entry of the command ``tidemill``: one that trains starts processes for its workers
before it imports anything of size."""

import sys

from tidemill.core.cores import cores
from tidemill.launchers.worker_process import start_early

MOST = 4  # processes to start before it is known how many there will be
_OTHERWISE = ("-h", "--help", "--print-config", "--launch")  # there may be none, then


def main() -> None:
    """Do what the command's words say."""
    words = sys.argv[1:]
    if words[:1] in (["train"], ["resume"]) and not any(word.startswith(_OTHERWISE) for word in words):
        # on a single core nothing is gained
        start_early(min(cores(), MOST) if cores() > 1 and sys.platform.startswith("linux") else 0)
    from tidemill.cli.main import app

    app()


if __name__ == "__main__":
    main()
