"""What the fused path gains across two nodes, by the model: jobs that are given as their arguments."""

from __future__ import annotations

import shlex
import textwrap

from ditron_train.runtime.profiles import network_named, profile_named
from ditron_train.tools.predict.cluster import Cluster
from ditron_train.tools.predict.megatron_arguments import parse_job
from ditron_train.tools.predict.step import predict_step

_DEVICE, _NETWORK, _NODES, _PER_NODE = "h200", "ib-400", 2, 8
_LAYERS = (
    "--num-layers 8 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --seq-length 32768 --global-batch-size 32 --swiglu --sequence-parallel --bf16 "
    "--position-embedding-type rope"
)  # of LLaMA-70B
_PARALLEL = {
    "tp": "--tensor-model-parallel-size 16",
    "sp": "--tensor-model-parallel-size 2 --context-parallel-size 8 --cp-comm-type a2a",
    "ep": "--expert-model-parallel-size 16 --num-experts 64 --moe-ffn-hidden-size 2048 --moe-router-topk 8 "
    "--moe-token-dispatcher-type alltoall",
}


def across_nodes_part() -> str:
    """The command, and a table with a line a feature, which is on alone."""
    cluster = Cluster(profile_named(_DEVICE), _NODES, _PER_NODE, network_named(_NETWORK))
    lines = [
        "```bash",
        " \\\n".join(textwrap.wrap(f'LAYERS="{_LAYERS}"', 115, break_on_hyphens=False)),
        f"python -m ditron_train predict --device {_DEVICE} --nodes {_NODES} --network {_NETWORK} -- "
        f"$LAYERS {_PARALLEL['tp']}",
        "```",
        "",
        "| behind `$LAYERS` | feature | gain |",
        "| --- | --- | --- |",
    ]
    for feature, words in _PARALLEL.items():
        step = predict_step(parse_job(shlex.split(f"{_LAYERS} {words}")), cluster, {feature})
        lines.append(f"| `{words}` | `{feature}` | {step.speedup:.3f}x |")
    return "\n".join(lines)
