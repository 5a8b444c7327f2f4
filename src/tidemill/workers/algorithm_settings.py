"""What the algorithm of a trainer is set to: as the experiment says, but for what was
changed since, and by its schedules."""

from collections import deque
from collections.abc import Callable, Mapping

from tidemill.api.algorithm import Algorithm, AlgorithmConfig
from tidemill.api.control_messages import ChangeSettings
from tidemill.api.policy import PolicyConfig
from tidemill.core.errors import ConfigError
from tidemill.workers.trainer_config import TrainerConfig
from tidemill.workers.trainer_counters import TrainingLimits
from tidemill.workers.version_metadata import with_settings


class AlgorithmSettings:
    """The settings by which a policy is trained now.

    changed: those that were changed, by name, which checkpoints keep
    changes: what equal trainers, which are still to agree on that, go on with next
    """

    def __init__(
        self,
        config: TrainerConfig,
        policy: PolicyConfig,
        group: str,
        limits: TrainingLimits,
        tell: Callable[[str], None],
    ) -> None:
        """`group`: the trainer's; `limits`: by which schedules go; `tell`: function that
        tells the user of what is not taken."""
        self._config, self._policy, self._group = config, policy, group
        self._limits, self._tell = limits, tell
        self.changed: dict[str, float | None] = {}
        self.changes = deque[AlgorithmConfig]()
        self._set: AlgorithmConfig = config.algorithm

    def build_by(self) -> AlgorithmConfig:
        """Return what an algorithm is to be built by, all that was changed included."""
        self._set = with_settings(self._config.algorithm, self.changed)
        return self._set

    def now(self) -> AlgorithmConfig:
        """Return the settings as they are now, each a number."""
        return self._set.at(self._limits.counters.steps, self._limits.progress())

    def follow(self, algorithm: Algorithm) -> None:
        """Set what has a schedule to what it is now."""
        if self._set.schedules:
            algorithm.config = self.now()

    def of_schedules(self, algorithm: Algorithm) -> dict[str, float]:
        """Return what `algorithm` has of settings that have a schedule."""
        return {name: float(getattr(algorithm.config, name)) for name in self._set.schedules}

    def accept(self, settings: Mapping[str, float | None]) -> AlgorithmConfig | None:
        """Return what the algorithm is to be set to with these settings, which
        checkpoints keep from now on. None, which is told, where they do not go with those
        that were changed before: nothing is changed then."""
        changed = {**self.changed, **settings}
        try:
            config = with_settings(self._config.algorithm, changed)
            config.check_policy(self._policy)
        except ConfigError as error:
            asked = ", ".join(f"{name} = {value}" for name, value in settings.items())
            self._tell(f"{asked} is not taken, since settings were changed before: {error}")
            return None
        self.changed = changed
        return config

    def hear(self, message: ChangeSettings) -> bool:
        """Take other settings, which come last among `changes`; not those that the
        checkpoint from which training goes on knows: other ones may have come after. True
        where there is another change."""
        counters = self._limits.counters
        if message.number <= counters.changes:
            return False
        counters.changes = message.number
        if (config := self.accept(message.settings)) is None:
            return False
        self.changes.append(config)
        return True

    def apply_next(self, algorithm: Algorithm) -> None:
        """Have `algorithm` go on with the first of `changes`."""
        self._go_on(algorithm, self.changes.popleft())

    def apply_all(self, algorithm: Algorithm) -> None:
        """Have `algorithm` go on with all of `changes`: all equal trainers were told the
        same."""
        while self.changes:
            self.apply_next(algorithm)

    def _go_on(self, algorithm: Algorithm, config: AlgorithmConfig) -> None:
        self._set = config
        algorithm.config = self.now()

    def make_smaller(self, algorithm: Algorithm) -> str:
        """Have `algorithm` go on with smaller learning rates, where the trainer is set so
        (`fault_rate_factor`). Return which, in words, "" where there are none."""
        rates = self._config.smaller_rates(self.now())
        if rates and (config := self.accept(rates)) is not None:
            self._go_on(algorithm, config)
        return "".join(f", with {name} = {rate:g}" for name, rate in rates.items())

    def cure(self) -> str:
        """Return what to try against updates that are not finite, "" where there is no
        learning rate."""
        now = self.now()
        rate, usual = (getattr(each, "learning_rate", None) for each in (now, type(now)))
        if not rate:
            return ""
        tried = min(rate / 3, usual) if isinstance(usual, float) and usual > 0 else rate / 3
        return f"try --set workers.{self._group}.algorithm.learning_rate={tried:.2g}"
