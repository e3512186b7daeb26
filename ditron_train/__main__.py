"""``python -m ditron_train``."""

import sys

from ditron_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
