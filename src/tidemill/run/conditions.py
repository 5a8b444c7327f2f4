"""What a run does by what is known of it: it ends where a limit on returns, or on what is
measured, is reached, and goes over to the next stage of its curriculum.

Only the runner hears of all actors' episodes; steps, updates and seconds are the
trainers' to watch. In lockstep with `exact_resume` a stage begins with a round
(`run/rounds.py`), else as soon as its condition holds.
"""

from collections.abc import Callable, Mapping

from tidemill.api.conditions import holds
from tidemill.api.control_messages import Down, EnterStage, Episodes, Measured
from tidemill.api.edges import group_of
from tidemill.api.experiment import Experiment
from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.replay_training.trainer_config import ReplayTrainer
from tidemill.run.run_state import RunState
from tidemill.store.query import Query, among
from tidemill.workers.cut_files import RUNNER, PartWriter, actors_with_part
from tidemill.workers.population_config import Population


def each_to_its_limit(experiment: Experiment, takes_turns: bool) -> bool:
    """True where policies go on to limits of their own, in a run that resumes exactly:
    else time would say how far they come. So do members of a population, unless workers
    take turns (`takes_turns`), and several policies of which one has a replay memory."""
    of_memory = len(experiment.trained()) > 1 and bool(experiment.groups(ReplayTrainer))
    members = not takes_turns and bool(experiment.groups(Population))
    return experiment.exact_resume and (of_memory or members)


class Conditions:
    """The conditions of an experiment, and what is counted for them: episodes, and what
    workers measure.

    folder: the run's, None for none
    write: function that is called with each record of what was measured
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: str | None,
        state: RunState,
        write: Callable[[dict[str, float]], None],
    ) -> None:
        self._experiment, self._state, self._write = experiment, state, write
        self._parts = PartWriter(folder, RUNNER, state.report.notify)
        self._several, self._judged = experiment.measured_by_several(), experiment.judged()
        # what infos say was compared with what conditions wait for
        self._listened = not experiment.players()

    def change(self, experiment: Experiment) -> None:
        """Go on with `experiment`, whose limits may be others."""
        self._experiment, self._judged = experiment, experiment.judged()

    # ---- what is known -----------------------------------------------------------------

    def count_episodes(self, name: str, message: Episodes) -> None:
        """Count episodes that a worker tells of."""
        self._state.progress.count_episodes(group_of(name), message)
        self._look_at_infos()

    def note_measured(self, name: str, message: Measured) -> None:
        """Record what an evaluation, or another worker, has measured, and look what
        follows."""
        group = name.rpartition("-")[0]
        values = {
            f"{group}/{metric}" if among(metric, self._several) else metric: value
            for metric, value in message.values.items()
        }
        self._write({"step": float(message.step), **values})
        self._state.progress.note_iteration(message.step, message.values)
        if message.stage == self._state.progress.stage:  # else it was on its way when the stage changed
            self._state.progress.measured |= values
            # what comes at any time begins no stage of a run that resumes exactly
            if not (self._experiment.exact_resume and self._state.members[name].config.watches):
                self.advance()
        self.look_at_rounds()

    # ---- what nobody says --------------------------------------------------------------

    def look_at_names(self) -> None:
        """Say so when a condition waits for what nobody measures, where that was not
        known before."""
        try:
            self._experiment.check_conditions(self._state.progress.metrics)
        except ConfigError as error:
            self._state.report.notify(f"{error}. It will never hold")

    def _look_at_infos(self) -> None:
        """Say so, once as many episodes have ended as the window holds, where a condition
        waits for what no info has said."""
        windows = self._state.progress.windows
        texts = [self._experiment.limits.until, *(stage.until for stage in self._experiment.curriculum)]
        if self._listened or windows is None or not any(texts) or not windows.all_full():
            return
        self._listened, known = True, windows.metrics()
        said = [name for name in known if name.startswith("info/")]
        for text in filter(None, texts):
            for name in Query.parse(text).fields():
                if name.startswith("info/") and name not in known:
                    self._state.report.notify(
                        f'"{text}" waits for "{name}", which no info of the episodes so far has said; '
                        f"{did_you_mean(name, said)}"
                    )

    # ---- what follows ------------------------------------------------------------------

    def look_at_returns(self) -> None:
        """End the run where a mean return has reached the limit."""
        target, windows = self._experiment.limits.mean_return, self._state.progress.windows
        if target is None or windows is None:
            return
        for who in self._judged:
            if windows.full(who) and (mean := windows.means(who)["return"]) >= target:
                self._state.end(
                    f"mean return {mean:.1f} of the last {windows.count(who)} "
                    f"episodes{f' of {who}' if who else ''}",
                    reached=True,
                )
                return

    def advance(self) -> None:
        """End the run, or go over to the curriculum's next stage, where the condition for
        that holds; where stages begin at rounds `look_at_rounds` does."""
        until = self._experiment.limits.until
        if until and holds(until, self._state.progress.known()):
            self._state.end(until, reached=True)
        if self._state.running and self._state.progress.rounds is None and self._end_stage():
            self.tell_all_stages()

    def look_at_rounds(self) -> None:
        """Say in which stage the next round is, once all is known that decides it."""
        rounds = self._state.progress.rounds
        while rounds is not None and rounds.due:
            for name, message in rounds.episodes():
                self.count_episodes(name, message)
            ended = self._end_stage()
            rounds.tell(self._state.progress.stage)
            for name in self._state.members if ended else rounds.parties:
                for order in self.stages_for(name)[-1:]:  # the others were told
                    self._state.members[name].send(order)

    def _end_stage(self) -> bool:
        """Go over to the curriculum's next stage where the condition for that holds. True
        where it does."""
        stages, progress = self._experiment.curriculum, self._state.progress
        if not stages or not (until := stages[progress.stage].until) or not holds(until, progress.known()):
            return False
        progress.enter_stage(progress.stage + 1)
        self._state.report.notify(
            f"curriculum: stage {progress.stage + 1} of {len(stages)} begins after {progress.steps:,} "
            "env steps"
        )
        return True

    # ---- stages ------------------------------------------------------------------------

    def stages_for(self, name: str) -> list[Down]:
        """Return what a worker is told of the curriculum's stages."""
        curriculum, rounds = self._experiment.curriculum, self._state.progress.rounds
        if not curriculum:
            return []
        by_round = None if rounds is None else rounds.stages_for(name)
        if by_round is None:
            return [EnterStage(self._state.progress.stage, curriculum[self._state.progress.stage].options)]
        return [EnterStage(stage, curriculum[stage].options, number) for number, stage in by_round.items()]

    def tell_all_stages(self) -> None:
        """Tell all workers of the curriculum's stages."""
        for name, member in self._state.members.items():
            for order in self.stages_for(name):
                member.send(order)

    def save(self, cut: int, checkpoints: Mapping[str, int]) -> None:
        """Write what is known of the run as a whole, as a part of a cut: its episodes,
        and what decides when stages of the curriculum begin."""
        if actors_with_part(self._experiment):
            self._parts.write(self._state.progress.state(), cut, checkpoints)
