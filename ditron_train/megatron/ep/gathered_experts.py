"""Whether the GEMMs of gathered experts run beside the gather and the reduce-scatter (part of feature ``ep``)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from ditron_train.ep.expert_functions import MOST_FEW
from ditron_train.ep.few_rows import NEVER, OTHER_BITS, fewest_rows_here
from ditron_train.ep.gathered import RowLayout
from ditron_train.ep.group_gemm import are_whole
from ditron_train.ep.orders import SumOrder
from ditron_train.megatron.ep.experts import why_not_called, why_not_fused_on_ranks
from ditron_train.megatron.ep.few_rows import products_of
from ditron_train.megatron.ep.gathered_spec import GATHERED_EXPERTS, ExpertsCall
from ditron_train.megatron.shared.values import own_or_normal
from ditron_train.policy import gate
from ditron_train.runtime.logs import log_once
from ditron_train.tp.context import TPContext


def fuses_here(
    experts: Any,
    hidden_states: torch.Tensor,
    local_map: torch.Tensor,
    context: TPContext,
    order: SumOrder,
    *,
    sum_dtype: torch.dtype,
    is_fused: bool,
) -> bool | None:
    """Whether a layer's GEMMs are to run beside its movement (collective); None: this step has too many experts of few
    rows to tell, on every rank.

    Args:
        experts: The layer's.
        hidden_states: The first step's tokens.
        local_map: Of all ranks' tokens to the local experts.
        context: Of all ranks that hold experts.
        order: In which a token's rows are added up.
        sum_dtype: In which results are added up over ranks.
        is_fused: Whether ``moe_permute_fusion`` is on.
    """
    if not (HAVE_TE and experts is not None and hidden_states.is_cuda):
        return False
    reason = why_not_fused_on_ranks(experts, hidden_states.device, context.group)
    if reason is None:
        first, second = (
            [own_or_normal(getattr(linear, f"weight{index}"), index) for index in range(linear.num_gemms)]
            for linear in (experts.linear_fc1, experts.linear_fc2)
        )
        if not all(are_whole(one[0].shape, hidden_states.dtype) for one in (first, second)):
            reason = "rows of weights are not whole 16 bytes"
    if reason is not None:
        log_once(f"ep apart {reason}", f"ep: tokens move before and after the experts' GEMMs, {reason}")
        return False
    with torch.no_grad():
        x = hidden_states.detach()
        grad = torch.empty_like(x).normal_(generator=torch.Generator(x.device).manual_seed(1))
        seen = ExpertsCall(x, first, second, local_map, context.group, order, sum_dtype, is_fused, grad)
        if GATHERED_EXPERTS.few_rows_reason(seen) is not None:  # also measures from how many rows on bits are native's
            return None
        return gate.context_for(GATHERED_EXPERTS, seen) is not None


def _fewest_rows(experts: Any, like: torch.Tensor) -> int:
    """How many rows an expert must have for our products to add up as native's do; measured the first time.
    Ranks may differ: what travels is the same."""
    products = products_of(experts.num_local_experts, experts.linear_fc1.weight0, experts.linear_fc2.weight0)
    return max(fewest_rows_here(product, like.dtype, like.device) for product in products)


def fewest_rows_of_call(experts: Any, layout: RowLayout, like: torch.Tensor) -> int | None:
    """Below how many rows an expert is multiplied by Transformer Engine in a call whose GEMMs run beside the movement
    of rows ``like`` these; None: all are, apart from it. An adapter may have come since the layer was built."""
    if why_not_called(experts) is not None:
        return None
    fewest = _fewest_rows(experts, like)
    few, num_experts = layout.experts_below(fewest), layout.num_experts
    if not few:
        return 0
    share = int(layout.tokens_per_expert[few].sum()) / layout.num_rows
    is_fused = share <= MOST_FEW
    whose = "their GEMMs" if is_fused else "all GEMMs of such a step"
    words = f"{len(few)} of {num_experts} gathered experts have fewer than {fewest} rows in a step, {share:.0%} of all"
    words = f"gathered {OTHER_BITS}" if fewest == NEVER else words
    log_once(f"ep few gathered rows {is_fused}", f"ep: {words}: {whose} are Transformer Engine's")
    return fewest if is_fused else None
