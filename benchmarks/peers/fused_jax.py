"""PPO as one program of JAX, in the way that PureJaxRL made known: gymnax's environment,
the rollout and all epochs are one function under one `jit`, and whole updates are
repeated in it. Written for this comparison. Compilation is not part of the time; the line
that tells the figures says how long it took.
"""

import os

import common

LAYOUTS = {
    "cartpole_vector": {"envs": 64, "cores": 1, "random numbers": "unsafe_rbg", "updates in a call": 4},
    "cartpole_vector_small": {"envs": 8, "cores": 1, "random numbers": "unsafe_rbg", "updates in a call": 4},
}
ARGS, WORK, LAYOUT = common.arguments(LAYOUTS)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: LAYOUT["cores"]])

from collections import deque  # noqa: E402
from itertools import pairwise  # noqa: E402
from time import perf_counter  # noqa: E402

import gymnax  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax, random  # noqa: E402

jax.config.update("jax_default_prng_impl", LAYOUT["random numbers"])
ENV, PARAMS = gymnax.make(WORK.environment)


def tower(key, sizes, gain):
    """Return orthogonal layers with biases of zero."""
    gains = [2**0.5] * (len(sizes) - 2) + [gain]
    made = []
    for shape, each in zip(pairwise(sizes), gains, strict=True):
        key, own = random.split(key)
        made.append((jax.nn.initializers.orthogonal(each)(own, shape), jnp.zeros(shape[1])))
    return made


def run_tower(layers, x):
    for weight, bias in layers[:-1]:
        x = jnp.tanh(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias


def evaluate(weights, obs):
    return run_tower(weights["actor"], obs), run_tower(weights["critic"], obs)[..., 0]


def loss_of(weights, batch):
    obs, action, old, gain, target = batch
    head, value = evaluate(weights, obs)
    logs = jax.nn.log_softmax(head)
    log_prob = jnp.take_along_axis(logs, action[:, None], 1)[:, 0]
    ratio = jnp.exp(log_prob - old)
    gain = (gain - gain.mean()) / (gain.std(ddof=1) + 1e-8)
    policy = jnp.maximum(-gain * ratio, -gain * jnp.clip(ratio, 1 - WORK.clip, 1 + WORK.clip)).mean()
    entropy = -(jnp.exp(logs) * logs).sum(1).mean()
    value_loss = 0.5 * jnp.square(value - target).mean()
    return policy + WORK.value_coefficient * value_loss - WORK.entropy_coefficient * entropy


def adam(weights, gradient, first, second, count):
    """One step of Adam by a gradient whose norm is cut."""
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient)))
    gradient = jax.tree.map(lambda g: g * jnp.minimum(1.0, WORK.max_gradient_norm / (norm + 1e-6)), gradient)
    count = count + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradient)
    a, b = 1 - 0.9**count, 1 - 0.999**count
    weights = jax.tree.map(
        lambda w, m, v: w - WORK.learning_rate * (m / a) / (jnp.sqrt(v / b) + WORK.adam_epsilon),
        weights,
        first,
        second,
    )
    return weights, first, second, count


def step(carry, key):
    """One step of all environments; an episode's return comes with its end, else NaN."""
    weights, obs, state, returns = carry
    of_action, of_step = random.split(key)
    head, value = evaluate(weights, obs)
    action = random.categorical(of_action, head)
    log_prob = jnp.take_along_axis(jax.nn.log_softmax(head), action[:, None], 1)[:, 0]
    keys = random.split(of_step, LAYOUT["envs"])
    after, state, reward, terminated, truncated, _ = jax.vmap(ENV.step, (0, 0, 0, None))(
        keys, state, action, PARAMS
    )
    done = terminated | truncated
    returns = returns + reward
    row = (obs, action, log_prob, value, reward, done, jnp.where(done, returns, jnp.nan))
    return (weights, after, state, jnp.where(done, 0.0, returns)), row


def advantages_of(values, rewards, dones, last):
    def back(carry, row):
        following, gain = carry
        value, reward, done = row
        going_on = 1.0 - done
        delta = reward + WORK.gamma * following * going_on - value
        gain = delta + WORK.gamma * WORK.gae_lambda * going_on * gain
        return (value, gain), gain

    return lax.scan(back, (last, jnp.zeros_like(last)), (values, rewards, dones), reverse=True, unroll=8)[1]


def update(carry, _):
    """One update: the rollout, and all its epochs."""
    learner, obs, state, returns, key = carry
    key, of_steps, of_rows = random.split(key, 3)
    weights = learner[0]
    (_, obs, state, returns), rows = lax.scan(
        step, (weights, obs, state, returns), random.split(of_steps, WORK.rollout)
    )
    seen, actions, log_probs, values, rewards, dones, ended = rows
    gains = advantages_of(values, rewards, dones, evaluate(weights, obs)[1])
    count = WORK.rollout * LAYOUT["envs"]
    batch = (seen, actions, log_probs, gains, gains + values)
    batch = jax.tree.map(lambda array: array.reshape(count, *array.shape[2:]), batch)

    def minibatch(learner, picked):
        part = jax.tree.map(lambda array: array[picked], batch)
        return adam(learner[0], jax.grad(loss_of)(learner[0], part), *learner[1:]), None

    def epoch(learner, key):
        order = random.permutation(key, count).reshape(WORK.minibatches, -1)
        return lax.scan(minibatch, learner, order)

    learner, _ = lax.scan(epoch, learner, random.split(of_rows, WORK.epochs))
    return (learner, obs, state, returns, key), ended


@jax.jit
def updates(carry):
    return lax.scan(update, carry, None, LAYOUT["updates in a call"])


def main():
    count = LAYOUT["envs"]
    of_actor, of_critic, of_reset, key = random.split(random.key(ARGS.seed), 4)
    inputs, actions = ENV.observation_space(PARAMS).shape[0], ENV.num_actions
    weights = {
        "actor": tower(of_actor, (inputs, 64, 64, actions), 0.01),
        "critic": tower(of_critic, (inputs, 64, 64, 1), 1.0),
    }
    zeros = jax.tree.map(jnp.zeros_like, weights)
    obs, state = jax.vmap(ENV.reset, (0, None))(random.split(of_reset, count), PARAMS)
    carry = ((weights, zeros, zeros, jnp.float32(0)), obs, state, jnp.zeros(count), key)
    started = perf_counter()
    compiled = updates.lower(carry).compile()
    compiling = perf_counter() - started
    meter, finished, trained = common.Meter(ARGS.seconds, WORK.target), deque(maxlen=100), 0
    meter.start()
    while True:
        carry, ended = compiled(carry)
        ended = np.asarray(ended)
        finished.extend(ended[~np.isnan(ended)])
        trained += ended.size
        if meter.update(trained, float(np.mean(finished)) if len(finished) == 100 else None):
            break
    settings = {**LAYOUT, "seconds of compilation": round(compiling, 1)}
    meter.report(settings, ("jax", "gymnax", "numpy"))


if __name__ == "__main__":
    main()
