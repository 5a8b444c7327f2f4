"""Parts of a cut come back as they were."""

import json

import numpy as np
import pytest

from tidemill.core.cut import flatten, generator_state, set_generator_state, unflatten
from tidemill.core.errors import CheckpointError
from tidemill.core.safetensors_io import pack, unpack


def test_a_part_is_arrays_and_plain_data_and_comes_back() -> None:
    part = {
        "steps": 3,
        "empty": {},
        "text": None,
        "agents": {"0": {"finished": np.array([True, False]), "asked": [1, 2]}, "1": {"at": np.array(7)}},
    }
    arrays, facts = flatten(part)
    assert sorted(arrays) == ["agents/0/finished", "agents/1/at"]
    assert facts == {"steps": 3, "empty": {}, "text": None, "agents": {"0": {"asked": [1, 2]}, "1": {}}}
    back = unflatten(unpack(pack(arrays))[0], json.loads(json.dumps(facts)))
    assert back["agents"]["0"]["finished"].tolist() == [True, False]
    assert back["agents"]["1"]["at"].shape == () and back["agents"]["1"]["at"] == 7
    assert (back["steps"], back["empty"], back["text"], back["agents"]["0"]["asked"]) == (3, {}, None, [1, 2])


def test_a_generator_goes_on_where_it_was() -> None:
    first, second = np.random.default_rng(1), np.random.default_rng(2)
    first.random(5, np.float32)  # which leaves half of a number behind
    state = json.loads(json.dumps(generator_state(first)))
    set_generator_state(second, state)
    assert first.random(4, np.float32).tobytes() == second.random(4, np.float32).tobytes()
    assert first.standard_normal(4).tobytes() == second.standard_normal(4).tobytes()


@pytest.mark.parametrize("wrong", [{}, {"bit_generator": "MT19937"}, {"bit_generator": "PCG64", "state": 3}])
def test_a_state_of_another_generator_is_named(wrong: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="none of a PCG64"):
        set_generator_state(np.random.default_rng(1), wrong)
