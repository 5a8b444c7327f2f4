"""The rounds of a run in lockstep that resumes exactly, as the runner hears of them: when
it knows enough to say whether a stage of the curriculum ends (see
`tidemill.workers.stages`)."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tidemill.api.control_messages import Episodes, Measured, RoundOver
from tidemill.api.edges import group_of
from tidemill.api.experiment import Experiment
from tidemill.core.cut import Part
from tidemill.core.errors import CheckpointError
from tidemill.workers.evaluation import Evaluation
from tidemill.workers.stages import in_rounds
from tidemill.workers.trainer_config import Trainer


class Rounds:
    """What workers have told of rounds, and which stages were told to them.

    parties: the workers that go by rounds
    told: the newest round of which they were told the stage: what comes after so many
    """

    def __init__(self, experiment: Experiment) -> None:
        self.parties = in_rounds(experiment)
        self.told = 0
        self._stages = {0: 0}  # by round, the newest two: all that anybody may still need
        self._trained = {
            name: config.policy for name, config in experiment.members() if isinstance(config, Trainer)
        }
        self._evaluations = {
            group: config
            for group, config in experiment.groups(Evaluation).items()
            if config.updates is not None
        }
        self._evaluators = {
            group: [name for name, _ in experiment.members() if group_of(name) == group]
            for group in self._evaluations
        }
        self._over: dict[str, int] = dict.fromkeys(self.parties, 0)
        self._updates: dict[str, int] = dict.fromkeys(self._trained.values(), 0)
        self._evaluated: dict[str, int] = dict.fromkeys(self._evaluations, -1)  # the newest version
        # of which round, by whom
        self._held = {name: deque[tuple[int, Episodes]]() for name in self.parties}

    def take(self, name: str, message: Any) -> bool:
        """Take in a message of a worker's. True of one that is kept until its round is
        over: what others of its group have told comes first where they come first."""
        match message:
            case Episodes() if name in self._over:
                self._held[name].append((self._over[name] + 1, message))
                return True
            case RoundOver():
                self._over[name] = message.number
                if name in self._trained:
                    self._updates[self._trained[name]] = message.updates
            case Measured() if (config := self._evaluations.get(group_of(name))) is not None:
                self._evaluated[group_of(name)] = int(message.values[f"{config.name}/version"])
        return False

    @property
    def due(self) -> bool:
        """True when all is known of the newest round whose stage was told, and of the
        version that came of it, so that it is time to say the next one's."""
        return all(number >= self.told for number in self._over.values()) and all(
            self._evaluated[group] >= self._awaited(config) for group, config in self._evaluations.items()
        )

    def lacking(self, name: str) -> list[str]:
        """Return whom worker `name` waits for where it is through with the newest round
        whose stage was told: those who are not. [] for one that is not either."""
        if self._over.get(name, -1) < self.told:
            return []
        behind = [other for other, number in self._over.items() if number < self.told]
        return behind + [
            other
            for group, config in self._evaluations.items()
            if self._evaluated[group] < self._awaited(config)
            for other in self._evaluators[group]
        ]

    def _awaited(self, config: Evaluation) -> int:
        """Return the newest version that an evaluation has got to by now: training waits
        for it."""
        now = self._updates[config.policy]
        return now - now % (config.updates or 1)

    def episodes(self) -> Iterator[tuple[str, Episodes]]:
        """Yield what was told of episodes in that round, and by whom, in the order of
        workers; once."""
        for name, held in self._held.items():
            while held and held[0][0] <= self.told:
                yield name, held.popleft()[1]

    def tell(self, stage: int) -> None:
        """Note that the stage of the next round is told."""
        self.told += 1
        self._stages = {self.told - 1: self._stages[self.told - 1], self.told: stage}

    def stages_for(self, name: str) -> Mapping[int, int] | None:
        """Return, by round, all stages that worker `name` may still need to be told; None
        for one that goes by no rounds."""
        return self._stages if name in self._over else None

    # ---- a cut -------------------------------------------------------------------------

    def state(self) -> Part:
        """Return all of this, for a cut."""
        return {
            "told": self.told,
            "stages": [[*pair] for pair in self._stages.items()],
            "over": self._over,
            "updates": self._updates,
            "evaluated": self._evaluated,
            "held": {name: msgspec.to_builtins([*held]) for name, held in self._held.items()},
        }

    def load_state(self, state: Part) -> None:
        """Be as the rounds were whose state this is. Raises `CheckpointError` where that
        is none."""
        if not state:
            raise CheckpointError(
                "the run's cuts do not say at which round its curriculum is: they are of an earlier version "
                "of Tidemill, in which stages began at other updates. Train anew; or set exact_resume to "
                "false in its config.json, and it goes on from its newest checkpoint with new episodes"
            )
        self.told = state["told"]
        self._stages = dict(state["stages"])
        for ours, theirs in (
            (self._over, state["over"]),
            (self._updates, state["updates"]),
            (self._evaluated, state["evaluated"]),
        ):
            ours.update(theirs)
        for name, held in state["held"].items():
            self._held[name] = deque(msgspec.convert(held, list[tuple[int, Episodes]]))
