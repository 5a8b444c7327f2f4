"""A kind of worker of one's own: it reads each version of the policy that the trainer
publishes, and measures how large its weights are ("weights/norm").

tidemill train examples/own_worker.py:experiment
"""

from dataclasses import dataclass

import numpy as np

from tidemill import Experiment, PollResult, Worker, WorkerConfig, experiment_for
from tidemill.api.control_messages import Facts, Measured
from tidemill.api.edges import Port
from tidemill.core.schema import allocate
from tidemill.envs.plain_gymnasium import Gymnasium


@dataclass(frozen=True, kw_only=True)
class WeightNorm(WorkerConfig):
    """The configuration: what the worker is connected to, and what it is built as."""

    policy: str = "policy"

    def ports(self):
        return (Port(self.policy, "subscribe"),)

    def measures(self):
        return ("weights/norm",)

    def build(self, context):
        return WeightNormWorker(context)


class WeightNormWorker(Worker):
    """The work: `_poll` is called again and again, and never waits."""

    def _configure(self, facts):
        (edge,) = self.context.edges("parameters/")
        self.cell = self.context.endpoints.reader(edge.name)
        self.version, self.arrays = -1, None
        return Facts()

    def _poll(self):
        if self.arrays is None:
            if not self.cell.attach():
                return PollResult()  # nothing was published yet
            self.arrays = allocate(self.cell.schema, ())
        if self.cell.newest() <= self.version:
            return PollResult()
        self.version = self.cell.read(self.arrays)
        weights = [array for name, array in self.arrays.items() if name.endswith("weight")]
        norm = float(np.sqrt(sum(np.sum(weight * weight) for weight in weights)))
        self.report(Measured(self.version, self.stage, {"weights/norm": norm}))
        return PollResult(1, 1)


def experiment() -> Experiment:
    """CartPole's own experiment, with a worker more."""
    made = experiment_for("CartPole-v1", Gymnasium(id="CartPole-v1"))
    return made.replace(workers={**made.workers, "norm": WeightNorm()})
