"""Stepwise agents: each tick sends a sample of one row of all seats at once, with what was observed and what led to it (`ARRIVAL_FIELDS`).

Nothing waits for the next action, so that an open episode never holds back what is known of its steps. Where a limiter stands behind the stream, a
tick needs a credit for each lane that is going to step, before its actions are asked for: so they are those of the newest policy. Resets need none.
"""

from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import Environment, Tick
from tidemill.api.experiment import Context
from tidemill.api.stream import InferenceClient, SampleProducer
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Arrays, Schema, allocate
from tidemill.streams.credits import Credits
from tidemill.workers.actor_config import INLINE, Actors, AgentSpec
from tidemill.workers.agent import Agent
from tidemill.workers.blocks import Blocks
from tidemill.workers.ring import EnvRing, EnvTarget

LOOK_AGAIN = 0.1
"""Seconds between looks at all targets, whatever happens."""


def check_stepwise(context: Context, config: Actors, environment: Environment) -> None:
    """Raise `ConfigError` for stepwise specs that cannot be."""
    stepwise = [spec for spec in config.agents if spec.mode == "stepwise"]
    if environment.voids and len(stepwise) < len(config.agents):
        raise ConfigError(
            f"{type(config.environment).__name__}: steps of this environment may be lost, which only stepwise agents can bear; take "
            'mode = "stepwise" and a replay memory, or the environment itself, whose faults end the run'
        )
    if not stepwise:
        return
    if len(environment.agents) > 1:
        raise ConfigError(
            f'agent spec "{stepwise[0].match}": mode = "stepwise" goes with environments of one agent, and this one has {len(environment.agents)}; '
            'take mode = "fixed" or "full"'
        )
    if environment.same_step:
        raise ConfigError(
            f'agent spec "{stepwise[0].match}": mode = "stepwise" sends one row in a tick, and this environment ends an episode and begins the next '
            "within one; take copies of a single environment (Gymnasium), or a vector environment that resets in the next step"
        )
    granting = [port for stream in stepwise[0].streams for port in context.experiment.granting(stream)]
    if len(granting) > 1:
        raise ConfigError(f"samples = {stepwise[0].streams}: two trainers with a ratio would hold the steps of one actor back; let one of them do")
    if any(port.lockstep for port in granting) and (config.lanes > 1 or config.count > 1 or stepwise[0].inference != INLINE):
        raise ConfigError(
            f"exact = True needs one actor whose targets have one lane each and whose policy runs inline, not count = {config.count}, lanes = "
            f'{config.lanes}, inference = "{stepwise[0].inference}"; set ring to the number of slots (--slots), and count and lanes to 1'
        )


class Arrivals(Blocks):
    """A row of all seats, which is a slot of its own."""

    def __init__(self, samples: SampleProducer) -> None:
        self._samples = samples
        self.arrays = {}

    def has_room(self) -> bool:
        self.arrays = self._samples.reserve() or {}  # the same slot until it is sent
        return bool(self.arrays)

    def send(self) -> bool:
        self._samples.commit()
        return True


class StepwiseAgent(Agent):
    """See the module's text. Its rows lie in the slots of its samples alone; requests are answered from there. `voids`: steps of its
    environment may be lost (`Environment.voids`)."""

    def __init__(self, schema: Schema, seats: int, deterministic: bool, client: InferenceClient, samples: SampleProducer, voids: bool) -> None:
        self._arrivals = Arrivals(samples)
        super().__init__(schema, seats, deterministic, client, self._arrivals)  # type: ignore[arg-type]  # all that touches blocks is below
        self._answer_names = [name for name in self._answer_names if name != "voided"]
        self._answers: Arrays = allocate({n: schema[n] for n in (*self._answer_names, "version", "policy")}, (seats,))
        self._led = self._answers  # what led to the newest row
        self._marks = ["on_reset", "voided", "done", "truncated", *(name for name in self._cleared if name != "reward")]
        self._row: Arrays = {}  # of the newest tick
        self._acts: NDArray[np.bool_] = np.zeros(seats, np.bool_)
        self.acts = 0
        """Seats that are going to act in the next tick."""
        self.asked = False
        """Their actions were asked for."""
        self.sent = 0
        """Samples so far."""
        self._quiet = False  # every seat acted, and none is finished
        self._one, self._voids = seats == 1, voids

    def next_observation(self, tick: Tick) -> None:
        self._row = {name: array[0] for name, array in self._arrivals.arrays.items()}
        tick.observation = {name: self._row[name] for name in self._observation_names}

    def observe(self, tick: Tick) -> None:
        """Send the rows of a tick."""
        row = self._row
        for name, array in self._led.items():
            row[name][:] = array
        for name in self._state_names:
            row[name][:] = self._state[name]
        for name in self._marks:
            row[name].fill(0)
        if self._quiet and not self._any(tick.done) and not self._any(tick.truncated) and not (self._voids and self._any(tick.voided)):
            row["reward"][:] = tick.reward
            self._return += tick.reward
            self._length += 1
        else:
            self._observe_rare(tick)
        self.asked = False
        self._arrivals.send()
        self.sent += 1

    def _any(self, flags: NDArray[np.bool_]) -> bool:
        return bool(flags[0]) if self._one else bool(flags.any())

    def _observe_rare(self, tick: Tick) -> None:
        """A tick in which an episode begins or ends, or a seat does not act."""
        row, begins = self._row, self.finished & tick.present
        voided = tick.voided & ~self.finished & self._voids
        stepped = tick.present & ~self.finished & ~voided
        final = (tick.done | tick.truncated) & stepped
        self._return += tick.reward * stepped
        self._length += stepped
        if begins.any():
            self._begin(begins.nonzero()[0])
            for name in self._state_names:
                row[name][:] = self._state[name]
        row["on_reset"][:], row["voided"][:] = begins, voided
        row["done"][:], row["truncated"][:] = tick.done & stepped, tick.truncated & final
        row["reward"][:] = tick.reward
        self._rare(tick, stepped, final, voided)
        self.finished = (self.finished & ~begins) | final | voided
        self._acts = tick.present & ~self.finished
        self.acts = int(np.count_nonzero(self._acts))
        self._quiet = self.acts == self._seats

    def _rare(self, tick: Tick, stepped: NDArray[np.bool_], final: NDArray[np.bool_], voided: NDArray[np.bool_]) -> None:
        """What is not in every tick: rows to which no action led, and final ones."""
        row = self._row
        idle = ~stepped
        for name in (*self._answer_names, "reward"):
            row[name][idle] = 0
        row["version"][idle] = -1
        row["policy"][idle] = -1
        nothing = voided | ~tick.present
        for name in (*self._observation_names, *self._state_names):
            row[name][nothing] = 0
        seats = final.nonzero()[0]
        if len(seats):
            returns, lengths = self._return[seats], self._length[seats]
            row["info_mask"][seats], row["info.return"][seats], row["info.length"][seats] = True, returns, lengths
            for name in self._info_names:
                row[name][seats] = tick.info[name.removeprefix("info.")][seats]
            self.episodes += zip(returns.tolist(), lengths.tolist(), self._stages[seats].tolist(), strict=True)

    def ask(self) -> None:
        """Ask for the actions of the seats that are going to act."""
        self.asked = True
        row = self._row
        if self.acts == self._seats:
            self._asking = None
            observation, state = ({name: row[name] for name in names} for names in (self._observation_names, self._state_names))
        else:
            self._asking = self._acts.nonzero()[0]
            observation, state = (
                {name: self._gather(name, row[name], self._asking, 0) for name in names} for names in (self._observation_names, self._state_names)
            )
        self._request = self._client.post_request(observation, state, self._deterministic)

    def get_action(self) -> Arrays:
        if self._request is not None:
            answer = self._client.consume_result(self._request)
            self._request = None
            count, seats = self.acts, slice(None) if self._asking is None else self._asking
            for name in self._answer_names:
                self._answers[name][seats] = answer.fields[name][:count]
            for name, action in self._actions.items():
                action[seats] = answer.fields[name][:count]  # once more: whoever is given it may change it
            for name, state in self._state.items():
                state[seats] = answer.fields[name][:count]
            self._answers["version"][seats], self._answers["policy"][seats] = answer.version, answer.policy
        return self._actions


class StepwiseTarget(EnvTarget):
    """A target of one `StepwiseAgent`. `credits`: what its steps need; None: they need none."""

    _credits: Credits | None = None

    def spend(self, credits: Credits | None) -> None:
        """Say whose credits its steps need."""
        self._credits = credits

    @property
    def _agent(self) -> StepwiseAgent:
        (agent,) = self._agents
        assert isinstance(agent, StepwiseAgent)
        return agent

    @property
    def place(self) -> tuple[bool, bool, int]:
        """How far it is: changes with everything that it does."""
        agent = self._agent
        return self._stepping, agent.asked, agent.sent

    @property
    def asleep(self) -> bool:
        """It waits for its environment, which rings."""
        return self._stepping and not self._environment.ready()

    @property
    def thirsty(self) -> int:
        """Credits that it waits for; 0 when it waits for none."""
        agent = self._agent
        return 0 if self._stepping or agent.asked else agent.acts

    def _agents_ready(self) -> bool:
        agent = self._agent
        if not agent.is_ready():
            return False
        if agent.asked or not agent.acts:
            return True
        if not self._may_step(agent):
            return False
        agent.ask()
        return agent.is_ready()

    def _may_step(self, agent: StepwiseAgent) -> bool:
        return self._credits is None or self._credits.take(agent.acts)


class SlotRing(EnvRing):
    """Targets in the order in which something happens to them: their environments answer, or there are credits for them. So a turn costs what it
    does, however many wait."""

    targets: list[StepwiseTarget]  # type: ignore[assignment]

    def __init__(self, targets: list[StepwiseTarget], credits: Credits | None) -> None:
        super().__init__(targets)
        self._credits = credits
        self._rung: deque[int] = deque()  # by environments, in their threads
        self._due = dict.fromkeys(range(len(targets)))  # in order, each once
        self._thirsty: dict[int, None] = {}  # likewise: those that wait for credits are served as they came
        self._looked_at = monotonic()

    def waker(self, number: int, ring: Callable[[], None]) -> Callable[[], None]:
        """Return what the environment of target `number` calls, from any thread, when it is ready; `ring` wakes the actor."""

        def wake() -> None:
            self._rung.append(number)
            ring()

        return wake

    def __iter__(self) -> Iterator[StepwiseTarget]:
        """Yield each target that may have something to do, as long as it has."""
        targets, rung, thirsty = self.targets, self._rung, self._thirsty
        due, self._due = self._due, {}
        while rung:
            due[rung.popleft()] = None
        if (now := monotonic()) - self._looked_at > LOOK_AGAIN:  # at deadlines, say, nobody rings
            self._looked_at = now
            due.update(dict.fromkeys(range(len(targets))))
        left = self._credits.left() if self._credits is not None and thirsty else 0
        for number in list(thirsty) if left else ():
            if (left := left - targets[number].thirsty) < 0:
                break
            del thirsty[number]
            due[number] = None
        for number in due:
            target = targets[number]
            while True:
                before = target.place
                yield target
                if target.place == before:
                    break
            if target.thirsty:
                thirsty[number] = None
            elif not target.asleep:
                self._due[number] = None  # it waits for an answer, or for room: whoever gives that rings the actor alone


class ExactTarget(StepwiseTarget):
    """A target of an exact run: it is served in its turn only, and acts (or resets) once all that the rows before owe has been trained."""

    turn = False

    def step(self) -> None:
        super().step()
        self.turn = False

    def ready_to_observe(self) -> bool:
        return self.turn and super().ready_to_observe()

    def _agents_ready(self) -> bool:
        assert self._credits is not None
        return self._credits.received() == self._ring.sent() and super()._agents_ready()

    def _may_step(self, agent: StepwiseAgent) -> bool:
        """All samples are dealt with. Where there is no credit now, none comes (the run is about to end): what is in flight still has its turns."""
        granted = super()._may_step(agent)
        self.turn = granted or not self._ring.in_flight()
        return granted

    def join(self, ring: "ExactRing") -> None:
        """Say in which ring its turns come."""
        self._ring = ring


class ExactRing(EnvRing):
    """Targets strictly in turn: each turn ends when the target's next step (or reset) was sent, however long it takes, and begins with the answer."""

    targets: list[ExactTarget]  # type: ignore[assignment]

    def __init__(self, targets: list[ExactTarget]) -> None:
        super().__init__(targets)
        for target in targets:
            target.join(self)
        targets[0].turn = True

    def __iter__(self) -> Iterator[ExactTarget]:
        target = self.targets[self._at]
        yield target
        if not target.turn:
            self._at = (self._at + 1) % len(self.targets)
            self.targets[self._at].turn = True

    def in_flight(self) -> bool:
        """True when a target waits for its environment."""
        return any(target._stepping for target in self.targets)

    def sent(self) -> int:
        """Return how many samples all targets have sent."""
        return sum(target._agent.sent for target in self.targets)


def credits_of(context: Context, spec: AgentSpec) -> Credits | None:
    """Return the credits of this actor for the steps of `spec`, None where nobody limits them."""
    for stream in spec.streams:
        for edge in context.edges(f"credits/{stream}/"):
            return Credits(context.endpoints.reader(edge.name))
    return None


def exact(context: Context, spec: AgentSpec) -> bool:
    """True when the steps of `spec` are granted ticket by ticket."""
    return any(port.lockstep for stream in spec.streams for port in context.experiment.granting(stream))
