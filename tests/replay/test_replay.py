"""The replay: what may be drawn, how likely, within how much memory, and the same again
after a restore."""

import os
import re
import stat
import sys
from collections import Counter
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.replay.arrivals import Play

from tidemill.api.spaces import Box
from tidemill.core.errors import CheckpointError, ConfigError, SchemaError
from tidemill.core.memory import own_bytes
from tidemill.core.schema import Field
from tidemill.envs.frame_stack import stacked
from tidemill.replay.priorities import BlockSums
from tidemill.replay.prioritised import PrioritisedReplay
from tidemill.replay.replay import Replay
from tidemill.replay.row_storage import frames_of

BEFALLS = st.sampled_from(["step"] * 6 + ["done", "cut", "lost", "anew", "away"])
KINDS = [Replay, PrioritisedReplay]


def drawn(batch):
    """The transitions of a batch, by seat, episode and step."""
    return {tuple(code) for code in batch["obs"].reshape(len(batch["obs"]), -1)[:, -3:].tolist()}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(
    life=st.lists(
        st.tuples(st.integers(0, 1), st.lists(BEFALLS, min_size=3, max_size=3)), min_size=1, max_size=150
    ),
    steps=st.integers(1, 4),
    stack=st.integers(1, 3),
    whole=st.booleans(),
    blank=st.booleans(),
    drop=st.booleans(),
)
def test_episodes_and_seats_never_mix(kind, life, steps, stack, whole, blank, drop):
    config = kind(
        capacity=3 * 16, warm_up=1, steps=steps, frame_stack=stack, whole_episodes=whole, drop_cut=drop
    )
    play = Play(config, seats=(2, 1), stack=stack, blank=blank)
    written = [0, 0]
    for producer, whats in life:
        received = play.tick(producer, *whats)
        written[0] += received.committed
        written[1] += received.voided
        if play.buffer.sampleable:
            play.check(steps)
    assert written[0] == sum(seat_steps(play, life))
    assert play.buffer.sequences.count == np.count_nonzero(play.buffer.sequences.span)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="own_bytes reads /proc")
@pytest.mark.parametrize("kind", KINDS)
def test_it_tells_how_much_of_its_own_memory_is_still_to_be_filled(kind):
    play = Play(kind(capacity=1 << 23, warm_up=8))
    shared, own = play.buffer.needs
    assert shared.shared and not own.shared and play.buffer.unfilled == own.nbytes > 0
    before = own_bytes(os.getpid())
    for array in play.buffer._store.arrays.values():
        array[...] = 1
    assert own_bytes(os.getpid()) - before < shared.nbytes / 10
    sequences = play.buffer.sequences
    sequences.heads[:] = sequences.length // 2
    assert play.buffer.unfilled == own.nbytes // 2
    sequences.heads[:] = 2 * sequences.length
    assert play.buffer.unfilled == 0


def seat_steps(play, life):
    """The steps that each seat has made, from its life alone."""
    for producer, group in enumerate(play.seats):
        for i in range(len(group)):
            is_open, steps = False, 0
            for at, whats in life:
                what = whats[min(i, 2)]
                if at != producer or what == "away":
                    continue
                steps += is_open and what not in ("lost", "anew")
                is_open = what in ("step", "anew") or (not is_open and what != "lost")
            yield steps


@pytest.mark.parametrize("kind", KINDS)
def test_without_warm_up_the_first_transition_makes_a_batch(kind):
    play = Play(kind(capacity=64, warm_up=0, drop_cut=True), batch=32)
    play.tick(0, "step")  # an episode begins: nothing was done yet
    assert not play.buffer.sampleable and play.buffer.take(0) is None
    play.tick(0, "step")
    (held,) = play.buffer.take(0)
    assert play.buffer.sampleable and held.rows == 32 and (held.sample["steps"] == 1).all()
    assert len(np.unique(held.sample["obs"].reshape(32, -1), axis=0)) == 1
    play.buffer.release()
    play.tick(0, "lost")  # and what is there stays, so that there is something to draw
    assert play.buffer.take(1) is not None
    with pytest.raises(ConfigError, match="warm_up = -1 must be at least 0"):
        kind(capacity=64, warm_up=-1)


@pytest.mark.parametrize(("lost", "after"), [("lost", 3), ("anew", 2)])
def test_every_transition_is_drawn_and_no_other(lost, after):
    play = Play(Replay(capacity=64, warm_up=8))
    for what in ["step"] * 5 + ["done"] + ["step"] * 4 + [lost] + ["step"] * after:
        play.tick(0, what)
    # episode 0: rows 0 to 5; episode 1: rows 0 to 3, cut; episode 2: rows 0 to 2, open
    batch = play.draw(transitions=400)
    assert drawn(batch) == {(0, 0, i) for i in range(5)} | {(0, 1, i) for i in range(3)} | {
        (0, 2, i) for i in range(2)
    }
    ends = {tuple(obs): done for obs, done in zip(batch["next.obs"].tolist(), batch["done"], strict=True)}
    # what was lost is no end: its value counts
    assert ends[0, 0, 5] and not ends[0, 1, 3] and not ends[0, 2, 2]


def test_windows_at_an_end_are_shorter_and_open_ones_wait():
    play = Play(Replay(capacity=64, warm_up=1, steps=3))
    for _ in range(5):
        play.tick(0, "step")
    assert drawn(play.draw(transitions=100)) == {(0, 0, 0), (0, 0, 1)}  # rows 0 to 4
    play.tick(0, "done")
    batch = play.draw(transitions=400)
    assert {
        obs[2]: steps for obs, steps in zip(batch["obs"].tolist(), batch["steps"].tolist(), strict=True)
    } == {0: 3, 1: 3, 2: 3, 3: 2, 4: 1}


def test_what_a_lost_step_cuts_off_can_be_drawn_at_once():
    play = Play(Replay(capacity=64, warm_up=1, steps=3))
    for what in ["step"] * 5 + ["lost"]:
        play.tick(0, what)
    assert drawn(play.check(3, transitions=200)) == {(0, 0, i) for i in range(4)}


def test_draws_are_uniform():
    play = Play(Replay(capacity=200, warm_up=1), seats=(2, 2), batch=200)
    for i in range(70):  # the lanes are full; seat 3 has short episodes
        for producer in (0, 1):
            play.tick(producer, "step", "done" if i % 3 == 2 and producer else "step")
    found = Counter(map(tuple, play.draw(transitions=20_000)["obs"].tolist()))
    expected = 20_000 / play.buffer.sequences.count
    assert len(found) == play.buffer.sequences.count
    assert max(abs(n - expected) for n in found.values()) < 6 * expected**0.5


def test_whole_episodes_count_when_they_are_over():
    play = Play(Replay(capacity=64, warm_up=1, whole_episodes=True))
    for _ in range(10):
        play.tick(0, "step")
    assert not play.buffer.sampleable and play.buffer.take(0) is None
    play.tick(0, "done")
    assert drawn(play.draw(transitions=300)) == {(0, 0, i) for i in range(10)}


def test_an_episode_that_outgrows_its_lane_counts_all_the_same():
    """Else a replay that was sampleable could become empty, and everybody would wait for
    it."""
    play = Play(Replay(capacity=20, warm_up=1, whole_episodes=True, frame_stack=2), stack=2)
    for _ in range(100):
        play.tick(0, "step")
    assert play.buffer.sampleable and play.buffer.sequences.count >= 15
    play.check(1)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_over_takes_along_what_needs_it(kind, whole):
    """Lanes go round and round; episodes shorter and longer than they are."""
    play = Play(
        kind(capacity=36, warm_up=1, steps=2, frame_stack=3, whole_episodes=whole),
        seats=(1, 1),
        batch=32,
        stack=3,
    )
    for i in range(150):
        for producer, length in ((0, 5), (1, 29)):
            play.tick(producer, "done" if i % length == length - 1 else "step")
        if play.buffer.sampleable:
            play.check(2, transitions=100)


def test_the_episode_after_one_that_outgrew_its_lane_counts_as_a_whole_again():
    play = Play(Replay(capacity=20, warm_up=1, whole_episodes=True))
    for _ in range(40):
        play.tick(0, "step")
    play.tick(0, "done")
    for _ in range(5):
        play.tick(0, "step")
    assert {episode for _, episode, _ in drawn(play.draw(transitions=200))} == {0}
    play.tick(0, "done")
    assert {episode for _, episode, _ in drawn(play.draw(transitions=200))} == {0, 1}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_episode_that_is_dropped_is_as_if_it_had_never_been(kind, whole):
    """Those that come to an end, and those that a time limit cuts, stay; also where rows
    lie, and what is drawn."""
    config = kind(capacity=60, warm_up=4, steps=3, whole_episodes=whole, drop_cut=True)
    whats = ["step"] * 6 + ["done"] + ["step"] * 5 + ["cut"]
    play, without = Play(config), Play(config)
    for i, what in enumerate(whats):
        for each in (play, without):
            each.tick(0, what)
        if what != "step":  # an attempt that fails after i steps
            seat = play.seats[0][0]
            for _ in range(i + 1):
                assert play.tick(0, "step").voided == 0
            assert play.tick(0, "lost").voided == 1
            seat.episode -= 1
    for _ in range(5):
        play.tick(0, "step")
        without.tick(0, "step")
    play.seats[0][0].open = False  # as after a resume; the next row begins an episode
    without.tick(0, "lost")
    for _ in range(6):
        play.tick(0, "step")
        without.tick(0, "step")
    assert play.buffer.sequences.count == without.buffer.sequences.count > 8
    assert (play.buffer.sequences.heads == without.buffer.sequences.heads).all()
    here, there = play.check(3, transitions=100), without.draw(transitions=100)
    for name in here:
        if "obs" not in name and name not in ("action", "rewards"):  # which tell the episode's number
            np.testing.assert_array_equal(here[name], there[name])
    assert {episode for _, episode, _ in drawn(here)} == ({0, 1} if whole else {0, 1, 3})


def test_an_episode_stays_that_is_needed_to_draw_from():
    play = Play(Replay(capacity=60, warm_up=4, drop_cut=True))
    for _ in range(4):
        play.tick(0, "step")
    play.tick(0, "lost")
    assert play.buffer.sequences.count == 0 and not play.buffer.sampleable  # nobody draws yet
    for _ in range(8):
        play.tick(0, "step")
    assert play.buffer.sampleable
    play.tick(0, "lost")
    assert play.buffer.sequences.count == 7 and {
        episode for _, episode, _ in drawn(play.check(1, transitions=50))
    } == {1}


def test_a_lane_whose_longest_episode_was_dropped_is_saved_as_it_is(tmp_path):
    config = Replay(capacity=40, warm_up=2, drop_cut=True)
    play = Play(config)
    for what in ["step"] * 4 + ["done"] + ["step"] * 30 + ["lost"] + ["step"] * 3:
        play.tick(0, what)
    save(play, tmp_path / "one")
    other = Play(config)
    other.buffer.restore(tmp_path / "one")
    save(other, tmp_path / "two")
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name
    assert np.load(tmp_path / "one" / "row.obs.npy").shape[1] == 5 + 30


@settings(max_examples=60)
@given(
    st.lists(st.lists(BEFALLS, min_size=2, max_size=2), min_size=120, max_size=200),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
def test_a_full_lane_always_holds_a_transition(life, steps, stack, whole, drop):
    capacity = 2 * (2 * (steps + stack) + 2)
    config = Replay(
        capacity=capacity, warm_up=1, steps=steps, frame_stack=stack, whole_episodes=whole, drop_cut=drop
    )
    play = Play(config, (2,), stack=stack)
    for whats in life:
        play.tick(0, *whats)
        assert not play.buffer.sampleable or play.buffer.sequences.count > 0


def test_a_slot_that_keeps_failing_does_not_push_out_what_others_and_it_itself_have_done():
    play = Play(Replay(capacity=40, warm_up=1))
    for _ in range(20):
        play.tick(0, "step")
    play.tick(0, "lost")
    before = play.buffer.sequences.count
    for _ in range(100):  # a reset that works, and a step that does not
        play.tick(0, "step")
        assert play.tick(0, "lost").voided == 1
    assert play.buffer.sequences.count == before


def test_an_episode_that_a_resume_leaves_open_is_cut():
    play = Play(Replay(capacity=40, warm_up=1, steps=3))
    for _ in range(6):
        play.tick(0, "step")
    play.seats[0][0].open = False
    for _ in range(2):
        play.tick(0, "step")
    batch = play.check(3, transitions=200)
    assert drawn(batch) == {(0, 0, i) for i in range(5)}
    assert not batch["done"].any()


def test_returns_of_finished_episodes_are_told():
    play = Play(Replay(capacity=40, warm_up=1))
    assert [play.tick(0, what).returns for what in ("step", "step", "done")] == [(), (), (2.0,)]


# ---- priorities ------------------------------------------------------------------------


@settings(max_examples=50)
@given(st.integers(1, 3000), st.integers(0, 2**32))
def test_what_is_found_is_what_a_running_sum_of_all_numbers_finds(size, seed):
    rng = np.random.default_rng(seed)
    sums, plain = BlockSums(size), np.zeros(size)
    for _ in range(3):
        places = rng.integers(size, size=min(size, 50))
        plain[places] = rng.integers(0, 4, len(places))  # whole numbers: exact whatever the order of adding
        sums.set(places, plain[places])
    if plain.any():
        shares, running = np.append(rng.random(100), [0.0, np.nextafter(1, 0), 1.0]), np.cumsum(plain)
        places, chances = sums.find(shares)
        assert (places[:-1] == np.searchsorted(running, shares[:-1] * running[-1], side="right")).all()
        assert places[-1] == plain.nonzero()[0][-1]
        assert (chances == plain[places] / running[-1]).all()


@settings(max_examples=50)
@given(st.integers(1, 30_000), st.integers(0, 2**32))
def test_what_is_found_follows_from_the_numbers_to_the_last_bit_whatever_they_were_before(size, seed):
    rng = np.random.default_rng(seed)
    changed, fresh = BlockSums(size), BlockSums(size)
    changed.set(np.arange(size), rng.random(size))
    for _ in range(20):
        places = rng.integers(size, size=rng.integers(1, 70))
        changed.set(places, rng.random(len(places)) * 10.0 ** rng.integers(-12, 12, len(places)))
    fresh.refill(changed.numbers)
    shares = rng.random(1000)
    for one, other in zip(changed.find(shares), fresh.find(shares), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(("size", "reach"), [(5000, 5000), (100_000, 30)])
def test_a_number_of_nothing_is_never_found(size, reach):
    rng = np.random.default_rng(0)
    for _ in range(30):
        sums = BlockSums(size)
        places = np.sort(rng.choice(np.arange(1, reach), 20, replace=False))
        sums.set(places, rng.random(20) * 10.0 ** rng.integers(-12, 3, 20))
        running = np.cumsum(sums.numbers[places])
        edges = running / running[-1]  # rounding may lead behind what is meant
        for shares in (
            edges,
            np.nextafter(edges, 0),
            np.minimum(np.nextafter(edges, 2), 1),
            rng.random(1000),
        ):
            assert np.isin(sums.find(shares)[0], places).all()


def test_each_place_is_found_in_proportion_to_its_number():
    rng = np.random.default_rng(0)
    numbers = rng.permutation(np.repeat([0.0, 1.0, 2.0, 5.0], 250)) * 1e-3
    sums = BlockSums(len(numbers))
    for first in range(0, 1000, 50):  # in parts, some of them changed again
        places = np.arange(first, first + 50)
        sums.set(places[::2], 7.0)
        sums.set(places, numbers[places])
    places, chances = sums.find(rng.random(400_000))
    expected = numbers / numbers.sum()
    np.testing.assert_allclose(chances, expected[places], rtol=1e-12)
    found = np.bincount(places, minlength=1000)
    deviation = (found - 400_000 * expected)[numbers > 0] / np.sqrt(400_000 * expected[numbers > 0])
    assert found[numbers == 0].sum() == 0
    assert abs((deviation**2).sum() - 749) < 5 * np.sqrt(2 * 749)  # chi squared with 749 degrees of freedom


def test_what_was_far_off_is_drawn_and_weighs_as_the_paper_says():
    play = Play(PrioritisedReplay(capacity=64, warm_up=1, alpha=0.5, beta=0.4, beta_updates=10), batch=64)
    for _ in range(11):
        play.tick(0, "step")
    (held,) = play.buffer.take(0)
    assert drawn({"obs": held.sample["obs"][0]}) == {(0, 0, i) for i in range(10)}
    off = held.sample["obs"][0, :, 2] + 1  # 1 to 10
    held.sample["priority"][0] = off
    play.buffer.release()
    batch = play.draw(version=5, transitions=20_000)
    share = np.sqrt(np.arange(1, 11)) / np.sqrt(np.arange(1, 11)).sum()
    found = np.bincount(batch["obs"][:, 2].astype(int), minlength=10) / len(batch["obs"])
    assert np.abs(found - share).max() < 1e-3  # draws are stratified
    beta = 0.4 + 0.6 * 5 / 10
    weight = (10 * share) ** -beta
    np.testing.assert_allclose(
        batch["weight"], (weight / weight.max())[batch["obs"][:, 2].astype(int)], rtol=1e-6
    )
    play.tick(0, "step")  # a new one is as likely as the likeliest
    new = (play.draw(transitions=20_000)["obs"][:, 2] == 10).mean()
    assert abs(new - np.sqrt(10) / (np.sqrt(np.arange(1, 11)).sum() + np.sqrt(10))) < 1e-3


def test_a_priority_is_not_given_to_what_was_written_over_meanwhile():
    play = Play(PrioritisedReplay(capacity=10, warm_up=1))
    for _ in range(10):
        play.tick(0, "step")
    (held,) = play.buffer.take(0)
    held.sample["priority"][...] = 1e6
    for _ in range(10):
        play.tick(0, "step")
    play.buffer.release()
    assert play.buffer._priorities.greatest == 1.0


def test_an_algorithm_without_priorities_leaves_them_as_they_are():
    play = Play(PrioritisedReplay(capacity=64, warm_up=1))
    for _ in range(10):
        play.tick(0, "step")
    play.draw()
    assert (play.buffer._priorities.powers.numbers[play.buffer.sequences.span > 0] == 1).all()


@pytest.mark.parametrize(("field", "gone"), [("reward", {4}), ("obs", {4, 5})])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_so_large_that_it_spoils_updates_is_not_drawn_again(kind, field, gone, tmp_path):
    play = Play(kind(capacity=64, warm_up=6), batch=64)
    for _ in range(10):
        play.tick(0, "step")
    everything = {(0, 0, i) for i in range(9)}
    assert drawn(play.draw(transitions=400)) == everything
    play.buffer.take(0)
    assert play.buffer.forget_large() == 0
    play.buffer._store.arrays[field][5] = 1e30  # is the end of the transition that begins in row 4
    play.buffer.take(0)
    assert play.buffer.forget_large() == len(gone)
    play.buffer.release()
    left = everything - {(0, 0, i) for i in gone}
    assert drawn(play.draw(transitions=400)) == left
    save(play, tmp_path / "saved")
    again = Play(kind(capacity=64, warm_up=6), batch=64)
    again.tick(0, "step")
    again.buffer.restore(tmp_path / "saved")
    assert again.buffer.sequences.count == len(left)


def test_where_all_is_so_large_enough_stays_to_draw_from():
    play = Play(Replay(capacity=64, warm_up=6), batch=64)
    for _ in range(10):
        play.tick(0, "step")
    play.buffer._store.arrays["reward"][:] = 1e30
    play.buffer.take(0)
    assert play.buffer.forget_large() == 0
    assert play.buffer.sequences.count == 9


# ---- saved and restored ----------------------------------------------------------------


def make(kind=Replay, **settings):
    return Play(
        kind(**{"capacity": 40, "warm_up": 3, "steps": 2, "frame_stack": 2, **settings}),
        seats=(1, 1),
        stack=2,
    )


def live(play, start, end):
    """Let both seats play on, and return the batches that were drawn meanwhile."""
    batches = []
    for i in range(start, end):
        for producer in (0, 1):
            play.tick(producer, "done" if i % (6 + producer) == 5 else "step")
        if play.buffer.sampleable:
            (held,) = play.buffer.take(i)
            held.sample["priority"][0] = held.sample["obs"][0, :, -1, 2]
            play.buffer.release()
            batches.append({name: array.copy() for name, array in held.sample.items()})
    return batches


def save(play, folder):
    folder.mkdir()
    play.buffer.save(folder)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ticks", [1, 7, 40])
def test_a_restored_replay_goes_on_exactly(kind, ticks, mapped, tmp_path):
    play = make(kind)
    live(play, 0, ticks)
    save(play, tmp_path / "replay")
    seats, stacks, sampleable = deepcopy(play.seats), deepcopy(play._stacks), play.buffer.sampleable
    expected = live(play, ticks, ticks + 30)

    other = Play(
        kind(capacity=40, warm_up=3, steps=2, frame_stack=2, mapped=mapped),
        seats=(1, 1),
        stack=2,
        folder=tmp_path,
    )
    other.buffer.restore(tmp_path / "replay")
    assert other.buffer.sampleable == sampleable
    other.seats, other._stacks = seats, stacks
    found = live(other, ticks, ticks + 30)
    assert len(found) == len(expected) > 20
    for here, there in zip(expected, found, strict=True):
        for name in here:
            np.testing.assert_array_equal(here[name], there[name])


def test_what_was_saved_is_the_owners_alone(tmp_path):
    play = make()
    live(play, 0, 5)
    save(play, tmp_path / "replay")
    files = list((tmp_path / "replay").iterdir())
    assert len(files) > 5 and all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "manifest"])
def test_a_damaged_file_is_named(damage, tmp_path):
    play = make()
    live(play, 0, 5)
    folder = tmp_path / "replay"
    save(play, folder)
    file = folder / ("manifest.json" if damage == "manifest" else "row.obs.npy")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(data[:-2] if damage in ("cut", "manifest") else data)
    with pytest.raises(CheckpointError, match=str(folder)):
        make().buffer.restore(folder)


@pytest.mark.parametrize(("name", "value"), [("span", -1), ("span", 1000), ("heads", -1)])
def test_rows_that_lead_out_of_the_memory_are_not_restored(name, value, tmp_path):
    play = make()
    live(play, 0, 5)
    play.buffer.sequences.state()[name][0] = value
    save(play, tmp_path / "replay")
    with pytest.raises(CheckpointError, match="ValueError: a lane has fewer than 0 rows, or a transition"):
        make().buffer.restore(tmp_path / "replay")


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_priorities_that_lead_out_of_the_memory_are_not_restored(value, tmp_path):
    play = make(PrioritisedReplay)
    live(play, 0, 5)
    play.buffer._priorities.powers.numbers[0] = value
    save(play, tmp_path / "replay")
    with pytest.raises(CheckpointError, match="ValueError: a priority is not a finite number from 0 on"):
        make(PrioritisedReplay).buffer.restore(tmp_path / "replay")


def test_a_replay_of_other_settings_is_not_restored(tmp_path):
    play = make()
    live(play, 0, 5)
    save(play, tmp_path / "replay")
    for other in (make(capacity=60), make(PrioritisedReplay), make(frame_stack=1), make(steps=1)):
        with pytest.raises(CheckpointError, match="resume with the settings"):
            other.buffer.restore(tmp_path / "replay")


# ---- memory ----------------------------------------------------------------------------


def test_single_frames_are_stored(tmp_path):
    stacked, plain = make(), make(frame_stack=1)
    assert stacked.buffer._store.schema["obs"].shape == (3,) and plain.buffer._store.schema["obs"].shape == (
        2,
        3,
    )
    assert stacked.buffer.needs[0].nbytes < plain.buffer.needs[0].nbytes


def test_a_mapped_replay_leaves_no_name_and_takes_the_disk_at_once(tmp_path):
    play = Play(Replay(capacity=1_000_000, warm_up=1, mapped=True), folder=tmp_path)
    (file,) = (
        link
        for link in Path("/proc/self/fd").iterdir()
        if os.path.realpath(link).startswith(f"{tmp_path}/.replay")
    )
    status = file.stat()
    assert list(tmp_path.iterdir()) == []
    assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_blocks * 512 >= status.st_size > 30_000_000
    for _ in range(20):
        play.tick(0, "step")
    play.check(1)


REFUSED = {
    "warm_up = 50 transitions are more than capacity = 10": lambda: Replay(capacity=10, warm_up=50),
    "steps = 0 must be at least 1": lambda: Replay(capacity=10, warm_up=1, steps=0),
    "alpha = 2 must be between 0 and 1": lambda: PrioritisedReplay(capacity=10, warm_up=1, alpha=2),
    "is less than a batch of 64": lambda: Play(Replay(capacity=63, warm_up=1), batch=64),
    "make it at least 16": lambda: Play(Replay(capacity=15, warm_up=1, steps=2), (1, 1)),
    "might never be reached": lambda: Play(Replay(capacity=64, warm_up=60)),
    "capacity = 1,000 rows takes": lambda: Play(Replay(capacity=1000, warm_up=1, max_bytes=10_000)),
    "this run has none": lambda: Play(Replay(capacity=1000, warm_up=1, mapped=True)),
    "which is no stack of 2 frames": lambda: Play(Replay(capacity=1000, warm_up=1, frame_stack=2)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_with_the_sums(message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        REFUSED[message]()


def test_a_budget_that_suffices_is_enough():
    takes = sum(need.nbytes for need in Play(Replay(capacity=1000, warm_up=1)).buffer.needs)
    Play(Replay(capacity=1000, warm_up=1, max_bytes=takes))
    with pytest.raises(ConfigError, match="max_bytes allows"):
        Play(Replay(capacity=1000, warm_up=1, max_bytes=takes - 1))


def test_rows_that_only_look_like_stacks_are_found_out():
    # three numbers, and not three frames of one
    play = Play(Replay(capacity=100, warm_up=1, frame_stack=3), seats=(1, 1))
    with pytest.raises(ConfigError, match="no stack of 3 frames"):
        play.tick(1, "step")


def test_rows_of_other_modes_are_refused():
    play = Play(Replay(capacity=100, warm_up=1))
    play.seats[0][0].row = lambda what: {"on_reset": True, "version": 3}
    with pytest.raises(SchemaError, match="ReplayActors"):
        play.tick(0, "step")


@pytest.mark.parametrize(
    ("single", "shape"),
    [((1, 5, 7), (4, 5, 7)), ((7, 5, 1), (7, 5, 4)), ((7, 5, 3), (7, 5, 12)), ((3, 40, 40), (12, 40, 40))],
)
def test_images_are_taken_apart_and_joined_as_actors_stack_them(single, shape):
    space = Box(single, "uint8", (0,), (255,))
    assert stacked(space, 4).shape == shape
    frames = frames_of("obs", Field(shape, "uint8"), 4)
    rng = np.random.default_rng(0)
    given = rng.integers(256, size=(2, 4, *single), dtype=np.uint8)
    axis = 2 if single[0] > single[2] else 0
    rows = np.stack([np.concatenate(list(seat), axis) for seat in given])
    assert frames is not None and frames.single == single
    np.testing.assert_array_equal(frames.join(given), rows)
    np.testing.assert_array_equal(frames.newest(rows), given[:, -1])


def test_an_image_that_can_be_read_in_two_ways_is_kept_whole():
    assert frames_of("obs", Field((12, 10, 12), "uint8"), 4) is None
