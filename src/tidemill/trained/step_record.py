"""The record of a step that an environment failed in, as `workers.step_faults` writes it,
read and checked: nothing in it is trusted."""

from dataclasses import dataclass
from pathlib import Path
from time import localtime, strftime

import numpy as np

from tidemill.api.plain_spaces import read_spaces
from tidemill.api.spaces import Spaces, leaves
from tidemill.core.cut import Part, unflatten
from tidemill.core.errors import CheckpointError, SchemaError
from tidemill.core.schema import Array
from tidemill.envs.space_values import misfit
from tidemill.envs.tick_check import LARGEST
from tidemill.store.checkpoint import read_checkpoint

SEATS = 8  # of which the row is shown, where it is not known whose step it was
_FLAGS = ("terminated", "truncated")
_COLUMNS = ("finished", "steps", "stage", "version", "policy")


@dataclass(frozen=True)
class RowLine:
    """A row line has what an agent saw, or chose, by the name of the array; its numbers
    in short."""

    agent: str
    name: str
    values: str


@dataclass(frozen=True)
class RecordedSpec:
    """One agent spec of a record: its policy, the names of its agents in a lane, and
    their spaces as the environment has them."""

    policy: str
    names: list[str]
    spaces: Spaces


class StepRecord:
    """A record of a step, read and checked. Raises `CheckpointError`. Texts have nothing
    in them that a terminal obeys.

    row: SPEC/NAME → [seats, ...], {} of a reset
    told: of each agent by its name, arrays and texts by theirs
    episode: as `Environment.episode` returned it; None where it is not kept, for which
        `why` says the reason
    others: as `workers.step_faults` writes them
    """

    def __init__(self, path: Path) -> None:
        arrays, facts = read_checkpoint(path)
        self.path, self.worker = path, path.parent.name
        try:
            self.row, told, self.episode_arrays = (arrays[part] for part in ("row", "told", "episode"))
            self.specs = [
                RecordedSpec(shown(each["policy"]), [*map(shown, each["names"])], read_spaces(each["spaces"]))
                for each in facts["agents"]
            ]
            self.told: dict[str, dict[str, Array | str]] = {}
            for number, (agent, texts) in enumerate(facts["told"].items()):
                start = f"{number}/"
                own = {name.removeprefix(start): told[name] for name in told if name.startswith(start)}
                said = {shown(name): shown(text) for name, text in texts.items()}
                self.told[shown(agent)] = {**said, **own}
            self.cause, self.traceback = shown(facts["cause"]), shown(facts["traceback"])
            self.why = shown(facts["why"])
            self.lane = None if facts["lane"] is None else int(facts["lane"])
            self.target, self.life, self.stage = (int(facts[name]) for name in ("target", "life", "stage"))
            self.when = strftime("%Y-%m-%d %H:%M:%S", localtime(float(facts["time"])))
            self.passed_over = int(facts["passed_over"])
            self.resets, self.hangs = bool(facts["resets"]), bool(facts["hangs"])
            self.episode: Part | None = None
            if facts["episode"] is not None:
                self.episode = unflatten(self.episode_arrays, facts["episode"])
            for spec, each in enumerate(self.specs if self.row else ()):
                seats = len(self.of(spec, "finished"))
                columns = {name: self.of(spec, name) for name in _COLUMNS}
                for name, column in columns.items():
                    if column.shape != (seats,) or column.dtype.kind not in (
                        "b" if name == "finished" else "iu"
                    ):
                        raise ValueError(f"{name} of {seats} seats")
                start = f"{spec}/"
                lengths = {len(self.row[name]) for name in self.row if name.startswith(start)}
                if not each.names or lengths != {seats} or seats % len(each.names):
                    raise ValueError(f"rows of {seats} seats")
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            OSError,
            OverflowError,
            SchemaError,
        ) as broken:
            raise CheckpointError(
                f"{path} is no record of a step that an environment failed in: {broken!r}"
            ) from None

    def of(self, spec: int, name: str) -> Array:
        """Return an array of a spec's seats."""
        return self.row[f"{spec}/{name}"]


def shown(value: object) -> str:
    """Return a text of a record as a terminal may have it."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in str(value))


def place_of(record: StepRecord) -> str:
    """Return in words in which lane that was, when, and by which policy."""
    lane = "some lane" if record.lane is None else f"lane {record.lane}"
    text = (
        f"{lane} of target {record.target} of {record.worker}, in its life {record.life + 1}, {record.when}"
    )
    if record.passed_over:
        text += f" (before it {record.passed_over:,} faults were not recorded)"
    if record.resets:
        return f"{text}: in a reset"
    for spec, each in enumerate(record.specs if record.row else ()):
        playing = np.flatnonzero(~record.of(spec, "finished").astype(np.bool_))
        if len(playing):
            steps, version = (record.of(spec, name)[playing] for name in ("steps", "version"))
            acted = "" if version[0] < 0 else f', by version {version[0]} of policy "{each.policy}"'
            return f"{text}: after {steps.max():,} steps of its episode{acted}"
    return text


def lines_of(record: StepRecord) -> list[RowLine]:
    """Return what the agents of the lane saw and chose, of all lanes those that come
    first."""
    lines = []
    for spec, each in enumerate(record.specs if record.row else ()):
        start, width = f"{spec}/", len(each.names)
        names = [name.removeprefix(start) for name in record.row if name.startswith(start)]
        seen = [name for name in names if name.partition(".")[0] in ("obs", "action")]
        playing = np.flatnonzero(~record.of(spec, "finished").astype(np.bool_))
        for seat in playing[:SEATS].tolist():
            agent = each.names[seat % width]
            if record.lane is None:
                agent += f" in lane {seat // width}"
            for name in sorted(seen, reverse=True):
                lines.append(RowLine(agent, shown(name), _short(record.of(spec, name)[seat])))
    return lines


def _short(values: Array) -> str:
    text = np.array2string(np.asarray(values), threshold=12, edgeitems=4, precision=5).replace("\n", "")
    return text if len(text) < 160 else text[:160] + "…"


def first_wrong(record: StepRecord) -> str:
    """Return in words which the first number is that an environment cannot tell."""
    for agent, told in record.told.items():
        spaces = next((each.spaces for each in record.specs if agent in each.names), None)
        if "answer" in told:
            return f"agent {agent} got {told['answer']}"
        parts = {} if spaces is None else leaves(spaces.observation, "obs")
        seen = any(name.partition(".")[0] == "obs" for name in told)
        for name, leaf in parts.items() if seen else ():
            value = told.get(name)
            if value is None and name in ("obs.action_mask", "obs.global_state"):
                continue
            if value is None or isinstance(value, str):
                return f"agent {agent}: {name} is {value or 'missing'}"
            wrong = "" if record.lane is None else misfit(leaf, value, "the observation space")
            if wrong:
                return f"agent {agent}: {name}{wrong}"
            if place := _not_finite(value):
                return f"agent {agent}: {name}{place}"
        for name, value in told.items():
            if name in parts or name.partition(".")[0] == "info":
                continue
            if isinstance(value, str):
                if name in (*_FLAGS, "reward"):
                    return f"agent {agent}: {name} is {value}"
                continue
            if place := _not_finite(value):
                return f"agent {agent}: {name}{place}"
            flag = name in _FLAGS and value.dtype.kind != "b" and not np.isin(value, (0, 1)).all()
            if flag or (name == "reward" and value.size and np.abs(value.astype(np.float64)).max() > LARGEST):
                return f"agent {agent}: {name} is {_short(value)}"
    return ""


def _not_finite(value: Array) -> str:
    """Return the place of the first number that is not finite, and what it is."""
    wrong = np.argwhere(~np.isfinite(value))
    if not len(wrong):
        return ""
    index = tuple(wrong[0].tolist())
    return f"{list(index) if index else ''} is {value[index]}"
