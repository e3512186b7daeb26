"""Benchmark of the optimizer's step: clipping, Adam and the cast to bf16 of what one rank of the distributed optimizer
has. Native is the installed FusedAdam with Megatron's passes around it."""

from __future__ import annotations

from ditron_train.tools.op_rows import bench_of_ops

add_arguments, run = bench_of_ops("adam", "ELEMENTS", "elements of a rank")
