"""Tool: measures native, peers and the fused path in one run.

A benchmark is a module ``ditron_train.tools.bench.<package>`` with ``add_arguments(parser)`` and ``run(arguments) ->
int`` (the exit status). ``run`` works inside ``session.bench_session``, adds a ``rows.Row`` for each shape and returns
``finish()``; see ``tp`` for an example. Once the module exists the command line lists it.
"""

import importlib.util

__all__ = ["PACKAGES", "available_benches"]

PACKAGES = {
    "tp": "tensor parallel: AG-GEMM, GEMM-RS, their layers' backward, a transformer layer",
    "pp": "pipeline: send and receive by copy engine",
    "sp": "Ulysses: projections and all-to-all",
    "ep": "mixture of experts: dispatch, grouped GEMMs, combine",
    "gemm": "the tile GEMM alone against cuBLAS, at one rank's share of the layers",
    "muon": "optimizer: Newton-Schulz steps",
    "loss": "cross entropy of language models",
    "adam": "optimizer: clipping, Adam and the cast to bf16",
}


def available_benches() -> dict[str, str]:
    """Returns name and description of every benchmark that has a module in this package."""
    return {
        name: text for name, text in PACKAGES.items() if importlib.util.find_spec(f"ditron_train.tools.bench.{name}")
    }
