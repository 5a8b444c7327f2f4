"""Threads of numeric libraries: two workers whose libraries each take every core make one
another many times slower.

Inline and in threads all workers share one process, whose BLAS was loaded with a thread
per core; environment variables come too late then, so that threadpoolctl is needed.
"""

import os
import sys

from threadpoolctl import threadpool_limits


def limit_threads(count: int) -> None:
    """Let numpy's BLAS and torch use `count` threads in this process, whether they are
    loaded yet or not.

    On two cores, small products on two BLAS threads beside another busy worker trained
    CartPole at 1.9 k steps/s, on one thread at 70 k.
    """
    threadpool_limits(count)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(count)  # what is loaded later, or started, reads these
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)
