"""An evaluation that hangs, for runs whose processes need nothing that tests alone
need."""

from dataclasses import dataclass
from pathlib import Path

from tidemill import Actors, AgentSpec, Drawn, Evaluation, Experiment, Gymnasium
from tidemill.api.worker import Context
from tidemill.core.user_code_loading import load_attribute, load_file
from tidemill.workers.evaluation import EvaluationWorker

experiments = load_file(Path(__file__).with_name("experiments.py"), "test")
hold = load_attribute(f"{experiments.ENVIRONMENTS}:hold", "test")


@dataclass(frozen=True, kw_only=True)
class HangsOnce(Evaluation):
    """Does not come back from what a version has reached before there is a file
    `flag`.over, but when it has hung before."""

    flag: str

    def build(self, context: Context) -> EvaluationWorker:
        return _HangsOnce(context, self)


class _HangsOnce(EvaluationWorker):
    def _conclude(self) -> None:
        assert isinstance(self.context.config, HangsOnce)
        hold(Path(self.context.config.flag))
        super()._conclude()


def hangs_once(flag: str) -> Experiment:
    """Its evaluation hangs, once: then there is a file `flag`."""
    made = experiments.experiment(Gymnasium(id="CartPole-v1"))
    spec = AgentSpec(parameters=Drawn(tag="evaluating"), mode="concise", samples="evaluation")
    judge = Actors(environment=Gymnasium(id="CartPole-v1"), lanes=2, agents=(spec,))
    return made.replace(workers={**made.workers, "judge": judge, "evaluation": HangsOnce(games=2, flag=flag)})
