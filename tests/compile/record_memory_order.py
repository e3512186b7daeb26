"""Writes ``memory_order.json``: the order in which the kernels of all subpackages acquire, release and copy, compiled
for sm_90.

    python -m tests.compile.record_memory_order

To be run with the Triton whose code was read, when a kernel is new or was changed on purpose.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests.compile.conftest import room_specs
from tests.support.compile_check import compile_specs, memory_order


def _main() -> None:
    specs = [replace(spec, targets=("sm_90",)) for spec in room_specs() if "sm_90" in spec.targets]
    reports = compile_specs(specs)
    orders = {name: memory_order(report.asm) for (name, _), report in sorted(reports.items())}
    Path(__file__).with_name("memory_order.json").write_text(json.dumps(orders, indent=0) + "\n")


if __name__ == "__main__":
    _main()
