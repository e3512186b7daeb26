"""Tool: measures native, peers and the fused path in one run.

A benchmark is a module ``ditron_train.tools.bench.<package>`` with ``add_arguments(parser)`` and ``run(arguments) ->
int`` (the exit status). ``run`` works inside ``session.bench_session``, adds a ``rows.Row`` for each shape and returns
``finish()``; see ``tp`` for an example. The command line lists ``PACKAGES``.
"""

#: Name and description of every benchmark.
PACKAGES = {
    "tp": "tensor parallel: AG-GEMM, GEMM-RS, their layers' backward, a transformer layer",
    "pp": "pipeline: send and receive by copy engine",
    "sp": "Ulysses: projections and all-to-all",
    "ep": "mixture of experts: dispatch, grouped GEMMs, combine",
    "gemm": "the tile GEMM alone against cuBLAS, at one rank's share of the layers",
    "muon": "optimizer: Newton-Schulz steps",
    "loss": "cross entropy of language models",
    "det": "the embedding in deterministic mode",
    "adam": "optimizer: clipping, Adam and the cast to bf16",
}
