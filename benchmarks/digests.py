"""Fixed-seed runs of every mode, a digest of each: what a change of the code must leave
as it is.

    python benchmarks/digests.py > before       # at one commit
    # at another, on the same machine; then compare
    python benchmarks/digests.py > after
    python benchmarks/digests.py sac exact      # some of them
    python benchmarks/digests.py --list

A digest is of all arrays of the newest checkpoints (weights, moments, normalisers, random
states) and of the metrics without times. Runs are inline, in one thread, and short: they
tell whether learning is the same, not whether it is good. Numbers are those of one
machine: other processors and libraries have other last bits.
"""

import argparse
import contextlib
import hashlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import tidemill
from tidemill import (
    DQN,
    GAE,
    PPO,
    QRDQN,
    SAC,
    TD3,
    ActorCritic,
    Actors,
    AgentSpec,
    Atari,
    Buffers,
    DeterministicActor,
    Drawn,
    Evaluation,
    Experiment,
    Fixed,
    Gymnasium,
    GymnasiumVector,
    Impala,
    Limits,
    PettingZoo,
    PolicyWorkers,
    PrioritisedReplay,
    PriorityQueue,
    QNetwork,
    Queue,
    RandomShift,
    Reanalyse,
    RecurrentActorCritic,
    Replay,
    ReplayActors,
    ReplayTrainer,
    Returns,
    Scripted,
    Slots,
    SquashedGaussian,
    Stage,
    Trainer,
)
from tidemill.api.environment import EnvironmentConfig
from tidemill.api.policy import PolicyConfig
from tidemill.api.schedule import LinearSchedule
from tidemill.core.user_code_loading import load_file
from tidemill.store.checkpoint import read_newest
from tidemill.trained.retrain import retrain

EXAMPLES = Path(__file__).parent.parent / "examples"
CARTPOLE, PENDULUM = Gymnasium(id="CartPole-v1"), Gymnasium(id="Pendulum-v1")
SMALL = PPO(epochs=2, minibatch_size=64, clip_apart=False)
MODES: dict[str, Callable[[Path], str]] = {}


def mode(function: Callable[[Path], str]) -> Callable[[Path], str]:
    """Make `function`, which trains in a folder and returns a digest, one of the
    modes."""
    MODES[function.__name__] = function
    return function


def digest_of(folder: Path) -> str:
    """Return the digest of what a finished run left."""
    found = hashlib.sha256()
    for policy in sorted(path for path in (folder / "checkpoints").iterdir() if path.is_dir()):
        _, files, _, _ = read_newest(policy)
        for file, arrays in sorted(files.items()):
            for name, array in sorted(arrays.items()):
                found.update(f"{policy.name}/{file}/{name} {array.dtype} {array.shape}".encode())
                found.update(np.ascontiguousarray(array).tobytes())
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "limiter/started" not in record:  # replay training is told of by time, not by update
            told = {
                name: value
                for name, value in record.items()
                if not name.startswith("time/") and not name.endswith("seconds")
            }
            found.update(json.dumps(told, sort_keys=True).encode())
    return found.hexdigest()[:16]


def trained(experiment: Experiment, folder: Path, **settings: Any) -> str:
    """Train inline in `folder`; return the digest of what is left."""
    return digest_of(
        whole(tidemill.train(experiment, launch="inline", run_dir=folder, quiet=True, **settings))
    )


def whole(result: tidemill.Result) -> Path:
    """Return the folder of a run that reached its limit. Raises `SystemExit` for one that
    a signal ended sooner, by a time limit, say: what it left is no digest."""
    if result.summary.status != "completed":
        raise SystemExit(f"a run was {result.summary.status} before its limit: it has no digest")
    return result.folder


def one_policy(
    spec: AgentSpec,
    environment: EnvironmentConfig = CARTPOLE,
    policy: PolicyConfig | None = None,
    algorithm: Any = SMALL,
    *,
    updates: int = 8,
    actors: Mapping[str, Any] | None = None,
    workers: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> Experiment:
    """Return an experiment of one actor group and one trainer, on-policy."""
    return Experiment(
        name="digest",
        policies={"policy": policy or ActorCritic(normalise_observations=False)},
        workers={
            "actor": Actors(
                environment=environment, agents=(spec,), **{"lanes": 8, "slots": 2, **(actors or {})}
            ),
            **(workers or {}),
            "trainer": Trainer(algorithm=algorithm, database_seconds=None, checkpoint_seconds=1e6, **trainer),
        },
        limits=Limits(updates=updates),
    )


def from_memory(
    algorithm: Any,
    policy: PolicyConfig,
    environment: EnvironmentConfig = CARTPOLE,
    *,
    steps: int = 600,
    actors: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> Experiment:
    """Return an experiment that trains from a replay memory."""
    settings = {"buffer": Replay(capacity=5_000, warm_up=100), "batch_size": 16, "ratio": "1/2", **trainer}
    return Experiment(
        name="digest",
        policies={"policy": policy},
        workers={
            "actor": ReplayActors(environment=environment, **{"lanes": 4, **(actors or {})}),
            "trainer": ReplayTrainer(
                algorithm=algorithm, database_seconds=None, checkpoint_seconds=1e6, **settings
            ),
        },
        limits=Limits(steps=steps),
    )


# ---- on-policy: what a sample is -------------------------------------------------------


@mode
def fixed(folder: Path) -> str:
    return trained(one_policy(AgentSpec(sample_steps=16)), folder)


@mode
def fixed_ring(folder: Path) -> str:
    return trained(one_policy(AgentSpec(sample_steps=16), actors={"lanes": 2, "ring": 3, "count": 2}), folder)


@mode
def fixed_one_lane(folder: Path) -> str:
    return trained(one_policy(AgentSpec(sample_steps=64), actors={"lanes": 1, "ring": 2}), folder)


@mode
def fixed_vector(folder: Path) -> str:
    return trained(one_policy(AgentSpec(sample_steps=16), GymnasiumVector(id="CartPole-v1")), folder)


@mode
def fixed_limit_of_steps(folder: Path) -> str:
    spec = AgentSpec(sample_steps=16, bootstrap=2)
    return trained(one_policy(spec, PENDULUM, actors={"max_episode_steps": 11}), folder)


@mode
def after_done(folder: Path) -> str:
    return trained(one_policy(AgentSpec(mode="after_done", sample_steps=16), batch_size=256), folder)


@mode
def full(folder: Path) -> str:
    return trained(one_policy(AgentSpec(mode="full"), batch_size=256, actors={"slots": 4}), folder)


@mode
def full_padded(folder: Path) -> str:
    spec = AgentSpec(mode="full", padded=True, post=(GAE(),))
    return trained(one_policy(spec, batch_size=256, actors={"slots": 4}), folder)


@mode
def post_returns(folder: Path) -> str:
    spec = AgentSpec(mode="after_done", sample_steps=16, post=(Returns(),))
    return trained(one_policy(spec, batch_size=256), folder)


@mode
def frame_stack(folder: Path) -> str:
    return trained(one_policy(AgentSpec(sample_steps=16, frame_stack=3)), folder)


@mode
def lockstep(folder: Path) -> str:
    return trained(one_policy(AgentSpec(sample_steps=16), max_policy_lag=0, actors={"count": 2}), folder)


@mode
def lockstep_several_agents(folder: Path) -> str:
    game = Scripted(agents=3, kinds=1, deaths=True)
    return trained(one_policy(AgentSpec(sample_steps=12), game, max_policy_lag=0), folder)


@mode
def correct_off_policy(folder: Path) -> str:
    algorithm = PPO(epochs=2, minibatch_size=64, clip_apart=False, correct_off_policy=True)
    return trained(one_policy(AgentSpec(sample_steps=16), algorithm=algorithm, actors={"count": 2}), folder)


@mode
def served(folder: Path) -> str:
    workers = {"server": PolicyWorkers(stream="inference")}
    spec = AgentSpec(inference="inference", sample_steps=16)
    return trained(one_policy(spec, workers=workers, actors={"count": 2}), folder)


@mode
def equal_trainers(folder: Path) -> str:
    made = one_policy(AgentSpec(sample_steps=16), actors={"count": 2}, count=2)
    return trained(made.replace(together=("actor", "trainer")), folder)


# ---- on-policy: policies and algorithms ------------------------------------------------


@mode
def box(folder: Path) -> str:
    algorithm = PPO(epochs=2, minibatch_size=64, clip_apart=False, target_kl=0.02, clip_value=0.2)
    policy = ActorCritic(normalise_observations=True)
    return trained(one_policy(AgentSpec(sample_steps=16), PENDULUM, policy, algorithm), folder)


@mode
def recurrent_gru(folder: Path) -> str:
    algorithm = PPO(epochs=2, minibatch_size=64, clip_apart=False, chunk_steps=8)
    policy = RecurrentActorCritic(cell="gru", normalise_observations=True)
    return trained(one_policy(AgentSpec(sample_steps=16), CARTPOLE, policy, algorithm), folder)


@mode
def recurrent_lstm(folder: Path) -> str:
    algorithm = PPO(epochs=2, minibatch_size=64, clip_apart=False, chunk_steps=8)
    spec = AgentSpec(sample_steps=16, burn_in=4)
    return trained(
        one_policy(
            spec, CARTPOLE, RecurrentActorCritic(cell="lstm", normalise_observations=False), algorithm
        ),
        folder,
    )


@mode
def torch_network(folder: Path) -> str:
    own = load_file(EXAMPLES / "own_network.py", "example")
    return trained(one_policy(AgentSpec(sample_steps=16), CARTPOLE, own.Residual()), folder)


@mode
def own_algorithm(folder: Path) -> str:
    made = load_file(EXAMPLES / "own_algorithm.py", "example").experiment()
    return trained(made.replace(limits=Limits(updates=8)), folder)


@mode
def images(folder: Path) -> str:
    atari = Atari(id="ALE/Pong-v5")
    policy = ActorCritic(convolutions="float32")
    return trained(
        one_policy(AgentSpec(sample_steps=16), atari, policy, updates=3, actors={"lanes": 4}), folder
    )


@mode
def images_bfloat16(folder: Path) -> str:
    atari = Atari(id="ALE/Pong-v5")
    policy = ActorCritic(convolutions="bfloat16")
    return trained(
        one_policy(AgentSpec(sample_steps=16), atari, policy, updates=3, actors={"lanes": 4}), folder
    )


@mode
def images_small(folder: Path) -> str:
    breakout = Gymnasium(id="MinAtar/Breakout-v1")
    return trained(
        one_policy(AgentSpec(sample_steps=16), breakout, ActorCritic(normalise_observations=False)), folder
    )


@mode
def impala(folder: Path) -> str:
    algorithm = Impala(clip_apart=False, minibatch_size=64, learning_rate=LinearSchedule(3e-4, 0))
    return trained(one_policy(AgentSpec(sample_steps=16), algorithm=algorithm, actors={"count": 2}), folder)


@mode
def impala_recurrent(folder: Path) -> str:
    algorithm = Impala(clip_apart=False, minibatch_size=64, chunk_steps=8)
    policy = RecurrentActorCritic(cell="gru", normalise_observations=False)
    return trained(one_policy(AgentSpec(sample_steps=16), CARTPOLE, policy, algorithm), folder)


# ---- on-policy: several agents, buffers, curricula -------------------------------------


@mode
def two_policies(folder: Path) -> str:
    kinds = ("red", "blue")
    specs = tuple(AgentSpec(match=f"{k}_.*", policy=k, samples=k, sample_steps=12) for k in kinds)
    trainers = {
        f"trainer-{k}": Trainer(
            policy=k, samples=k, algorithm=SMALL, database_seconds=None, checkpoint_seconds=1e6
        )
        for k in kinds
    }
    actors = Actors(environment=Scripted(agents=3, kinds=2, deaths=True), lanes=8, slots=2, agents=specs)
    made = Experiment(
        name="digest",
        policies={k: ActorCritic(normalise_observations=False) for k in kinds},
        workers={"actor": actors, **trainers},
        limits=Limits(updates=8),
    )
    return trained(made, folder)


@mode
def centralised(folder: Path) -> str:
    game = PettingZoo(make="mpe2.simple_spread_v3", team_reward=True, state=True)
    policy = ActorCritic(critic_only=("global_state",), normalise_observations=False)
    return trained(one_policy(AgentSpec(sample_steps=16), game, policy, actors={"lanes": 4}), folder)


@mode
def in_turn_masked(folder: Path) -> str:
    game = PettingZoo(make="pettingzoo.classic.connect_four_v3")
    return trained(one_policy(AgentSpec(sample_steps=16), game), folder)


@mode
def self_play(folder: Path) -> str:
    """Against the first version, judged in games of one lane: versions are pushed at the
    end only."""
    own = load_file(EXAMPLES / "self_play.py", "example")
    game = PettingZoo(make="pettingzoo.classic.connect_four_v3")
    chance = AgentSpec(match="player_1", policy="anyhow", parameters=Fixed(), samples=None)
    learns, past = AgentSpec(match="player_0", sample_steps=16), AgentSpec(match="player_1", samples=None)
    judged = AgentSpec(match="player_0", parameters=Drawn(tag="now"), samples="judged", mode="concise")
    made = Experiment(
        name="digest",
        policies={"policy": ActorCritic(normalise_observations=False), "anyhow": own.Anyhow()},
        workers={
            "actor": Actors(
                environment=game,
                lanes=4,
                slots=2,
                agents=(learns, past.replace(parameters=Drawn(how="prioritised"))),
            ),
            "judge": Actors(environment=game, lanes=1, ring=2, slots=2, agents=(judged, chance)),
            "trainer": Trainer(algorithm=SMALL, database_seconds=1e6, checkpoint_seconds=1e6),
            "rating": Evaluation(samples="judged", tag="now", games=10, drawn=0.0, name="evaluation"),
        },
        limits=Limits(updates=8),
    )
    return trained(made, folder)


@mode
def curriculum(folder: Path) -> str:
    made = one_policy(AgentSpec(sample_steps=16), updates=12)
    stages = (
        Stage(options={"low": -0.01, "high": 0.01}, until="update >= 4"),
        Stage(options={"low": -0.1, "high": 0.1}),
    )
    return trained(made.replace(curriculum=stages), folder)


@mode
def buffers(folder: Path) -> str:
    environment = load_file(EXAMPLES / "augmentation.py", "example").experiment().workers["actor"].environment
    spec = AgentSpec(samples="gathered", sample_steps=16)
    between = Buffers(process=(RandomShift(pixels=2), Reanalyse()), policy="policy")
    return trained(one_policy(spec, environment, workers={"buffers": between}, updates=4), folder)


@mode
def queue_reuse(folder: Path) -> str:
    spec = AgentSpec(sample_steps=16)
    return trained(one_policy(spec, buffer=Queue(reuses=2), max_policy_lag=3), folder)


@mode
def priority_queue(folder: Path) -> str:
    spec = AgentSpec(sample_steps=16)
    return trained(one_policy(spec, buffer=PriorityQueue(capacity=512, reuses=2), max_policy_lag=3), folder)


# ---- from a replay memory --------------------------------------------------------------


def _dqn(**settings: Any) -> DQN:
    return DQN(target_steps=10, epsilon=LinearSchedule(1, 0.05, to_step=200), **settings)


PLAIN = QNetwork(hidden=(32, 32), duelling=False)


@mode
def dqn(folder: Path) -> str:
    return trained(from_memory(_dqn(), PLAIN), folder)


@mode
def dqn_served(folder: Path) -> str:
    made = from_memory(_dqn(), PLAIN, actors={"inference": "inference"})
    return trained(
        made.replace(workers={**made.workers, "server": PolicyWorkers(stream="inference")}), folder
    )


@mode
def rainbow(folder: Path) -> str:
    network = QNetwork(hidden=(32, 32), noise=0.5, atoms=11, least_return=0, greatest_return=100)
    memory = PrioritisedReplay(capacity=5_000, warm_up=100, steps=3, beta_updates=1_000)
    return trained(from_memory(DQN(target_steps=0, target_rate=0.01), network, buffer=memory), folder)


@mode
def qrdqn(folder: Path) -> str:
    network = QNetwork(hidden=(32, 32), quantiles=11)
    return trained(
        from_memory(QRDQN(target_steps=10, epsilon=LinearSchedule(1, 0.05, to_step=200)), network), folder
    )


@mode
def dqn_images(folder: Path) -> str:
    network = QNetwork(hidden=(32,), duelling=True)
    return trained(from_memory(_dqn(), network, Gymnasium(id="MinAtar/Breakout-v1"), steps=300), folder)


@mode
def dqn_frame_stack(folder: Path) -> str:
    return trained(from_memory(_dqn(), PLAIN, actors={"frame_stack": 2}), folder)


@mode
def dqn_ring_of_slots(folder: Path) -> str:
    settings = {"actors": {"lanes": 1, "ring": 4}}
    return trained(from_memory(_dqn(), PLAIN, Slots(environment=CARTPOLE), **settings), folder)


@mode
def sac(folder: Path) -> str:
    network = SquashedGaussian(hidden=(32, 32))
    return trained(from_memory(SAC(learning_rate=1e-3), network, PENDULUM, steps=300, ratio=1), folder)


@mode
def td3(folder: Path) -> str:
    network = DeterministicActor(hidden=(32, 32))
    return trained(from_memory(TD3(), network, PENDULUM, steps=300, ratio=1), folder)


def _exact(**settings: Any) -> Experiment:
    alone = {"actors": {"lanes": 1, "ring": 4}, "exact": True, "journal": True}
    return from_memory(_dqn(), PLAIN, **{**alone, **settings})


@mode
def exact(folder: Path) -> str:
    return trained(_exact(), folder)


@mode
def exact_iterations(folder: Path) -> str:
    phases = {"iteration_steps": 200, "finish_episodes": True, "evaluation_steps": 50}
    return trained(_exact(**phases), folder)


@mode
def exact_resumed_retrained(folder: Path) -> str:
    trained(_exact(steps=400), folder)
    done = whole(tidemill.resume(folder, launch="inline", limits={"steps": 600}, quiet=True))
    again = retrain(done)
    return f"{digest_of(done)} {again.same} {again.updates}"


@mode
def iterations(folder: Path) -> str:
    phases = {"iteration_steps": 200, "evaluation_steps": 50, "slack": 4}
    return trained(from_memory(_dqn(), PLAIN, actors={"lanes": 1, "ring": 4}, **phases), folder)


# ---- what is done with a trained policy ------------------------------------------------


@mode
def resumed(folder: Path) -> str:
    made = one_policy(AgentSpec(sample_steps=16))
    trained(made, folder)
    return digest_of(whole(tidemill.resume(folder, launch="inline", limits={"updates": 12}, quiet=True)))


@mode
def evaluated(folder: Path) -> str:
    trained(one_policy(AgentSpec(sample_steps=16)), folder)
    found = tidemill.evaluate(folder, episodes=10, seed=3, quiet=True)
    return hashlib.sha256(repr((found.env_steps, found.specs)).encode()).hexdigest()[:16]


@mode
def loaded(folder: Path) -> str:
    trained(one_policy(AgentSpec(sample_steps=16), PENDULUM), folder)
    policy, rng, found = tidemill.load(folder), np.random.default_rng(1), hashlib.sha256()
    for _ in range(50):
        found.update(np.asarray(policy.act(rng.standard_normal(3).astype(np.float32))).tobytes())
    return found.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modes", nargs="*", metavar="MODE", help="which modes; none: all")
    parser.add_argument("--list", action="store_true", help="name the modes and end")
    parser.add_argument("--times", action="store_true", help="say how long each took, on standard error")
    options = parser.parse_args()
    if options.list:
        print("\n".join(MODES))
        return 0
    if unknown := [name for name in options.modes if name not in MODES]:
        parser.error(f"{', '.join(unknown)}: no such mode; there are {', '.join(MODES)}")
    failed = 0
    for name in options.modes or MODES:
        began = time.perf_counter()
        with (
            tempfile.TemporaryDirectory(prefix="tidemill-digest-") as folder,
            contextlib.redirect_stdout(io.StringIO()),
        ):
            try:
                found = MODES[name](Path(folder) / "run")
            except Exception as error:  # one mode that fails says so, and the others are run
                found, failed = f"FAILED {type(error).__name__}: {str(error).splitlines()[0]}", failed + 1
        print(f"{name:<28} {found}", flush=True)
        if options.times:
            print(f"    {time.perf_counter() - began:.1f} s", file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(main())
