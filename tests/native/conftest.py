import os
import shlex
import shutil
from pathlib import Path

import pytest

from tidemill.native.build import build
from tidemill.native.library import BUILT, INSTRUCTION_SETS, Kernels, unavailable


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The library of kernels of this tree: the installed one, unless its sources are
    others or ``$NATIVE_LIBRARY`` names another, such as one with sanitizers."""
    if given := os.environ.get("NATIVE_LIBRARY"):
        return Path(given)
    if unavailable("baseline") is None:
        return BUILT
    if shutil.which(shlex.split(os.environ.get("CC", "cc"))[0]) is None:
        text = "there is no C compiler"
        pytest.fail(text) if os.environ.get("TIDEMILL_REQUIRE_COMPILERS") else pytest.skip(text)
    return build(tmp_path_factory.mktemp("native"))


WISH = os.environ.get("TIDEMILL_NATIVE")


@pytest.fixture(params=[WISH] if WISH in INSTRUCTION_SETS else INSTRUCTION_SETS)
def kernels(request, library):
    """The kernels of each instruction set that this machine can run, or of the one that
    ``$TIDEMILL_NATIVE`` names."""
    if INSTRUCTION_SETS.index(request.param) > INSTRUCTION_SETS.index(Kernels(library).processor):
        pytest.skip(f"this processor cannot run {request.param}")
    return Kernels(library, request.param)  # which the library has to have
