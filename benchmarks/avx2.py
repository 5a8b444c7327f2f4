"""Runs a command as on an ordinary processor: what of this one lies beyond AVX2 (AVX-512,
bfloat16) is kept from oneDNN, MKL, torch, numpy, OpenBLAS, XLA and the native core. What
else a program calls, such as physics, chooses for itself.

    python benchmarks/avx2.py tidemill bench CartPole-v1
"""

import os
import sys

AVX2 = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    # as numpy 2.4 names them, and as older ones do, which pass over what they do not know
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR "
    "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL",
    "OPENBLAS_CORETYPE": "Haswell",
    "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
    "TIDEMILL_NATIVE": "avx2",
}

if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    os.execvpe(sys.argv[1], sys.argv[1:], os.environ | AVX2)
