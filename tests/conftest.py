"""Without a GPU, kernels run in Triton's interpreter, which is decided when they are imported.

Checks that compile kernels start a process of their own with ``TRITON_INTERPRET=0``.
"""

import os

if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
