import os
import shlex
import shutil

import pytest

from tidemill.native.build import build
from tidemill.native.library import INSTRUCTION_SETS, Kernels


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The library of kernels, compiled from this tree's source with ``$NATIVE_FLAGS``,
    such as a sanitizer's."""
    if shutil.which(shlex.split(os.environ.get("CC", "cc"))[0]) is None:
        pytest.skip("there is no C compiler")
    return build(tmp_path_factory.mktemp("native"), *os.environ.get("NATIVE_FLAGS", "").split())


@pytest.fixture(params=INSTRUCTION_SETS)
def kernels(request, library):
    """The kernels of each instruction set that this machine can run."""
    best = INSTRUCTION_SETS.index(Kernels(library).instruction_set)
    if INSTRUCTION_SETS.index(request.param) > best:
        pytest.skip(f"this processor cannot run {request.param}")
    return Kernels(library, request.param)
