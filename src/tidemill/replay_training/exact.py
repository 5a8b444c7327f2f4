"""Exact runs: slots are served strictly in turn, so that their results depend on nothing
but the configuration.

A slot's turn begins when the answer to its step is there: its row is sent, all that this
owes is trained, and by the version after that its next action is chosen (or it is to be
reset); then it is the next slot's turn. The step is sent as soon as there is a credit for
it, which is at once but for the end of a phase. So neither latencies nor phases,
checkpoints or resumes change what is chosen by which version, nor the order of rows.

Whatever is drawn for acting is drawn by (slot, episode, step), and each episode begins
with a seed of its own, by (slot, episode). So it is enough to know an open episode's
number and actions to play it again after a resume. Each row tells besides what was chosen
last in the ring (`SENT`): a checkpoint needs that too, and the step is in flight.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self, cast

import numpy as np

from tidemill.api.environment import Environment, NotReady, Tick
from tidemill.api.stream import SampleProducer
from tidemill.api.worker import Context
from tidemill.core.clock import Clock, awake
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Array, Arrays, Field, Schema
from tidemill.core.seeding import derive_seed
from tidemill.envs.episode_replay import LONGEST
from tidemill.replay_training.granted_order import GrantedOrder, credits_of
from tidemill.replay_training.open_episodes import SENT, OpenEpisode, newest_slots
from tidemill.replay_training.slot_fault_notices import SlotFaults
from tidemill.replay_training.transitions import TransitionAgent
from tidemill.streams.credits import Credits
from tidemill.streams.inline import InlineInferenceClient
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.actor_context import ActorContext
from tidemill.workers.agent_spec import INLINE
from tidemill.workers.info_numbers import InfoReader
from tidemill.workers.ring import EnvRing, EnvTarget
from tidemill.workers.sample_writers.base import Seats


def chosen_fields(row: Schema, sample: Schema) -> dict[str, Field]:
    """Return the fields of `sample`, with those that tell what was chosen last: an
    answer, the version that gave it, and the state after it."""
    return {
        **sample,
        **{SENT + name: field for name, field in row.items() if name.partition(".")[0] not in _OBSERVED},
    }


_OBSERVED = ("obs", "on_reset", "done", "truncated", "reward", "voided", "info", "info_mask")


class ExactAgent(TransitionAgent):
    """The seat of one slot. `seed`: the root of all that is drawn for it."""

    client: InlineInferenceClient

    def __init__(
        self,
        schema: Schema,
        deterministic: bool,
        client: InlineInferenceClient,
        samples: SampleProducer,
        seed: int,
    ) -> None:
        super().__init__(schema, 1, deterministic, client, samples)
        self._seed = seed
        self.episode = -1
        """Number of the newest episode; -1 before the first one."""
        self.chosen: Arrays = {**self._answers, **self._state}
        """What was chosen last, and the state after it."""
        self.last: Arrays | None = None
        """What was chosen last in the ring; None: nothing, its slot is reset."""

    def begin(self) -> int:
        """Begin the next episode. Return the seed of its reset."""
        self.episode += 1
        return derive_seed(self._seed, "reset", self.episode)

    def ask(self, seats: Seats | None = None) -> int:
        self.client.reseed(derive_seed(self._seed, "act", self.episode, int(self._length[0])))
        return super().ask(seats)

    def observe(self, tick: Tick, came: Seats | None = None) -> None:
        row, last = self._row, self.last
        for name in self.chosen:
            row[SENT + name][:] = last[name] if last is not None else -1 if name == "version" else 0
        tick.restarted.fill(False)  # it is reset in its next turn, by the seed of that episode
        super().observe(tick, came)

    def go_on(self, episode: OpenEpisode, reward: Array) -> None:
        """Be where this open episode is, after it was played again; `reward` is the sum
        of what it brought."""
        self.finished[:] = False
        self._acts[:], self.acts = True, 1
        self._length[:], self._return[:], self._stages[:] = episode.steps, reward, self.stage
        for name, array in {**self._newest, **self._state}.items():
            array[:] = episode.seen[name]
        if episode.chosen is not None:
            self.asked = True
            for name, array in self.chosen.items():
                array[:] = episode.chosen[name]
            for name, array in self._actions.items():
                array[:] = episode.chosen[name]


class ExactTarget(EnvTarget):
    """A slot's environment. `credits`: what its steps need, `tell` takes a text for the
    user."""

    def __init__(
        self,
        environment: Environment,
        agent: ExactAgent,
        tick: Tick,
        clock: Clock,
        info_reader: InfoReader,
        number: int,
        credits: Credits,
        tell: Callable[[str], None],
        ticked: Callable[[float, bool], None],
    ) -> None:
        super().__init__(environment, [agent], [tick], clock, info_reader, number, ticked=ticked)
        self.agent, self._credits, self._tell = agent, credits, tell
        self._again: _Again | None = None
        self.turn = False
        self.decided = True
        """What it does next is known: an action was chosen, or it is to be reset."""

    def join(self, ring: "ExactRing") -> None:
        """Say in which ring its turns come."""
        self._ring = ring

    def waits(self) -> bool:
        """True when it is to be sent, and was not yet: for want of a credit, if it was
        tried."""
        return self.decided and not self._stepping

    def step(self) -> None:
        if self._reset[0]:
            self._environment.seed(self.agent.begin())
            self.agent.begun_in[:] = self._stage
        super().step()

    def ready_to_observe(self) -> bool:
        return self.turn and super().ready_to_observe()

    def observe(self) -> bool:
        self.agent.last = self._ring.last
        if not super().observe():
            return False
        self._ring.rows += 1
        self.decided = False
        return True

    def _may_step(self) -> bool:
        agent = self.agent
        if not self.decided:
            if not self.turn or self._credits.received() != self._ring.rows:
                return False
            if agent.acts:
                if not agent.asked:
                    agent.ask()
                if not agent.is_ready():
                    return False
                agent.get_action()
            self._ring.last = agent.chosen if agent.acts else None
            self.decided, self.turn = True, False
        return not agent.acts or self._ring.may_step()

    # ---- after a resume ----------------------------------------------------------------

    def resume(self, episode: OpenEpisode) -> None:
        """Go on from `episode`, once it was played again (see `play_again`); from the
        next one, if it was over."""
        self.agent.episode = episode.number
        if episode.open and not episode.replayable:
            self._tell(
                f"{self._cut_text(episode)}: it had more than {LONGEST:,} steps, and so many are not played "
                "again"
            )
        elif episode.open:
            self.agent.episode -= 1
            self._environment.seed(self.agent.begin())
            self._again = _Again(self._environment, episode, self._ticks[0], self.agent.get_action())

    def play_again(self) -> bool:
        """Go on playing; True when that is over."""
        if self._again is None or not self._again.go_on():
            return self._again is None
        again, self._again = self._again, None
        episode = again.episode
        if again.difference:
            self._tell(
                f"{self._cut_text(episode)}: played again with the same seed and actions after the resume, "
                f"it had {again.difference}. So this environment is not deterministic, and the resumed run "
                "is not what it would have been (tidemill check-env says more)"
            )
            return True
        self.agent.go_on(episode, again.total)
        self._reset[:] = False
        self.decided = episode.chosen is not None
        return True

    def _cut_text(self, episode: OpenEpisode) -> str:
        return (
            f"slot {self.number}: its open episode of {episode.steps:,} steps was cut after its last stored "
            "one"
        )


class _Again:
    """Plays an open episode again. `actions` are any, for the reset. `difference`: what
    was another than before, "" as long as nothing was."""

    def __init__(self, environment: Environment, episode: OpenEpisode, tick: Tick, actions: Arrays) -> None:
        self.episode, self.difference = episode, ""
        self.total = np.zeros(1, np.float32)
        self._environment, self._tick = environment, tick
        self._at = 0
        environment.send([actions], np.ones(1, np.bool_))

    def go_on(self) -> bool:
        """Play as long as the environment is ready. True when the episode is where it
        was, or something differs."""
        episode, tick = self.episode, self._tick
        while self._environment.ready():
            try:
                self._environment.recv([tick])
            except NotReady:
                return False
            if tick.voided.any():
                self.difference = f"a fault in step {self._at}"
            elif (tick.done | tick.truncated).any():
                self.difference = f"its end in step {self._at}"
            elif self._at and tick.reward.tobytes() != episode.rewards[self._at - 1].tobytes():
                self.difference = (
                    f"a reward of {tick.reward[0]} in step {self._at} instead of "
                    f"{episode.rewards[self._at - 1]}"
                )
            elif self._at == episode.steps:
                other = [
                    name
                    for name, array in tick.observation.items()
                    if array.tobytes() != episode.seen[name].tobytes()
                ]
                self.difference = (
                    f"another observation ({', '.join(other)}) after step {self._at}" if other else ""
                )
            if self._at:
                self.total += tick.reward
            if self.difference or self._at == episode.steps:
                return True
            self._at += 1
            self._environment.send(
                [{name: array[self._at - 1 : self._at] for name, array in episode.actions.items()}],
                np.zeros(1, np.bool_),
            )
        return False


def _build_target(parts: ActorContext, number: int, credits: Credits) -> ExactTarget:
    context, environment, (spec,) = parts.context, parts.environments[number], parts.config.agents
    environment.bind(parts.groups)
    environment.on_ready(context.endpoints.bell.ring)
    terms, client = parts.terms(0, 1, number), parts.client(spec, number)
    fields = chosen_fields(terms.row, terms.schema)
    terms.offer(fields)
    client = cast("InlineInferenceClient", client)  # `check` has seen to that
    client.reseed(0)  # so that a policy which cannot be is refused now
    # the same after a resume
    seed = derive_seed(context.experiment.seed, context.name, "slot", number)
    agent = ExactAgent(terms.row, spec.deterministic, client, terms.samples, seed)
    tick = Tick.allocate(parts.spaces[0].observation, 1, environment.info, False)
    return ExactTarget(
        environment,
        agent,
        tick,
        parts.clock,
        parts.info_reader,
        number,
        credits,
        parts.tell,
        parts.ticked,
    )


class ExactRing(GrantedOrder, EnvRing):
    """The order of service of exact runs: targets strictly in turn. See the module's
    text."""

    targets: list[ExactTarget]  # type: ignore[assignment]

    def __init__(self, targets: list[ExactTarget], parts: ActorContext, credits: Credits) -> None:
        super().__init__(targets, parts)
        self.rows = 0
        """Samples that all targets have sent."""
        self.last: Arrays | None = None
        """What was chosen last; None: nothing, its slot is reset."""
        for target in targets:
            target.join(self)
        self._credits, self._waited = credits, 0.0
        self._finishing = False
        self._again: list[ExactTarget] = []
        self._unsent = deque(targets)  # those that are to be sent, in the order in which that was known
        self._waiting, self._since = False, awake()
        self._begin(0)

    @classmethod
    def check(cls, context: Context, config: ActorConfig, environment: Environment) -> None:
        super().check(context, config, environment)
        if environment.timed:
            raise ConfigError(
                "exact = True needs episodes that depend on nothing but seeds and actions, and "
                "max_episode_seconds cuts them by the clock; leave it out, or take max_episode_steps"
            )
        (spec,) = config.agents
        if config.lanes > 1 or config.count > 1 or spec.inference != INLINE:
            raise ConfigError(
                "exact = True needs one actor whose targets have one lane each and whose policy runs "
                f"inline, not count = {config.count}, lanes = {config.lanes}, inference = "
                f'"{spec.inference}"; set ring to the number of slots (--slots), and count and lanes to 1'
            )

    @classmethod
    def build(cls, parts: ActorContext) -> Self:
        context, (spec,) = parts.context, parts.config.agents
        credits = credits_of(context, spec)
        assert credits is not None  # steps that nobody grants are not granted in turn
        targets = [_build_target(parts, number, credits) for number in range(parts.config.ring)]
        made = cls(targets, parts, credits)
        made.faults = SlotFaults(parts.environments, True, parts.tell)
        if (context.resume is not None or context.life) and context.folder is not None:
            (policy,) = {
                port.policy for stream in spec.streams for port in context.experiment.granting(stream)
            }
            if (found := newest_slots(Path(context.folder) / "checkpoints" / policy)) is not None:
                made.resume(*found)
        return made

    @property
    def waited(self) -> float:
        return self._waited

    def resume(self, last: int, episodes: Sequence[OpenEpisode]) -> None:
        """Go on after a row of target `last`, -1 for none, with these open episodes; the
        row counts as sent."""
        self.rows = 1
        for target, episode in zip(self.targets, episodes, strict=False):
            target.resume(episode)
        self._again = list(self.targets)
        self._begin(last)
        if last >= 0:
            # not before all that its row owes is trained, also where its episode was over
            self.targets[self._at].decided = False

    def _passed_over(self, target: ExactTarget) -> bool:
        """True when the target's next step would begin an episode, and none may begin."""
        return self._finishing and target.waits() and bool(target.agent.acts) and target.agent.begins(0)

    def may_step(self) -> bool:
        """Spend a credit. False without one, or where it came with another word on
        whether episodes may begin than was heard: others may go first then."""
        if self._credits.left() < 1 or self._credits.finishing != self._finishing:
            return False
        self._credits.spend(1)
        return True

    def _begin(self, at: int) -> None:
        self.targets[self._at].turn = False
        self._at = at % len(self.targets)
        self.targets[self._at].turn = True

    def _count_wait(self) -> None:
        """Count the time up to now for what was so until now."""
        now, target = awake(), self.targets[self._at]
        self._waited += (now - self._since) * self._waiting
        self._since = now
        self._waiting = target.waits() or (not target.decided and self._credits.received() != self.rows)

    def __iter__(self) -> Iterator[ExactTarget]:
        self._count_wait()
        if self._again:
            self._again = [target for target in self._again if not target.play_again()]
            if self._again:
                return
            order = [*self.targets[self._at + 1 :], *self.targets[: self._at + 1]]
            self._unsent = deque(target for target in order if target.decided)
            self._begin(self._at + self.targets[self._at].decided)
        if self._credits.finishing != self._finishing:
            self._finishing = not self._finishing
            self._unsent = deque(
                sorted(self._unsent, key=lambda target: (target.number - self._at) % len(self.targets))
            )
        for target in list(self._unsent):
            if self._passed_over(target):
                continue
            yield target
            if target.waits():
                break
            self._unsent.remove(target)
        for _ in self.targets:
            target = self.targets[self._at]
            if not self._passed_over(target):
                break
            self._begin(self._at + 1)
        if target.waits():
            return
        yield target
        if not target.turn:
            if target.waits():
                self._unsent.append(target)
            self._begin(self._at + 1)
