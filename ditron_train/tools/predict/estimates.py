"""What the parts of a job's step take on both paths: op costs times the calls that the job makes.

Parts have the names that ``tools.job.parts`` gives them. Parts that both paths run alike (attention, passes over
memory, gradients, optimizer) are those of the rough step, which is used if the user states no step time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from ditron_train.costs.estimate import Estimate
from ditron_train.costs.exchanges import Span, message_us, rail_us, ring_us, send_us
from ditron_train.costs.fp8 import Recipe, operands, product_rates, quantised_us
from ditron_train.costs.products import attention_us, cublas_us, pass_us
from ditron_train.data.device_profiles import Profile
from ditron_train.data.rates import NetworkRates
from ditron_train.ep.cost_model import Experts, even_load, moe_layer
from ditron_train.optim.cost_model import muon_step
from ditron_train.runtime.errors import SettingError
from ditron_train.sp.cost_model import (
    AttentionSizes,
    exchange,
    gathers,
    output_backward,
    output_forward,
    qkv_backward,
    qkv_forward,
)
from ditron_train.tools.job import Job
from ditron_train.tools.job.model import Matrix, layer_counts, matrices_of, windowed_layers
from ditron_train.tp.linear_costs import linear_backward, linear_forward, reduced

_ITEMSIZE = 2
_DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Bytes, in units of 2, that a value of a token's hidden vector costs a layer forward: two norms, two residual sums, a
# dropout's mask or a cast that a fusion did not take.
_VECTOR_PASSES = 11
_ROPE_PASSES = 8  # of q and k: split, two products, their sum, and the copies around them
_LOSS_BYTES = 34  # of each logit, forward and backward: its fp32 copy, the largest, the sum, the gradient
# Bytes of memory traffic that a parameter costs a step of fp32 Adam: the gradient copied, its norm and scale, Adam's
# four reads and three writes, the bf16 weight, the gradient set to zero; and the same without Adam itself.
_ADAM_BYTES, _CLIP_BYTES = 60, 32

#: Estimates of a whole step by part, in us.
Parts = dict[str, Estimate]


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, ``per_node`` of them in each of ``nodes``."""

    profile: Profile
    nodes: int
    per_node: int
    network: NetworkRates

    @property
    def world_size(self) -> int:
        """All GPUs."""
        return self.nodes * self.per_node

    def span(self, ranks: int, stride: int) -> Span:
        """A group of ``ranks`` every ``stride``-th of which counts, as Megatron lays groups out."""
        per_node = min(max(self.per_node // stride, 1), ranks)
        while ranks % per_node:
            per_node -= 1
        return Span(ranks, per_node, self.network if per_node < ranks else None)


class _Step:
    """Numbers of one job on one cluster that several estimates need."""

    def __init__(self, job: Job, cluster: Cluster, *, is_last: bool) -> None:
        config = job.config
        self.job, self.cluster, self.config, self.model = job, cluster, config, job.model
        self.machine, self.rates = cluster.profile.machine, cluster.profile.rates
        self.tp, self.pp, self.cp, self.ep = (
            getattr(config, f"{name}_model_parallel_size" if name != "context" else "context_parallel_size")
            for name in ("tensor", "pipeline", "context", "expert")
        )
        self.recipe: Recipe | None = (
            config.fp8_recipe if config.fp8 and config.fp8_recipe in get_args(Recipe) else None
        )
        self.tokens = self.model.tokens // self.cp
        self.replicas = job.replicas(cluster.world_size)
        batch = config.global_batch_size
        self.microbatches = batch // (self.replicas * self.model.micro_batch_size) if batch else 1
        most, last, self.chunks = job.stages
        self.is_last = is_last  # of the pipeline's stages: it has the output layer
        self.share = (last if is_last else most) / config.num_layers  # of the model's layers
        self.slots = self.microbatches + (self.pp - 1) / self.chunks
        self.forwards = 2 if config.recompute_granularity == "full" else 1
        self.group = cluster.span(self.tp, 1)
        # Projections and exchanges in one kernel.
        self.fused_heads = self.cp > 1 and self.tp == 1 and config.cp_comm_type == "a2a" and not config.fp8
        self.check()

    def check(self) -> None:
        """Raises SettingError for groups that the sizes do not divide over."""
        ranks, slices = self.replicas * self.cp * self.tp, self.config.expert_tensor_parallel_size
        if self.model.experts and ranks % (self.ep * slices):
            raise SettingError(f"{ranks} ranks of a stage do not divide into EP {self.ep} x {slices} slices")
        if self.model.tokens % (self.cp * (self.tp if self.config.sequence_parallel else 1)):
            raise SettingError(f"{self.model.tokens} tokens do not divide over TP {self.tp} x CP {self.cp}")

    def whole(self, forward: Estimate, backward: Estimate, count: float) -> Estimate:
        """Of a step: ``count`` layers of the model, as far as the stage has them."""
        return (forward * self.forwards + backward) * (count * self.share * self.slots)

    def alike(self, us: float, count: float = 1.0) -> Estimate:
        """Of a step, what both paths run alike: forward and backward together, of ``count`` layers."""
        return Estimate.alike(us * count * self.share * self.slots)


def estimate_step(job: Job, cluster: Cluster) -> Parts:
    """Every part of a step by the stage that takes longest: the last, or the one that has most layers.

    Raises:
        SettingError: The sizes do not divide.
    """
    return max((_of_stage(_Step(job, cluster, is_last=is_last)) for is_last in (True, False)), key=natively)


def _of_stage(step: _Step) -> Parts:
    return dict(
        [
            *_linears(step), *_attention(step), *_experts(step), *_passes(step), *_messages(step),
            *_gradients(step), *_optimizer(step),
        ]
    )  # fmt: skip


def _linears(step: _Step) -> Iterator[tuple[str, Estimate]]:
    for matrix in matrices_of(step.job):
        if step.fused_heads and matrix.name in ("attention: linear_qkv", "attention: linear_proj"):
            continue  # parts of `sp`
        forward, backward = (_linear(step, matrix, backward=backward) for backward in (False, True))
        if matrix.name in ("output_layer", "multi-token prediction: eh_proj"):
            yield matrix.name, (forward + backward) * (matrix.layers * step.slots * step.is_last)
        else:
            yield matrix.name, step.whole(forward, backward, matrix.layers)


def _linear(step: _Step, matrix: Matrix, *, backward: bool) -> Estimate:
    """One pass of a layer on one microbatch."""
    fp8 = None if matrix.name == "output_layer" else step.recipe
    sizes, where = (step.tokens, matrix.n, matrix.k), (step.group, step.machine, step.rates)
    if step.config.sequence_parallel or step.tp == 1:
        return (linear_backward if backward else linear_forward)(matrix.kind, *sizes, *where, fp8)
    rates = product_rates(step.rates, fp8, "dgrad" if backward else "forward")
    is_column, n, k = matrix.kind == "column", matrix.n, matrix.k
    local_n, local_k = (n // step.tp, k) if is_column else (n, k // step.tp)
    local_us = (2 if backward else 1) * cublas_us(step.tokens, local_n, local_k, step.machine, rates, operands(fp8))
    if is_column != backward:
        return Estimate.alike(local_us)
    if backward or fp8 is not None:  # an all-reduce that the weight gradient covers, or in FP8 stays native
        sum_us = ring_us(2 * step.tokens * (k if backward else n) * _ITEMSIZE, step.group, step.rates)
        exposed_us = max(sum_us - local_us / 2, step.rates.nccl_share * sum_us) if backward else sum_us
        return Estimate.alike(local_us + exposed_us)
    return reduced(step.tokens, n, k, *where)


def _attention(step: _Step) -> Iterator[tuple[str, Estimate]]:
    config, model, rates = step.config, step.model, step.rates
    count = layer_counts(step.job)["*"]
    if not count:
        return
    mla = config.multi_latent_attention
    value_dim = config.v_head_dim if mla else model.channels
    q_dim = config.qk_head_dim + config.qk_pos_emb_head_dim if mla else model.channels
    windowed = windowed_layers(step.job) / count
    kinds = config.cp_comm_type if isinstance(config.cp_comm_type, list) else [config.cp_comm_type]
    # With gathered keys a step computes all that its chunk of queries may see: half a chunk more on average.
    more = model.seq_length // (4 * step.cp) if step.cp > 1 and "all_gather" in kinds else 0
    forward_us, backward_us = (
        sum(
            share * attention_us(
                model.seq_length, model.heads / (step.tp * step.cp), (q_dim + value_dim) // 2, rates,
                keys=keys, batch=model.micro_batch_size, backward=backward,
            )
            for keys, share in ((config.window_size[0] + more if windowed else None, windowed), (None, 1.0 - windowed))
        )
        for backward in (False, True)
    )  # fmt: skip
    backward_us *= rates.attention_deterministic if config.deterministic_mode else 1.0
    again = step.forwards + (config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules)
    yield "attention itself", step.alike(again * forward_us + backward_us, count)
    if step.cp == 1:
        return
    span = step.cluster.span(step.cp, step.tp)
    if step.fused_heads and not mla:
        sizes = AttentionSizes(step.tokens, model.hidden, model.heads, model.groups, model.channels)
        where = (sizes, span, step.machine, rates)
        qkv = step.whole(qkv_forward(*where), qkv_backward(*where), count)
        out = step.whole(output_forward(*where), output_backward(*where), count)
        yield "attention: QKV projection with its exchange", qkv
        yield "attention: output projection with its exchange", out
    elif "a2a" in kinds:
        width = (model.heads * (q_dim + 2 * value_dim) + 2 * model.groups * q_dim) / step.tp
        moved = exchange(step.tokens * width * _ITEMSIZE, 4, span, rates)
        yield "attention: exchanges", step.whole(moved, moved, count)
    elif "all_gather" in kinds:
        num_bytes = 2 * step.model.tokens * model.groups * value_dim / step.tp * _ITEMSIZE
        both = gathers(num_bytes, model.seq_length, config.window_size, span, rates)
        yield "attention: gathers of keys and values", step.whole(*both, count)


def _experts(step: _Step) -> Iterator[tuple[str, Estimate]]:
    model, config, count = step.model, step.config, layer_counts(step.job)["E"]
    if not count or not model.experts:
        return
    tokens = step.tokens // (step.tp if config.sequence_parallel else 1)
    slices = config.expert_tensor_parallel_size
    experts = Experts(
        tokens * slices, model.hidden, model.expert_ffn // slices, model.experts, model.topk, model.swiglu
    )
    span, load = step.cluster.span(step.ep, slices), even_load(experts, step.ep)
    (moved, products, us), (moved_back, products_back, us_back) = (
        moe_layer(
            load, experts, span, step.machine, step.rates,
            backward=backward, fp8=step.recipe, deterministic=config.deterministic_mode,
        )
        for backward in (False, True)
    )  # fmt: skip
    # Of other dispatchers no op costs are known. While another microbatch is computed, separate kernels multiply.
    if config.overlap_moe_expert_parallel_comm:
        products = products.natively()
    if slices > 1 or config.moe_token_dispatcher_type != "alltoall":
        moved, moved_back, products = (one.natively() for one in (moved, moved_back, products))
    yield "experts: dispatch and combine", step.whole(moved, moved_back, count)
    yield "experts: GEMMs in one kernel with them", step.whole(products, products_back, count)
    yield "router and activation of experts", step.alike(step.forwards * us + us_back, count)


def _passes(step: _Step) -> Iterator[tuple[str, Estimate]]:
    """Norms, residual sums, rotation, activation, loss and casts to FP8: passes over memory."""
    model, rates, counts = step.model, step.rates, layer_counts(step.job)
    shared = step.tp if step.config.sequence_parallel else 1
    vectors = pass_us(_VECTOR_PASSES * step.tokens / shared * model.hidden * _ITEMSIZE, rates)
    layers = counts["*"] or sum(counts.values())
    us = vectors * (step.forwards + 2) * layers
    if step.config.position_embedding_type == "rope":
        width = (model.heads + model.groups) * model.channels / step.tp
        us += 2 * counts["*"] * pass_us(_ROPE_PASSES * step.tokens * width * _ITEMSIZE, rates)
    columns = (3 if model.swiglu else 2) * model.ffn / step.tp
    us += 3 * counts["-"] * pass_us(step.tokens * columns * _ITEMSIZE, rates)
    if step.recipe is not None:
        elements = sum(m.layers * (m.k + m.n) / step.tp for m in matrices_of(step.job) if m.name != "output_layer")
        us += quantised_us(step.tokens * elements, step.recipe, rates)
    whole = step.alike(us)
    loss_us = (
        pass_us(_LOSS_BYTES * step.tokens * (step.job.vocabulary or 0) / step.tp, rates) * step.slots * step.is_last
    )
    yield "norms, activations and other passes over memory", whole + Estimate.alike(loss_us)


def _messages(step: _Step) -> Iterator[tuple[str, Estimate]]:
    """Exposed messages between stages: all of 1F1B, those of an interleaved pipeline at its ends."""
    if step.pp == 1:
        return
    num_bytes = _ITEMSIZE * step.tokens * step.model.hidden / (step.tp if step.config.sequence_parallel else 1)
    stride = step.cluster.world_size // step.pp
    count = 2 * (step.microbatches * step.chunks + step.pp - 1)
    if step.cluster.span(step.pp, stride).nodes > 1:
        message = Estimate.alike(rail_us(num_bytes, step.cluster.network))
    else:
        native_us = send_us(num_bytes, step.rates, ranks=step.pp, both_ways=True)
        message = Estimate(native_us, message_us(num_bytes, step.rates))
    at_ends = 2 * (step.pp - 1)
    waited = at_ends if step.chunks > 1 and step.config.overlap_p2p_comm else count
    yield "messages between stages", message * waited


def _num_parameters(step: _Step) -> tuple[float, float]:
    """On a rank of the longest stage: dense ones, and those of experts."""
    counts, model = layer_counts(step.job), step.model
    dense = sum(m.n * m.k * (m.layers * step.share if m.name != "output_layer" else 1) for m in matrices_of(step.job))
    experts = 0.0
    if model.experts:
        each = (3 if model.swiglu else 2) * model.hidden * model.expert_ffn
        experts = each * model.experts * counts["E"] * step.share
        experts /= step.ep * step.config.expert_tensor_parallel_size
    return dense / step.tp, experts


def _gradients(step: _Step) -> Iterator[tuple[str, Estimate]]:
    """Sums of gradients over replicas, and gathers of weights: exposed unless Megatron overlaps them."""
    config, replicas = step.config, step.replicas * step.cp
    dense, experts = _num_parameters(step)
    itemsize = 2 if config.grad_reduce_in_bf16 else _DTYPE_BYTES.get(config.main_grads_dtype, 4)
    expert_replicas = max(replicas * step.tp // (step.ep * config.expert_tensor_parallel_size), 1)
    us = 0.0
    for number, ranks, stride in ((dense, replicas, step.tp), (experts, expert_replicas, step.ep)):
        if ranks > 1 and number:
            us += ring_us((itemsize + 2) * number, step.cluster.span(ranks, stride), step.rates)
    if us:
        yield (
            "gradients over replicas",
            Estimate.alike(us * (step.rates.nccl_share if config.overlap_grad_reduce else 1)),
        )


def _optimizer(step: _Step) -> Iterator[tuple[str, Estimate]]:
    config, rates, replicas = step.config, step.rates, step.replicas * step.cp
    dense, experts = _num_parameters(step)
    if "muon" not in config.optimizer:
        if config.use_distributed_optimizer:
            dense, experts = dense / replicas, experts / max(replicas * step.tp // step.ep, 1)
        yield "optimizer", Estimate.alike(pass_us(_ADAM_BYTES * (dense + experts), rates))
        return
    is_shared = config.optimizer == "dist_muon" or config.use_distributed_optimizer
    span = step.cluster.span(replicas if is_shared else 1, step.tp)
    matrices = _muon_matrices(step)
    if matrices:
        yield "Newton-Schulz steps of matrices", muon_step(matrices, span, step.machine, rates)
    table = (step.job.vocabulary or 0) * step.model.hidden / step.tp
    yield "optimizer", Estimate.alike(pass_us(_CLIP_BYTES * (dense + experts) + _ADAM_BYTES * table, rates))


def _muon_matrices(step: _Step) -> list[tuple[int, int]]:
    """A rank's matrices of the longest stage."""
    found: list[tuple[int, int]] = []
    for matrix in matrices_of(step.job):
        if matrix.name != "output_layer":
            n, k = matrix.n, matrix.k
            local = (n // step.tp, k) if matrix.kind == "column" else (n, k // step.tp)
            found += [local] * math.ceil(matrix.layers * step.share)
    model: Any = step.model
    if model.experts:
        layers = math.ceil(layer_counts(step.job)["E"] * step.share)
        columns = model.expert_ffn * (2 if model.swiglu else 1)
        each = [(columns, model.hidden), (model.hidden, model.expert_ffn)]
        found += each * (model.experts // step.ep * layers)
    return found


def natively(parts: Parts) -> float:
    """The rough step, in us: all parts by the native path."""
    return sum(part.native_us for part in parts.values())
