"""An algorithm of one's own: advantage actor-critic, one gradient step per batch (Mnih et
al. 2016, "Asynchronous Methods for Deep RL").

tidemill train examples/own_algorithm.py:experiment
"""

from dataclasses import dataclass

import numpy as np

from tidemill import (
    ActorCritic,
    Actors,
    AgentSpec,
    Algorithm,
    AlgorithmConfig,
    Experiment,
    Gymnasium,
    Limits,
    Trainer,
)


@dataclass(frozen=True, kw_only=True)
class A2C(AlgorithmConfig):
    gamma: float = 0.99
    learning_rate: float = 2e-3
    entropy: float = 0.01

    def build(self, policy, seed):
        return Learner(self, policy)


class Learner(Algorithm):
    def __init__(self, config: A2C, policy) -> None:
        import torch

        self.config, self.policy = config, policy
        self.weights = policy.trainable_parameters()
        self.optimiser = torch.optim.Adam(self.weights, lr=config.learning_rate)

    def update(self, samples, steps):
        import torch

        def rows(name):  # of all samples, those that enter the loss
            return np.concatenate([sample[name][sample.trained()] for sample in samples])

        names = [name for name in samples[0] if name.split(".")[0] == "obs"]
        observation, action = {name: rows(name) for name in names}, torch.from_numpy(rows("action"))
        returns = np.concatenate([self.returns(sample)[sample.trained()] for sample in samples])
        advantage = returns - rows("value")
        target = torch.from_numpy(returns / np.float32(self.policy.value_scale))
        weight = torch.from_numpy((advantage - advantage.mean()) / (advantage.std() + 1e-8))

        inputs = {name: torch.from_numpy(array) for name, array in self.policy.prepare(observation).items()}
        found = self.policy.evaluate(inputs, {"action": action})
        of_policy = -(found.log_prob * weight).mean()
        of_value = (found.value - target).square().mean()
        entropy = found.entropy.mean()
        self.optimiser.zero_grad(set_to_none=False)
        (of_policy + 0.5 * of_value - self.config.entropy * entropy).backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 0.5)
        self.optimiser.step()
        self.policy.fold(observation, returns)
        return {"loss/policy": of_policy.item(), "loss/value": of_value.item(), "entropy": entropy.item()}

    def returns(self, sample):
        """Discounted rewards up to the end of the episode, else up to its cut or the
        sample's last row, and from there on the value."""
        # an ended row has value 0
        reward, value, final = sample["reward"], sample["value"], sample["done"] | sample["truncated"]
        returns = value.copy()
        for t in reversed(range(len(returns) - 1)):
            returns[t] = reward[t] + self.config.gamma * np.where(final[t + 1], value[t + 1], returns[t + 1])
        return returns

    def state(self):
        moments = self.optimiser.state
        return {
            f"{i}.{name}": moment.numpy().copy()
            for i, w in enumerate(self.weights)
            for name, moment in moments[w].items()
        }

    def load_state(self, state):
        import torch

        for key, array in state.items():
            i, name = key.split(".")
            self.optimiser.state[self.weights[int(i)]][name] = torch.from_numpy(np.array(array))


def experiment() -> Experiment:
    return Experiment(
        name="own-algorithm",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(
                environment=Gymnasium(id="CartPole-v1"), lanes=64, agents=(AgentSpec(sample_steps=16),)
            ),
            "trainer": Trainer(algorithm=A2C()),
        },
        limits=Limits(mean_return=400.0, steps=1_500_000),
    )
