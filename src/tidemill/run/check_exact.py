"""Whether an experiment can be resumed exactly (`Experiment.exact_resume`): what goes by
the clock in it is refused by name."""

from tidemill.api.edges import group_of
from tidemill.api.experiment import Experiment
from tidemill.core.errors import ConfigError
from tidemill.replay.queue import Queue
from tidemill.replay_training.trainer_config import ReplayTrainer
from tidemill.store.query import Query, among
from tidemill.streams.sources import Drawn
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.agent_spec import PlayerSpec
from tidemill.workers.buffer_worker import Buffers
from tidemill.workers.cut_files import watches
from tidemill.workers.evaluation import Evaluation, judge_of
from tidemill.workers.policy import PolicyWorkers
from tidemill.workers.population_config import Population
from tidemill.workers.stages import in_rounds
from tidemill.workers.trainer_config import Trainer, TrainerConfig

COUNTED_FIELDS = frozenset({"version", "env_steps"})
"""What of versions is the same at one update, however long that took."""


def check_exact(experiment: Experiment, inline: bool) -> None:
    """Raise `ConfigError` for an experiment with `exact_resume` that cannot be resumed
    exactly. `inline`: its workers take turns in one thread."""
    if not experiment.exact_resume:
        return
    wrong = ""
    if experiment.curriculum:
        wrong = _wrong_with_stages(experiment, inline)
    for name, config in experiment.workers.items():
        match config:
            case ReplayTrainer():
                if not config.exact:
                    wrong = f"workers.{name} is a ReplayTrainer with exact = False; set exact = True"
                elif config.device != "cpu":
                    wrong = f'workers.{name}.device = "{config.device}"; take "cpu"'
            case Trainer():
                if config.max_policy_lag != 0 and not inline:
                    wrong = (
                        f"workers.{name}.max_policy_lag = {config.max_policy_lag}, so that what is "
                        "trained on which weights is a matter of time; set it to 0, or launch inline"
                    )
                elif config.buffer != Queue() and not inline:
                    wrong = (
                        f"workers.{name}.buffer = {config.buffer}, which may depend on which sample comes "
                        "first; take Queue(), or launch inline"
                    )
                elif config.device != "cpu":
                    wrong = f'workers.{name}.device = "{config.device}"; take "cpu"'
            case ActorConfig():
                for spec in config.agents:
                    if isinstance(spec.parameters, Drawn) and not watches(experiment, name):
                        wrong = _wrong_with_draws(experiment, config, spec, inline)
                    if wrong:
                        break
            case Evaluation():  # it watches, or training waits for it
                pass
            case PolicyWorkers():
                if config.threaded:
                    wrong = f"workers.{name}.threaded = True, so that who draws first is a matter of time"
                elif config.device != "cpu":
                    wrong = f'workers.{name}.device = "{config.device}"; take "cpu"'
            case Buffers():
                if not inline:
                    wrong = (
                        f"workers.{name} are buffer workers, whose samples come to trainers at any time; "
                        "launch inline"
                    )
            case Population():
                wrong = _wrong_with_population(experiment, name, config, inline)
            case _:
                wrong = f"workers.{name}, a {type(config).__name__}, works by the clock; leave it out"
        if wrong:
            break
    if wrong:
        raise ConfigError(f"exact_resume = True cannot be had here: {wrong}; or leave out exact_resume")


def _wrong_with_stages(experiment: Experiment, inline: bool) -> str:
    """Return why when the stages of the curriculum begin would be a matter of time, ""
    where it is not."""
    if experiment.groups(ReplayTrainer):
        return "a curriculum and a ReplayTrainer, which keeps no stage with its episodes; leave one out"
    if not inline and experiment.groups(Population):
        return "a curriculum and a Population, whose members are no rounds together; launch inline"
    together = {group_of(name) for name in in_rounds(experiment)}
    for name, actors in experiment.groups(ActorConfig).items():
        if not inline and actors.plays() and name not in together:
            return (
                f"a curriculum and workers.{name}, whose episodes count, and end at any time, since no "
                "trainer waits for their samples; have its agents play other parameters than the newest, or "
                "launch inline"
            )
    evaluations = experiment.groups(Evaluation).values()
    watching = [config.measures() for config in evaluations if config.watches]
    for number, stage in enumerate(experiment.curriculum, 1):
        for name in Query.parse(stage.until).fields() if stage.until else ():
            names = name, name.partition("/")[2]  # the group stands before what several measure
            if name == "time/seconds" or any(among(each, told) for each in names for told in watching):
                return (
                    f'stage {number} of the curriculum, which ends by "{name}", a matter of time; take '
                    '"step", "update", "episodes", what the last episodes have reached, what training tells '
                    "or what an evaluation with updates says"
                )
    return ""


def _wrong_with_draws(experiment: Experiment, config: ActorConfig, spec: PlayerSpec, inline: bool) -> str:
    """Return why what these agents draw would be a matter of time, "" where it is not."""
    drawn, who = spec.parameters, f'the agents "{spec.match}" play versions that are drawn'
    assert isinstance(drawn, Drawn)
    awaited = [
        each
        for each in experiment.groups(Evaluation).values()
        if each.updates is not None and each.policy == spec.policy
    ]
    judged = [each for each in awaited if judge_of(experiment, config.agents) == each]
    counted = {*COUNTED_FIELDS, *(name for each in awaited if inline for name in each.records())}
    if drawn.tag and drawn.tag in {tag for each in awaited if inline for tag in (each.tag, each.best)} | {
        each.tag for each in judged
    }:
        return ""
    fields = {field for query in drawn.queries() for field in query.fields()} - counted
    if drawn.tag or fields:
        by = f'the tag "{drawn.tag}"' if drawn.tag else f'"{min(fields)}"'
        return f"{who} by {by}, which moves at any time; draw by {' and '.join(sorted(COUNTED_FIELDS))} alone"
    for name, trainer in experiment.groups(TrainerConfig).items():
        if trainer.policy != spec.policy:
            continue
        if trainer.database_updates is None or trainer.database_versions is not None:
            return (
                f"{who}, and which ones there are is a matter of time; set workers.{name}.database_updates "
                f"(updates between two of them) and workers.{name}.database_versions = None (all are kept)"
            )
        streams = [stream for each in config.agents for stream in each.streams]
        if not (inline or judged) and not any(
            name == group_of(taker) for s in streams for taker in experiment.in_lockstep(s)
        ):
            return f"{who}, and {name}, which makes these, does not wait for their actors' samples"
    return ""


def _wrong_with_population(experiment: Experiment, name: str, config: Population, inline: bool) -> str:
    """Return why what a population decides would be a matter of time, "" where it is
    not."""
    if config.updates is None:
        return f"workers.{name} decides by env steps, whenever it looks; set its updates"
    evaluations = [each for each in experiment.groups(Evaluation).values() if each.updates is not None]
    for member in config.members:
        counted = {name for each in evaluations if each.policy == member for name in each.records()}
        if config.metric not in {"training_return", *counted}:
            return (
                f'workers.{name}.metric = "{config.metric}", which is known of versions of "{member}" at any '
                'time; take "training_return", or what an Evaluation with updates records'
            )
    if not inline and (experiment.limits.updates is None or experiment.limits.steps is not None):
        return (
            f"the first member of workers.{name} that reaches a limit would end the run, or keep the others "
            "waiting; set limits.updates, which all members reach, and no limits.steps"
        )
    return ""
