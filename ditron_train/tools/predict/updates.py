"""What follows the last microbatch of a step: sums of gradients over the replicas, and the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

from ditron_train.costs import Estimate, Span, one_node, pass_us, ring_us
from ditron_train.optim.cost_model import muon_step, products_us
from ditron_train.tools.predict.cluster import Cluster
from ditron_train.tools.predict.megatron_arguments import Job

# Bytes of memory traffic that a parameter costs a step of fp32 Adam: the gradient copied, its norm and scale, Adam's
# four reads and three writes, the bf16 weight, the gradient set to zero.
_ADAM_BYTES = 60
_CLIP_BYTES = 32  # the same without Adam itself


def gradient_sums(job: Job, cluster: Cluster, parameters: Mapping[str, float]) -> Estimate:
    """Gradients over the replicas, as fp32: exposed unless Megatron overlaps them with the last backward."""
    replicas = job.data_parallel(cluster.world_size) * job.cp
    if replicas == 1:
        return Estimate.alike(0.0)
    rates = cluster.profile.rates
    dense = parameters["layers"] + parameters["vocabulary"]
    span = cluster.span(replicas, job.replica_stride)
    exchange_us = 2 * ring_us(4 * dense, span, rates)  # an all-reduce; or scattered, and weights gathered
    expert_replicas = job.expert_replicas(cluster.world_size)
    if parameters["experts"] and expert_replicas > 1:
        span = cluster.span(expert_replicas, job.expert_stride)
        exchange_us += 2 * ring_us(4 * parameters["experts"], span, rates)
    exposed = rates.nccl_share if "overlap_grad_reduce" in job.flags else 1.0
    return Estimate(exposed * exchange_us, exposed * exchange_us, 0.0, exchange_us)


def optimizer_step(job: Job, cluster: Cluster, parameters: Mapping[str, float], features: Set[str]) -> Estimate:
    """The optimizer on the rank that takes longest; ``parameters`` are a rank's by kind, as of `parameters_of`."""
    profile = cluster.profile
    number = sum(parameters.values())
    replicas = job.data_parallel(cluster.world_size) * job.cp
    if "muon" not in job.optimizer:
        if "use_distributed_optimizer" in job.flags:  # shares of experts are those of their own replicas
            experts = parameters["experts"]
            number = (number - experts) / replicas + experts / job.expert_replicas(cluster.world_size)
        return Estimate.alike(pass_us(_ADAM_BYTES * number, profile.rates))
    stepped = muon_step(*_dealt_out(job, cluster), profile.machine, profile.rates)
    around_us = pass_us(_CLIP_BYTES * number + _ADAM_BYTES * parameters["vocabulary"], profile.rates)
    return (stepped if "muon" in features else stepped.natively()) + Estimate.alike(around_us)


def optimizer_products(job: Job, cluster: Cluster, features: Set[str]) -> tuple[float, float]:
    """How much of the optimizer's time is GEMMs, in us, natively and with ours."""
    if "muon" not in job.optimizer:
        return 0.0, 0.0
    native_us, ours_us = products_us(*_dealt_out(job, cluster), cluster.profile.machine, cluster.profile.rates)
    return native_us, ours_us if "muon" in features else native_us


def _dealt_out(job: Job, cluster: Cluster) -> tuple[list[tuple[int, int]], Span]:
    """Muon's matrices, and the ranks that share them out."""
    replicas = job.data_parallel(cluster.world_size) * job.cp
    span = cluster.span(replicas, job.replica_stride) if job.is_layer_wise else one_node(1)
    return _matrices(job) * math.ceil(job.num_layers / job.pp), span  # of the stage that has most


def _matrices(job: Job) -> list[tuple[int, int]]:
    """Of one layer on one rank."""
    model, tp = job.model, job.tp
    dense = [(n // tp, k) if name in ("qkv", "fc1") else (n, k // tp) for name, (n, k) in model.matrices.items()]
    if model.experts is None:
        return dense
    columns = model.expert_ffn * (2 if model.swiglu else 1)
    return dense[:2] + [(columns, model.hidden), (model.hidden, model.expert_ffn)] * (model.experts // job.ep)
