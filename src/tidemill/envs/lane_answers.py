"""What Gymnasium environments that step together answer, made into a tick by a few calls
for all of them, and what does not fit their spaces explained."""

from collections.abc import Sequence
from typing import Any

from tidemill.api.environment import Tick
from tidemill.api.spaces import Space, Tuple
from tidemill.core.errors import EnvironmentFault, message_of
from tidemill.core.schema import Arrays
from tidemill.envs.space_values import LeafReader, brief, is_sequence, readers_of
from tidemill.envs.tick_check import FLAGS, NUMBERS, TickCheck, check_flag, check_number, is_flag, is_number

Result = tuple[Any, Any, Any, Any, Any]
"""What a Gymnasium step returns."""
_PARTS = ("obs", "reward", "terminated", "truncated", "info")


class LaneAnswers:
    """The answers of lanes that observe `space`. `name` is what messages call them."""

    def __init__(self, space: Space, name: str) -> None:
        self._space, self._name = space, name
        self._readers = readers_of(space, LeafReader)
        self._check = TickCheck(space, name, ("agent",))

    def write(self, results: Sequence[Result], tick: Tick) -> Sequence[Any]:
        """Write what the lanes' steps returned as it is, and return their observations.
        Raises whatever comes of what does not fit: `explained` says what."""
        observations, rewards, terminated, truncated, _ = zip(*results, strict=True)
        for reader in self._readers:
            reader.write(observations, tick.observation[reader.name])
        if not (NUMBERS.issuperset(map(type, rewards)) or all(map(is_number, rewards))):
            raise TypeError("rewards")
        tick.reward[:] = rewards
        ends = terminated + truncated
        if not (FLAGS.issuperset(map(type, ends)) or all(map(is_flag, ends))):
            raise TypeError("flags")
        if ends.count(False) == len(ends):  # a tenth of what it takes to write them
            tick.done.fill(False)
            tick.truncated.fill(False)
        else:
            tick.done[:] = terminated
            tick.truncated[:] = truncated
        self._check(tick)
        return observations

    def explained(self, error: Exception, results: Sequence[Any], before: Sequence[Any]) -> EnvironmentFault:
        """Find which lane's answer does not fit, by which `write` raised `error`, and
        return a fault that says what it should have been. `before`: what each lane showed
        before."""
        for lane, result in enumerate(results):
            try:
                self._look(result, self._where(lane))
            except EnvironmentFault as fault:
                fault.__cause__ = error
                return fault.in_lane(lane).telling(_told(result, before[lane]))
        if isinstance(error, EnvironmentFault):
            at = error.lane
            return error if at is None else error.telling(_told(results[at], before[at]))
        unknown = EnvironmentFault(
            f"{self._name}: what it returned does not fit its spaces: {message_of(error)}"
        )
        unknown.__cause__ = error
        return unknown

    def begun(self, lane: int, answer: Any) -> Any:
        """Return the observation of what a lane's reset returned. Raises
        `EnvironmentFault` for what none may return."""
        where = self._where(lane)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise EnvironmentFault(f"{where}: reset returned {brief(answer)} instead of (observation, info)")
        for reader in self._readers:
            reader.check(answer[0], where)
        return answer[0]

    def rows(self, observation: Any) -> Arrays:
        """Return an observation as its rows have it."""
        return {reader.name: reader.row(observation) for reader in self._readers}

    def _look(self, result: Any, where: str) -> None:
        """Raise `EnvironmentFault` for what no step may return."""
        if not isinstance(result, tuple) or len(result) != len(_PARTS):
            raise EnvironmentFault(
                f"{where}: step returned {brief(result)} instead of (observation, reward, terminated, "
                "truncated, info)"
            )
        observation, reward, terminated, truncated, _ = result
        for reader in self._readers:
            reader.check(observation, where)
        if is_sequence(reward) and len(reward) > 1:
            raise EnvironmentFault(f"{where}: reward is {brief(reward)}, {self._several(len(reward))}")
        check_number(reward, "reward of agent agent", where)
        check_flag(terminated, "terminated of agent agent", where)
        check_flag(truncated, "truncated of agent agent", where)

    def _several(self, count: int) -> str:
        """Return what to say of so many rewards."""
        if isinstance(self._space, Tuple) and len(self._space.spaces) == count:
            return (
                "one for each part of the observation, as where several agents play: they are trained by the "
                f'name "pettingzoo:{self._name}"'
            )
        return (
            "and must be one number: a wrapper weighs several objectives, as mo-gymnasium's does, --wrap "
            "mo_gymnasium.wrappers:LinearReward"
        )

    def _where(self, lane: int) -> str:
        return f"{self._name}: lane {lane}"


def _told(result: Any, before: Any) -> dict[str, dict[str, Any]]:
    """Return what a lane returned, for its fault."""
    if not isinstance(result, tuple) or len(result) != len(_PARTS):
        return {"agent": {"before": before, "answer": result}}
    return {"agent": {"before": before, **dict(zip(_PARTS, result, strict=True))}}
