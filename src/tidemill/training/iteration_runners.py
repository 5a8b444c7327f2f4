"""Train runners: an experiment as iterations of training steps and evaluation steps.

    runner = AsyncTrainRunner(
        experiment, num_slots=32, ratio="1/4",
        num_iterations=20, training_steps=10_000, evaluation_steps=2_000,
    )
    result = runner.run()
    for iteration in runner.iterations:
        # None: no episode of the evaluation ended
        print(iteration["iteration/number"], iteration.get("iteration/evaluation_return"))

They are settings of an experiment and no second system: what they run is the experiment
that `with_slots` returns, which every launcher runs.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from tidemill.api.experiment import Experiment
from tidemill.core.errors import ConfigError, RunError
from tidemill.core.user_code_loading import refuse_while_loading
from tidemill.metrics.json_lines import each_record
from tidemill.replay.limiter import parse_ratio, tasks_at_once
from tidemill.replay_training.trainer_config import ReplayTrainer
from tidemill.run.folder import new_folder
from tidemill.run.trust import Trust
from tidemill.training.replay_slots import by_turns, with_slots
from tidemill.training.result import Result
from tidemill.training.train import resume as go_on
from tidemill.training.train import train


def read_iterations(folder: str | Path) -> list[dict[str, float]]:
    """Return one record per iteration of the run in `folder`: ``step``, and
    ``iteration/`` with ``number``, ``updates``, ``seconds``, ``training_episodes``,
    ``training_return``, ``overshoot``, ``evaluation_episodes``, ``evaluation_steps`` and
    ``evaluation_return``; returns only where episodes ended, the others where they apply.
    Raises `RunError` where there are no metrics."""
    return [
        {name: value for name, value in record.items() if name == "step" or name.startswith("iteration/")}
        for record in each_record(Path(folder))
        if "iteration/number" in record
    ]


class AsyncTrainRunner:
    """The asynchronous runner trains while `num_slots` environments step, with exactly
    `ratio` updates per env step. An argument that is None leaves what the experiment
    says; `ratio` must be given here or by the experiment's `ReplayTrainer`.

    num_slots: number of environments, each in a slot of its own (`Slots`)
    ratio: updates per env step: "1/4", "3/2", 8
    num_iterations: number of iterations; needs `training_steps`, and sets the
        experiment's limit of steps to their product. None: until its own limits
    training_steps: env steps of an iteration
    evaluation_steps: env steps of the evaluation at each one's end, by the weights of
        that moment, in an environment of its own
    exact: the result depends on nothing but the configuration, however long steps and
        updates take (see `ReplayTrainer.exact`)
    slack: steps that gathering may be ahead
    finish_episodes: phases end with episodes (see `ReplayTrainer.finish_episodes`)
    launch: "threads", "processes" or "inline"

    Of its attributes `experiment` is what it runs, `folder` that of its last run, and
    `iterations` what `read_iterations` found there. Raises `ConfigError`.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        num_slots: int,
        ratio: str | int | None = None,
        num_iterations: int | None = None,
        training_steps: int | None = None,
        evaluation_steps: int | None = None,
        exact: bool | None = None,
        slack: int | None = None,
        finish_episodes: bool | None = None,
        launch: str = "threads",
    ) -> None:
        given = {
            "exact": exact,
            "slack": slack,
            "finish_episodes": finish_episodes,
            "iteration_steps": training_steps,
            "evaluation_steps": evaluation_steps,
        }
        settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if exact:
            settings.setdefault("slack", None)  # it is the number of slots
        _refuse_another(experiment, ratio)
        experiment = by_turns(with_slots(experiment, num_slots, ratio, **settings), launch)
        if num_iterations is not None:
            if num_iterations < 1 or training_steps is None:
                raise ConfigError(
                    f"num_iterations = {num_iterations}: make it at least 1, and say how many training_steps "
                    "an iteration has"
                )
            experiment = experiment.replace(
                limits=experiment.limits.replace(steps=num_iterations * training_steps)
            )
        self.experiment, self._launch = experiment, launch
        """What it runs."""
        self.folder: Path | None = None
        """Of its last run."""
        self.iterations: list[dict[str, float]] = []
        """What `read_iterations` found there once that had ended, however it did."""

    def run(
        self,
        run_dir: str | Path | None = None,
        *,
        source: str | Path | None = None,
        quiet: bool = False,
        resume: bool = False,
        trust: Trust = False,
    ) -> Result:
        """Train to the end; see `tidemill.train`. A checkpoint is written at each
        iteration's end (`ReplayTrainer.checkpoints` says how many are kept).

        resume: go on with the run in `run_dir`, by default this runner's last one, as
            `tidemill.resume` does: by the settings that it was begun with, but up to this
            runner's limit of steps; `trust` is as there
        """
        refuse_while_loading(f"{type(self).__name__}.run()")
        if resume and run_dir is None and self.folder is None:
            raise ConfigError(
                "resume = True, and this runner has not run yet: name the run's folder, run(run_dir, "
                "resume=True)"
            )
        self.folder = (
            Path(run_dir)
            if run_dir is not None
            else self.folder
            if resume and self.folder is not None
            else new_folder(self.experiment)
        )
        steps = self.experiment.limits.steps
        try:
            if resume:
                return go_on(
                    self.folder,
                    launch=self._launch,
                    file=source,
                    limits=None if steps is None else {"steps": steps},
                    quiet=quiet,
                    trust=trust,
                )
            return train(
                self.experiment,
                launch=self._launch,
                run_dir=self.folder,
                source=source,
                quiet=quiet,
                layout="given",
            )
        finally:
            with suppress(OSError):
                self.folder.rmdir()  # it never began
            self.iterations = []
            with suppress(RunError):  # it ended before there was anything to tell
                self.iterations = read_iterations(self.folder)


class TrainRunner(AsyncTrainRunner):
    """The synchronous runner steps one environment in this thread: a step, then the
    training that it owes. It takes the same experiment and has the same iterations.

    settings: arguments of `AsyncTrainRunner`; by default num_slots = 1, exact = True (so
        that `slack` must be left out) and launch = "inline"
    """

    def __init__(self, experiment: Experiment, **settings: Any) -> None:
        super().__init__(experiment, **{"num_slots": 1, "exact": True, "launch": "inline", **settings})


def _refuse_another(experiment: Experiment, ratio: str | int | None) -> None:
    for name, config in experiment.groups(ReplayTrainer).items():
        if ratio is None or config.ratio is None:
            continue
        said = [(parse_ratio(each), tasks_at_once(each)) for each in (config.ratio, ratio)]
        if said[0] != said[1]:
            raise ConfigError(
                f"ratio = {ratio!r}, and the experiment's {name} has ratio = {config.ratio!r}: say it in one "
                "of both places"
            )
