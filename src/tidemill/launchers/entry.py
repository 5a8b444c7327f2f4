"""What every worker process runs: receive the order, connect, build the workers, live."""

import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import msgspec

from tidemill.api.control_messages import State, Status, pack
from tidemill.api.experiment import Experiment
from tidemill.api.launcher import Job
from tidemill.core.clock import noticing_stops
from tidemill.core.config import decode
from tidemill.core.cores import keep_to
from tidemill.core.errors import TidemillError, place
from tidemill.core.forgiving_output import forgiving_output
from tidemill.core.memory import keep_freed
from tidemill.core.resource_shortage import why
from tidemill.core.run_marks import STARTER, end_marked, lives, mark_started, marked
from tidemill.core.thread_stacks import stack_of
from tidemill.core.user_code_loading import begin_to_work, expect, load_file, travel
from tidemill.launchers.process_setup import ProcessSetup
from tidemill.launchers.worker_process import ASK_FOR_STACK, ENDING, SPARE, receive_order
from tidemill.launchers.worker_stack import dump_of
from tidemill.native.library import use_threads
from tidemill.store.fence import hold
from tidemill.transports.shared import EventBell, SocketLink
from tidemill.transports.table import find_transport

GRACE = 3.0  # seconds that a worker has to end by itself once the runner is gone


@forgiving_output()
def main() -> None:
    """Run the workers that standard input describes."""
    # imports make objects that stay: with 700, a tenth of torch's import is looking for
    # garbage among them
    gc.set_threshold(10_000)
    keep_freed()
    _leave_signals_to_runner()
    runner = os.getppid()
    # what the runner has forked holds its ends of all sockets, too
    gone = -1
    with suppress(OSError):  # it is no process that can be seen from here
        gone = os.pidfd_open(runner)
    if not lives(os.environ.get(STARTER, "")):  # it had ended before, and that is another one
        return
    if not select.select([0], [], [], 0)[0]:  # one of `Spares`
        _show_name(SPARE)
        _import_ahead()
    if (received := receive_order(gone)) is None:
        return
    text, (output, *descriptors) = received
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    order = msgspec.json.decode(text, type=ProcessSetup).received(descriptors)
    # where its threads are, when the runner asks for it and `_end_with_runner` does not
    # get Python's lock
    faulthandler.register(ASK_FOR_STACK, order.stacks)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (ASK_FOR_STACK,))  # see `_signals_blocked`
    mark_started(order.mark)
    _show_name("+".join(each.worker for each in order.ends))
    begin_to_work()
    travel(order.path)
    if order.core is not None:
        keep_to(order.core)
    use_threads(order.layer_threads)
    lifeline = order.ends[0].link
    bell = EventBell(order.bell)
    links = [SocketLink(socket.socket(fileno=ends.link)) for ends in order.ends]
    try:
        every = [each.link for each in order.ends]
        watched = every, gone, order.asked, order.stacks, order.mark
        threading.Thread(target=_end_with_runner, args=watched, name="lifeline", daemon=True).start()
    except RuntimeError as error:
        links[0].send(pack(Status(State.FAILED, error=why(error))))
        return
    workers = []
    for ends, link in zip(order.ends, links, strict=True):
        try:
            expect(order.files)
            if order.source is not None:
                load_file(Path(order.source), "experiment file")
            bell.also(link.connection.fileno())
            endpoints = find_transport(order.transport).endpoints(bell, link, ends.edges)
            experiment = decode(Experiment, json.loads(order.experiment))
            if order.folder is not None:
                hold(order.folder, order.epoch, {each.worker: order.life for each in order.ends})
            job = Job(
                experiment, order.source, order.folder, order.resume, gpus=order.gpus, places=order.places
            )
            workers.append(job.build(ends.worker, endpoints, order.math_threads, order.spin, order.life))
        except Exception as error:
            expected = isinstance(error, TidemillError)
            message = str(error) if expected else f"{type(error).__name__}: {error}{place(error)}"
            details = "" if expected else traceback.format_exc()
            link.send(pack(Status(State.FAILED, error=message, details=details)))
            return
    with noticing_stops():
        workers[0].run(*workers[1:])
    # as it ends, Python looks for garbage among all that was imported: 0.4 s with torch
    gc.freeze()
    for link in links:
        link.finish()
    if _hung_up(lifeline) and _has_company(order.mark):
        # A dying runner closes its links a moment before it is dead. One that lives on
        # ends the session itself.
        deadline = monotonic() + 0.5
        while os.getppid() == runner and monotonic() < deadline:
            sleep(0.005)
        if os.getppid() != runner:
            _end_session(order.mark)


def _show_name(name: str) -> None:
    """Have `ps`, `top` and the like call this process so; Linux takes 15 bytes."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name[:15])


def _import_ahead() -> None:
    """Import what most workers need, as long as nobody knows what is needed."""
    for module in ("workers.actor", "workers.trainer", "nets.actor_critic", "algorithms.ppo"):
        importlib.import_module(f"tidemill.{module}")
    with suppress(ImportError):
        importlib.import_module("gymnasium")


def _leave_signals_to_runner() -> None:
    """Ctrl-C is the runner's to handle, and so is a SIGTERM that a batch system sends to
    every process. Handled, not ignored: what an environment starts or forks must not
    inherit that. What is ignored already stays so (nohup)."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # see `_signals_blocked`
    os.register_at_fork(after_in_child=_take_signals_again)


def _take_signals_again() -> None:
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _end_with_runner(links: Sequence[int], gone: int, asked: int, stacks: int, mark: str) -> None:
    """Write down where the workers' thread is, in `stacks`, whenever that is `asked`,
    until the runner is `gone` (its pidfd, or -1), or has hung up; a worker that is still
    here a little later (its environment hangs) is ended."""
    poll = select.poll()
    poll.register(links[0], 0)  # hang-up is always reported
    poll.register(asked, select.POLLIN)
    if gone >= 0:
        poll.register(gone, select.POLLIN)
    while all(descriptor == asked for descriptor, _ in poll.poll()):
        with suppress(OSError):  # memory that is full is not ours to tell
            os.eventfd_read(asked)
            os.write(stacks, dump_of(stack_of(threading.main_thread().ident)).encode())
    for link in links:  # what the runner had forked may hold their other ends
        with suppress(OSError), socket.socket(fileno=os.dup(link)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    sleep(GRACE)
    _end_session(mark)


def _hung_up(link: int) -> bool:
    poll = select.poll()
    poll.register(link, 0)  # hang-up is always reported
    return bool(poll.poll(0))


def _has_company(mark: str) -> bool:
    """True when something that the environment started is still there."""
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        with suppress(ProcessLookupError, PermissionError):
            if name.isdigit() and int(name) != os.getpid() and os.getsid(int(name)) == os.getsid(0):
                return True
    return bool(marked(mark))


def _end_session(mark: str) -> None:
    """End this process and all that its environment started: nobody else is left to do
    it."""
    end_marked(mark)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
