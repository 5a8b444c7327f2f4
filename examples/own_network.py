"""A network of one's own: a torch module from observations to (action head, value),
trained by PPO.

tidemill train examples/own_network.py:experiment
"""

from dataclasses import dataclass

from tidemill import PPO, Actors, AgentSpec, Experiment, Gymnasium, Limits, Trainer
from tidemill.nets.torch_network import TorchNetwork


@dataclass(frozen=True, kw_only=True)
class Residual(TorchNetwork):
    """Actor and critic share a residual trunk."""

    width: int = 64
    blocks: int = 2

    def network(self, spaces, outputs):
        from torch import nn  # here, so that the main process, which builds no network, need not import torch

        class Network(nn.Module):
            def __init__(self, inputs: int, width: int, blocks: int) -> None:
                super().__init__()
                self.first = nn.Linear(inputs, width)
                self.blocks = nn.ModuleList(
                    nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())
                    for _ in range(blocks)
                )
                self.actor, self.critic = nn.Linear(width, outputs), nn.Linear(width, 1)

            def forward(self, observation):
                x = self.first(observation["obs"])
                for block in self.blocks:
                    x = x + block(x)
                return self.actor(x), self.critic(x).squeeze(-1)

        return Network(spaces.observation.shape[0], self.width, self.blocks)


def experiment() -> Experiment:
    return Experiment(
        name="own-network",
        policies={"policy": Residual()},
        workers={
            "actor": Actors(
                environment=Gymnasium(id="CartPole-v1"), lanes=64, agents=(AgentSpec(sample_steps=64),)
            ),
            "trainer": Trainer(algorithm=PPO(learning_rate=1e-3, minibatch_size=1024, epochs=4)),
        },
        limits=Limits(mean_return=475.0, steps=600_000),
    )
