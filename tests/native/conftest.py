import os
import shlex
import shutil

import pytest

from tidemill.native.build import SOURCE, build
from tidemill.native.library import BUILT, INSTRUCTION_SETS, Kernels


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The library of kernels of this tree: the installed one, unless its source is newer
    or ``$NATIVE_FLAGS``, such as a sanitizer's, ask for another."""
    flags = os.environ.get("NATIVE_FLAGS", "").split()
    if not flags and BUILT.exists() and BUILT.stat().st_mtime > SOURCE.stat().st_mtime:
        return BUILT
    if shutil.which(shlex.split(os.environ.get("CC", "cc"))[0]) is None:
        pytest.skip("there is no C compiler")
    return build(tmp_path_factory.mktemp("native"), *flags)


@pytest.fixture(params=INSTRUCTION_SETS)
def kernels(request, library):
    """The kernels of each instruction set that this machine can run."""
    best = INSTRUCTION_SETS.index(Kernels(library).instruction_set)
    if INSTRUCTION_SETS.index(request.param) > best:
        pytest.skip(f"this processor cannot run {request.param}")
    return Kernels(library, request.param)
