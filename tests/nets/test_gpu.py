"""What a real GPU answers and learns is what the processor does. All of it needs one, and
is left out where there is none; what can be said of devices without one is in
test_choose_device.py and algorithms/test_device.py."""

import gc
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tests.algorithms.test_ppo import NET, SPACES, make_sample
from tests.nets.test_actor_critic import ACTIONS, OBSERVATIONS, VECTOR, act, draw, evaluate, stir

import tidemill
from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    Limits,
    PolicyWorkers,
    RecurrentActorCritic,
    Trainer,
)
from tidemill.algorithms.array_library import Library
from tidemill.algorithms.impala import Impala
from tidemill.algorithms.torch_library import TorchLibrary
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.core.errors import RunError
from tidemill.core.schema import Arrays, allocate
from tidemill.metrics.json_lines import read_metrics

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
GPU = "cuda:0"
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
ROUGH: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2}  # products of 10 bits (TF32) in convolutions


def twice(config: Any, spaces: Spaces) -> tuple[Any, Any]:
    """The same policy on the processor and on the GPU."""
    plain, other = config.to_play().build(spaces, 0), config.build_on(GPU, spaces, 0)
    stir(plain)
    other.load(plain.parameters(), 3)
    return plain, other


def same(found: Arrays, expected: Arrays, close: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, err_msg=name, **close)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_batches_of_any_size_are_answered_as_on_the_processor(observation: str, action: str) -> None:
    spaces, config = Spaces(OBSERVATIONS[observation], ACTIONS[action]), ActorCritic(convolutions="float32")
    plain, other = twice(config, spaces)
    close = ROUGH if plain.encoder.images else CLOSE
    for n in (5, 1, 8, 9, 300, 2, 33):
        seen = draw(spaces.observation, n)
        same(act(other, config, spaces, seen, True), act(plain, config, spaces, seen, True), close)
        drawn = act(other, config, spaces, seen)
        found = evaluate(plain, seen, drawn["action"])
        np.testing.assert_allclose(drawn["log_prob"], found.log_prob.detach(), **close)


def test_batches_under_way_do_not_disturb_each_other() -> None:
    spaces, config = Spaces(VECTOR, Discrete(4)), ActorCritic(hidden=(64, 64))
    plain, other = twice(config, spaces)
    rng, ends, outs, seen = np.random.default_rng(0), list[Any](), list[Arrays](), list[Arrays]()
    for k in range(200):
        seen.append(draw(VECTOR, int(rng.integers(1, 70)), seed=k))
        outs.append(allocate(config.answer(spaces), (len(seen[-1]["obs"]),)))
        if len(ends) == 2:
            ends.pop(0)()
        ends.append(other.begin(seen[-1], {}, True, outs[-1]))
    for end in ends:
        end()
    for given, out in zip(seen, outs, strict=True):
        same(out, act(plain, config, spaces, given, True), CLOSE)


def test_weights_that_are_loaded_are_those_that_answer_next() -> None:
    spaces, config = Spaces(OBSERVATIONS["frames"], Discrete(4)), ActorCritic(convolutions="float32")
    plain, other = twice(config, spaces)
    seen = draw(spaces.observation, 20)
    for version in range(4, 8):
        stir(plain, 0.1)
        other.load({name: array.copy() for name, array in plain.parameters().items()}, version)
        same(act(other, config, spaces, seen, True), act(plain, config, spaces, seen, True), ROUGH)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_memory_is_handed_on(cell: str) -> None:
    spaces, config = Spaces(VECTOR, Discrete(4)), RecurrentActorCritic(cell=cell)
    plain, other = twice(config, spaces)
    states = [allocate(config.state(spaces), (9,)) for _ in range(2)]
    for k in range(5):
        outs = [allocate({**config.answer(spaces), **config.state(spaces)}, (9,)) for _ in range(2)]
        for policy, state, out in zip((plain, other), states, outs, strict=True):
            policy.act(draw(VECTOR, 9, seed=k), state, True, out)
            for name in state:
                state[name][...] = out[name]
        same(outs[1], outs[0], CLOSE)


UPDATES = {
    "plain": PPO(minibatch_size=8, learning_rate=1e-2),
    "all terms": PPO(minibatch_size=8, learning_rate=1e-2, entropy_coefficient=0.02, clip_value=0.1),
    "apart": PPO(minibatch_size=8, learning_rate=1e-2, max_gradient_norm=0.05, clip_apart=True),
    "stops": PPO(minibatch_size=8, learning_rate=1e-2, target_kl=0.01),
    "impala": Impala(learning_rate=1e-2),
}


@pytest.mark.parametrize("name", UPDATES)
def test_updates_are_those_of_the_processor_and_go_on_there(name: str) -> None:
    net = ActorCritic(hidden=(8, 8), normalise_observations=True)
    plain, other = (UPDATES[name].build(policy, 0) for policy in twice(net, SPACES))
    for update in range(4):
        sample = make_sample(NET.build(SPACES, 0), seed=update)
        metrics = [learner.update([sample], 0.0) for learner in (plain, other)]
        for key, value in metrics[0].items():
            assert metrics[1][key] == pytest.approx(value, rel=1e-3, abs=1e-4), key
        same(other.policy.parameters(), plain.policy.parameters(), CLOSE)
    resumed = UPDATES[name].build(net.build(SPACES, 1), 0)
    resumed.policy.load(other.policy.parameters(), 5)
    resumed.load_state(other.state())
    sample = make_sample(NET.build(SPACES, 0), seed=9)
    for learner in (other, resumed):
        learner.update([sample], 0.0)
    same(resumed.policy.parameters(), other.policy.parameters(), CLOSE)


IMAGES = Spaces(Box((4, 84, 84), "uint8", (0.0,), (255.0,)), Discrete(3))
RECORDED = {
    "small": (SPACES, NET, {}),
    "wide": (SPACES, ActorCritic(hidden=(256, 256)), {"max_gradient_norm": 0.1, "clip_apart": True}),
    "by minibatch": (SPACES, NET, {"normalise_advantages": "minibatch"}),
    "images": (IMAGES, ActorCritic(convolutions="float32"), {}),
}


@pytest.mark.parametrize("case", RECORDED)
def test_updates_that_were_recorded_are_those_step_by_step(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces, net, settings = RECORDED[case]
    learners = [
        PPO(minibatch_size=20, learning_rate=1e-3, **settings).build(net.build_on(GPU, spaces, 0), 0)
        for _ in range(2)
    ]
    replays, replay = list[int](), torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(1), replay(graph))[1])
    reserved = list[int]()
    for update in range(12):
        sample = make_sample(NET.build(SPACES, 0), T=40, N=8, seed=update)
        if spaces is IMAGES:
            del sample["obs"]
            sample["obs"] = (
                np.random.default_rng(update).integers(0, 256, (40, 8, 4, 84, 84)).astype(np.uint8)
            )
        metrics = []
        for learner, recorded in zip(learners, (True, False), strict=True):
            with monkeypatch.context() as patch:
                if not recorded:
                    patch.setattr(TorchLibrary, "recorded", lambda library, step: None)
                before = len(replays)
                metrics.append(learner.update([sample], 0.0))
                assert (len(replays) > before + 10) == recorded
        assert metrics[0].keys() == metrics[1].keys()
        for key, value in metrics[1].items():
            assert metrics[0][key] == pytest.approx(value, rel=1e-2, abs=1e-3), key
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[3]
    close = ROUGH if spaces is IMAGES else CLOSE
    same(learners[0].policy.parameters(), learners[1].policy.parameters(), close)


def test_garbage_that_has_recordings_does_not_spoil_another_one() -> None:
    spaces, config = Spaces(VECTOR, Discrete(4)), ActorCritic(hidden=(8,))
    plain, other = twice(config, spaces)
    expected = act(plain, config, spaces, draw(VECTOR, 20), True)
    thresholds = gc.get_threshold()
    try:
        for _ in range(10):
            gone = config.build_on(GPU, spaces, 0)
            act(gone, config, spaces, draw(VECTOR, 20), True)
            gone.itself = gone  # only a collection frees it
            del gone
            gc.set_threshold(1, 1, 1)
            other = config.build_on(GPU, spaces, 0)
            other.load(plain.parameters(), 3)
            same(act(other, config, spaces, draw(VECTOR, 20), True), expected, CLOSE)
            gc.set_threshold(*thresholds)
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled()


def test_images_arrive_from_page_locked_memory_as_from_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    learners = [
        PPO(minibatch_size=40, learning_rate=1e-3).build(
            ActorCritic(convolutions="float32").build_on(GPU, IMAGES, 0), 0
        )
        for _ in range(2)
    ]
    for update in range(6):
        # of as many rows as it happens, so that page-locked memory is taken again
        sample = make_sample(NET.build(SPACES, 0), T=10 + 7 * (update % 3), N=8, seed=update)
        rng = np.random.default_rng(update)
        sample["obs"] = rng.integers(0, 256, (*sample["done"].shape, 4, 84, 84)).astype(np.uint8)
        learners[0].update([sample], 0.0)
        with monkeypatch.context() as patch:
            patch.setattr(TorchLibrary, "host_empty", Library.host_empty)
            learners[1].update([sample], 0.0)
    same(learners[1].policy.parameters(), learners[0].policy.parameters(), CLOSE)


def test_a_loss_that_waits_for_the_gpu_is_not_recorded() -> None:
    learners = [UPDATES["plain"].build(NET.build_on(GPU, SPACES, 0), 0) for _ in range(2)]
    plain = learners[1].loss.of_policy
    learners[1].loss.of_policy = lambda *given: (plain(*given), given[0].sum().item())[0]
    for update in range(3):
        sample = make_sample(NET.build(SPACES, 0), T=40, N=8, seed=update)
        for learner in learners:
            learner.update([sample], 0.0)
    same(learners[1].policy.parameters(), learners[0].policy.parameters(), CLOSE)


def test_a_step_that_is_not_finite_is_left_out_with_all_that_follow_it() -> None:
    learners = [UPDATES["plain"].build(policy, 0) for policy in twice(NET, SPACES)]
    spoilt = make_sample(NET.build(SPACES, 0), seed=1)
    spoilt["log_prob"][2:4] = np.nan
    for learner in learners:
        learner.update([make_sample(NET.build(SPACES, 0))], 0.0)
        with pytest.raises(RunError, match="loss/policy is nan"):
            learner.update([spoilt], 0.0)
    plain, other = (learner.policy.parameters() for learner in learners)
    same(other, plain, CLOSE)
    learners[1].update([make_sample(NET.build(SPACES, 0), seed=2)], 0.0)
    assert all(np.isfinite(array).all() for array in other.values())


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("launch", ["inline", "threads", "processes"])
def test_a_run_trains_and_acts_there(tmp_path: Path, launch: str, threaded: bool) -> None:
    spec = AgentSpec(sample_steps=64, inference="inference")
    made = Experiment(
        name="gpu",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(environment=Gymnasium(id="CartPole-v1"), lanes=32, ring=2, agents=(spec,)),
            "policy": PolicyWorkers(device="cuda", threaded=threaded),
            "trainer": Trainer(
                algorithm=PPO(minibatch_size=512, learning_rate=3e-3, normalise_returns=True), device="cuda"
            ),
        },
        limits=Limits(updates=40),
    )
    result = tidemill.train(made, run_dir=tmp_path / "run", launch=launch, layout="given", quiet=True)
    assert (result.summary["status"], result.summary["updates"]) == ("completed", 40)
    returns = [row["return/mean"] for row in read_metrics(tmp_path / "run") if "return/mean" in row]
    assert np.mean(returns[-5:]) > 2 * np.mean(returns[:3])


@pytest.mark.parametrize(("convolutions", "close"), [("float32", 0.02), ("bfloat16", 0.1)])
def test_images_are_answered_in_either_type(
    convolutions: Literal["float32", "bfloat16"], close: float
) -> None:
    spaces = Spaces(Box((4, 84, 84), "uint8", (0.0,), (255.0,)), Discrete(6))
    config = ActorCritic(convolutions=convolutions)
    plain, other = config.build(spaces, 0), config.build_on(GPU, spaces, 0)
    seen = draw(spaces.observation, 64)
    answers = [act(policy, config, spaces, seen, True) for policy in (other, plain)]
    for name in ("value", "log_prob"):
        np.testing.assert_allclose(answers[0][name], answers[1][name], atol=close)
