"""When the stages of a curriculum begin: at once, as the runner says; at a definite round
of a run in lockstep that resumes exactly; or, for judges, with the version that they are
to play.

A *round* of a run in lockstep is what its actors gather between two versions, and the
update by that. Whoever has done its part of one says so (`RoundOver`), an actor after the
episodes that ended in it. Once all have, the runner knows all that there is to know by
then, looks whether the stage ends, and says in which one the next version is
(`EnterStage.round`). Trainers wait for that before they make it, actors before they play
it: so a stage begins at one and the same tick, whoever was quick.

A version that is pushed into the parameter database has its stage with it ("stage"). The
judges of an evaluation that counts updates play it in that stage, and what they reach is
recorded as of that.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tidemill.api.control_messages import EnterStage
from tidemill.api.experiment import Experiment
from tidemill.api.worker import Context
from tidemill.core.cut import Part
from tidemill.workers.actor_config import Actors
from tidemill.workers.agent_spec import in_lockstep
from tidemill.workers.population_config import Population
from tidemill.workers.trainer_config import Trainer, TrainerConfig
from tidemill.workers.version_metadata import stage_of


def stages_by_round(experiment: Experiment) -> bool:
    """Return whether the stages of the curriculum begin at definite rounds: of a run that
    resumes exactly, where all of it is in lockstep. Members of a population are not with
    one another."""
    trainers = experiment.groups(TrainerConfig).values()
    lockstep = all(isinstance(each, Trainer) and each.max_policy_lag == 0 for each in trainers)
    staged = experiment.exact_resume and bool(experiment.curriculum)
    return staged and bool(trainers) and lockstep and not experiment.groups(Population)


def in_rounds(experiment: Experiment) -> list[str]:
    """Return the workers that go by rounds: trainers, and actors in lockstep."""
    return [
        name
        for name, config in experiment.members()
        if isinstance(config, Trainer)
        or (isinstance(config, Actors) and any(in_lockstep(experiment, spec) for spec in config.agents))
    ]


class StagesByRound:
    """The stages that a worker was told of by rounds. `number`: how many rounds it has
    done."""

    def __init__(self) -> None:
        self.number = 0
        self._told: dict[int, EnterStage] = {}

    def tell(self, message: EnterStage) -> bool:
        """Take in from which round on a stage holds. True when it holds now."""
        assert message.round is not None
        if message.round > self.number:
            self._told[message.round] = message
        return message.round == self.number

    @property
    def known(self) -> bool:
        """True when it is known in which stage the next round is."""
        return self.number + 1 in self._told

    def next(self) -> EnterStage:
        """Go over to the next round, and return its stage."""
        self.number += 1
        return self._told.pop(self.number)


class ActorStages:
    """The stage in which an actor's episodes begin.

    judges: its agents play the versions of an evaluation that counts updates
    round_over: function that says that the actor's part of a round, by its number, is
        done
    enter: function that has its environments go over to a stage, with what their resets
        are told then
    """

    def __init__(
        self,
        context: Context,
        judges: bool,
        round_over: Callable[[int], None],
        enter: Callable[[int, Mapping[str, Any]], None],
    ) -> None:
        experiment = context.experiment
        self._curriculum = experiment.curriculum
        self._round_over, self._enter = round_over, enter
        by_round = stages_by_round(experiment) and context.name in in_rounds(experiment)
        self.rounds = StagesByRound() if by_round else None
        self._of_versions = judges and bool(self._curriculum)
        self.stage = 0

    def begin(self) -> None:
        """Have judges begin in the first stage: nobody tells them."""
        if self._of_versions:
            self._enter(0, self._curriculum[0].options)

    def hear(self, message: EnterStage) -> None:
        """Do as the runner says, once that holds."""
        if not self._of_versions and (self.rounds is None or self.rounds.tell(message)):
            self.stage = message.stage
            self._enter(message.stage, message.options)

    def end_round(self) -> None:
        """The actor has sent all samples of a round."""
        if self.rounds is not None:
            self._round_over(self.rounds.number + 1)

    def known(self) -> bool:
        """True when it is known in which stage the next round is."""
        return self.rounds is None or self.rounds.known

    def begin_round(self) -> None:
        """The actor goes on with the version of the next round."""
        if self.rounds is not None:
            self._go_to(self.rounds.next().stage)

    def play(self, counters: Mapping[str, float]) -> None:
        """The actor goes on with a version of which these counters are known."""
        if self._of_versions:
            self._go_to(stage_of(counters))

    def _go_to(self, stage: int) -> None:
        """Go through all stages up to this one: what is played again at a resume is told
        by their order."""
        while self.stage < stage:
            self.stage += 1
            self._enter(self.stage, self._curriculum[self.stage].options)

    # ---- a cut -------------------------------------------------------------------------

    def state(self) -> Part:
        """Return the stage, and the round."""
        return {"stage": self.stage, "round": 0 if self.rounds is None else self.rounds.number}

    def load_state(self, state: Part) -> None:
        """Be in the stage in which the actor was, before its open episodes are."""
        if self._curriculum:
            self._enter(0, self._curriculum[0].options)
            self._go_to(state["stage"])
        if self.rounds is not None:
            self.rounds.number = state.get("round", 0)
