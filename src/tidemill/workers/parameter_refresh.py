"""When an actor takes new parameters: the one place where that is decided.

======================================  ==============================================
at the start                            everybody
replay training                         just before actions are computed: their steps
                                        were granted by the newest version's trainer
in lockstep                             once a sample was given back, before the next
judges in rounds                        once a round was given back, before the next
targets of one lane                     before an episode begins: it has one version
targets of many lanes                   after the tick in which a sample was sent
no sample was sent for `PULL_TICKS`     those who have none, or whose rows are dropped
                                        when they lag; not within a lane's own episode
episodes may never end                  after `ENDLESS_TICKS`, those of one lane, too
======================================  ==============================================

All of these lie between ticks, and as late as can be: an actor that was held back goes on
with what came meanwhile.
"""

from collections.abc import Iterable, Mapping

from tidemill.api.environment import Environment
from tidemill.api.experiment import Experiment
from tidemill.api.stream import InferenceClient
from tidemill.core.cut import Part
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.evaluation import judge_of
from tidemill.workers.inference_clients import ClientKey

# an actor that meets no sample boundary for so many ticks takes new parameters all the
# same: the timed pull
PULL_TICKS = 128
# so many it leaves alone targets of one lane, which take parameters before resets, where
# episodes may never end
ENDLESS_TICKS = 10_000


class ParameterRefresh:
    """The refresh tells an actor's inference `clients` when to take new parameters (see
    the module's text).

    environment: the first one of the actor's
    granted: the actor's steps are granted
    """

    def __init__(
        self,
        experiment: Experiment,
        config: ActorConfig,
        environment: Environment,
        clients: Mapping[ClientKey, InferenceClient],
        granted: bool,
    ) -> None:
        in_rounds = {  # they are told by their gate alone
            ClientKey.of(spec, target)
            for spec in config.agents
            if judge_of(experiment, [spec])
            for target in range(config.ring)
        }
        clients = {key: client for key, client in clients.items() if key not in in_rounds}
        self._all, self._granted = list(clients.values()), granted
        # for lanes that begin again by themselves there is no time before a reset
        self._at_resets = config.lanes == 1 and not environment.same_step
        self._single = config.lanes == 1
        self._of_target = [
            [client for key, client in clients.items() if key.target in (target, None)]
            for target in range(config.ring)
        ]
        own = [key for key in clients if self._at_resets and key.target is not None]
        self._between = [client for key, client in clients.items() if key not in own]
        # A lane that plays alone keeps its episode's version, unless the samples would
        # come too late for who takes them.
        keeps = self._at_resets and not environment.independent
        pulled = {
            ClientKey.of(spec, target)
            for spec in config.agents
            if not keeps or any(map(experiment.lag_bounded, spec.streams))
            for target in range(config.ring)
        }
        self._timed = [client for key, client in clients.items() if key in pulled and key not in own]
        self._endless = not environment.max_episode_steps
        self._ticks = 0  # since parameters were last taken
        self._sent = False  # a sample, since then
        self._cut = False  # the actor goes on from a cut, with the parameters of then

    def _take(self, clients: Iterable[InferenceClient]) -> None:
        for client in clients:
            client.refresh()
        self._ticks, self._sent = 0, False

    def start(self) -> None:
        """The actor begins, or goes on after a pause."""
        if not self._cut:
            self._take(self._all)
        self._cut = False

    def state(self) -> Part:
        """Return what it goes by."""
        return {"ticks": self._ticks, "sent": self._sent}

    def load_state(self, state: Part) -> None:
        """Go on from there: the clients have their parameters."""
        self._ticks, self._sent, self._cut = state["ticks"], state["sent"], True

    def sample_sent(self) -> None:
        """A sample was sent in this tick."""
        self._sent = True

    def before_episodes(self, target: int) -> None:
        """Note that all lanes of the target are about to begin an episode."""
        if self._single:
            self._take(self._of_target[target])

    def after_tick(self) -> None:
        """A target has finished a tick."""
        self._ticks += 1
        if (self._sent and not self._single) or (self._endless and self._ticks > ENDLESS_TICKS):
            self._take(self._between)
        elif self._ticks > PULL_TICKS and self._timed:
            self._take(self._timed)

    def before_actions(self, client: InferenceClient) -> None:
        """Requests are about to be answered."""
        if self._granted:
            client.refresh()

    def next_samples(self, client: InferenceClient) -> None:
        """Samples in lockstep were given back: the next ones are of the next version."""
        client.refresh()
