"""Benchmark of the cross entropy: loss and gradient of a microbatch's logits, whose vocabulary the ranks share.

Native is megatron-core's unfused cross entropy; the peer is its fused one, whose bits differ from the unfused one's.
"""

from __future__ import annotations

from ditron_train.tools.op_rows import bench_of_ops

add_arguments, run = bench_of_ops("loss", "TOKENS VOCABULARY")
