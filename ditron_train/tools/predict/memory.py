"""Memory of a step on the fullest rank, natively, in bytes; ours adds the symmetric buffers of its exchanges."""

from __future__ import annotations

from ditron_train.tools.predict.megatron_arguments import Job

_WEIGHT, _GRADIENT, _STATE = 2, 4, 12  # bf16; fp32 main_grad; fp32 parameter and two moments
_MUON_STATE = 8  # of its matrices: fp32 parameter and one momentum
# Values of 2 bytes that a layer keeps of a token for its backward, in units of the hidden size: inputs of the two
# norms and of the two column layers, the attention's output, two residual sums.
_KEPT_VECTORS = 8
_FP8_WEIGHT = 2  # row-wise and transposed, beside the one in bf16 or in its place
_CONTEXT_BYTES = 3e9  # CUDA, NCCL's buffers, cuBLAS's workspaces
_HELD = 0.12  # of the tensors is what torch's allocator holds beside them: temporary ones, pieces too small


def parameters_of(job: Job) -> dict[str, float]:
    """Parameters on one rank: of its layers' dense weights, its experts, and the embedding with the output layer."""
    model = job.model
    matrices = model.matrices
    attention = sum(n * k for name, (n, k) in matrices.items() if name in ("qkv", "proj"))
    dense: float = sum(n * k for name, (n, k) in matrices.items() if name in ("fc1", "fc2"))
    layers = job.num_layers / job.pp
    experts = 0.0
    if model.experts is not None:
        one = (3 if model.swiglu else 2) * model.hidden * model.expert_ffn
        experts, dense = one * model.experts / (job.ep * job.expert_slices), model.hidden * model.experts * job.tp
    tables = 2 if job.pp == 1 and "untie_embeddings_and_output_weights" in job.flags else 1
    return {
        "layers": layers * (attention + dense) / job.tp,
        "experts": layers * experts,
        "vocabulary": tables * (model.vocabulary or 0) * model.hidden / job.tp,
    }


def _kept_bytes(job: Job) -> float:
    """Of one layer and microbatch."""
    model = job.model
    tokens = model.tokens / job.cp
    if job.words.get("recompute_granularity") == "full":
        return tokens * model.hidden * 2 / (job.tp if "sequence_parallel" in job.flags else 1)
    shared = job.tp if "sequence_parallel" in job.flags else 1
    vectors = _KEPT_VECTORS * model.hidden / shared
    heads = ((model.heads + 2 * model.groups) * model.channels + model.heads * model.channels) / job.tp
    if model.experts is not None:
        # Rows that experts are split over come to each of the ranks whole, with a part of what is between.
        rows_columns = model.hidden * 2 * job.expert_slices + model.expert_ffn * (3 if model.swiglu else 2)
        columns: float = model.topk * rows_columns / shared
    else:
        columns = model.ffn * (3 if model.swiglu else 2) / job.tp
    return 2 * tokens * (vectors + heads + columns)


def memory_bytes(job: Job, world_size: int) -> dict[str, float]:
    """By what it is for."""
    replicas = job.data_parallel(world_size) * job.cp
    parameters = parameters_of(job)
    number = sum(parameters.values())
    shards = replicas if "use_distributed_optimizer" in job.flags or job.is_layer_wise else 1
    of_matrices = _MUON_STATE if "muon" in job.optimizer else _STATE
    states = (of_matrices * parameters["layers"] + _STATE * parameters["vocabulary"]) / shards
    states += of_matrices * parameters["experts"] / (job.expert_replicas(world_size) if shards > 1 else 1)
    in_flight: float = min(job.pp, job.microbatches(world_size))
    if job.chunks > 1:
        in_flight = in_flight * (1 + (job.pp - 1) / (job.pp * job.chunks))
    logits = 6.0 * job.model.tokens / job.cp * (job.model.vocabulary or 0) / job.tp
    beside = job.fp8 is not None and "fp8_param_gather" not in job.flags
    fp8 = _FP8_WEIGHT * (parameters["layers"] + parameters["experts"]) if beside else 0.0
    tensors = {
        "weights": _WEIGHT * number + fp8,
        "gradients": _GRADIENT * number,
        "optimizer": states,
        "activations": in_flight * job.num_layers / job.pp * _kept_bytes(job) + logits,
    }
    return {**tensors, "allocator": _HELD * sum(tensors.values()), "libraries": _CONTEXT_BYTES}
