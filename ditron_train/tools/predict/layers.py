"""Estimates of a transformer layer: linear layers, attention, experts, and the passes over memory between them."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from ditron_train.costs import (
    FP8_TARGETS,
    Estimate,
    Recipe,
    Span,
    amax_bytes,
    attention_us,
    cublas_us,
    one_node,
    operands,
    pass_us,
    product_rates,
    quantised_us,
    ring_us,
    transposed_us,
)
from ditron_train.ep.cost_model import Experts, even_load, moe_layer
from ditron_train.runtime.profiles import Machine
from ditron_train.runtime.rates import MachineRates
from ditron_train.sp.cost_model import (
    AttentionSizes,
    exchange,
    output_backward,
    output_forward,
    qkv_backward,
    qkv_forward,
)
from ditron_train.tools.cases import ModelSizes
from ditron_train.tp.linear_costs import Kind, linear_backward, linear_forward, reduced

FEATURES = frozenset({"tp", "sp", "ep", "pp", "muon"})
_ITEMSIZE = 2
# Bytes, in units of 2, that each value of a token's hidden vector costs a layer forward: two norms (one read, one
# write), two residual sums (two reads, one write), and a dropout's mask or a cast that a fusion did not take.
_VECTOR_PASSES = 11
_ROPE_PASSES = 8  # of q and k: split, two products, their sum, and the copies around them
_UNFUSED_SCORE_BYTES = 120  # of each score forward and backward, where Megatron's own attention keeps them in memory

#: Estimates by what they are of.
Parts = dict[str, Estimate]


@dataclass(frozen=True)
class Groups:
    """Where ranks that share a layer are: tensor, context and expert parallel; one rank where not named.

    ``ulysses``: Whether context parallel ranks exchange heads, rather than pass keys and values on in a ring.
    ``deterministic``: under Megatron's deterministic mode, in which torch fills every new tensor, too.
    ``fp8``: The recipe of linear layers and experts.
    ``moves_tokens``: Whether ``ep`` has something to do in layers with experts.
    """

    tp: Span = field(default_factory=lambda: one_node(1))
    cp: Span = field(default_factory=lambda: one_node(1))
    ep: Span = field(default_factory=lambda: one_node(1))
    sequence_parallel: bool = True
    ulysses: bool = True
    deterministic: bool = False
    fp8: Recipe | None = None
    moves_tokens: bool = True

    @property
    def fuses_heads(self) -> bool:
        """Whether the projections and the exchanges of heads are ``sp``'s in one kernel."""
        return self.ulysses and self.cp.ranks > 1 and self.tp.ranks == 1 and self.fp8 is None

    @property
    def shared(self) -> int:
        """Ranks that share out the tokens between linear layers."""
        return self.tp.ranks if self.sequence_parallel else 1


def total(parts: Parts) -> Estimate:
    """The sum of all parts."""
    whole = Estimate.alike(0.0)
    for estimate in parts.values():
        whole += estimate
    return whole


def _quicker(one: Estimate) -> Estimate:
    """What ``strict`` runs of one op."""
    return one if one.ditron_us < one.native_us else one.natively()


def _linear(
    kind: Kind, m: int, sizes: tuple[int, int], groups: Groups, machine: Machine, rates: MachineRates, backward: bool
) -> Estimate:
    n, k = sizes
    fp8 = groups.fp8
    if not groups.sequence_parallel and groups.tp.ranks > 1:
        rates = product_rates(rates, fp8, "dgrad" if backward else "forward")
        local = cublas_us(m, n // (groups.tp.ranks if kind == "column" else 1),
                          k // (groups.tp.ranks if kind == "row" else 1), machine, rates, operands(fp8))  # fmt: skip
        if fp8 is not None:  # by Megatron's path: products, and one all-reduce of 16 bits
            sums = kind == ("column" if backward else "row")
            sum_us = ring_us(2 * m * (k if backward else n) * _ITEMSIZE, groups.tp, rates) if sums else 0.0
            product_us = (2 if backward else 1) * local
            return Estimate(product_us + sum_us, product_us + sum_us, product_us, sum_us)
        if kind == "row":
            return Estimate.alike(2 * local) if backward else _quicker(reduced(m, n, k, groups.tp, machine, rates))
        if not backward:
            return Estimate.alike(local)
        return reduced(m, k, n, groups.tp, machine, rates).natively() + Estimate.alike(local)
    whole = (linear_backward if backward else linear_forward)(kind, m, n, k, groups.tp, machine, rates, fp8)
    return whole if fp8 is None or machine.target in FP8_TARGETS else whole.natively()


def _quantised(
    model: ModelSizes, groups: Groups, rates: MachineRates, recipe: Recipe, rows: float, backward: bool
) -> Estimate:
    """Inputs of products, or gradients of their results, cast to FP8, and transposed where they were gathered;
    what ranks agree on before. ``rows``: of a rank's experts."""
    tokens, tp, matrices = model.tokens / groups.cp.ranks, groups.tp.ranks, model.matrices
    sides = 0 if backward else 1  # of a weight: its output features, or its input's
    linears = ("qkv", "proj") if model.experts is not None else ("qkv", "proj", "fc1", "fc2")
    cast = transposed = 0.0
    for name in linears:
        is_gathered = name in (("proj", "fc2") if backward else ("qkv", "fc1"))
        cast += tokens * matrices[name][sides] / (groups.shared if is_gathered else tp)
        transposed += tokens * model.hidden if groups.shared > 1 and backward else 0.0
    if model.experts is not None:
        columns = model.expert_ffn * (2 if model.swiglu and backward else 1)
        cast += rows * (model.hidden + columns)
    local_us = quantised_us(cast, recipe, rates) + (transposed_us(transposed, rates) if transposed else 0.0)
    agreed_us = len(linears) / 2 * ring_us(amax_bytes(recipe), groups.tp, rates) if amax_bytes(recipe) else 0.0
    return Estimate(local_us + agreed_us, local_us + agreed_us, local_us, agreed_us)


def attention_block(
    model: ModelSizes, groups: Groups, machine: Machine, rates: MachineRates, *, backward: bool, rope: bool = True
) -> Parts:
    """QKV projection, attention, output projection: one pass of a microbatch."""
    tokens = model.tokens // groups.cp.ranks
    matrices = model.matrices
    heads = model.heads / (groups.tp.ranks * groups.cp.ranks)  # a ring's ranks share out their work, not the heads
    core_us = attention_us(
        model.seq_length, heads, model.channels, rates, batch=model.micro_batch_size, backward=backward
    )
    if backward and groups.deterministic:
        core_us *= rates.attention_deterministic
    parts = {"attention": Estimate.alike(core_us)}
    if groups.fuses_heads:
        sizes = AttentionSizes(tokens, model.hidden, model.heads, model.groups, model.channels)
        first, second = (qkv_backward, output_backward) if backward else (qkv_forward, output_forward)
        parts["qkv"] = first(sizes, groups.cp, machine, rates)
        parts["proj"] = second(sizes, groups.cp, machine, rates)
    else:
        parts["qkv"] = _linear("column", tokens, matrices["qkv"], groups, machine, rates, backward)
        parts["proj"] = _linear("row", tokens, matrices["proj"], groups, machine, rates, backward)
        if groups.cp.ranks > 1 and groups.ulysses:
            num_bytes = tokens * (matrices["qkv"][0] + model.hidden) / groups.tp.ranks * _ITEMSIZE
            parts["heads"] = exchange(num_bytes, 4, groups.cp, rates)
    if rope:
        width = (model.heads + model.groups) * model.channels / groups.tp.ranks
        parts["rope"] = Estimate.alike(pass_us(_ROPE_PASSES * tokens * width * _ITEMSIZE, rates))
    return parts


def _vectors_us(model: ModelSizes, groups: Groups, rates: MachineRates, backward: bool) -> float:
    values = model.tokens / groups.cp.ranks / groups.shared * model.hidden
    return pass_us((2 if backward else 1) * _VECTOR_PASSES * values * _ITEMSIZE, rates)


def layer_parts(
    model: ModelSizes,
    groups: Groups,
    machine: Machine,
    rates: MachineRates,
    *,
    backward: bool,
    features: Set[str] = FEATURES,
    rope: bool = True,
) -> Parts:
    """One pass of a whole layer by its parts; what is not in ``features`` runs by Megatron's path."""
    attention = attention_block(model, groups, machine, rates, backward=backward, rope=rope)
    parts = {
        name: one if ("sp" if groups.fuses_heads or name == "heads" else "tp") in features else one.natively()
        for name, one in attention.items()
    }
    tokens, num_rows = model.tokens // groups.cp.ranks, 0.0
    if model.experts is not None:
        experts = Experts(
            tokens // groups.shared, model.hidden, model.expert_ffn, model.experts, model.topk, model.swiglu
        )
        load = even_load(experts, groups.ep.ranks)
        layer = moe_layer(
            load, experts, groups.ep, machine, rates,
            backward=backward, fp8=groups.fp8, deterministic=groups.deterministic,
        )  # fmt: skip
        num_rows = sum(load.rows)
        parts["experts"] = layer if "ep" in features and groups.moves_tokens else layer.natively()
    else:
        for name, kind in (("fc1", "column"), ("fc2", "row")):
            one = _linear(kind, tokens, model.matrices[name], groups, machine, rates, backward)  # type: ignore[arg-type]
            parts[name] = one if "tp" in features else one.natively()
        columns = (model.matrices["fc1"][0] + model.ffn) / groups.tp.ranks
        num_bytes = (2 if backward else 1) * tokens * columns * _ITEMSIZE
        parts["activation"] = Estimate.alike(pass_us(num_bytes, rates))
    if groups.fp8 is not None:
        parts["quantised"] = _quantised(model, groups, rates, groups.fp8, num_rows, backward)
    parts["norms"] = Estimate.alike(_vectors_us(model, groups, rates, backward))
    if groups.deterministic:
        parts["filled"] = Estimate.alike(_filled_us(model, groups, rates, backward))
    return parts


def _filled_us(model: ModelSizes, groups: Groups, rates: MachineRates, backward: bool) -> float:
    """Every result is filled before it is written: activations; backward twice as many, and the weights' gradients;
    experts' are a part of theirs."""
    matrices = model.matrices
    columns = (matrices["qkv"][0] + model.heads * model.channels) / groups.tp.ranks
    weights = matrices["qkv"][0] * model.hidden + model.hidden * model.heads * model.channels
    if model.experts is None:
        columns += (matrices["fc1"][0] + model.ffn) / groups.tp.ranks
        weights += (matrices["fc1"][0] + model.ffn) * model.hidden
    columns += 5 * model.hidden / groups.shared
    num_bytes = _ITEMSIZE * model.tokens / groups.cp.ranks * columns * (2 if backward else 1)
    return pass_us(num_bytes + (_ITEMSIZE * weights / groups.tp.ranks if backward else 0), rates)


def local_layer_us(model: ModelSizes, machine: Machine, rates: MachineRates) -> float:
    """Forward and backward of a layer of Megatron's own modules on one rank, which keep the attention's scores."""
    tokens = model.tokens
    products = 3 * sum(cublas_us(tokens, n, k, machine, rates) for n, k in model.matrices.values())
    scores = float(model.heads) * model.seq_length**2 * model.micro_batch_size
    attention_flops = 3 * 4.0 * scores * model.channels
    columns = model.matrices["fc1"][0] + model.ffn
    passes = pass_us(_UNFUSED_SCORE_BYTES * scores, rates)
    passes += pass_us(3 * tokens * (columns + _VECTOR_PASSES * model.hidden) * _ITEMSIZE, rates)
    return products + attention_flops / rates.gemm_flop_per_us + passes
