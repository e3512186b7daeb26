"""A whole training step: stages of layers, bubbles, gradients, optimizer, host; natively and with ours."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from ditron_train.costs import Estimate, cublas_us, pass_us, quantised_us, ring_us
from ditron_train.pp.cost_model import pipeline_step, sent
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.profiles import Profile
from ditron_train.tools.cases import ModelSizes
from ditron_train.tools.fp8.recipes import fp8_format
from ditron_train.tools.predict.cluster import Cluster
from ditron_train.tools.predict.host import Side
from ditron_train.tools.predict.layers import FEATURES, Groups, Parts, layer_parts, total
from ditron_train.tools.predict.megatron_arguments import Job, parse_job
from ditron_train.tools.predict.memory import parameters_of
from ditron_train.tools.predict.power import clock_us
from ditron_train.tools.predict.updates import gradient_sums, optimizer_products, optimizer_step
from ditron_train.tools.results import TRAINING_STEP, Row

_ITEMSIZE = 2
_NOTHING = Estimate.alike(0.0)
_LOSS_BYTES = 34  # of each logit, forward and backward: its fp32 copy, the largest, the sum, the gradient
_EMBEDDING_PASSES = 6
_ACCUMULATED_BYTES = 10  # of each parameter and microbatch: a gradient in bf16 added to one in fp32


#: What a step is made of. Exchanges are those that nothing covers, with what covering costs; the clock is what a step
#: takes longer because the GPU may not draw more.
COMPONENTS = ("GEMMs", "attention", "passes", "exchanges", "bubbles", "gradients", "optimizer", "host", "clock")


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
        moves_tokens=job.moves_tokens,
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
    if model.heads % (job.tp * job.head_ranks) or (model.ffn or 0) % job.tp:
        over = f"TP {job.tp}" + (f" x CP {job.head_ranks}" if job.head_ranks > 1 else "")
        raise SettingError(f"{model.heads} heads and FFN {model.ffn} do not divide over {over}")
    if model.tokens % (job.cp * (job.tp if "sequence_parallel" in job.flags else 1)):
        raise SettingError(f"{model.tokens} tokens do not divide over TP {job.tp} x CP {job.cp}")


def _pipelined(
    job: Job, cluster: Cluster, groups: Groups, stage: Estimate, inner: Estimate, features: Set[str]
) -> tuple[Estimate, tuple[float, float]]:
    """Bubbles of a pipeline whose longest stage takes ``stage`` and the others ``inner``, and what its messages take
    natively and with ours, where nothing covers them."""
    microbatches = job.microbatches(cluster.world_size)
    across = cluster.span(job.pp, job.stage_stride(cluster.world_size)).nodes > 1
    num_bytes = _ITEMSIZE * job.model.tokens / job.cp * job.model.hidden
    if groups.sequence_parallel:
        num_bytes /= job.tp
    message = sent(num_bytes, job.pp, cluster.profile.rates, network=cluster.network if across else None)
    message = message if "pp" in features else message.natively()
    step = pipeline_step(
        stage, message, microbatches=microbatches, stages=job.pp, chunks=job.chunks,
        overlaps=job.chunks > 1 and "no_overlap_p2p_communication" not in job.flags, bubble=inner,
    )  # fmt: skip
    bubbles = inner * ((job.pp - 1) / job.chunks)
    sent_us = [
        max(whole - microbatches * each - bubble_us, 0.0)
        for whole, each, bubble_us in (
            (step.native_us, stage.native_us, bubbles.native_us),
            (step.ditron_us, stage.ditron_us, bubbles.ditron_us),
        )
    ]
    return bubbles, (sent_us[0], sent_us[1])


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
    forward, backward = (
        layer_parts(job.model, groups, profile.machine, rates, backward=one, features=features, rope=rope)
        for one in (False, True)
    )
    layer = {name: forward.get(name, _NOTHING) + backward.get(name, _NOTHING) for name in {**forward, **backward}}
    if job.words.get("recompute_granularity") == "full":
        layer = {name: one + forward.get(name, _NOTHING) for name, one in layer.items()}
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
    if job.pp > 1:
        inner = total(layer) * (job.num_layers / job.pp)
        bubbles, messages_us = _pipelined(job, cluster, groups, total(parts), inner, features)
        for times, bubble_us, us in zip((native, ditron), (bubbles.native_us, bubbles.ditron_us), messages_us):
            _add(times, "bubbles", bubble_us)
            _add(times, "exchanges", us)
    for kind, one in (("gradients", gradient_sums(job, cluster, parameters)),
                      ("optimizer", optimizer_step(job, cluster, parameters, features))):  # fmt: skip
        _add(native, kind, one.native_us)
        _add(ditron, kind, one.ditron_us)
    ends = total(last if job.pp > 1 else first | last)
    products = optimizer_products(job, cluster, features)
    for times, ours, products_us in ((native, False, products[0]), (ditron, True, products[1])):
        late_us = Side(job, groups, rates, ours).late_us(forward, backward, ends)
        _add(times, "host", rates.host_step_us + microbatches * late_us)
        _add(times, "clock", clock_us(times, rates.gemm_power, products_us=products_us))
    return Step(_in_order(native), _in_order(ditron), (hidden_native, hidden_ours))


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
