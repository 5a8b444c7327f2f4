"""What a tick costs an actor besides environment and inference.

    python benchmarks/actor.py

Free environments (they return zeros), a policy that answers zeros, a consumer that
releases at once; one process, local transport. Per tick: the clock's share of "python"
and "copy" in the actor worker, with everything that an actor does (agents, ring, rows,
samples, requests); where a policy worker that takes turns with it answers, with all that
this one does, too.
"""

import argparse
import statistics
from dataclasses import dataclass
from time import perf_counter

import tidemill
from tidemill.api.control_messages import Configure, Start, Status, pack, unpack_up
from tidemill.api.policy import Policy, PolicyConfig
from tidemill.api.spaces import schema_of_space
from tidemill.api.worker import Context
from tidemill.core.clock import Clock
from tidemill.core.schema import Field
from tidemill.testing.scripted import Free, Scripted
from tidemill.transports.local import local_endpoints
from tidemill.workers.actor import INLINE, Actors, AgentSpec


class _Zero(Policy):
    def act(self, observation, state, deterministic, out):
        pass

    def parameters(self):
        return {}

    def load(self, parameters, version):
        self.version = version


@dataclass(frozen=True, kw_only=True)
class Zero(PolicyConfig):
    """Answers whatever is in the answer buffer."""

    def answer(self, spaces):
        return {
            **schema_of_space(spaces.action, "action"),
            "log_prob": Field((), "float32"),
            "value": Field((), "float32"),
        }

    def build(self, spaces, seed):
        return _Zero()


class _Stopwatch(Clock):
    """Is not begun anew by the worker's own reports."""

    def shares(self):
        return {}


def measure(environment, lanes, ticks=4000, runs=5, limit=0, served=False, **spec):
    """Return (µs per tick besides environment and inference, µs per tick of the
    environment), medians. `served`: by a policy worker, with what that takes."""
    trainer = tidemill.Trainer(algorithm=tidemill.PPO())
    asks = AgentSpec(inference="inference" if served else INLINE, **spec)
    actors = Actors(environment=environment, lanes=lanes, max_episode_steps=limit, agents=(asks,))
    workers = {"actor": actors, "trainer": trainer}
    if served:
        workers["policy"] = tidemill.PolicyWorkers()
    experiment = tidemill.Experiment(name="free", policies={"policy": Zero()}, workers=workers)
    names = [name for name, _ in experiment.members()]
    ends = local_endpoints(names, experiment.edges(), [names])
    endpoints, link = ends["actor-0"]
    worker = actors.build(Context(experiment, "actor-0", actors, endpoints))
    link.send(pack(Configure()))
    worker.run_once()
    if served:
        (facts,) = (m.facts for m in map(unpack_up, link.receive()) if isinstance(m, Status))
        beside = workers["policy"]
        server = beside.build(Context(experiment, "policy-0", beside, ends["policy-0"][0]))
        for message in (Configure(facts), Start()):
            ends["policy-0"][1].send(pack(message))
            server.run_once()
        worker.attendants = [server]
    link.send(pack(Start()))
    worker.run_once()
    (channel,) = [ends["trainer-0"][0].consumer(e.name) for e in experiment.edges() if "samples" in e.name]
    channel.attach()
    found = []
    for run in range(runs + 1):
        worker.clock = clock = _Stopwatch()
        for target in worker.order.targets:
            target._clock = clock
        for client in worker._clients.values() if not served else ():
            client._clock = clock
        done, spent = worker.order.ticks, 0.0
        while worker.order.ticks - done < ticks:
            start = perf_counter()
            worker.run_once()
            spent += perf_counter() - start
            while channel.take() is not None:
                channel.release()
        clock.enter("python")
        count = worker.order.ticks - done
        other = clock.seconds["environment"] + clock.seconds["inference"]  # the latter: inline alone
        if run:
            found.append((1e6 * (spent - other) / count, 1e6 * clock.seconds["environment"] / count))
        link.receive()
    return tuple(statistics.median(column) for column in zip(*found, strict=True))


def main():
    """Print the table."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(f"{'environment':46} {'seats':>6} {'actor µs/tick':>14} {'allowed':>9} {'environment µs/tick':>20}")
    dying = Free(agents=1024, death_rate=0.01)
    by_turns = Scripted(agents=1024, turns=4, shortest=1024, longest=1024)
    one_by_one = Scripted(agents=1024, turns=1024, shortest=4096, longest=4096)
    cases = [
        ("1 lane", Free(), 1, {}),
        ("64 lanes", Free(), 64, {}),
        ("64 lanes, served in turn", Free(), 64, {"served": True}),
        ("256 lanes", Free(), 256, {}),
        ("1,024 lanes", Free(), 1024, {}),
        ("8 lanes x 128 agents", Free(agents=128), 8, {}),
        ("8 lanes x 128 agents, dying", Free(agents=128, death_rate=0.01), 8, {}),
        ("1 lane x 1,024 agents", Free(agents=1024), 1, {}),
        ("1 lane x 1,024 agents, dying", dying, 1, {"limit": 100}),
        ("1 lane x 1,024 agents, a quarter each tick", by_turns, 1, {}),
        ("1 lane x 1,024 agents, one by one", one_by_one, 1, {}),
        ("1 lane x 1,024 agents, dying, after done", dying, 1, {"limit": 100, "mode": "after_done"}),
        ("1 lane x 1,024 agents, dying, full", dying, 1, {"limit": 100, "mode": "full"}),
        ("1 lane x 1,024 agents, dying, concise", dying, 1, {"limit": 100, "mode": "concise"}),
        ("64 lanes, 4 frames", Free(), 64, {"frame_stack": 4}),
    ]
    for name, environment, lanes, spec in cases:
        seats = lanes * environment.agents
        own, env = measure(environment, lanes, **spec)
        allowed = f"{40 + 0.3 * lanes:9.0f}" if environment.agents == 1 and not spec else " " * 9
        print(f"{name:46} {seats:6} {own:14.1f} {allowed} {env:20.1f}", flush=True)


if __name__ == "__main__":
    main()
