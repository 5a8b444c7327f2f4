"""CartPole over the reference server on loopback: what part of the bare client's and
server's speed does a whole run reach?

    python benchmarks/rest.py [--slots 8] [--runs 3] [--seconds 6] [--forms threads,loop]
        [--kinds bare,httpx,slots,lanes] [--fault latency=0.002]

Bare: a process with as many sessions, each of which a thread (form "threads") or a task
of one event loop ("loop") steps by `RemoteEnv` or `AsyncRemoteEnv` with fixed actions,
and resets when it must. Httpx: the same by a plain script, which writes the protocol's
messages itself, in MessagePack, all sessions on one `httpx.Client` or
`httpx.AsyncClient`; it tries nothing again and checks nothing. Slots: a run of one actor
of as many slots (`Slots(environment=Rest(...))`) and a trainer (DQN, replay,
ratio 1/16), on processes. Lanes: PPO on two targets that share the sessions as lanes,
each tick waiting for all. All by the server's own count of applied steps over `seconds`,
after the start. The server keeps to one core, bare clients and actors to another, the
trainer to none. "cpu" is what client, actor and trainer computed per step, "server" what
the server did: where other programs share the cores they say more than the speed. They
alternate; medians.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import psutil

import tidemill
from tidemill import (
    DQN,
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Limits,
    QNetwork,
    Replay,
    ReplayActors,
    ReplayTrainer,
    Rest,
    Slots,
    Trainer,
)

STARTUP = 2.0


CORES = sorted(os.sched_getaffinity(0))
OURS = CORES[os.getpid() % len(CORES)]  # of actors: as the launcher chooses it
THEIRS = CORES[(os.getpid() + 1) % len(CORES)]  # of the server


def serve(faults):
    """Start a server on a core that no actor keeps to; return its process and URL."""
    command = [sys.executable, "-m", "tidemill.cli.main", "serve-env", "CartPole-v1", "--port", "0"]
    command += [word for fault in faults for word in ("--fault", fault)]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, [THEIRS])
    )
    return server, re.search(r"http://\S+", server.stdout.readline())[0]


def applied(url):
    """Return the server's count of steps."""
    with urllib.request.urlopen(f"{url}/v1/counts") as answer:
        return json.load(answer)["applied"]


def rate(url, seconds, server):
    """Return applied steps per second from now on, and CPU microseconds per step: of all
    processes of this program but the server, and its own."""

    def computed():
        return {
            process.pid: sum(process.cpu_times()[:2]) for process in psutil.Process().children(recursive=True)
        }

    first, start, before = applied(url), time.perf_counter(), computed()
    time.sleep(seconds)
    steps, elapsed, after = applied(url) - first, time.perf_counter() - start, computed()
    spent = {pid: 1e6 * (after[pid] - before.get(pid, 0.0)) / max(1, steps) for pid in after}
    own = spent.pop(server.pid)
    return steps / elapsed, sum(spent.values()), own


def bare_sessions(url, form):
    """Return what makes sessions by their number, each as its `reset` and `step`."""
    from tidemill.remote.session import AsyncRemoteEnv, RemoteEnv

    host, kind = Rest(url=url).host(), AsyncRemoteEnv if form == "loop" else RemoteEnv

    def session(number):
        env = kind(host)
        return env.reset, env.step

    return session


def plain_sessions(url, form):
    """The same, as a script on httpx has it."""
    import httpx
    import msgspec

    kind = httpx.AsyncClient if form == "loop" else httpx.Client
    headers = {"content-type": "application/msgpack", "accept": "application/msgpack"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = kind(base_url=url, headers=headers, limits=limits, timeout=30.0, trust_env=False)

    def read(answer):
        answer.raise_for_status()
        told = msgspec.msgpack.decode(answer.content)
        array = told["observation"]
        return (
            np.frombuffer(array["data"], array["dtype"]).reshape(array["shape"]),
            told.get("reward"),
            told["terminated"],
            told["truncated"],
        )

    def session(number):
        at = {"session": f"plain.{os.getpid()}.{number}", "episode": -1, "step": 0}

        def asked(action=None):
            if action is not None:
                at["step"] += 1
                return msgspec.msgpack.encode({**at, "action": action})
            at.update(episode=at["episode"] + 1, step=0)
            return msgspec.msgpack.encode(
                {"session": at["session"], "episode": at["episode"], "seed": None, "options": None}
            )

        async def reset():
            return read(await client.post("/v1/reset", content=asked()))

        async def step(action):
            return read(await client.post("/v1/step", content=asked(action)))

        if form == "loop":
            return reset, step
        return lambda: read(client.post("/v1/reset", content=asked())), lambda action: read(
            client.post("/v1/step", content=asked(action))
        )

    return session


SESSIONS = {"bare": bare_sessions, "httpx": plain_sessions}


def play(url, kind, form, slots):
    """Step as many sessions until the process is ended."""
    made = SESSIONS[kind](url, form)

    def session(number):
        reset, step = made(number)
        over, at = True, 0
        while True:
            over = reset() is None if over else any(step(at % 2)[2:4])
            at += 1

    async def sessions():
        async def one(number):
            reset, step = made(number)
            over, at = True, 0
            while True:
                over = await reset() is None if over else any((await step(at % 2))[2:4])
                at += 1

        await asyncio.gather(*(one(number) for number in range(slots)))

    if form == "loop":
        asyncio.run(sessions())
    threads = [threading.Thread(target=session, args=(number,), daemon=True) for number in range(slots)]
    for thread in threads:
        thread.start()
    threads[0].join()


def client_of(kind):
    """Return what measures clients that do nothing else, in a process of their own."""

    def measure(url, form, slots, seconds, server):
        command = [
            sys.executable,
            __file__,
            "--play",
            url,
            "--kinds",
            kind,
            "--forms",
            form,
            "--slots",
            str(slots),
        ]
        client = subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, [OURS]))
        try:
            time.sleep(STARTUP)
            return rate(url, seconds, server)
        finally:
            client.kill()
            client.wait()

    return measure


def slots_of(url, form, slots, seconds):
    """Return the system whose slots answer each in its own time."""
    environment = Slots(environment=Rest(url=url, form=form))
    return Experiment(
        name="rest",
        policies={"policy": QNetwork()},
        workers={
            "actor": ReplayActors(
                environment=environment,
                lanes=1,
                ring=slots,
                one_core=True,
            ),
            "trainer": ReplayTrainer(
                algorithm=DQN(), buffer=Replay(capacity=100_000, warm_up=1000), batch_size=64, ratio="1/16"
            ),
        },
        limits=Limits(seconds=seconds),
    )


def lanes_of(url, form, slots, seconds):
    """Return the system whose targets wait for all of their lanes."""
    actors = Actors(
        environment=Rest(url=url, form=form),
        lanes=slots // 2,
        ring=2,
        slots=2,
        one_core=True,
        agents=(AgentSpec(sample_steps=128),),
    )
    return Experiment(
        name="rest",
        policies={"policy": ActorCritic()},
        workers={"actor": actors, "trainer": Trainer(algorithm=PPO(minibatch_size=2048, epochs=4))},
        limits=Limits(seconds=seconds),
    )


def run_of(make):
    """Return what measures runs of an experiment."""

    def measure(url, form, slots, seconds, server):
        found = []

        def watch():
            before = applied(url)
            while applied(url) < before + 1500:
                time.sleep(0.1)
            found.append(rate(url, seconds, server))

        watcher = threading.Thread(target=watch)
        watcher.start()
        with tempfile.TemporaryDirectory() as folder:
            tidemill.train(
                make(url, form, slots, seconds + 5),
                run_dir=Path(folder) / "run",
                launch="processes",
                quiet=True,
            )
        watcher.join()
        return found[0]

    return measure


KINDS = {
    "bare": client_of("bare"),
    "httpx": client_of("httpx"),
    "slots": run_of(slots_of),
    "lanes": run_of(lanes_of),
}


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--forms", default="threads,loop")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--fault", action="append", default=[], metavar="NAME=VALUE", help="of the server")
    parser.add_argument("--play", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.play:
        play(given.play, given.kinds, given.forms, given.slots)
        return
    server, url = serve(given.fault)
    found = {}
    try:
        for run in range(given.runs):
            for form in given.forms.split(","):
                for name in given.kinds.split(","):
                    figures = KINDS[name](url, form, given.slots, given.seconds, server)
                    found.setdefault((form, name), []).append(figures)
                    print(
                        f"run {run}: {form}, {name}: {figures[0]:,.0f} steps/s, cpu {figures[1]:.0f} + "
                        f"{figures[2]:.0f} µs per step",
                        flush=True,
                    )
    finally:
        server.terminate()
        server.wait()
    print(
        f"\n{'form':8} {'':6} {'steps/s':>8} {'of bare':>8} {'cpu µs':>8} {'server':>8}   {given.slots} "
        f"sessions, medians of {given.runs}"
    )
    for (form, name), figures in found.items():
        speed, cpu, own = (statistics.median(column) for column in zip(*figures, strict=True))
        whole = statistics.median(each[0] for each in found.get((form, "bare"), [(float("nan"),)]))
        print(f"{form:8} {name:6} {speed:8,.0f} {speed / whole:8.2f} {cpu:8.0f} {own:8.0f}")


if __name__ == "__main__":
    main()
