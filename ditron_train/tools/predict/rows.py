"""What the model says of a committed row of results."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ditron_train.costs import (
    Estimate,
    Product,
    Recipe,
    all_to_all_us,
    attention_us,
    cast_us,
    copied_us,
    cublas_us,
    one_node,
    pass_us,
    product_rates,
    ring_us,
    send_us,
)
from ditron_train.ep.cost_model import (
    Experts,
    Load,
    combine,
    dispatch,
    even_load,
    expert_product,
    moe_layer,
    skewed_load,
)
from ditron_train.optim.cost_model import muon_step, newton_schulz
from ditron_train.pp.cost_model import beside_message, pipeline_step, sent
from ditron_train.runtime.profiles import Profile
from ditron_train.sp.cost_model import (
    AttentionSizes,
    exchange,
    output_backward,
    output_forward,
    qkv_backward,
    qkv_forward,
)
from ditron_train.tools.cases import ModelSizes
from ditron_train.tools.predict.layers import Groups, layer_parts, local_layer_us, total
from ditron_train.tools.predict.step import committed_step
from ditron_train.tools.results import TRAINING_STEP, Row
from ditron_train.tp.choices import Problem
from ditron_train.tp.linear_costs import Kind, linear_backward, linear_forward, op_estimate, reduced

Modelled = Callable[[Row, Profile], Estimate]
_CHANNELS = 128
_PIPELINE_MODEL = dict(hidden=4096, ffn=11008, heads=32, groups=32, channels=_CHANNELS)  # of ``bench pp``
# Matrices of a layer whose step ``bench muon`` takes; q, k and v are stepped apart.
_LLAMA_8B = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
_LLAMA_70B = [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), (57344, 8192), (8192, 28672)]
_MUON = {"LLaMA-8B": _LLAMA_8B, "Mixtral-8x7B": _LLAMA_8B[:4] + 8 * _LLAMA_8B[4:], "custom": _LLAMA_70B}


def _gemm(row: Row, profile: Profile) -> Estimate:
    m, n, k = (row.shape[name] for name in "mnk")
    return Estimate.alike(cublas_us(m, n, k, profile.machine, profile.rates))


def _op(row: Row, profile: Profile) -> Estimate:
    m, n, k = (row.shape[name] for name in "mnk")
    n, k = (n // row.world_size, k) if row.op == "ag_gemm" else (n, k // row.world_size)
    problem = Problem(row.op, m, n, k, "nt", torch.bfloat16, row.world_size)  # type: ignore[arg-type]
    return op_estimate(problem, profile.machine, profile.rates)


def _linear(row: Row, profile: Profile) -> Estimate:
    kind: Kind = "column" if row.op == "column_linear" else "row"
    m, n, k = (row.shape[name] for name in "mnk")
    where = (one_node(row.world_size), profile.machine, profile.rates)
    whole = linear_backward(kind, m, n, k, *where)
    return whole if row.direction == "backward" else whole + linear_forward(kind, m, n, k, *where)


def _reduced_linear(row: Row, profile: Profile) -> Estimate:
    """Forward and backward of a row layer without sequence parallelism; nothing travels in backward."""
    m, n, k = (row.shape[name] for name in "mnk")
    own, where = k // row.world_size, (profile.machine, profile.rates)
    backward_us = cublas_us(m, own, n, *where) + cublas_us(n, own, m, *where)
    return reduced(m, n, k, one_node(row.world_size), *where) + Estimate.alike(backward_us)


def _layer(row: Row, profile: Profile) -> Estimate:
    hidden = row.shape["hidden"]
    heads = hidden // _CHANNELS
    model = ModelSizes(
        hidden, row.shape["ffn_hidden"], heads, 8, _CHANNELS, row.shape["tokens"], 1, True, None, None, 0, 0
    )
    groups = Groups(tp=one_node(row.world_size), sequence_parallel=row.op != "transformer_layer_ar")
    passes = [False] if row.direction == "forward" else [False, True]
    where = (model, groups, profile.machine, profile.rates)
    parts = [total(layer_parts(*where, backward=backward, rope=False)) for backward in passes]
    return sum(parts[1:], parts[0])


def _attention_sizes(row: Row) -> AttentionSizes:
    shape = row.shape
    channels = shape.get("head_size", _CHANNELS)
    hidden = shape["heads"] * channels
    return AttentionSizes(shape["seqlen"] // row.world_size, hidden, shape["heads"], shape["groups"], channels)


def _projection(row: Row, profile: Profile) -> Estimate:
    named = {
        "gemm_a2a": qkv_forward,
        "a2a_gemm": output_forward,
        "qkv_projection": qkv_backward,
        "output_projection": output_backward,
    }
    return named[row.op](_attention_sizes(row), one_node(row.world_size), profile.machine, profile.rates)


def _heads(row: Row, profile: Profile) -> Estimate:
    """An exchange alone: of q, k and v, or of the attended values."""
    sizes, itemsize = _attention_sizes(row), 2
    heads = sizes.heads + (2 * sizes.groups if row.op == "to_heads" else 0)
    num_bytes = sizes.tokens * heads * sizes.channels * itemsize
    return exchange(num_bytes, 3 if row.op == "to_heads" else 1, one_node(row.world_size), profile.rates)


def _attention_layer(row: Row, profile: Profile) -> Estimate:
    sizes, rates = _attention_sizes(row), profile.rates
    where = (sizes, one_node(row.world_size), profile.machine, rates)
    whole = Estimate.alike(0.0)
    for backward in [False] if row.direction == "forward" else [False, True]:
        first, second = (qkv_backward, output_backward) if backward else (qkv_forward, output_forward)
        core_us = attention_us(
            row.shape["seqlen"], sizes.heads // row.world_size, sizes.channels, rates, backward=backward
        )
        norm_us = pass_us(4 * (2 if backward else 1) * sizes.tokens * sizes.hidden, rates)
        whole += first(*where) + second(*where) + Estimate.alike(core_us + norm_us)
    return whole


def _experts(row: Row) -> tuple[Experts, Load]:
    shape = row.shape
    experts = Experts(
        shape["tokens_per_rank"], shape["hidden"], shape["ffn_hidden"], shape["num_experts"], shape["topk"]
    )
    if "Zipf" not in row.model:
        return experts, even_load(experts, row.world_size)
    order = torch.randperm(
        experts.count, device="cpu", generator=torch.Generator().manual_seed(1)
    )  # as ``bench ep`` deals them
    return experts, skewed_load(experts, row.world_size, 1.0, tuple(order.tolist()))


def _movement(row: Row, profile: Profile) -> Estimate:
    experts, load = _experts(row)
    movement = dispatch if row.op == "dispatch" else combine
    where = (load, experts, one_node(row.world_size), profile.rates)
    return movement(*where, deterministic="deterministic" in row.model)


def _expert_product(row: Row, profile: Profile) -> Estimate:
    _, load = _experts(row)
    n, k = row.shape["n"], row.shape["k"]
    if row.op == "group_dgrad":
        n, k = k, n
    return expert_product(load.rows, n, k, profile.machine, profile.rates, wgrad=row.op == "group_wgrad")


def _moe_layer(row: Row, profile: Profile) -> Estimate:
    experts, load = _experts(row)
    where = (load, experts, one_node(row.world_size), profile.machine, profile.rates)
    passes = [
        moe_layer(*where, backward=backward, deterministic="deterministic" in row.model) for backward in (False, True)
    ]
    return passes[0] if row.direction == "forward" else passes[0] + passes[1]


def _send(row: Row, profile: Profile) -> Estimate:
    return sent(row.shape["num_bytes"], row.world_size, profile.rates, both_ways=row.model == "ring")


def _beside(row: Row, profile: Profile) -> Estimate:
    gemm_us = row.shape["num_gemms"] * _gemm(row, profile).native_us
    together = beside_message(gemm_us, row.shape["num_bytes"], row.world_size, profile.rates)
    if row.op == "gemm_and_transfer":
        return together
    copied_us = sent(row.shape["num_bytes"], row.world_size, profile.rates).ditron_us
    native_us = gemm_us + profile.rates.p2p_share * min(gemm_us, together.exchange_us)
    ours_us = gemm_us + profile.rates.copy_share * min(gemm_us, copied_us)
    return Estimate(native_us, ours_us, gemm_us, together.exchange_us)


def _pipeline(row: Row, profile: Profile) -> Estimate:
    shape, rates = row.shape, profile.rates
    model = ModelSizes(**_PIPELINE_MODEL, seq_length=shape["tokens"], micro_batch_size=1, swiglu=False,
                       vocabulary=None, experts=None, topk=0, expert_ffn=0)  # fmt: skip
    stage = Estimate.alike(shape["layers_per_stage"] * local_layer_us(model, profile.machine, rates))
    message = sent(2 * shape["tokens"] * model.hidden, row.world_size, rates)
    return pipeline_step(
        stage,
        message,
        microbatches=shape["microbatches"],
        stages=row.world_size,
        chunks=1 if row.model == "1f1b" else 2,
        overlaps="overlap" in row.model,
    )


def _newton_schulz(row: Row, profile: Profile) -> Estimate:
    return newton_schulz(row.shape["m"], row.shape["n"], profile.machine, profile.rates)


def _muon(row: Row, profile: Profile) -> Estimate:
    matrices = _MUON[row.model] * row.shape["num_layers"]
    return muon_step(matrices, one_node(row.world_size), profile.machine, profile.rates)


def _part(row: Row, profile: Profile) -> Estimate:
    """Of ``bench profile``: one part alone, the same natively and with ours."""
    shape, rates, ranks = row.shape, profile.rates, row.world_size
    num_bytes = shape.get("num_bytes", 0)
    if row.op == "attention":
        backward = row.direction == "backward"
        return Estimate.alike(
            attention_us(shape["seqlen"], shape["heads"], shape["head_size"], rates, backward=backward)
        )
    times = {
        "memory_pass": lambda: pass_us(num_bytes, rates),
        "memory_reorder": lambda: pass_us(num_bytes, rates, reorders=True),
        "fp8_cast": lambda: cast_us(num_bytes, rates),
        "fp8_transpose": lambda: cast_us(num_bytes, rates),
        "all_gather": lambda: ring_us(num_bytes, one_node(ranks), rates),
        "reduce_scatter": lambda: ring_us(num_bytes, one_node(ranks), rates),
        "all_to_all": lambda: all_to_all_us(num_bytes, one_node(ranks), rates),
        "nccl_send": lambda: send_us(num_bytes, rates, ranks=ranks, both_ways=True),
        "copied_gather": lambda: copied_us(num_bytes, ranks, rates),
    }
    return Estimate.alike(times[row.op]())


def _fp8_product(row: Row, profile: Profile) -> Estimate:
    """Of ``bench profile``."""
    m, n, k = (row.shape[name] for name in "mnk")
    rates = product_rates(profile.rates, *_FP8_PRODUCTS[row.op])
    return Estimate.alike(cublas_us(m, n, k, profile.machine, rates, torch.float8_e4m3fn))


_FP8_PRODUCTS: dict[str, tuple[Recipe, Product]] = {
    "fp8_forward": ("tensorwise", "forward"),
    "fp8_gradient": ("tensorwise", "dgrad"),
    "fp8_block": ("blockwise", "forward"),
    "fp8_block_wgrad": ("blockwise", "wgrad"),
}
_PARTS = (
    "attention", "memory_pass", "memory_reorder", "all_gather", "reduce_scatter", "all_to_all", "nccl_send",
    "copied_gather", "fp8_cast", "fp8_transpose",
)  # fmt: skip
_BY_OP: dict[str, Modelled] = {
    **dict.fromkeys(_PARTS, _part),
    **dict.fromkeys(_FP8_PRODUCTS, _fp8_product),
    "gemm_nt": _gemm,
    "gemm_nn": _gemm,
    "ag_gemm": _op,
    "gemm_rs": _op,
    "gemm_ar": _op,
    "row_linear_ar": _reduced_linear,
    "transformer_layer_ar": _layer,
    "column_linear": _linear,
    "row_linear": _linear,
    "transformer_layer": _layer,
    "layer_under_strict": _layer,
    "gemm_a2a": _projection,
    "a2a_gemm": _projection,
    "qkv_projection": _projection,
    "output_projection": _projection,
    "to_heads": _heads,
    "to_sequence": _heads,
    "attention_layer": _attention_layer,
    "dispatch": _movement,
    "combine": _movement,
    "group_gemm": _expert_product,
    "group_dgrad": _expert_product,
    "group_wgrad": _expert_product,
    "moe_layer": _moe_layer,
    "send_recv": _send,
    "gemm_beside_transfer": _beside,
    "gemm_and_transfer": _beside,
    "pipeline_step": _pipeline,
    "newton_schulz": _newton_schulz,
    "muon_step": _muon,
}


def estimate_of(row: Row, profile: Profile) -> Estimate | None:
    """What the model says of a row; None of an op that it does not know, and of an op in FP8. A step in FP8 names its
    job's command, which says the rest."""
    if row.op.startswith(TRAINING_STEP):
        return committed_step(row, profile)
    modelled = None if row.fp8 is not None else _BY_OP.get(row.op)
    return None if modelled is None else modelled(row, profile)
