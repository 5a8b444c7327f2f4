"""What a callback of one's own may do with a run that is going on."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.run.controller import Controller
from tidemill.workers.trainer_config import TrainerConfig

OnUpdate = Callable[[dict[str, float], "RunControl"], None]
"""Called in the main process with each record of updates: of each update, or of several
together where they are quicker than `metrics.record_pace` lets them be written. Training
goes on meanwhile, in other processes or threads. What it raises ends the run, once its
last checkpoint is written; it is not called again."""
LIMITS = ("mean_return", "until")
"""The limits that the main process looks at."""


class RunControl:
    """A run control lets a callback (`train(on_update=…)`) act on the run that is going
    on: log, save, stop, change a limit, or numbers of an algorithm."""

    def __init__(self, controller: Controller, record: Callable[[dict[str, float]], None]) -> None:
        self._controller, self._record = controller, record

    def log(self, metrics: Mapping[str, float]) -> None:
        """Write numbers of one's own into the run's metrics, at its present env step."""
        self._record({"step": float(self._controller.state.progress.steps), **metrics})

    def stop(self, reason: str = "stopped by on_update") -> None:
        """End the run with a final checkpoint, as ``tidemill stop`` does."""
        self._controller.state.end(reason)

    def save(self) -> bool:
        """Write a checkpoint now. False where the run is ending, which writes one."""
        return self._controller.save()

    def change(self, policy: str | None = None, /, **settings: Any) -> None:
        """Change numbers of the algorithm that trains `policy` (None: of every
        algorithm), such as `learning_rate`, or the limits `mean_return` and `until`. A
        change acts from the next update on, at the same update in all equal trainers, and
        is kept after a resume. Raises `ConfigError`, and changes nothing, where one of
        them cannot be changed; with `ReplayTrainer.exact` or `journal` no number of the
        algorithm can."""
        experiment = self._controller.job.experiment
        trainers = experiment.groups(TrainerConfig)
        if policy is not None:
            trainers = {group: trainer for group, trainer in trainers.items() if trainer.policy == policy}
        if not trainers and policy is not None:
            raise ConfigError(f'no trainer trains "{policy}"; {did_you_mean(policy, experiment.trained())}')
        settings = {name: plain_number(value) for name, value in settings.items()}
        limits = {name: settings.pop(name) for name in LIMITS if name in settings}
        known = {*LIMITS, *(name for trainer in trainers.values() for name in trainer.algorithm.changeable)}
        for name in settings:
            if name not in known:
                raise ConfigError(
                    f"{name} cannot be changed while a run is going on; these can be: "
                    f"{', '.join(sorted(known))}. Stop it, and go on with other limits by tidemill.resume"
                )
        changed = {group: trainer.changed(settings) for group, trainer in trainers.items() if settings}
        experiment = experiment.replace(
            workers={**experiment.workers, **changed}, limits=experiment.limits.replace(**limits)
        )
        for trainer in changed.values():
            trainer.check(experiment)
        told = {
            group: {name: getattr(trainer.algorithm, name) for name in settings}
            for group, trainer in changed.items()
        }
        self._controller.change(experiment, told)


def plain_number(value: Any) -> Any:
    """Return Python's own number for one of numpy's, and anything else as it is."""
    return value.item() if isinstance(value, (np.generic, np.ndarray)) and value.size == 1 else value
