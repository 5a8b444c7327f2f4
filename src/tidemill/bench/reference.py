"""The bare costs of an experiment's parts, which speed is measured against: no change
that claims speed may touch this file.

Nothing here uses Tidemill's actors, learner or networks (but where a policy's network is
its own), so that the bound does not move with their speed. How processes are started and
work is timed is `cost_measurement`'s, as for layouts.

env: a plain loop over the environment, random actions, resets as they come:
    ``gymnasium.make`` per lane, or the library's own vector environment with one thread;
    any other kind of environment through `Environment`. Per env step
infer: forward pass of actor and critic, one sample and its log-probability, for as many
    rows as one request has. Per row
train: one shuffled gather, then per minibatch the clipped PPO loss, backward, the
    gradient's norm clipped, fused Adam. Per row and epoch

infer and train are written plainly in torch; for MLPs once more in numpy (`plain_mlps`),
since at their sizes torch's calls and its tanh cost more than the arithmetic, and by the
native core's kernels called bare (`bare_kernels`), where they can be had; for
convolutions in bfloat16 once more in float32. A bound that takes the dearer of several
ways would be none: the cheapest one counts. Minibatches
have as many rows as each of the experiment's equal trainers has of them.

This is a process of its own, one on each core, all at work at the same time (`measure`
starts them and says what to do): on standard input the order comes first, then lines
``SECONDS PART``, each answered with what that took (`TimeSpent`).
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from math import ceil, log, pi
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tidemill import PPO, ActorCritic, Atari, Experiment, Gymnasium, ReplayTrainer, Trainer
from tidemill.api.edges import group_of
from tidemill.api.environment import Environment
from tidemill.api.policy import PolicyConfig
from tidemill.api.schedule import number
from tidemill.api.spaces import Box, Discrete, Spaces, schema_of_space
from tidemill.bench.bare_kernels import BareKernels, best_kernels
from tidemill.bench.plain_mlps import PlainMLPs
from tidemill.core.errors import ConfigError, TidemillError
from tidemill.core.forgiving_output import forgiving_output
from tidemill.core.schema import Array, Arrays, Schema, allocate
from tidemill.envs.lanes import LaneLoop
from tidemill.launchers.measuring import end_session, obey
from tidemill.layouts.cost_measurement import RandomPlay, random_rows, timed
from tidemill.nets.encoders import ObservationEncoder
from tidemill.nets.torch_copies import convolution_type
from tidemill.nets.trainable import TrainablePolicy
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.actor_environments import seen_by
from tidemill.workers.agent_spec import INLINE, PlayerSpec, match_agents
from tidemill.workers.policy import PolicyWorkers

POOL = 1021  # random actions drawn beforehand; a prime, so that lanes do not repeat theirs
MOST_BYTES = 2**28  # of observations to train on; a larger batch is measured by a part of it


# ---- env -------------------------------------------------------------------------------


def env_part(config: ActorConfig, environment: Environment) -> tuple[Callable[[], int], bool]:
    """Return a function that steps every lane some times and returns how many env steps
    that were, and whether the environment steps elsewhere than in the thread that calls
    it."""
    if isinstance(config.environment, Gymnasium) and isinstance(environment, LaneLoop):
        return plain_lanes([plain(config.environment) for _ in range(config.lanes)]), False
    vector = getattr(environment, "env", None)
    if vector is not None and hasattr(vector, "num_envs"):
        return native_vector(vector), isinstance(config.environment, Atari)
    return any_environment(environment)


def plain(config: Gymnasium) -> Any:
    """Return what ``gymnasium.make`` gives, wrappers included."""
    import gymnasium

    if config.id is None:
        return config.make_one()
    limit: dict[str, Any] = (
        {} if config.max_episode_steps is None else {"max_episode_steps": config.max_episode_steps or -1}
    )
    return gymnasium.make(config.id, **limit, **config.kwargs)


def plain_lanes(envs: list[Any]) -> Callable[[], int]:
    """Step one after the other."""
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    actions = cycle([envs[0].action_space.sample() for _ in range(POOL)])
    passes = max(1, 64 // len(envs))

    def work() -> int:
        for _ in range(passes):
            for env, action in zip(envs, actions, strict=False):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
        return passes * len(envs)

    return work


def native_vector(env: Any) -> Callable[[], int]:
    """Step all at once."""
    env.reset(seed=0)
    actions = cycle([env.action_space.sample() for _ in range(POOL // 16)])
    mode = env.metadata.get("autoreset_mode")
    next_step, disabled = (getattr(mode, "value", mode) == value for value in ("NextStep", "Disabled"))
    finished = 0

    def work() -> int:
        nonlocal finished
        _, _, terminated, truncated, _ = env.step(next(actions))
        steps = int(env.num_envs) - (finished if next_step else 0)  # those were reset, not stepped
        over = terminated | truncated
        finished = int(np.count_nonzero(over))
        if disabled and finished:
            env.reset(options={"reset_mask": over})
        return steps

    return work


def any_environment(env: Environment) -> tuple[Callable[[], int], bool]:
    """Send and receive."""
    stepping, elsewhere = RandomPlay(env), False

    def work() -> int:
        nonlocal elsewhere
        steps = stepping.tick()
        elsewhere |= stepping.waited
        return steps

    work()
    return work, elsewhere


# ---- infer and train -------------------------------------------------------------------


class ReferenceNetwork(nn.Module):
    """Actor and critic: two MLPs, one with the outputs of both, or Mnih et al.'s
    convolutions (channels last) under two heads."""

    def __init__(self, config: ActorCritic, encoder: ObservationEncoder, outputs: int) -> None:
        super().__init__()
        self.dtype = torch.float32
        self.log_std = nn.Parameter(torch.zeros(outputs))
        self.image, self.shared = next(iter(encoder.images.values()), None), config.towers(encoder) == 1
        if self.image is None:
            activation = nn.Tanh if config.activation == "tanh" else nn.ReLU
            if self.shared:
                self.both = mlp(encoder.width, config.hidden, activation, outputs + 1)
            else:
                self.actor, self.critic = (
                    mlp(encoder.width, config.hidden, activation, n) for n in (outputs, 1)
                )
            return
        self.dtype = convolution_type(config.convolutions, torch.device("cpu"))
        sizes = [self.image.height, self.image.width]
        for kernel, stride in ((8, 4), (4, 2), (3, 1)):
            sizes = [(size - kernel) // stride + 1 for size in sizes]
        self.features = nn.Sequential(
            nn.Conv2d(self.image.channels, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * sizes[0] * sizes[1], 512),
            nn.ReLU(),
        )  # fmt: skip
        for convolution in (layer for layer in self.features.modules() if isinstance(layer, nn.Conv2d)):
            convolution.weight.data = convolution.weight.data.contiguous(memory_format=torch.channels_last)
        self.actor, self.critic = nn.Sequential(nn.Linear(512, outputs)), nn.Sequential(nn.Linear(512, 1))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Return (head [n, outputs], value [n])."""
        if self.image is not None:
            if observation.ndim == 3:
                observation = observation.unsqueeze(1)
            elif not self.image.channels_first:
                observation = observation.permute(0, 3, 1, 2)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype is torch.bfloat16):
                x = observation.contiguous(memory_format=torch.channels_last).to(self.dtype) / 255
                observation = self.features(x).float()
        elif self.shared:
            both = self.both(observation)
            return both[:, :-1], both[:, -1]
        return self.actor(observation), self.critic(observation).squeeze(-1)


def mlp(width: int, hidden: tuple[int, ...], activation: type[nn.Module], outputs: int) -> nn.Sequential:
    """Return hidden layers and a head."""
    layers: list[nn.Module] = []
    for units in hidden:
        layers += [nn.Linear(width, units), activation()]
        width = units
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def log_prob_entropy(head: Tensor, log_std: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Return both, [n], of categorical (integer) or diagonal normal (float) actions."""
    if not action.is_floating_point():
        logs = head.log_softmax(-1)
        return logs.gather(-1, action.unsqueeze(-1)).squeeze(-1), -(logs.exp() * logs).sum(-1)
    constant = log_std.sum() + head.shape[-1] * 0.5 * log(2 * pi)
    log_prob = -0.5 * ((action.flatten(1) - head) * (-log_std).exp()).square().sum(-1) - constant
    return log_prob, (constant + 0.5 * head.shape[-1]).expand(len(head))


def infer_part(network: ReferenceNetwork, observation: Tensor, discrete: bool) -> Callable[[], int]:
    """Return a function that answers `observation` once, in torch."""

    @torch.inference_mode()
    def work() -> int:
        head, _ = network(observation)
        if discrete:
            action = (head - torch.empty_like(head).exponential_().log()).argmax(-1)  # the Gumbel-max trick
        else:
            action = head + network.log_std.exp() * torch.randn_like(head)
        log_prob_entropy(head, network.log_std, action)
        return len(observation)

    return work


Columns = dict[str, Tensor]
Evaluate = Callable[[Columns], tuple[Tensor, Tensor, Tensor]]
Loss = Callable[[Columns], Tensor]
"""Columns of n rows → (log_prob, entropy, value), each [n]."""


def loss_of(ppo: PPO, evaluate: Evaluate) -> Loss:
    """Return the loss of a minibatch."""
    clip, of_values, bonus = map(number, (ppo.clip, ppo.value_coefficient, ppo.entropy_coefficient))

    def loss(part: Columns) -> Tensor:
        log_prob, entropy, value = evaluate(part)
        ratio, advantage = (log_prob - part["log_prob"]).exp(), part["advantage"]
        of_policy = -torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
        found = of_policy + of_values * 0.5 * (value - part["target"]).square().mean()
        return found - bonus * entropy.mean() if bonus else found

    return loss


def torch_step(ppo: PPO, loss: Loss, parameters: list[Tensor]) -> Callable[[Columns], None]:
    """Return a function that does one minibatch with torch's autograd."""
    optimiser = torch.optim.Adam(parameters, lr=number(ppo.learning_rate), eps=ppo.adam_epsilon, fused=True)

    def step(part: Columns) -> None:
        found = loss(part)
        optimiser.zero_grad(set_to_none=False)
        found.backward()  # type: ignore[no-untyped-call]
        if ppo.max_gradient_norm is not None:
            nn.utils.clip_grad_norm_(parameters, ppo.max_gradient_norm)
        optimiser.step()

    return step


def train_part(minibatch: float, columns: Columns, step: Callable[[Columns], None]) -> Callable[[], int]:
    """Return a function that does one epoch, in minibatches of so many rows, about."""
    rows = len(columns["advantage"])
    count = max(1, round(rows / minibatch))

    def work() -> int:
        order = torch.randperm(rows)
        shuffled = {name: column.index_select(0, order) for name, column in columns.items()}
        for i in range(count):
            step(
                {
                    name: column[rows * i // count : rows * (i + 1) // count]
                    for name, column in shuffled.items()
                }
            )
        return rows

    return work


# ---- the parts of one experiment -------------------------------------------------------


Parts = dict[str, Callable[[], int]]
"""Name of a part (``infer``, or ``infer numpy`` where there are several ways) → function
that works a while and returns the units done."""


def network_parts(
    experiment: Experiment,
    spec: PlayerSpec,
    spaces: Spaces,
    ppo: PPO,
    batch: int,
    rows: int,
    minibatch: float,
) -> tuple[str, Parts]:
    """Return which network is measured, and its parts."""
    config = experiment.policies[spec.policy]
    acted, seen = (random_rows(spaces.observation, n) for n in (batch, rows))
    columns = {
        name: torch.from_numpy(array) for name, array in random_rows(spaces.action, rows, "action").items()
    }
    columns |= {name: torch.randn(rows) for name in ("log_prob", "advantage", "target")}
    if (
        not isinstance(config, ActorCritic)
        or config.state(spaces)
        or not isinstance(spaces.action, (Discrete, Box))
    ):
        return "own", own_parts(config, spaces, ppo, minibatch, acted, seen, columns)
    encoder = ObservationEncoder(spaces.observation, config.encoder, scaled_bytes=config.scaled_bytes)
    if (
        len(encoder.images) + bool(encoder.width) != 1
        or (encoder.images and (config.towers(encoder) > 1 or config.encoder == "impala_cnn"))
        or config.beyond_core
        or config.critic_hidden is not None
        or config.activation not in ("tanh", "relu")
    ):
        return "own", own_parts(config, spaces, ppo, minibatch, acted, seen, columns)
    discrete = isinstance(spaces.action, Discrete)
    outputs = spaces.action.n if isinstance(spaces.action, Discrete) else int(np.prod(spaces.action.shape))

    def inputs(observation: Arrays) -> Tensor:
        if encoder.images:
            return torch.from_numpy(next(iter(observation.values())))
        flat = np.empty((len(next(iter(observation.values()))), encoder.width), np.float32)
        encoder.encode(observation, flat)
        return torch.from_numpy(flat)

    columns["input"], x = inputs(seen), inputs(acted)

    def in_torch(config: ActorCritic) -> tuple[ReferenceNetwork, Columns, Parts]:
        network = ReferenceNetwork(config, encoder, outputs)

        def evaluate(part: Columns) -> tuple[Tensor, Tensor, Tensor]:
            head, value = network(part["input"])
            return *log_prob_entropy(head, network.log_std, part["action"]), value

        with torch.no_grad():  # as it is at the first epoch: nothing is clipped
            every = [
                evaluate({name: columns[name][i : i + 1024] for name in ("input", "action")})[0]
                for i in range(0, rows, 1024)
            ]
        step = torch_step(ppo, loss_of(ppo, evaluate), list(network.parameters()))
        own = {**columns, "log_prob": torch.cat(every)}
        return (
            network,
            own,
            {
                "infer": infer_part(network, x, discrete),
                "train": train_part(minibatch, own, step),
            },
        )

    network, own, parts = in_torch(config)
    if encoder.images:
        kind = str(network.dtype).removeprefix("torch.")
        ways = {kind: parts}
        if network.dtype is not torch.float32:  # the bound is of what is quicker here
            ways["float32"] = in_torch(config.replace(convolutions="float32"))[2]
        every = {f"{part} {way}": found[part] for part in parts for way, found in ways.items()}
        return f"nature cnn {kind}", every
    arrays = {name: column.numpy() for name, column in own.items()}
    plain_mlps = PlainMLPs(weights_of(network), config, ppo)

    def infer_numpy() -> int:
        plain_mlps.act(x.numpy(), discrete)
        return batch

    infers, trains = {"torch": parts["infer"], "numpy": infer_numpy}, {"torch": parts["train"]}
    trains["numpy"] = lambda: plain_mlps.epoch(minibatch, arrays)
    if (kernels := best_kernels()) is not None:
        bare, of_kernels = BareKernels(weights_of(network), config, ppo, discrete, kernels), dict(arrays)
        of_kernels["action"] = arrays["action"].astype(np.int32 if discrete else np.float32)

        def infer_native() -> int:
            bare.act(x.numpy())
            return batch

        infers[kernels.instruction_set] = infer_native
        trains[kernels.instruction_set] = lambda: bare.epoch(minibatch, of_kernels)
    kind = f"mlp {'×'.join(map(str, config.hidden))} {config.activation}{', shared' * network.shared}"
    ways = {"infer": infers, "train": trains}
    return kind, {f"{part} {way}": work for part, each in ways.items() for way, work in each.items()}


def weights_of(network: ReferenceNetwork) -> list[Array]:
    """Return log_std, then weight [in, out] and bias of each layer, the actor's before
    the critic's."""
    given = [weight.detach().numpy() for weight in network.parameters()]
    return [weight.T if weight.ndim == 2 else weight for weight in given]


def own_parts(
    config: PolicyConfig,
    spaces: Spaces,
    ppo: PPO,
    minibatch: float,
    acted: Arrays,
    seen: Arrays,
    columns: Columns,
) -> Parts:
    """Return the parts of a policy whose network this file does not have."""
    # one that is trained may not keep what it prepares for acting
    policy, acting = config.build(spaces, 0), config.build(spaces, 0)
    if not isinstance(policy, TrainablePolicy):
        raise ConfigError(
            f"bench cannot tell what training costs: a {type(policy).__name__} is no TrainablePolicy (see "
            "tidemill.nets.trainable)"
        )
    if policy.recurrent:
        raise ConfigError(
            f"bench trains on rows one by one, and a {type(config).__name__} on rows in time; bench the "
            "experiment with ActorCritic in its place, or look at the shares of time that a run reports"
        )
    batch = len(next(iter(acted.values())))
    schema: Schema = {**config.answer(spaces), **config.state(spaces)}
    out, state = allocate(schema, (batch,)), allocate(config.state(spaces), (batch,))
    actions = [name for name in columns if name.startswith("action")]

    def act() -> int:
        acting.act(acted, state, False, out)
        return batch

    def evaluate(part: Columns) -> tuple[Tensor, Tensor, Tensor]:
        found = policy.evaluate(
            {k[6:]: v for k, v in part.items() if k.startswith("input ")}, {k: part[k] for k in actions}
        )
        return found.log_prob, found.entropy, found.value

    prepared = {f"input {k}": torch.from_numpy(v) for k, v in policy.prepare(seen).items()}
    return {
        "infer": act,
        "train": train_part(
            minibatch,
            columns | prepared,
            torch_step(ppo, loss_of(ppo, evaluate), policy.trainable_parameters()),
        ),
    }


def parts_of(experiment: Experiment) -> tuple[dict[str, Any], Parts]:
    """Return what is measured (facts for the report) and how."""
    found = [(c, s) for c in experiment.groups(ActorConfig).values() for s in c.agents if s.streams]
    if not found:
        raise ConfigError("bench needs actors whose samples are trained on")
    actors, spec = found[0]
    trainers = [
        (g, c)
        for g, c in experiment.workers.items()
        if isinstance(c, (Trainer, ReplayTrainer)) and c.samples in spec.streams
    ]
    if not trainers:
        raise ConfigError(f"bench needs a trainer of sample stream {' or '.join(spec.streams)}")
    group, trainer = trainers[0]
    ppo = (
        trainer.algorithm
        if isinstance(trainer.algorithm, PPO)
        # what names no minibatches makes a step of a batch
        else PPO(
            epochs=getattr(trainer.algorithm, "epochs", 1),
            minibatch_size=getattr(trainer.algorithm, "minibatch_size", 10**9),
            clip_apart=getattr(trainer.algorithm, "clip_apart", False),
        )
    ).at(0, 0.0)
    config = actors.environment
    environment = (config.replace(num_threads=1) if isinstance(config, Atari) else config).build(
        actors.lanes, 0
    )
    groups = match_agents(environment.agents, actors.agents)
    seats = len(groups[actors.agents.index(spec)])
    samples = len(
        [
            e
            for e in experiment.edges()
            if e.name.startswith(f"samples/{trainer.samples}/") and group_of(e.targets[0]) == group
        ]
    )
    batch = actors.lanes * seats
    rows = trainer.batch_size or samples * spec.sample_steps * actors.lanes * seats
    if spec.inference != INLINE:
        asked = [
            e
            for e in experiment.edges()
            if e.name.startswith(f"requests/{spec.inference}/") and e.name.endswith(f"/{spec.policy}")
        ]
        server, askers = Counter(e.targets[0] for e in asked).most_common(1)[0]
        served = experiment.workers[group_of(server)]
        assert isinstance(served, PolicyWorkers)
        batch = max(1, min(batch * actors.ring * askers, served.most_rows))
    spaces = seen_by(spec, environment.agents[groups[actors.agents.index(spec)][0]].spaces)
    bytes_per_row = sum(field.nbytes for field in schema_of_space(spaces.observation, "obs").values())
    # As n equal trainers cut a batch: each has its part of the rows, and of every
    # minibatch.
    minibatch = rows / max(1, round(rows / ppo.minibatch_size)) / trainer.count
    rows = min(rows // trainer.count, max(ceil(minibatch), MOST_BYTES // bytes_per_row))
    kind, parts = network_parts(experiment, spec, spaces, ppo, batch, rows, minibatch)
    env, elsewhere = env_part(actors, environment)
    facts = {
        "environment": getattr(config, "id", None) or getattr(config, "make", None) or type(config).__name__,
        "environment_kind": type(config).__name__,
        "lanes": actors.lanes,
        "rows_per_step": seats,
        "network": kind,
        "batch": batch,
        "rows": rows,
        "minibatch": round(minibatch),
        "epochs": ppo.epochs,
        "elsewhere": elsewhere,
        "parts": ["env", *parts],
    }
    return facts, {"env": env, **parts}


@forgiving_output()
def main() -> None:
    """Obey standard input (see the module's text)."""
    order, answers = obey()
    torch.manual_seed(0)
    try:
        facts, parts = parts_of(order.load())
        for part in parts.values():
            part()  # what happens once only is no cost
    except TidemillError as error:
        print(json.dumps({"error": str(error)}), file=answers)
        return
    print(json.dumps(facts), file=answers)
    for line in sys.stdin:
        seconds, _, name = line.strip().partition(" ")
        print(json.dumps(timed(parts[name], float(seconds))._asdict()), file=answers)


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # whoever asked is gone
        main()
    end_session()
