"""Ranks are killed, stopped, delayed and starved in the middle of ops, and the others watched.

    TRITON_INTERPRET=1 python -m tests.faults --count 40 --seed 0 --results faults.json

It needs no torchrun. On GPUs (``--device cuda``) 2 or 3 ranks have one each; two share a single GPU. For each seed a
small job of 2 or 3 ranks is forked, and one thing goes wrong with one rank: a signal (KILL, TERM, INT, SEGV, STOP), a
delay, an error, an exit, a call left out, no memory, a full or a read-only disk. It happens at any call of a function
of the package, kernels in Triton's interpreter included.

A fault has ended as it should if

- every other rank ended by itself, with another exit code than 0, within the deadline of its wait and 5 s (of a wait
  of the package that is ``DITRON_TIMEOUT_S``, of an agreement of all ranks 30 s at least, of torch's collectives their
  own);
- ``postmortem`` names the rank at fault; of a disk, which all ranks share, the error names the disk;
- no process and no file of shared memory is left.

Time in which a survivor was ready to run and no core took it does not count. A short delay, an error that is caught on
purpose, or a lack of memory that nothing notices may also leave the job running: then with the same bits. On a busy
machine a job may fail before its fault comes; it is tried again.
"""

from __future__ import annotations

import argparse
import os
import sys

# Ranks are forked: CUDA cannot have been asked for GPUs before that.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

from ditron_train.runtime.errors import DitronError  # noqa: E402
from tests.faults import campaign  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.splitlines()[0])
    campaign.add_arguments(parser)
    try:
        return campaign.run(parser.parse_args())
    except DitronError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
