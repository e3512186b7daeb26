"""`python -m tests.mutations`: proves that the tests catch the seeded faults."""

from __future__ import annotations

import sys

from tests.mutations.run import main

sys.exit(main())
