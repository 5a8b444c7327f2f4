"""Versions whose weights tell their number, in a real parameter database; evaluation and
actors over the ends of streams that a test holds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.workers.world import Known, KnownPolicy, Marked

from tidemill.api.control_messages import Facts, Measured, SampleFacts, unpack_up
from tidemill.api.edges import Port
from tidemill.api.experiment import Experiment
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.api.worker import Context, WorkerConfig
from tidemill.core.schema import poison, schema_of
from tidemill.store.parameter_database import PARAMETERS, ParameterDatabase
from tidemill.streams.sources import Drawn
from tidemill.transports.local import local_endpoints
from tidemill.workers.actor import Actors, AgentSpec
from tidemill.workers.evaluation import Evaluation
from tidemill.workers.row_schema import row_schema, sample_schema

SPACES = Spaces(Box((5,), "float32"), Discrete(4))


@dataclass(frozen=True, kw_only=True)
class Keeper(WorkerConfig):
    """Stands where trainers do: stores, publishes and consumes."""

    policies: tuple[str, ...]
    streams: tuple[str, ...] = ()

    def ports(self) -> tuple[Port, ...]:
        ends = [Port(policy, role) for policy in self.policies for role in ("publish", "store")]  # type: ignore[arg-type]
        return (*ends, *(Port(stream, "consume") for stream in self.streams))


class Arena:
    """An experiment of policies "policy" and "other" (both `KnownPolicy`), with a
    database in `folder`."""

    def __init__(self, folder: Path, workers: dict[str, WorkerConfig], streams: tuple[str, ...] = ()) -> None:
        Known.built.clear()
        Marked.built.clear()
        folder.mkdir(exist_ok=True)  # as a run does
        self.folder, self.database = folder, ParameterDatabase(folder / PARAMETERS)
        policies = {name: KnownPolicy() for name in ("policy", "other")}
        self.experiment = Experiment(
            name="arena",
            policies=policies,
            workers={**workers, "keeper": Keeper(policies=("policy", "other"), streams=streams)},
        )
        self.edges = self.experiment.edges()
        self.ends = local_endpoints([name for name, _ in self.experiment.members()], self.edges)
        self.writers = [
            self.ends["keeper-0"][0].writer(edge.name) for edge in self.edges if edge.kind == "cell"
        ]
        for writer in self.writers:
            writer.offer(schema_of({"w": np.zeros(3)}))
        self.publish(0)

    def context(self, name: str) -> Context:
        return Context(
            self.experiment, name, dict(self.experiment.members())[name], self.ends[name][0], str(self.folder)
        )

    def build(self, name: str) -> Any:
        return dict(self.experiment.members())[name].build(self.context(name))

    def publish(self, version: int) -> None:
        for writer in self.writers:
            writer.write({"w": np.full(3, float(version))}, version)

    def push(self, *versions: int, policy: str = "policy") -> None:
        """Push versions that were trained 100 env steps per update."""
        for version in versions:
            self.database.push(
                policy, version, {"w": np.full(3, float(version))}, {"env_steps": 100.0 * version}
            )

    def results(self, version: int) -> dict[str, float]:
        """What the database knows of a version, by name."""
        (found,) = (known for known in self.database.versions("policy") if known.version == version)
        return {name: mean.mean for name, mean in found.means.items()}

    def told(self, name: str) -> list[Any]:
        """What a worker has told the runner since the last look."""
        return [unpack_up(message) for message in self.ends[name][1].receive() or []]


def judge(lanes: int = 1, ring: int = 1, count: int = 1, agents: int = 1, **spec: Any) -> Actors:
    """Actors that play the version that is being evaluated, against `Drawn` ones in a
    game of two."""
    own = AgentSpec(
        **{
            "match": "red_0",
            "parameters": Drawn(tag="evaluating"),
            "mode": "concise",
            "samples": "evaluation",
            **spec,
        }
    )
    rest = (AgentSpec(match=".*", parameters=Drawn(), samples=None),) if agents > 1 else ()
    return Actors(environment=Marked(agents=agents), lanes=lanes, ring=ring, count=count, agents=(own, *rest))


class Games(Arena):
    """An evaluation worker whose actors are the test: it says how each game ended. There
    is a channel for each target of each actor."""

    def __init__(
        self,
        folder: Path,
        lanes: int = 1,
        ring: int = 1,
        count: int = 1,
        agents: int = 1,
        slots: int = 64,
        **evaluation: Any,
    ) -> None:
        super().__init__(
            folder, {"judge": judge(lanes, ring, count, agents), "evaluation": Evaluation(**evaluation)}
        )
        self.producers = []
        for edge in self.edges:
            if edge.name.startswith("samples/"):
                context = self.context(edge.source)
                (spec, *rest) = self.experiment.workers["judge"].agents  # type: ignore[attr-defined]
                producer = self.ends[edge.source][0].producer(edge.name)
                producer.offer(
                    sample_schema(spec, row_schema(context, spec, SPACES, {}), len(rest)), (1, 1), slots
                )
                self.producers.append(producer)
        self.begin()

    def begin(self) -> None:
        """Let a new evaluation worker begin, as a resumed run does."""
        self.worker = self.build("evaluation-0")
        self.worker._configure(Facts(samples={"evaluation": SampleFacts(1, 0, 1, "concise")}))
        self.worker.start()

    def play(
        self,
        version: int,
        reached: float,
        seat: int = 0,
        channel: int = 0,
        length: int = 5,
        last: int | None = None,
        against: Any = None,
    ) -> bool:
        """Let a game of `version` end, which played `against` (version, policy's number).
        False when it has to wait."""
        slot = self.producers[channel].reserve()
        if slot is None:
            return False
        poison(slot)
        cells = {
            "version": version,
            "last_version": version if last is None else last,
            "seat": seat,
            "info_mask": True,
        }
        cells |= {
            "info.return": reached,
            "info.length": length,
            "info.packed": 0,
            "done": True,
            "truncated": False,
        }
        if against is not None:
            cells |= {"others.version": against[0], "others.policy": against[1]}
        for name, value in cells.items():
            slot[name][0, 0] = value
        self.producers[channel].commit()
        return True

    def evaluate(self) -> list[Measured]:
        """Let the worker do all that it can, and return what it measured."""
        self.worker._poll()  # may find a version
        while self.worker._poll().batch_count:
            pass
        return [message for message in self.told("evaluation-0") if isinstance(message, Measured)]
