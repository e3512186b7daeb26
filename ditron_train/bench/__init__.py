"""Tool: measures native, peers and ours in one run.

A benchmark is a module ``ditron_train.bench.<room>`` with ``run(arguments) -> int`` (the exit status) and, where it takes
options of its own, ``add_arguments(parser)``. ``run`` works inside ``bench_session``; importing the module must be cheap.
"""

from ditron_train.bench.registry import available_benches
from ditron_train.bench.rows import Row, Stamp, read_results, write_results
from ditron_train.bench.session import BenchSession, add_common_arguments, bench_session
from ditron_train.bench.timing import Timing, measure

__all__ = [
    "BenchSession",
    "Row",
    "Stamp",
    "Timing",
    "add_common_arguments",
    "available_benches",
    "bench_session",
    "measure",
    "read_results",
    "write_results",
]
