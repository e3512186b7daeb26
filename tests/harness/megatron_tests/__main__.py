"""``bash scripts/test_megatron.sh``."""

import argparse
import logging
import sys

from ditron_train.runtime.errors import DitronError
from megatron_tests.campaign import __doc__ as description
from megatron_tests.campaign import add_arguments, run

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("megatron_tests").setLevel(logging.INFO)
    parser = argparse.ArgumentParser(description=description)
    add_arguments(parser)
    try:
        sys.exit(run(parser.parse_args()))
    except DitronError as error:
        sys.exit(f"error: {error}")
