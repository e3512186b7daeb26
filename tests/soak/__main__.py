"""The same few ops of every package again and again: every result is compared, memory is watched.

torchrun --nproc-per-node 4 -m tests.soak --ops 100000
"""

from __future__ import annotations

import sys

from ditron_train.runtime.errors import DitronError
from tests.soak.run import parser, run

if __name__ == "__main__":
    try:
        sys.exit(run(parser().parse_args()))
    except DitronError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
