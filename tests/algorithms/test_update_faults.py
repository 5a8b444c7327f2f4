"""Updates that are not finite: nothing is changed by the step that was left out, and what
led to it can be done again, which shows where it began."""

import warnings
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
from tests.algorithms import test_dqn, test_parallel, test_ppo, test_sac, test_td3

from tidemill.algorithms.dqn import DQN
from tidemill.algorithms.impala import Impala
from tidemill.algorithms.ppo import PPO
from tidemill.algorithms.qr_dqn import QRDQN
from tidemill.api.algorithm import UpdateFault
from tidemill.native.library import BUILT, Kernels, choices
from tidemill.nets.actor_critic import ActorCritic, ActorCriticPolicy
from tidemill.nets.native_actor_critic import NativeActorCritic
from tidemill.nets.q_network import QNetwork
from tidemill.nets.recurrent import RecurrentActorCritic


def first_wrong(learner, fault):
    """Return kind and name of the first array that is not finite, the first such number's
    row in the minibatch, and where that lay."""
    with np.errstate(all="ignore"):
        for each in learner.trace(fault.stage, fault.minibatch):
            if each.array.dtype.kind == "f" and not np.isfinite(each.array).all():
                row = None if each.rows is None else int(np.argwhere(~np.isfinite(each.array))[0][each.rows])
                place = None if each.place is None or row is None else each.place[row].tolist()
                return each.kind, each.name, row, place
    return None


def fault_of(learner, sample):
    with np.errstate(invalid="ignore", over="ignore"), pytest.raises(UpdateFault) as caught:
        learner.update([sample], 0)
    return caught.value


def spoilt_row(sample):
    """Return a row that is trained, and whose next one is, too."""
    rows = np.argwhere(sample.trained())
    return tuple(rows[len(rows) // 2])


PLAIN = ActorCritic(hidden=(8,), native="off")
NETWORKS = {
    "numpy": (PLAIN, "numpy"),
    "native": (PLAIN, "native"),
    "torch": (PLAIN, "torch"),
    "recurrent": (RecurrentActorCritic(hidden=(8,), width=8), "numpy"),
}


def made(net, algorithm=PPO):
    """Return a learner, and a sample that it is to learn from."""
    config, backend = NETWORKS[net]
    policy = ActorCriticPolicy(config, test_parallel.VECTOR, 0, "numpy" if backend == "native" else backend)
    if backend == "native":
        if not BUILT.exists():
            pytest.skip("the native core is not built")
        kernels = Kernels(BUILT, "baseline")
        policy.network = NativeActorCritic(config.shape(test_parallel.VECTOR), policy.network.flat, kernels)
    learner = algorithm(minibatch_size=8, learning_rate=1e-2).build(policy, 0)
    plain = PLAIN.build(test_parallel.VECTOR, 0)
    sample = test_parallel.make_sample(plain, PLAIN, test_parallel.VECTOR, 4, 0)
    for name, field in config.state(test_parallel.VECTOR).items():
        sample[name] = np.zeros((*sample["done"].shape, *field.shape), field.dtype)
    return learner, sample


@pytest.mark.parametrize("algorithm", [PPO, Impala])
@pytest.mark.parametrize("net", sorted(NETWORKS))
def test_a_row_that_is_not_finite_is_found_in_its_sample_and_lane(net, algorithm):
    learner, sample = made(net, algorithm)
    row, seat = spoilt_row(sample)
    name = next(name for name in sample if name.partition(".")[0] == "obs")
    sample[name][row, seat] = np.nan
    fault = fault_of(learner, sample)
    assert all(np.isfinite(a).all() for a in learner.policy.parameters().values())
    kind, found, _, place = first_wrong(learner, fault)
    assert (kind, found, place) == ("input", name, [0, row, seat])


@pytest.mark.parametrize("net", ["numpy", "native", "torch"])
def test_of_an_update_that_fails_in_the_middle_the_steps_before_stay(net):
    learner, sample = made(net)
    sample["log_prob"][spoilt_row(sample)] = np.nan
    fault = fault_of(learner, sample)
    done = int(learner.state()["adam.0.step"])
    assert 0 <= done < 4 * round(sample.trained().sum() / 8)
    assert np.isnan(fault.minibatch["scalars"][0]).sum() == 1
    before = {name: array.copy() for name, array in learner.policy.parameters().items()}
    kind, name, *_ = first_wrong(learner, fault)
    assert (kind, name) == ("input", "log_prob")
    for name, array in learner.policy.parameters().items():  # looking changes nothing
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("net", ["numpy", "native", "torch"])
def test_a_layer_that_overflows_is_named(net):
    learner, sample = made(net)
    learner.policy.parameters()["critic.weight"][...] = 3e38
    learner.policy.network.push()
    fault = fault_of(learner, sample)
    kind, name, *_ = first_wrong(learner, fault)
    assert kind == "layer"
    assert "critic" in name or "addmv" in name


@pytest.mark.parametrize("net", ["numpy", "native", "torch"])
def test_a_step_of_which_the_norm_alone_overflows_is_recorded(net):
    learner, sample = made(net, partial(PPO, value_coefficient=1e9, normalise_returns=False))
    sample["reward"][...] *= np.float32(1e13)
    fault = fault_of(learner, sample)
    assert "the gradient's norm is inf" in str(fault)
    assert first_wrong(learner, fault)[:2] == ("gradient", "norm")


@pytest.mark.parametrize("large", [100.0, 1000.0])
def test_a_temperature_that_explodes_leaves_steps_out(large):
    """Also where no float holds it."""
    learner = test_sac.learner_of()
    learner.log_temperature[:] = large
    fault = fault_of(learner, test_sac.sample_of())
    assert fault.stage == "critics"
    state = learner.state()
    assert all(np.isfinite(array).all() for array in state.values() if array.dtype.kind == "f")


@pytest.mark.parametrize(("module", "large"), [(test_sac, 1e18), (test_dqn, 1e30)])
def test_a_gradient_whose_norm_alone_overflows_is_named(module, large):
    learner, sample = module.learner_of(), module.sample_of()
    sample["obs"][0, 2] = large
    fault = fault_of(learner, sample)
    assert "norm inf" in str(fault)
    assert first_wrong(learner, fault)[:2] == ("gradient", "norm")


def test_weights_that_are_not_finite_are_named():
    learner, sample = made("numpy")
    learner.policy.parameters()["hidden.0.weight"][0, 1, 2] = np.nan
    assert first_wrong(learner, fault_of(learner, sample))[:2] == ("weights", "hidden.0.weight")


def test_an_observation_that_is_infinite_does_not_enter_what_normalises():
    net = ActorCritic(hidden=(8,), normalise_observations=True)
    learner = test_ppo.learner_of(net=net)
    sample = test_ppo.make_sample(learner.policy)
    sample["obs"][spoilt_row(sample)] = np.inf  # clipped to 10 before the network sees it
    fault = fault_of(learner, sample)
    assert fault.stage == "moments"
    assert np.isfinite(learner.policy.parameters()["observation.mean"]).all()
    assert first_wrong(learner, fault)[:2] == ("input", "obs")


def test_a_reward_that_is_not_finite_is_found_among_many_rows(monkeypatch):
    monkeypatch.setattr("tidemill.algorithms.policy_gradient_faults.LARGEST_RECORD", 400)
    learner = test_ppo.learner_of()
    sample = test_ppo.make_sample(learner.policy, T=200)
    row, seat = spoilt_row(sample)
    sample["reward"][row, seat] = np.nan
    fault = fault_of(learner, sample)
    assert len(fault.minibatch["reward"]) < 20
    kind, name, _, place = first_wrong(learner, fault)
    assert (kind, name, place) == ("input", "reward", [0, row, seat])


Q = {
    "dqn": (DQN(), QNetwork(hidden=(8,))),
    "noisy": (DQN(), QNetwork(hidden=(8,), noise=0.5, atoms=5)),
    "quantiles": (QRDQN(), QNetwork(hidden=(8,), quantiles=5)),
}


@pytest.mark.parametrize("case", sorted(Q))
def test_transitions_that_are_not_finite_change_nothing_and_are_found(case):
    learner = test_dqn.learner_of(*Q[case])
    sample = test_dqn.sample_of()
    sample["obs"][0, 2] = np.nan
    before = learner.state(), {n: a.copy() for n, a in learner.policy.parameters().items()}
    fault = fault_of(learner, sample)
    for name, array in learner.policy.parameters().items():
        np.testing.assert_array_equal(array, before[1][name])
    for name, array in learner.state().items():
        if name != "random":
            np.testing.assert_array_equal(array, before[0][name])
    assert first_wrong(learner, fault)[:3] == ("input", "obs", 2)


def learner_by(case):
    """Return a learner of `Q`, or DQN's, in numpy, or in the native core where that is
    built."""
    algorithm, net = Q.get(case, Q["dqn"])
    native = choices()[-1] if case.startswith("native") else "off"
    learner = test_dqn.learner_of(
        algorithm, net.replace(native=native, normalise_observations=case.endswith("normalised"))
    )
    assert learner._native is not None or native == "off"  # which a leg of continuous integration overrules
    return learner


@pytest.mark.parametrize("case", [*Q, "normalised", "native", "native, normalised"])
@pytest.mark.parametrize("large", [1e15, 1e30, 3e38, 1e300, np.inf])
def test_updates_of_huge_observations_warn_of_nothing(case, large):
    learner, sample, before = learner_by(case), test_dqn.sample_of(), np.geterr()
    for name in ("obs", "next.obs"):  # of 64 bits, of which the network takes 32
        sample[name] = np.full(sample[name].shape, large)
    with warnings.catch_warnings(), suppress(UpdateFault):
        warnings.simplefilter("error")
        learner.update([sample], 0)
    assert np.geterr() == before


@pytest.mark.parametrize("case", ["dqn", "native"])
def test_values_whose_sum_overflows_are_learnt_without_a_warning(case):
    learner, sample = learner_by(case), test_dqn.sample_of()
    learner.policy.flat[:] = 0
    learner.policy.parameters()["head.bias"][0] = 3e38
    sample["obs"][:] = sample["rewards"][:] = 0
    sample["rewards"][..., 0], sample["done"][:] = 3e38, True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert learner.update([sample], 0)["q/mean"] == np.inf


@pytest.mark.parametrize("module", [test_sac, test_td3])
@pytest.mark.parametrize(("field", "stage"), [("rewards", "critics"), ("obs", "critics")])
def test_critics_that_would_be_spoilt_stay_and_the_row_is_found(module, field, stage):
    learner, sample = module.learner_of(), module.sample_of()
    sample[field][0, 1] = np.nan
    fault = fault_of(learner, sample)
    assert fault.stage == stage
    state = learner.state()
    assert all(np.isfinite(array).all() for array in state.values() if array.dtype.kind == "f")
    assert first_wrong(learner, fault)[:3] == ("input", field, 1)


@pytest.mark.parametrize("module", [test_sac, test_td3])
def test_an_actor_that_would_be_spoilt_stays_while_its_critics_have_learnt(module, monkeypatch):
    learner, sample = module.learner_of(), module.sample_of()
    if module is test_td3:  # whose actor learns in each second update
        learner.update([sample], 0)
    before, told, forward = learner.state(), [], learner.critics.forward

    def spoilt(inputs):
        told.append(forward(inputs))
        if len(told) == 2:  # of the actor's own actions
            told[-1][...] = np.nan
        return told[-1]

    monkeypatch.setattr(learner.critics, "forward", spoilt)
    fault = fault_of(learner, sample)
    assert fault.stage == "actor"
    after = learner.state()
    steps = [(before[f"adam.{name}.0.step"], after[f"adam.{name}.0.step"]) for name in ("actor", "critics")]
    assert [int(now - was) for was, now in steps] == [0, 1]
    assert all(np.isfinite(array).all() for array in after.values() if array.dtype.kind == "f")
    kinds = {each.kind for each in learner.trace(fault.stage, fault.minibatch)}
    assert kinds == {"input", "weights", "layer", "loss", "gradient"}
