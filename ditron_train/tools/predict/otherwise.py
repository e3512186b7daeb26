"""What a job's arguments ask for that is estimated otherwise, or not at all, in words: what is silent misleads."""

from __future__ import annotations

from ditron_train.tools.predict.megatron_arguments import Job

__all__ = ["estimated_otherwise"]

_SHARDED = "parameters count as whole on each replica, and their gathers as nothing"
_GRAPHS = "the host's time is that without CUDA graphs"
_SELECTIVE = "selective recomputation counts as none, in time and in memory"
_PACKED = "attention counts as over whole sequences"
_HYBRID = "every layer counts as a transformer layer"
#: Of arguments that the estimates do not look at, those that change a step's time or memory.
_OTHERWISE = {
    "--multi-latent-attention": "attention counts as one with whole projections of q, k and v",
    "--moe-layer-freq": "every layer counts as one with experts",
    "--moe-shared-expert-intermediate-size": "shared experts are left out",
    "--moe-latent-size": "experts count as of the whole width",
    "--mtp-num-layers": "layers of multi-token prediction are left out",
    "--tp-comm-overlap": "Megatron's step counts as without userbuffers, whose layers --ditron tp leaves alone",
    "--overlap-moe-expert-parallel-comm": "what moves tokens counts as uncovered by another microbatch",
    "--use-megatron-fsdp": _SHARDED,
    "--use-torch-fsdp2": _SHARDED,
    "--enable-cuda-graph": _GRAPHS,
    "--external-cuda-graph": _GRAPHS,
    "--recompute-activations": _SELECTIVE,
    "--cpu-offloading-num-layers": "offloaded activations count as kept",
    "--reset-attention-mask": _PACKED,
    "--sft": _PACKED,
    "--is-hybrid-model": _HYBRID,
    "--hybrid-layer-pattern": _HYBRID,
    "--hybrid-override-pattern": _HYBRID,
    "--experimental-attention-variant": "attention counts as one over all keys",
    "--fp4-format": "products count as in bf16",
}
_DISPATCHERS = {
    "allgather": "tokens count as moved by the alltoall dispatcher",
    "flex": "tokens count as moved by the alltoall dispatcher, and --ditron ep leaves this one alone",
}
_RINGS = {
    "p2p": "the ring of keys and values counts as covered",
    "a2a+p2p": "the ring of keys and values, and the exchanges of heads, count as covered",
}


def estimated_otherwise(job: Job) -> dict[str, str]:
    """By argument, what is estimated in the place of what it asks for."""
    found = {argument: words for argument, words in _OTHERWISE.items() if argument in job.ignored}
    if job.words.get("recompute_granularity") == "selective":
        found["--recompute-granularity selective"] = _SELECTIVE
    ring = job.words.get("cp_comm_type", "p2p")
    if job.cp > 1 and ring in _RINGS:
        found[f"--cp-comm-type {ring}"] = _RINGS[ring]
    if job.model.experts is not None:
        kind = job.words.get("moe_token_dispatcher_type", "allgather")
        if job.ep > 1 and kind in _DISPATCHERS:
            found[f"--moe-token-dispatcher-type {kind}"] = _DISPATCHERS[kind]
        if job.expert_slices > 1:
            found[f"--expert-tensor-parallel-size {job.expert_slices}"] = "in time, each expert counts as on one rank"
    blocks = set(job.words.get("cuda_graph_scope", "").split()) - {"attn", "mlp"}
    if job.words.get("cuda_graph_impl", "none") != "none" and blocks:
        found[f"--cuda-graph-scope {' '.join(sorted(blocks))}"] = "the host's time is that without these graphs"
    if not {"bf16", "fp16"} & job.flags:
        found["without --bf16 or --fp16"] = "all counts as in bf16, and in fp32 --ditron does nothing"
    return found
