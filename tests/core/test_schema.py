"""Schemas: fields lie apart, aligned and inside their memory, and say what is stored."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.errors import SchemaError
from tidemill.core.schema import ALIGNMENT, Field, allocate, layout, poison, schema_of, views, zeros

DTYPES = ["bool", "int8", "uint8", "int16", "int64", "uint64", "float16", "float32", "float64"]
fields = st.builds(Field, st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from(DTYPES))
schemas = st.dictionaries(st.sampled_from(["obs", "action", "reward", "done", "info.return"]), fields)
leads = st.lists(st.integers(0, 5), max_size=2).map(tuple)


@given(leads, st.sampled_from(DTYPES))
def test_zeros_begin_on_a_cache_line(shape: tuple[int, ...], dtype: str) -> None:
    array = zeros(shape, dtype)
    assert array.shape == shape and array.dtype == dtype and not array.any()
    assert array.ctypes.data % ALIGNMENT == 0 or not array.size
    assert array.flags.c_contiguous and array.flags.writeable


@given(schemas, leads)
def test_each_field_has_its_own_cache_lines(schema: dict[str, Field], lead: tuple[int, ...]) -> None:
    offsets, total = layout(schema, lead)
    assert list(offsets) == list(schema)
    end = 0
    for name, offset in offsets.items():
        assert offset % ALIGNMENT == 0
        assert offset >= end
        end = offset + prod(lead) * schema[name].nbytes
    assert end <= total
    assert total % ALIGNMENT == 0


@given(schemas, leads, st.integers(0, 3))
def test_views_share_the_memory_and_not_one_another(
    schema: dict[str, Field], lead: tuple[int, ...], start: int
) -> None:
    start *= ALIGNMENT
    _, total = layout(schema, lead)
    memory = memoryview(bytearray(start + total))
    arrays = views(schema, lead, memory, start)
    for i, (name, array) in enumerate(arrays.items()):
        assert array.shape == lead + schema[name].shape
        assert array.dtype == schema[name].dtype
        array.fill(i % 2)
    for i, array in enumerate(arrays.values()):
        assert (array == i % 2).all()  # none was written over by its neighbour
    again = views(schema, lead, memory, start)
    assert all((again[name] == array).all() for name, array in arrays.items())


@given(schemas, leads)
def test_a_schema_is_read_off_its_arrays(schema: dict[str, Field], lead: tuple[int, ...]) -> None:
    arrays = allocate(schema, lead)
    assert schema_of(arrays) == {
        name: Field(lead + field.shape, field.dtype) for name, field in schema.items()
    }
    assert not any(array.any() for array in arrays.values())


def test_an_element_counts_its_bytes() -> None:
    assert Field((4, 84, 84), "uint8").nbytes == 28224
    assert Field((), "float32").nbytes == 4
    assert Field((0, 3), "int64").nbytes == 0


def test_a_written_out_layout() -> None:
    assert layout({"obs": Field((4,), "float32"), "done": Field((), "bool")}, (2, 3)) == (
        {"obs": 0, "done": 128},
        192,
    )


@pytest.mark.parametrize(("nbytes", "start"), [(127, 0), (128, 1), (128, 64), (0, 0)])
def test_a_memory_that_is_too_small_is_refused(nbytes: int, start: int) -> None:
    with pytest.raises(SchemaError, match=f"128 bytes at {start} do not fit a memory of {nbytes} bytes"):
        views({"a": Field((32,), "float32")}, (1,), memoryview(bytearray(nbytes)), start)


def test_a_memory_is_measured_in_bytes() -> None:
    doubles = memoryview(bytearray(128)).cast("d")
    assert views({"a": Field((32,), "float32")}, (1,), doubles)["a"].shape == (1, 32)


def test_poison_is_what_no_correct_program_reads() -> None:
    arrays = allocate({name: Field((3,), name) for name in ("float32", "int64", "uint8", "bool")}, ())
    poison(arrays)
    assert np.isnan(arrays["float32"]).all()
    assert (arrays["int64"] == np.iinfo(np.int64).min).all()
    assert (arrays["uint8"] == 255).all()
    assert arrays["bool"].all()
