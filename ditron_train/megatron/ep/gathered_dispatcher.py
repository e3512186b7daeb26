"""megatron-core's allgather token dispatcher with the gather and the reduce-scatter overlapped (feature ``ep``).

A subclass of the native dispatcher with the same method split. What is not covered runs the inherited methods: same
bits, one log line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

from ditron_train.ep import SumOrder, index_add_order
from ditron_train.ep.gather import GatheredLayout, RowLayout
from ditron_train.ep.grouped_gemm import are_whole
from ditron_train.ep.plan import MOST_FEW, NEVER, OTHER_BITS, min_rows_here, products_of
from ditron_train.megatron.ep.coverage import COMPARED, unsupported_reason_gathered, unsupported_reason_tensors
from ditron_train.megatron.ep.experts import unsupported_reason_called, unsupported_reason_fused_on_ranks
from ditron_train.megatron.ep.gather import GatheredCall, gather_to_rows, given_up_on_error, scatter_rows, start
from ditron_train.megatron.ep.gathered_spec import GATHERED, GATHERED_EXPERTS, ExpertsCall
from ditron_train.megatron.ep.schedule import in_schedule_node, watch_schedule_nodes
from ditron_train.megatron.ep.spec import MovementCall
from ditron_train.megatron.shared.in_place import EqualsBaseClass
from ditron_train.megatron.shared.values import own_or_normal
from ditron_train.policy import gate, log_native
from ditron_train.runtime.device import is_capturing
from ditron_train.runtime.errors import ArenaError, NotSupportedError
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.tp.context import TPContext, get_tp_context
from ditron_train.tp.gather import PendingGather


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
    """Whether a layer's GEMMs are to overlap its transfers (collective); None: this step has too many experts with
    few rows to tell, on every rank.

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
    reason = unsupported_reason_fused_on_ranks(experts, hidden_states.device, context.group)
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
        if GATHERED_EXPERTS.min_rows_reason(seen) is not None:  # also measures from how many rows on bits are native's
            return None
        return gate.context_for(GATHERED_EXPERTS, seen) is not None


def _min_rows(experts: Any, like: torch.Tensor) -> int:
    """How many rows an expert must have for our products to add up as native's do; measured the first time.
    Ranks may differ: what travels is the same."""
    products = products_of(experts.num_local_experts, experts.linear_fc1.weight0, experts.linear_fc2.weight0)
    return max(min_rows_here(product, like.dtype, like.device) for product in products)


def min_rows_of_call(experts: Any, layout: RowLayout, like: torch.Tensor) -> int | None:
    """Below how many rows an expert is multiplied by Transformer Engine in a call whose GEMMs overlap the transfers
    of rows ``like`` these; None: all are, apart from it. An adapter may have come since the layer was built."""
    if unsupported_reason_called(experts) is not None:
        return None
    min_rows = _min_rows(experts, like)
    few, num_experts = layout.experts_below(min_rows), layout.num_experts
    if not few:
        return 0
    share = int(layout.tokens_per_expert[few].sum()) / layout.num_rows
    is_fused = share <= MOST_FEW
    whose = "their GEMMs" if is_fused else "all GEMMs of such a step"
    words = (
        f"{len(few)} of {num_experts} gathered experts have fewer than {min_rows} rows in a step, {share:.0%} of all"
    )
    words = f"gathered {OTHER_BITS}" if min_rows == NEVER else words
    log_once(f"ep few gathered rows {is_fused}", f"ep: {words}: {whose} are Transformer Engine's")
    return min_rows if is_fused else None


_MOST_ASKED = 8  # steps in which it is asked whether GEMMs overlap the transfers, each at the cost of some overlap


@outside_compile
class DitronMoEAllGatherTokenDispatcher(
    MoEAllGatherTokenDispatcher, metaclass=EqualsBaseClass, native=MoEAllGatherTokenDispatcher
):
    """``MoEAllGatherTokenDispatcher`` whose tokens travel while the routing is exchanged and rows are placed, and
    whose results leave rank by rank as they are added up.

    If the experts' GEMMs go beside, ``dispatch_postprocess`` hands over tokens and a ``GatheredCall``, and the
    experts return tokens.
    """

    routing_map: Any

    def __init__(
        self, num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: Any = None
    ) -> None:
        super().__init__(num_local_experts, local_expert_indices, config, pg_collection)
        self._arguments = (num_local_experts, local_expert_indices, config, pg_collection)
        self._native_because: str | None = unsupported_reason_gathered(self)
        self._asks_policy = True
        self._gathered_context: TPContext | None = None
        self._order: SumOrder | None = None
        self._started: PendingGather | None = None
        self._call: GatheredCall | None = None
        self._fuses: bool | None = None
        self._num_asked = 0
        self._is_fused = False
        self._layer_modules: Mapping[str, torch.nn.Module | None] = {}
        watch_schedule_nodes()
        self._log_native()

    @property
    def ep_context(self) -> TPContext | None:
        """Where the tokens of the last call moved, None natively."""
        return self._gathered_context

    def meet_experts(self, modules: Mapping[str, torch.nn.Module | None]) -> None:
        """Learns whose rows are gathered: the layer's own mapping, which says at every call what its experts are."""
        self._layer_modules = modules

    def _log_native(self) -> None:
        if self._native_because not in (None, COMPARED):
            log_native("ep", self._native_because)

    def _context_for(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> TPContext | None:
        """The context of this call, or None for the native path; the same answer on every rank of the group."""
        if in_schedule_node():
            log_native("ep", "a schedule plan runs the layer in pieces, with overlap_moe_expert_parallel_comm off")
            return None
        if self._native_because is None and is_capturing(hidden_states.device):
            log_native("ep", "a CUDA graph is being captured, which the host sync for its sizes does not allow")
            return None
        if self._native_because is None:
            try:
                self._native_because = self._unsupported_reason(hidden_states, probs)
                if self._native_because is None:
                    return get_tp_context(self.tp_ep_group, hidden_states.device)
            except (ArenaError, NotSupportedError) as error:  # raised by every rank alike
                self._native_because = str(error)
            self._log_native()
        return None

    def _unsupported_reason(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> str | None:
        reason = unsupported_reason_tensors(hidden_states, probs, None, gathered=True)
        device = hidden_states.device
        if reason is None and self._order is None:
            fused = self.config.moe_permute_fusion
            self._order = "descending" if fused else index_add_order(hidden_states.dtype, device)
            if self._order is None:
                reason = f"index_add_ of {hidden_states.dtype} adds in an order of its own here"
        if reason is None and self._asks_policy and device.type == "cuda":  # on the CPU there are no times to compare
            reason = self._ask_policy(hidden_states, probs)
        return reason

    def _ask_policy(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> str | None:
        """Why the policy keeps layers of this kind native here, or None; asked once a dispatcher."""
        self._asks_policy = False

        def make(native: bool) -> DitronMoEAllGatherTokenDispatcher:
            dispatcher = DitronMoEAllGatherTokenDispatcher(*self._arguments)
            dispatcher._asks_policy, dispatcher._fuses = False, False
            dispatcher._native_because = COMPARED if native else None
            return dispatcher

        fused, topk = self.config.moe_permute_fusion, self.config.moe_router_topk
        call = MovementCall(make, hidden_states, self.routing_map, probs, topk, fused, self.tp_ep_group)
        return gate.answer_for(GATHERED, call).reason

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._call = None
        context = self._gathered_context = self._context_for(hidden_states, probs)
        if context is None:
            return super().token_dispatch(hidden_states, probs)
        own_map, is_open, left_over = self.routing_map, self._fuses is None, self._take_started()
        if left_over is not None:  # of a call that ended before its tokens were asked for
            left_over.abort()
        try:
            if is_open:  # what is tried for it cannot run while tokens are on their way
                self._gather_routing()
                self._fuses = self._asks_for_gemms(hidden_states, probs, context)
                self._num_asked += 1
                if self._fuses is None and self._num_asked == _MOST_ASKED:
                    words = f"in each of {_MOST_ASKED} steps too many rows were of experts with few"
                    log_once("ep gathered few", f"ep: tokens move before and after the experts' GEMMs, {words}")
                    self._fuses = False
            self._started = start(hidden_states, context, probs.dtype)
        except (ArenaError, NotSupportedError) as error:  # raised by every rank alike
            self._native_because, self._gathered_context, self.routing_map = str(error), None, own_map
            self._log_native()
            return super().token_dispatch(hidden_states, probs)
        with given_up_on_error(self._take_started):
            if not is_open:
                self._gather_routing()
            return hidden_states, gather_from_sequence_parallel_region(probs, group=self.tp_ep_group)

    def _take_started(self) -> PendingGather | None:
        started, self._started = self._started, None
        return started

    def _gather_routing(self) -> None:
        with torch.no_grad():
            self.routing_map = gather_from_sequence_parallel_region(self.routing_map, group=self.tp_ep_group)

    def _local(self, of_experts: torch.Tensor) -> torch.Tensor:
        return of_experts[:, self.local_expert_indices[0] : self.local_expert_indices[-1] + 1]

    def _asks_for_gemms(self, hidden_states: torch.Tensor, probs: torch.Tensor, context: TPContext) -> bool | None:
        """Whether the experts' GEMMs are to overlap the transfers; None: not to be told in this step."""
        experts, local_map = self._layer_modules.get("experts"), self._local(self.routing_map).contiguous()
        assert self._order is not None, "the context was asked for"
        return fuses_here(
            experts,
            hidden_states,
            local_map,
            context,
            self._order,
            sum_dtype=probs.dtype,
            is_fused=self.config.moe_permute_fusion,
        )

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, Any, torch.Tensor]:
        if self._gathered_context is None:
            return super().dispatch_postprocess(hidden_states, probs)
        with given_up_on_error(self._take_started):
            self.local_map = self._local(self.routing_map).contiguous()
            self.local_probs = self._local(probs).T.contiguous().masked_select(self.local_map.T.contiguous())
            layout = GatheredLayout(self.local_map, self._gathered_context.world_size)
            # Ranks may differ in this: what they send is alike.
            experts = self._layer_modules.get("experts")
            min_rows = min_rows_of_call(experts, layout, hidden_states) if self._fuses else None
        self.routing_map = None
        assert self._order is not None, "the context was asked for"
        call = self._call = GatheredCall(
            layout, self._gathered_context, self._order, probs.dtype, self._take_started()
        )
        self._is_fused = min_rows is not None
        if min_rows is not None:
            call.min_rows = min_rows
            return hidden_states, call, self.local_probs
        return gather_to_rows(hidden_states, call), layout.tokens_per_expert, self.local_probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self._gathered_context is None:
            return super().combine_preprocess(hidden_states)
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self._gathered_context is None:
            return super().token_combine(hidden_states)
        call, self._call = self._call, None
        assert call is not None, "dispatched before"
        return hidden_states if self._is_fused else scatter_rows(hidden_states, call)
