"""The example worlds are the same in every language: same rules, same random numbers,
same rows, to the last bit."""

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.bridge.conftest import Build
from tests.bridge.raw_trainer import CLOSE, RESET, STEP, Group, RawTrainer

from tidemill.bridge.protocol.side_channels import EnvironmentParameters

WORLDS = ["reach", "corridor"]


@pytest.fixture
def commands(native: Build, csharp: Path, world: str) -> dict[str, list[str | Path]]:
    return {
        "C": [native(world)],
        "Python": [sys.executable, "-m", f"tidemill.bridge.worlds.{world}"],
        "C#": [csharp / world],
    }


@pytest.mark.parametrize("world", WORLDS)
def test_heuristics_reach_the_same_in_every_language(
    world: str, commands: dict[str, list[str | Path]]
) -> None:
    said = {
        language: subprocess.run(
            [*command, "--episodes", "300", "--seed", "11"], capture_output=True, text=True, check=True
        ).stdout
        for language, command in commands.items()
    }
    assert said["C"].startswith("mean return ")
    assert set(said.values()) == {said["C"]}, said


def parameter(key: str, value: float) -> bytes:
    """A message on the channel of environment parameters."""
    content = struct.pack("<i", len(key)) + key.encode() + struct.pack("<if", 0, value)
    return EnvironmentParameters().uuid.bytes_le + struct.pack("<i", len(content)) + content


def rows(group: Group) -> list[tuple[object, ...]]:
    """All that a step says, agents in order."""
    found = []
    for kind, part in (("decision", group.decisions), ("end", group.ends)):
        for i in np.argsort(part.ids):
            cut = part.interrupted[i] if kind == "end" else False
            found.append(
                (
                    kind,
                    part.ids[i],
                    cut,
                    part.rewards[i],
                    part.obs[0][i].tolist(),
                    part.masks[i].tolist() if kind == "decision" else None,
                )
            )
    return found


def played(
    command: list[str | Path], world: str, layout: str, folder: Path
) -> list[list[tuple[object, ...]]]:
    """The steps of a world under actions that depend on the agent and the step alone;
    with resets, another seed and another speed."""
    folder.mkdir()
    trainer = RawTrainer(folder, layout, known=False)  # one that wakes nobody: simulators nap
    found = []
    try:
        trainer.start(*command, "--seed", "5")
        for step in range(260):
            if step == 120:
                trainer.side = parameter("seed", 1234.0) + parameter("speed", 0.3)
            group = trainer.step(RESET if step in (80, 120) else STEP)[world]
            found.append(rows(group))
            rngs = [np.random.default_rng((step, agent)) for agent in group.decisions.ids]
            if world == "reach":
                trainer.act(group, continuous=[rng.normal(0.3, 1.0, 2) for rng in rngs])
            else:
                trainer.act(
                    group, discrete=[[rng.choice(3, p=(0.1, 0.3, 0.6)), rng.random() < 0.3] for rng in rngs]
                )
        trainer.give(CLOSE)
        assert trainer.end()[0] == 0
    finally:
        trainer.close()
    return found


@pytest.mark.parametrize("layout", ["0", "0.3.2"])
@pytest.mark.parametrize("world", WORLDS)
def test_worlds_are_the_same_to_the_last_bit_in_every_language(
    world: str, layout: str, commands: dict[str, list[str | Path]], tmp_path: Path
) -> None:
    steps = {
        language: played(command, world, layout, tmp_path / language)
        for language, command in commands.items()
    }
    kinds = {(row[0], row[2]) for step in steps["C"] for row in step}
    assert kinds == {("decision", False), ("end", False), ("end", True)}  # nothing of the rules is left out
    for language in ("Python", "C#"):
        for number, (ours, theirs) in enumerate(zip(steps["C"], steps[language], strict=True)):
            assert ours == theirs, f"step {number}: C and {language}"
