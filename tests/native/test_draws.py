"""Draws from a replay memory by the native core: numpy's, in every bit."""

import numpy as np
import pytest
from tests.replay.arrivals import Play

from tidemill.replay import replay
from tidemill.replay.native_draws import NativeSequences
from tidemill.replay.prioritised import PrioritisedReplay
from tidemill.replay.replay import Replay


def played(config, stack, seed):
    """A memory that seats have filled and wrapped, and batches that were drawn
    meanwhile."""
    play, rng = Play(config, seats=(2, 1), batch=32, stack=stack), np.random.default_rng(seed)
    batches = []
    for _ in range(120):
        whats = rng.choice(["step"] * 8 + ["done", "cut", "lost", "away"], 3)
        play.tick(int(rng.integers(2)), *whats)
        if play.buffer.sampleable:
            (held,) = play.buffer.take(0)
            held.sample["priority"][0] = rng.random(32)
            batches.append({name: array.copy() for name, array in held.sample.items()})
            batches[-1] |= {"oldest": held.oldest, "stamps": held.stamps}
            play.buffer.release()
    return play, batches


@pytest.mark.parametrize("kind", [Replay, PrioritisedReplay])
@pytest.mark.parametrize(("steps", "stack", "whole"), [(1, 1, False), (3, 1, True), (2, 3, False)])
def test_batches_are_numpy_s_in_every_bit(kernels, monkeypatch, kind, steps, stack, whole):
    config = kind(capacity=3 * 24, warm_up=1, steps=steps, frame_stack=stack, whole_episodes=whole)
    found = []
    for chosen in (None, kernels):
        monkeypatch.setattr(replay, "asked_for", lambda setting, chosen=chosen: chosen)
        play, batches = played(config, stack, 7)
        assert isinstance(play.buffer.sequences, NativeSequences) == (chosen is not None)
        assert len(batches) > 80 and (play.buffer.sequences.heads > 24).any()
        found.append(batches)
    for plain, native in zip(*found, strict=True):
        assert [*plain] == [*native]
        for name, array in plain.items():
            np.testing.assert_array_equal(native[name], array, err_msg=name, strict=True)


def test_where_hardly_a_row_begins_a_transition_the_last_ones_are_chosen_alike(kernels):
    heads, found = [np.int64(3), np.int64(0), np.int64(400)], []
    for made in (replay.Sequences, lambda *settings: NativeSequences(kernels, *settings)):
        sequences = made(3, 300, 1, 1, False, False, None)
        sequences.heads[:] = heads
        sequences.span[[1, 777]] = 1
        found.append(sequences.draw(50, np.random.default_rng(0)))
    np.testing.assert_array_equal(*found)
    assert {*found[0].tolist()} == {1, 777}
