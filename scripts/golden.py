"""Compares what kernels are compiled to and what calls do with their golden records, or records them anew.

    TRITON_INTERPRET=1 python scripts/golden.py [--record] [--only SUBSTRING] [--part kernels]

No GPU is needed. ``--check``, which is the default, ends with 1 if an entry has changed, is missing or is new, and
if nothing was compared. CONTRIBUTING.md says when records may change.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PARTS = ("kernels", "calls")


def _found(part: str, only: str) -> Mapping[str, Any]:
    """The entries as they are now, of kernels or cases with ``only`` in their name."""
    if part == "kernels":
        from tests.compile.conftest import compiled_for_cuda
        from tests.support.golden import kernel_entries

        return kernel_entries(compiled_for_cuda(only))
    from tests.golden.cases import all_cases, records

    return records([case for case in all_cases() if only in case.name])


def main() -> int:
    """Returns 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, which is the default")
    parser.add_argument("--record", action="store_true", help="write the entries as they are now")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="of the names of kernels and cases")
    parser.add_argument("--part", choices=PARTS, action="append", help="one of the two (default: both)")
    arguments = parser.parse_args()
    from tests.support import golden

    status = 0
    for part in arguments.part or PARTS:
        read, write = getattr(golden, f"read_{part}"), getattr(golden, f"write_{part}")
        recorded, found = read(), _found(part, arguments.only)
        wanted = {key for key in recorded if arguments.only in golden.name_of(key)}
        if arguments.record:
            kept = {key: entry for key, entry in recorded.items() if key not in wanted}
            write({**kept, **found})
        changes = golden.differences(recorded, found, wanted)
        print(*changes, f"{part}: {len(found)} entries, {len(changes)} differences", sep="\n")
        status |= bool(changes) and not arguments.record
    return status


if __name__ == "__main__":
    sys.exit(main())
