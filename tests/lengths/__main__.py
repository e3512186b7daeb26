"""``python -m tests.lengths`` under torchrun: linear layers at the lengths of an RL job, by both paths."""

from __future__ import annotations

import argparse
import logging
import sys

from tests.lengths import run

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=run.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    run.add_arguments(parser)
    sys.exit(run.run(parser.parse_args()))
