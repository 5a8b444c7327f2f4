"""Simulators in three languages: ten agents on their way to targets, and agents that come
and go in a corridor.

tidemill train examples/simulator.py:reach             # the world in Python
tidemill train examples/simulator.py:reach_c           # in C, compiled here; needs cc
tidemill train examples/simulator.py:reach_csharp      # in C#; needs mcs and mono
# and so on: corridor_c, corridor_csharp
tidemill train examples/simulator.py:corridor

The worlds in C and C# are copied into the folder simulators/ (what
`tidemill simulator sources simulators` does) and compiled there, once. Each run ends at
0.95 of what the world's own heuristic reaches, which is printed by the world when it is
run without a trainer, say simulators/bin/reach.
"""

import subprocess
from pathlib import Path

from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Limits, SimulatorEnvironment, Trainer
from tidemill.bridge import worlds
from tidemill.bridge.world_side.language_files import copy_sources
from tidemill.core.errors import ConfigError

FOLDER = Path("simulators").absolute()
HEURISTIC = {"reach": 1.999, "corridor": 0.92}


def of(world: str, path: Path, name: str) -> Experiment:
    """Four simulators of ten agents."""
    return Experiment(
        name=name,
        policies={"policy": ActorCritic(normalise_observations=False)},
        workers={
            "actor": Actors(
                environment=SimulatorEnvironment(path=str(path)),
                lanes=4,
                slots=2,
                agents=(AgentSpec(sample_steps=64),),
            ),
            "trainer": Trainer(
                algorithm=PPO(learning_rate=1e-3, minibatch_size=512, epochs=4, clip_apart=False, gamma=0.98)
            ),
        },
        limits=Limits(mean_return=0.95 * HEURISTIC[world], steps=50_000),
    )


def reach() -> Experiment:
    return of("reach", Path(worlds.__path__[0], "reach.py"), "reach")


def corridor() -> Experiment:
    return of("corridor", Path(worlds.__path__[0], "corridor.py"), "corridor")


def reach_c() -> Experiment:
    return of("reach", in_c("reach"), "reach-c")


def corridor_c() -> Experiment:
    return of("corridor", in_c("corridor"), "corridor-c")


def reach_csharp() -> Experiment:
    return of("reach", in_csharp("reach"), "reach-csharp")


def corridor_csharp() -> Experiment:
    return of("corridor", in_csharp("corridor"), "corridor-csharp")


def in_c(world: str) -> Path:
    """Compile a world in C, unless that was done, and return the program."""
    program = FOLDER / "bin" / world
    if not program.exists():
        copy_sources(FOLDER)
        program.parent.mkdir(exist_ok=True)
        compiled(
            "cc",
            "-O2",
            "-std=c99",
            "-pthread",
            str(FOLDER / "native" / f"{world}.c"),
            "-o",
            str(program),
            "-lm",
        )
    return program


def in_csharp(world: str) -> Path:
    """Compile the worlds in C#, unless that was done, and return the program."""
    program = FOLDER / "mono" / world
    if not program.exists():
        copy_sources(FOLDER)
        compiled("sh", str(FOLDER / "csharp" / "Build~" / "build.sh"), str(program.parent))
    return program


def compiled(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError(
            f'there is no "{command[0]}" here to compile with; install a compiler, or train the world in '
            "Python"
        ) from None
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"{' '.join(command)} failed:\n{error.stderr or error.stdout}") from None
