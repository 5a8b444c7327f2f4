"""Buffer workers: what they change, and that nothing is lost on the way."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.run.watching import EXPERIMENTS

from tidemill import ActorCritic, Buffers, Experiment, Limits, RandomShift, Reanalyse, Scripted, Trainer
from tidemill.algorithms.augmentation import shift
from tidemill.api.algorithm import Sample
from tidemill.api.policy import Policy
from tidemill.api.processing import Processor, ProcessorConfig
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.core.errors import ConfigError, RunError
from tidemill.core.source import load_file
from tidemill.run.session import train

experiments = load_file(EXPERIMENTS, "test")


@dataclass(frozen=True, kw_only=True)
class Add(ProcessorConfig):
    """Adds to every reward."""

    amount: float = 1.0

    def build(self, policy: Policy | None, seed: int) -> Processor:
        return _Add(self.amount)


class _Add(Processor):
    def __init__(self, amount: float) -> None:
        self._amount = amount

    def process(self, sample: Sample) -> None:
        sample["reward"] += self._amount


def gathered(folder: Path, buffers: dict[str, Buffers], launch: str, first: str) -> list[dict[str, np.ndarray]]:
    """Train two updates through the buffers and return the samples that arrived."""
    made: Experiment = experiments.experiment(Scripted(agents=2), algorithm=experiments.Recorder(record=str(folder / "sample")), batch_size=1)
    actor = made.workers["actor"]
    actor = actor.replace(agents=(actor.agents[0].replace(samples=first),))
    made = made.replace(workers={"actor": actor, **buffers, "trainer": made.workers["trainer"]}, limits=Limits(updates=4))
    train(made, launch=launch, run_dir=folder / "run", source=__file__, quiet=True)
    return [dict(np.load(folder / f"sample-{i}.npz")) for i in range(4)]


@pytest.mark.parametrize("launch", ["inline", "processes"])
def test_samples_pass_through_in_order_and_are_changed_on_the_way(tmp_path: Path, launch: str) -> None:
    for name in ("plain", "added"):
        (tmp_path / name).mkdir()
    chain = {
        "one": Buffers(samples="a", into="b", process=(Add(),)),
        "two": Buffers(samples="b", into="samples", process=(Add(amount=10.0), Add(amount=100.0))),
    }
    plain, added = gathered(tmp_path / "plain", {}, launch, "samples"), gathered(tmp_path / "added", chain, launch, "a")
    for before, after in zip(plain, added, strict=True):
        for name, array in before.items():
            np.testing.assert_array_equal(after[name], array + 111 if name == "reward" else array, err_msg=name)


def test_values_are_those_of_the_newest_policy() -> None:
    spaces = Spaces(Box((3,), "float32"), Discrete(2))
    policy = ActorCritic().build(spaces, 1)
    rng = np.random.default_rng(0)
    observation = rng.standard_normal((4, 2, 3)).astype(np.float32)
    value = np.full((4, 2), 7.0, np.float32)
    version = np.zeros((4, 2), np.int64)
    version[2, 1] = -1
    sample = Sample(
        {"obs": observation, "value": value, "version": version, "action": np.zeros((4, 2), np.int64), "log_prob": np.zeros((4, 2), np.float32)}
    )
    out = {"action": np.zeros(8, np.int64), "log_prob": np.zeros(8, np.float32), "value": np.zeros(8, np.float32)}
    policy.act({"obs": observation.reshape(8, 3)}, {}, True, out)
    Reanalyse().build(policy, 0).process(sample)
    expected = out["value"].reshape(4, 2).copy()
    expected[2, 1] = 7.0  # on which nothing acted
    np.testing.assert_allclose(sample["value"], expected, rtol=1e-6)
    assert not sample["action"].any()


def test_images_are_shifted_and_their_border_repeated() -> None:
    image = np.arange(9, dtype=np.uint8).reshape(1, 1, 3, 3)
    shift(image, np.array([[1, -1]]))
    np.testing.assert_array_equal(image[0, 0], [[1, 2, 2], [1, 2, 2], [4, 5, 5]])


def test_every_image_is_shifted_by_a_draw_of_its_own_and_nothing_else_is() -> None:
    pictures = np.zeros((2, 3, 40, 40, 3), np.uint8)
    pictures[:, :, 20, 20] = 255
    sample = Sample({"obs.picture": pictures, "obs.speed": np.ones((2, 3, 4), np.float32)})
    RandomShift(pixels=2).build(None, 3).process(sample)
    places = {tuple(np.argwhere(picture[..., 0])[0]) for picture in pictures.reshape(6, 40, 40, 3)}
    assert len(places) > 1 and all(18 <= place <= 22 for pair in places for place in pair)
    assert (sample["obs.speed"] == 1).all() and pictures.sum() == 6 * 3 * 255


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="Reanalyse needs a policy"):
        Buffers(process=(Reanalyse(),))
    made = experiments.experiment(Scripted())
    ring = {"one": Buffers(samples="samples", into="b", process=()), "two": Buffers(samples="b", into="samples", process=())}
    actor = made.workers["actor"]
    silent = actor.replace(agents=(actor.agents[0].replace(samples=None),))
    looped = made.replace(workers={**made.workers, "actor": silent, **ring})
    with pytest.raises((ConfigError, RunError)):
        train(looped, launch="inline", quiet=True)


def test_a_trainer_behind_buffers_takes_as_many_samples_as_actors_fill(tmp_path: Path) -> None:
    made: Experiment = experiments.experiment(Scripted(), algorithm=experiments.Recorder(record=str(tmp_path / "sample")))
    actor = made.workers["actor"].replace(count=2, ring=2)
    actor = actor.replace(agents=(actor.agents[0].replace(samples="gathered"),))
    workers = {"actor": actor, "buffers": Buffers(process=()), "trainer": made.workers["trainer"]}
    train(made.replace(workers=workers, limits=Limits(updates=2)), launch="inline", run_dir=tmp_path / "run", quiet=True)
    assert len(list(tmp_path.glob("sample-*.npz"))) == 2 * 4
    assert isinstance(made.workers["trainer"], Trainer)
