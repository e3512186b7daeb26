"""Benchmark of the embedding in deterministic mode: rows of a microbatch's words, and the weight's gradient."""

from __future__ import annotations

from ditron_train.tools.op_rows import bench_of_ops

add_arguments, run = bench_of_ops("det", "TOKENS HIDDEN VOCABULARY")
