"""torchrun without its own traceback behind the workers' messages: what went wrong is said by the workers.

python scripts/launch.py NUM_PROCESSES SCRIPT [arguments]          (-m MODULE instead of SCRIPT)
"""

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    logging.disable(logging.ERROR)  # of this launcher alone
    try:
        main(["--standalone", "--nproc-per-node", *sys.argv[1:]])
    except SignalException as error:
        print(f"ended by {error.sigval.name}", file=sys.stderr)
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"error: rank {rank} was ended by {failure.signal_name()}", file=sys.stderr)
        sys.exit(failure.exitcode if failure.exitcode > 0 else 1)
