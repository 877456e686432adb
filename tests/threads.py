"""How many threads a process of the tests computes with: ``TEST_THREADS``, one unless it is set.

Two cores belong to two ranks. With another number kernels cut their sums elsewhere, so that the tests show whether what
they say holds for more than one order of summation.
"""

from __future__ import annotations

import os

THREADS = int(os.environ.get("TEST_THREADS") or 1)
# Ranks share cores, so threads that have nothing to do must sleep; OpenMP lets them spin.
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(THREADS)),
    "OMP_WAIT_POLICY": "PASSIVE",
}
