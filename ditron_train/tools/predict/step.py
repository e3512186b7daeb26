"""A whole training step: stages of layers, bubbles, gradients, optimizer, host; natively and with ours."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from ditron_train.costs import Estimate, Span, cublas_us, one_node, pass_us, quantised_us, ring_us
from ditron_train.optim.cost_model import muon_step
from ditron_train.policy import ModelSizes
from ditron_train.pp.cost_model import pipeline_step, sent
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.profiles import Profile
from ditron_train.runtime.rates import NetworkRates
from ditron_train.tools.fp8.recipes import fp8_format
from ditron_train.tools.predict.layers import FEATURES, Groups, Parts, layer_parts, total
from ditron_train.tools.predict.megatron_arguments import Job, parse_job
from ditron_train.tools.predict.memory import parameters_of
from ditron_train.tools.results import TRAINING_STEP, Row

_ITEMSIZE = 2
# Bytes of memory traffic that a parameter costs a step of fp32 Adam: the gradient copied, its norm and scale, Adam's
# four reads and three writes, the bf16 weight, the gradient set to zero.
_ADAM_BYTES = 60
_CLIP_BYTES = 32  # the same without Adam itself
_LOSS_BYTES = 34  # of each logit, forward and backward: its fp32 copy, the largest, the sum, the gradient
_EMBEDDING_PASSES = 6
_ACCUMULATED_BYTES = 10  # of each parameter and microbatch: a gradient in bf16 added to one in fp32


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, ``per_node`` of them in each of ``nodes``."""

    profile: Profile
    nodes: int
    per_node: int
    network: NetworkRates | None = None

    @property
    def world_size(self) -> int:
        """All GPUs."""
        return self.nodes * self.per_node

    def span(self, ranks: int, stride: int) -> Span:
        """A group of ``ranks`` every ``stride``-th of which counts, as Megatron lays groups out."""
        if ranks == 1:
            return one_node(1)
        per_node = min(max(self.per_node // stride, 1), ranks)
        while ranks % per_node:
            per_node -= 1
        return Span(ranks, per_node, self.network if per_node < ranks else None)


#: What a step is made of. Exchanges are those that nothing covers, with what covering costs; the clock is what a step
#: takes longer because the GPU may not draw more.
COMPONENTS = ("GEMMs", "attention", "passes", "exchanges", "bubbles", "gradients", "optimizer", "host", "clock")
# Of the most that a GPU may draw for long: other computation, and waits, whose multiprocessors poll at full clock.
_COMPUTING, _WAITING = 0.8, 0.6


@dataclass(frozen=True)
class Step:
    """A step by component, in us, natively and with ours.

    Attributes:
        native, ditron: Times by component, in the order of `COMPONENTS`; they add up to the step.
        hidden: Of Megatron's exchanges, what lies under computation, natively and with ours.
    """

    native: Mapping[str, float]
    ditron: Mapping[str, float]
    hidden: tuple[float, float] = (0.0, 0.0)

    @property
    def native_us(self) -> float:
        """Megatron's step."""
        return sum(self.native.values())

    @property
    def ditron_us(self) -> float:
        """Ours."""
        return sum(self.ditron.values())

    @property
    def speedup(self) -> float:
        """Natively over ours."""
        return self.native_us / self.ditron_us


_KINDS = {"attention": "attention", "norms": "passes", "activation": "passes", "rope": "passes", "loss": "passes",
          "embedding": "passes", "filled": "passes", "accumulated": "passes",
          "quantised": "passes", "weights": "passes"}  # fmt: skip


def _ends(job: Job, groups: Groups, profile: Profile, features: Set[str]) -> tuple[Parts, Parts]:
    """Forward and backward together of the embedding, and of the output layer with the loss."""
    model, rates = job.model, profile.rates
    tokens, ranks = model.tokens // job.cp, groups.tp.ranks
    vocabulary = model.vocabulary or 0
    embedding_us = pass_us(_EMBEDDING_PASSES * tokens * model.hidden * _ITEMSIZE, rates)
    products = (tokens, vocabulary // ranks, model.hidden), (tokens, model.hidden, vocabulary // ranks)
    local = sum(cublas_us(*sizes, profile.machine, rates) for sizes in products)
    local += cublas_us(vocabulary // ranks, model.hidden, tokens, profile.machine, rates)
    exchange_us = 2 * ring_us(tokens * model.hidden * _ITEMSIZE, groups.tp, rates)
    output = Estimate(local + exchange_us, local + exchange_us, local, exchange_us)
    loss_us = pass_us(_LOSS_BYTES * tokens * vocabulary / ranks, rates)
    gathered = Estimate(exchange_us / 2, exchange_us / 2, 0.0, exchange_us / 2)
    return (
        {"embedding": Estimate.alike(embedding_us), "gathered": gathered},
        {"output": output, "loss": Estimate.alike(loss_us)},
    )


def _groups(job: Job, cluster: Cluster) -> Groups:
    return Groups(
        tp=cluster.span(job.tp, 1),
        cp=cluster.span(job.cp, job.tp),
        ep=cluster.span(job.ep, 1),
        sequence_parallel="sequence_parallel" in job.flags,
        ulysses=job.words.get("cp_comm_type") == "a2a",
        deterministic="deterministic_mode" in job.flags,
        fp8=job.fp8,
    )


def _add(times: dict[str, float], kind: str, us: float) -> None:
    times[kind] = times.get(kind, 0.0) + us


def _components(parts: Parts, scale: float) -> tuple[dict[str, float], dict[str, float], float, float]:
    """Times by component: computation that both run, and what is left over it, exposed exchanges."""
    native: dict[str, float] = {}
    ditron: dict[str, float] = {}
    hidden_native = hidden_ours = 0.0
    for name, one in parts.items():
        kind = _KINDS.get(name, "GEMMs")
        for times, us in ((native, one.native_us), (ditron, one.ditron_us)):
            _add(times, kind, scale * one.compute_us)
            _add(times, "exchanges", scale * (us - one.compute_us))
        hidden_native += scale * max(one.exchange_us - (one.native_us - one.compute_us), 0.0)
        hidden_ours += scale * max(one.exchange_us - (one.ditron_us - one.compute_us), 0.0)
    return native, ditron, hidden_native, hidden_ours


def _sums(job: Job, cluster: Cluster, parameters: Mapping[str, float]) -> Estimate:
    """Gradients over the replicas, as fp32: exposed unless Megatron overlaps them with the last backward."""
    replicas = job.data_parallel(cluster.world_size) * job.cp
    if replicas == 1:
        return Estimate.alike(0.0)
    rates = cluster.profile.rates
    dense = parameters["layers"] + parameters["vocabulary"]
    span = cluster.span(replicas, job.tp)
    exchange_us = 2 * ring_us(4 * dense, span, rates)  # an all-reduce; or scattered, and weights gathered
    expert_replicas = job.expert_replicas(cluster.world_size)
    if parameters["experts"] and expert_replicas > 1:
        span = cluster.span(expert_replicas, job.ep * job.expert_slices)
        exchange_us += 2 * ring_us(4 * parameters["experts"], span, rates)
    exposed = rates.nccl_share if "overlap_grad_reduce" in job.flags else 1.0
    return Estimate(exposed * exchange_us, exposed * exchange_us, 0.0, exchange_us)


def _optimizer(job: Job, cluster: Cluster, parameters: Mapping[str, float], features: Set[str]) -> Estimate:
    profile = cluster.profile
    number = sum(parameters.values())
    replicas = job.data_parallel(cluster.world_size) * job.cp
    if "muon" not in job.optimizer:
        shards = replicas if "use_distributed_optimizer" in job.flags else 1
        return Estimate.alike(pass_us(_ADAM_BYTES * number / shards, profile.rates))
    matrices = list(_matrices(job)) * (job.num_layers // job.pp)
    span = cluster.span(replicas, job.tp) if job.optimizer == "dist_muon" else one_node(1)
    stepped = muon_step(matrices, span, profile.machine, profile.rates)
    around_us = pass_us(_CLIP_BYTES * number + _ADAM_BYTES * parameters["vocabulary"], profile.rates)
    return (stepped if "muon" in features else stepped.natively()) + Estimate.alike(around_us)


def _matrices(job: Job) -> list[tuple[int, int]]:
    """Of one layer on one rank."""
    model, tp = job.model, job.tp
    dense = [(n // tp, k) if name in ("qkv", "fc1") else (n, k // tp) for name, (n, k) in model.matrices.items()]
    if model.experts is None:
        return dense
    columns = model.expert_ffn * (2 if model.swiglu else 1)
    return dense[:2] + [(columns, model.hidden), (model.hidden, model.expert_ffn)] * (model.experts // job.ep)


def _check(job: Job, cluster: Cluster) -> None:
    """Raises SettingError for groups that the job's sizes, or the GPUs, cannot be shared out over."""
    model, replicas = job.model, job.data_parallel(cluster.world_size) * job.cp
    if job.fp8 is not None and cluster.profile.machine.target == "sm_80":
        raise SettingError(f"{cluster.profile.machine.device} has no FP8")
    if job.ep > 1 and (
        model.experts is None or model.experts % job.ep or replicas * job.tp % (job.ep * job.expert_slices)
    ):
        raise SettingError(
            f"{model.experts or 'no'} experts of {replicas * job.tp} ranks: EP {job.ep} with experts split over "
            f"{job.expert_slices} does not divide"
        )
    if model.heads % (job.tp * job.cp) or (model.ffn or 0) % job.tp:
        raise SettingError(f"{model.heads} heads and FFN {model.ffn} do not divide over TP {job.tp} x CP {job.cp}")
    if model.tokens % (job.cp * (job.tp if "sequence_parallel" in job.flags else 1)):
        raise SettingError(f"{model.tokens} tokens do not divide over TP {job.tp} x CP {job.cp}")


def predict_step(job: Job, cluster: Cluster, features: Set[str] = FEATURES) -> Step:
    """The step of ``job`` on ``cluster``; ours with ``features``.

    Raises:
        SettingError: The sizes do not divide.
    """
    _check(job, cluster)
    profile = cluster.profile
    rates = profile.rates
    microbatches = job.microbatches(cluster.world_size)
    groups = _groups(job, cluster)
    rope = job.words.get("position_embedding_type") == "rope"
    layer: Parts = {}
    for backward in (False, True):
        passed = layer_parts(
            job.model, groups, profile.machine, rates, backward=backward, features=features, rope=rope
        )
        for name, one in passed.items():
            layer[name] = layer[name] + one if name in layer else one
    if job.words.get("recompute_granularity") == "full":
        again = layer_parts(job.model, groups, profile.machine, rates, backward=False, features=features, rope=rope)
        layer = {name: one + again[name] for name, one in layer.items()}
    first, last = _ends(job, groups, profile, features)
    parts = {name: one * (job.num_layers / job.pp) for name, one in layer.items()}
    if job.pp == 1:
        parts |= first
    parts |= last  # the last stage is the longest
    parameters = parameters_of(job)
    if job.fp8 is not None:  # once a step, for its first microbatch
        number = parameters["layers"] + parameters["experts"]
        parts["weights"] = Estimate.alike(quantised_us(number, job.fp8, rates) / microbatches)
    if "no_gradient_accumulation_fusion" in job.flags:
        number = sum(parameters.values())
        parts["accumulated"] = Estimate.alike(pass_us(_ACCUMULATED_BYTES * number, rates))
    native, ditron, hidden_native, hidden_ours = _components(parts, microbatches)
    longest, inner = total(parts), total(layer) * (job.num_layers / job.pp)
    if job.pp > 1:
        network = cluster.network if cluster.span(job.pp, job.tp * job.cp).nodes > 1 else None
        num_bytes = _ITEMSIZE * job.model.tokens / job.cp * job.model.hidden
        if groups.sequence_parallel:
            num_bytes /= job.tp
        message = sent(num_bytes, job.pp, rates, network=network)
        message = message if "pp" in features else message.natively()
        step = pipeline_step(
            longest, message, microbatches=microbatches, stages=job.pp, chunks=job.chunks,
            overlaps=job.chunks > 1 and "no_overlap_p2p_communication" not in job.flags, bubble=inner,
        )  # fmt: skip
        waits = 2 * (job.pp - 1) / job.chunks
        for times, whole, stage, each in (
            (native, step.native_us, longest.native_us, inner.native_us),
            (ditron, step.ditron_us, longest.ditron_us, inner.ditron_us),
        ):
            bubble_us = waits / 2 * each
            _add(times, "bubbles", bubble_us)
            _add(times, "exchanges", max(whole - microbatches * stage - bubble_us, 0.0))
    for kind, one in (("gradients", _sums(job, cluster, parameters)),
                      ("optimizer", _optimizer(job, cluster, parameters, features))):  # fmt: skip
        _add(native, kind, one.native_us)
        _add(ditron, kind, one.ditron_us)
    host_us = rates.host_step_us + microbatches * rates.host_microbatch_us
    for times in (native, ditron):
        _add(times, "host", host_us)
        _add(times, "clock", _clock_us(times, rates.gemm_power, products="muon" in job.optimizer))
    return Step(_in_order(native), _in_order(ditron), (hidden_native, hidden_ours))


def _clock_us(times: Mapping[str, float], gemm_power: float, *, products: bool) -> float:
    """What a step takes longer than its parts alone: no less than its energy over the power that the GPU may draw.

    So a wait that is covered gains its energy alone where that is what a step takes. ``products``: the optimizer's
    time is mostly GEMMs.
    """
    power = dict.fromkeys(("attention", "passes", "optimizer"), _COMPUTING) | {"GEMMs": gemm_power}
    if products:
        power["optimizer"] = gemm_power
    energy_us = sum(power.get(kind, _WAITING) * us for kind, us in times.items())
    return max(energy_us - sum(times.values()), 0.0)


def _in_order(times: Mapping[str, float]) -> dict[str, float]:
    return {kind: times[kind] for kind in COMPONENTS if times.get(kind)}


#: What rows without a command do not say of the models that they name: heads, groups; vocabulary as below.
_HEADS = {4096: (32, 8), 8192: (64, 8), 7168: (56, 56)}
_VOCABULARY = 128


def committed_step(row: Row, profile: Profile) -> Estimate:
    """A row of ``compare``: a step of Megatron-LM's script on one node."""
    feature = row.op.removeprefix(TRAINING_STEP)
    job = _job_of_sizes(row, feature) if row.command is None else _job_of_command(row, row.command)
    step = predict_step(job, Cluster(profile, 1, row.world_size), set(feature.split(",")))
    return Estimate(step.native_us, step.ditron_us, step.native["GEMMs"])


def _job_of_command(row: Row, command: str) -> Job:
    """The job that its command describes, in the row's recipe."""
    job = parse_job(shlex.split(command))
    words = job.words if row.fp8 is None else {**job.words, "fp8_recipe": row.fp8, "fp8_format": fp8_format(row.fp8)}
    return replace(job, words=words)


def _job_of_sizes(row: Row, feature: str) -> Job:
    """The job of a row that was written before rows had commands: deterministic, without apex, a small vocabulary."""
    shape = row.shape
    heads, groups = _HEADS[shape["hidden_size"]]
    model = ModelSizes(
        hidden=shape["hidden_size"], ffn=shape["ffn_hidden_size"], heads=heads, groups=groups, channels=128,
        seq_length=shape["seq_length"], micro_batch_size=shape["micro_batch_size"], swiglu=True,
        vocabulary=_VOCABULARY * shape["tensor_model_parallel_size"], experts=shape.get("num_experts"),
        topk=shape.get("moe_router_topk", 1), expert_ffn=shape.get("moe_ffn_hidden_size", 0),
    )  # fmt: skip
    return Job(
        model=model,
        num_layers=shape["num_layers"],
        global_batch=shape["global_batch_size"],
        tp=shape["tensor_model_parallel_size"],
        pp=shape["pipeline_model_parallel_size"],
        cp=shape["context_parallel_size"],
        ep=shape["expert_model_parallel_size"],
        chunks=1,
        optimizer="dist_muon" if feature == "muon" else "adam",
        flags=frozenset(
            {"swiglu", "sequence_parallel", "bf16", "deterministic_mode", "no_gradient_accumulation_fusion"}
        ),
        words={"cp_comm_type": "a2a", "position_embedding_type": "rope"},
    )
