"""The eyes of the conformance kit: what is looked at after every answer of a
simulator.

Whether a core is burnt is told by the time for which a thread ran as a share of that in
which it did not wait for a core, so that a busy machine excuses nobody and blames nobody.
"""

import numpy as np
from numpy.typing import NDArray

from tidemill.bridge.kit.check_points import Findings, SimulatorUnplayable
from tidemill.bridge.kit.trial_trainer import SimulatorPlay
from tidemill.bridge.protocol.image import GroupImage
from tidemill.bridge.protocol.messages import ChannelError
from tidemill.bridge.protocol.side_channels import Channels, Framing
from tidemill.bridge.protocol.specs import BehaviorSpec, Bools, DecisionSteps, Ints, TerminalSteps
from tidemill.bridge.protocol.tables import RESET, STEP
from tidemill.bridge.trainer_side.steps import StepReader, count
from tidemill.core.errors import EnvironmentFault, ImageError


class Watcher:
    """A watcher plays, and looks at all that comes after every answer."""

    def __init__(self, play: SimulatorPlay, found: Findings, framing: Framing) -> None:
        self.play, self.found = play, found
        self.rng = np.random.default_rng(0)
        self.rows: dict[str, tuple[GroupImage, DecisionSteps, TerminalSteps, NDArray[np.intp] | None]] = {}
        self._channels = Channels(framing=framing)
        self._known: dict[str, BehaviorSpec] = {}
        self._asked: dict[str, set[int]] = {}  # agents that asked and have not ended
        self._numbers: set[tuple[int, ...]] = set()
        self._unread = False  # rows came that are not finite
        self.exchanges = 0
        self.settled = False  # after the first reset

    def exchange(self, point: str, command: int = STEP, side_channel: bytes = b"") -> None:
        """Hand over, take the answer and look at it; whatever breaks is blamed on
        `point`."""
        before = {name: set(ids) for name, ids in self._asked.items()}
        with self.found.during(point, self.play):
            data = self.play.exchange(command, side_channel)
        self.look(data, command)
        if command == RESET:
            self.settled = True
            for name, (_, decisions, terminals, _) in self.rows.items():
                self._asked[name] = set(decisions.agent_id.tolist())
                if stale := sorted(before.get(name, set()) & set(terminals.agent_id.tolist())):
                    self.found.bad(
                        "reset",
                        f'group "{name}": the answer to a reset ends the episode of agent {stale[0]}, which '
                        "began before it",
                    )

    def look(self, data: bytes, command: int = STEP) -> None:
        """Look at what came with the answer to a command."""
        self.exchanges += 1
        self._see_channels(data)
        self._see_commands()
        self._see_change()
        self._see_groups()
        numbers = []
        for group in self.play.memory.groups:
            numbers.append(self._see_rows(group, command))
        self._numbers.add(tuple(numbers))
        if len(self._numbers) > 2:  # the first, without any agents, is none
            self.found.good("varying agents", f"{len(self._numbers)} different numbers of agents asked")

    def _see_channels(self, data: bytes) -> None:
        if data:
            try:
                self._channels.incoming(data)
                messages = sum(self._channels.unknown.values())
                self.found.good(
                    "side channel", f"{messages} messages in {len(self._channels.unknown)} channels"
                )
            except ChannelError as error:
                self.found.bad("side channel", f"{len(data)} bytes cannot be read: {error}")

    def _see_commands(self) -> None:
        header = self.play.header()
        names = (
            ["command"]
            if self.play.layout.files == 1
            else [name for name in ("reset", "query") if name in header]
        )
        for name in names:
            if header[name]:
                self.found.bad("commands", f"it handed back with {name} = {header[name]}")
        self.found.good("commands", f"{self.exchanges} answers")

    def _see_change(self) -> None:
        changed = self.play.changed
        if self.play.layout.files == 2 and changed > 1:
            self.found.bad("one change", f"it made {changed} bodies in its turn, exchange {self.exchanges}")
        elif self.play.layout.files == 2 and changed:
            self.found.good("one change", f"a body in exchange {self.exchanges}")

    def _see_groups(self) -> None:
        memory = self.play.memory
        now = {group.name: group.spec for group in memory.groups}
        for name, spec in self._known.items():
            if now.get(name) != spec:
                self.found.bad(
                    "late groups",
                    f'group "{name}" {"was changed" if name in now else "vanished"} when the memory changed',
                )
        if list(now)[: len(self._known)] != list(self._known):
            self.found.bad(
                "late groups", f"the order of groups was {', '.join(self._known)} and is {', '.join(now)}"
            )
        new = [name for name in now if name not in self._known]
        if new and self.settled and self._known:
            self.found.good("late groups", f'"{new[0]}" appeared in exchange {self.exchanges}')
        self._known = now
        if now:
            self.found.good("groups", f"{len(now)}: {', '.join(now)}")
        if memory.groups and memory.generation:
            self.found.good("growth", "it made room for its groups")

    def _see_rows(self, group: GroupImage, command: int) -> int:
        """Look at a group's rows; return how many ask."""
        found, memory, layout, name = self.found, self.play.memory, self.play.layout, group.name
        none = np.empty(0, np.int32)
        self.rows[name] = (
            group,
            DecisionSteps([], none.astype(np.float32), none),
            TerminalSteps([], none.astype(np.float32), none),
            None,
        )
        try:
            decisions, terminals, asks = StepReader(layout, group).read(memory.data)
        except ImageError as error:
            found.bad("agents", str(error))
            raise SimulatorUnplayable from None
        except EnvironmentFault as error:
            found.bad("numbers", str(error))
            self._unread = True
            return 0
        self.rows[name] = group, decisions, terminals, asks
        rows = len(decisions) + len(terminals)
        if rows:
            found.good("agents", f"up to {group.spec.max_agents} in a step")
            found.good("numbers", f"{self.exchanges} answers")
        for what, ids in (("asks", decisions.agent_id), ("ends", terminals.agent_id)):
            if len(np.unique(ids)) < len(ids):
                found.bad("agents", f'group "{name}": agent {_twice(ids)} {what} twice in one exchange')
        asked = self._asked.setdefault(name, set())
        for agent in terminals.agent_id.tolist():
            if agent not in asked and command != RESET:
                found.bad(
                    "varying agents",
                    f'group "{name}": agent {agent} ends, and has never asked for a decision',
                )
        asked -= set(terminals.agent_id.tolist())
        asked |= set(decisions.agent_id.tolist())
        self._see_flags(group, rows)
        self._see_ends(terminals)
        if decisions.forbidden is not None:
            self._see_masks(group, decisions, rows if layout.files == 1 else len(decisions))
        return len(decisions)

    def _see_flags(self, group: GroupImage, rows: int) -> None:
        data, places, layout = self.play.memory.data, group.places, self.play.layout
        if layout.files == 2:
            cut = data[places["interrupted"] : places["interrupted"] + count(data, group, "ended")]
            if any(flag > 1 for flag in cut):
                self.found.bad(
                    "interruptions", f'group "{group.name}": interrupted = {max(cut)} of an agent that ended'
                )
            return
        done, cut = (data[places[name] : places[name] + rows] for name in ("done", "max_step"))
        if any(flag > 1 for flag in done):
            self.found.bad("ends", f'group "{group.name}": done = {max(done)}')
        for row, (over, flag) in enumerate(zip(done, cut, strict=True)):
            if flag > 1 or (flag and not over):
                self.found.bad(
                    "interruptions", f'group "{group.name}", row {row}: max_step = {flag} where done = {over}'
                )

    def _see_ends(self, terminals: TerminalSteps) -> None:
        if (~terminals.interrupted).any():
            self.found.good("ends", f"seen in exchange {self.exchanges}")
        if terminals.interrupted.any():
            self.found.good("interruptions", f"seen in exchange {self.exchanges}")

    def _see_masks(self, group: GroupImage, decisions: DecisionSteps, rows: int) -> None:
        masks: list[Bools] = decisions.action_mask or []
        for branch, forbidden in enumerate(masks):
            stuck = forbidden.all(axis=1)
            if stuck.any():
                agent = decisions.agent_id[int(stuck.argmax())]
                self.found.bad(
                    "masks",
                    f'group "{group.name}": all actions of branch {branch} are forbidden to agent {agent}',
                )
        place = group.places["masks"]
        flags = self.play.memory.data[place : place + rows * group.symbols["B"]]
        if any(flag > 1 for flag in flags):
            self.found.bad("masks", f'group "{group.name}": a mask is {max(flags)}')
        if any(forbidden.any() for forbidden in masks):
            self.found.good("masks", f'group "{group.name}" forbids actions now and then')

    def act(self) -> None:
        """Set allowed actions at random for all who ask."""
        for group, decisions, terminals, asks in self.rows.values():
            self.play.act(group, decisions, asks, len(decisions) + len(terminals), self.rng)

    @property
    def asking(self) -> bool:
        """Whether any agent asks for a decision."""
        return self._unread or any(len(decisions) for _, decisions, _, _ in self.rows.values())


def _twice(ids: Ints) -> int:
    unique, numbers = np.unique(ids, return_counts=True)
    return int(unique[numbers.argmax()])
