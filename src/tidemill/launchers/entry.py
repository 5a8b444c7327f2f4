"""What every worker process runs: read the order, connect, build the worker, live.

python -m tidemill.launchers.entry < order.json
"""

import json
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from time import sleep

import msgspec

import tidemill  # noqa: F401  registers every configuration
from tidemill.api.control import State, Status, pack
from tidemill.api.experiment import Context, Experiment
from tidemill.core.config import decode
from tidemill.core.errors import TidemillError
from tidemill.core.source import load_file
from tidemill.launchers.processes import Order
from tidemill.transports.shared import EventBell, SharedEndpoints, SocketLink

GRACE = 3.0  # seconds that a worker has to end by itself once the runner is gone


def main() -> None:
    """Run the worker that standard input describes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    descriptors = {order.bell, order.runner_bell, order.link}
    for handle in order.edges.values():
        descriptors |= {handle.segment, *handle.wake}
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)  # what an environment starts must not keep them open
    link = SocketLink(socket.socket(fileno=order.link))
    threading.Thread(target=_end_with_runner, args=(order.link,), name="lifeline", daemon=True).start()
    endpoints = SharedEndpoints(EventBell(order.bell), link, order.edges)
    try:
        if order.source is not None:
            load_file(Path(order.source), "experiment file")
        experiment = decode(Experiment, json.loads(order.experiment))
        config = dict(experiment.members())[order.worker]
        worker = config.build(Context(experiment, order.worker, config, endpoints, order.folder, order.resume, order.spin, order.threads))
    except TidemillError as error:
        link.send(pack(Status(State.FAILED, error=str(error))))
        return
    worker.run()


def _end_with_runner(link: int) -> None:
    """Wait until the runner is gone; a worker that is still here a little later (its environment hangs) is ended."""
    poll = select.poll()
    poll.register(link, 0)  # hang-up is always reported
    poll.poll()
    sleep(GRACE)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
