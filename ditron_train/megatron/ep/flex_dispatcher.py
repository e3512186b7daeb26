"""megatron-core's flex token dispatcher with the deepep backend, with DeepEP or without it (feature ``ep``).

A subclass of the native dispatcher with the same method split. Tokens are sent once to each rank that has one of their
experts, and straight to the experts' rows there, which the native dispatcher does in three steps (dispatch, conversion
of indices, permutation). The combine adds up a token's rows at each rank, as the native permutation in use does, and
sends the sum rounded to the rows' type; sums are added up by ascending rank, from 0 in fp32 with one rounding, as
DeepEP's combine does. Backward is the same the other way round. Gradients of probabilities travel in fp32.

If DeepEP is installed, what is not covered runs the inherited methods: same bits, one log line. If it is missing there
is no native path: what is not covered raises an error, on every rank alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.moe import token_dispatcher as native_module
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

from ditron_train.ep import (
    EPContext,
    EPHandle,
    PendingLayout,
    SumOrder,
    begin_layout,
    combine_rows,
    dispatch_ahead,
    dispatch_tokens,
    get_ep_context,
    index_add_order,
)
from ditron_train.megatron.ep.coverage import COMPARED, unsupported_reason_flex, unsupported_reason_tensors
from ditron_train.megatron.ep.schedule import in_schedule_node, watch_schedule_nodes
from ditron_train.megatron.ep.spec import FLEX, MovementCall
from ditron_train.megatron.shared.freed_memory import awaiting_freed_memory
from ditron_train.megatron.shared.in_place import EqualsBaseClass
from ditron_train.policy import gate, log_native
from ditron_train.policy.probe import compares
from ditron_train.runtime.device import is_capturing
from ditron_train.runtime.errors import ArenaError, NotSupportedError
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.runtime.settings import get_settings
from ditron_train.symm.nodes import spans_nodes

_FUNCTIONS = ("fused_dispatch", "fused_combine", "set_deepep_num_sms")
_MOST_RANKS = 8  # whose rows DeepEP's kernels inside a node add up
#: Native order of a rank's own sum -> order of the whole sum.
_BY_RANK: dict[SumOrder, SumOrder] = {
    "ascending_rounded": "by_rank_ascending_rounded",
    "ascending": "by_rank_ascending",
    "descending": "by_rank_descending",
}


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotSupportedError("ep: DeepEP is missing, and the flex dispatcher was called without --ditron ep")


def has_deepep() -> bool:
    """Whether Megatron-core could import DeepEP: releases from 2.0 on lack a name that it asks for."""
    return native_module.fused_dispatch not in (None, _refuse)


@contextlib.contextmanager
def deepep_optional() -> Iterator[None]:
    """Megatron-core builds its flex dispatcher although DeepEP is missing; nothing if it is there."""
    if has_deepep():
        yield
        return
    before = {name: getattr(native_module, name) for name in _FUNCTIONS}
    for name in _FUNCTIONS:
        setattr(native_module, name, _refuse)
    native_module.set_deepep_num_sms = lambda num_sms: None
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(native_module, name, value)


def _log_start(is_missing: bool) -> None:
    where = "DeepEP is missing: flex runs by this package's kernels, with nothing to compare" if is_missing else "flex"
    log_once(
        "ep flex",
        f"ep: {where}; --moe-token-dispatcher-type alltoall with ep is expected to be as fast or faster (on 2 H200s a "
        "layer took 0.88 of the time of flex with DeepEP 1.2.1 at 7168 x 2048, 0.5 to 0.7 at 4096 x 1536; its bits "
        "differ from those of flex)",
    )


@outside_compile
class DitronMoEFlexTokenDispatcher(MoEFlexTokenDispatcher, metaclass=EqualsBaseClass, native=MoEFlexTokenDispatcher):
    """``MoEFlexTokenDispatcher`` by this package's kernels.

    ``dispatch_preprocess`` takes the top-k of the probabilities as the native dispatcher does (which picks experts of
    probability 0 too, if a token has fewer others) and exchanges counts, ``token_dispatch`` waits for them and moves
    the tokens into [local expert, source rank, token] order, ``token_combine`` returns one sum a rank.
    """

    def __init__(
        self, num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: Any = None
    ) -> None:
        self._is_missing = not has_deepep() and config.moe_flex_dispatcher_backend == "deepep"
        with deepep_optional() if self._is_missing else contextlib.nullcontext():
            super().__init__(num_local_experts, local_expert_indices, config, pg_collection)
        self._arguments = (num_local_experts, local_expert_indices, config, pg_collection)
        self._asks_policy = not self._is_missing
        self._native_because: str | None = None
        self.ep_context: EPContext | None = None
        self._pending: PendingLayout | None = None
        self._layout: EPHandle | None = None
        self._order: SumOrder | None = None
        self._given: tuple[torch.Tensor, torch.Tensor] | None = None  # the router's, for the native path
        watch_schedule_nodes()
        self._go_native(unsupported_reason_flex(self))
        if self._native_because is None:
            _log_start(self._is_missing)
            if get_settings().ep_capacity is not None:
                log_once(
                    "ep flex capacity", "ep: flex has exact sizes with a host sync in spite of DITRON_EP_CAPACITY"
                )

    @property
    def dispatched(self) -> tuple[EPHandle | None, SumOrder | None]:
        """The handle of the tokens that have been dispatched and not combined yet, and the order of their sums."""
        return self._layout, self._order

    def _go_native(self, reason: str | None, *, for_good: bool = True) -> None:
        """Goes over to the native path if there is a reason.

        Raises:
            NotSupportedError: DeepEP is missing.
        """
        if reason is None:
            return
        if self._is_missing:
            raise NotSupportedError(
                f"ep: the flex dispatcher cannot run: {reason}, and DeepEP is missing (not installed, or a release "
                "that this Megatron-core cannot import)"
            )
        if for_good:
            self._native_because = reason
        if reason != COMPARED:
            log_native("ep", reason)

    def _context_for(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> EPContext | None:
        """The context of this call, or None for the native path; the same answer on every rank of the group."""
        device, reason = hidden_states.device, None
        if self._native_because is not None:
            return None
        if in_schedule_node():
            reason = "a schedule plan runs the layer in pieces"
        elif is_capturing(device):
            reason = "a CUDA graph is being captured, which the host sync for its sizes does not allow"
        if reason is not None:
            self._go_native(reason, for_good=False)
            return None
        try:
            reason = unsupported_reason_tensors(hidden_states, probs.new_empty(0, dtype=torch.float32), None)
            if reason is None and (spans_nodes(self.tp_ep_group) or self.tp_ep_group.size() > _MOST_RANKS):
                reason = (
                    f"the group spans nodes, or has more than {_MOST_RANKS} ranks: DeepEP then rounds by node, too"
                )
            if reason is None and self._order is None:
                order = (
                    "descending" if self.config.moe_permute_fusion else index_add_order(hidden_states.dtype, device)
                )
                reason = None if order else f"index_add_ of {hidden_states.dtype} adds in an order of its own here"
                self._order = _BY_RANK[order] if order else None
            if reason is None and self._asks_policy and compares(device):
                reason = self._ask_policy(hidden_states, probs)
            if reason is None:
                manager = self._comm_manager
                return get_ep_context(self.tp_ep_group, device, manager.num_experts, manager.router_topk)
        except (ArenaError, NotSupportedError) as error:  # raised by every rank alike
            reason = str(error)
        self._go_native(reason)
        return None

    def _ask_policy(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> str | None:
        """Why the policy keeps layers of this kind native here, or None; asked once a dispatcher."""
        self._asks_policy = False

        def make(native: bool) -> DitronMoEFlexTokenDispatcher:
            dispatcher = DitronMoEFlexTokenDispatcher(*self._arguments)
            dispatcher._asks_policy = False
            dispatcher._native_because = COMPARED if native else None
            return dispatcher

        fused, topk = self.config.moe_permute_fusion, self.config.moe_router_topk
        call = MovementCall(make, hidden_states, probs != 0, probs, topk, fused, self.tp_ep_group)
        return gate.answer_for(FLEX, call).reason

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.ep_context = self._context_for(hidden_states, probs)
        if self.ep_context is None:
            return super().dispatch_preprocess(hidden_states, routing_map, probs)
        self.hidden_shape, self._given = hidden_states.shape, (routing_map, probs)
        tokens = hidden_states.view(-1, self.hidden_shape[-1])
        expanded = self._initialize_metadata(routing_map, probs)[1].flatten(1)
        chosen = torch.topk(expanded.detach(), self._comm_manager.router_topk, dim=-1).indices
        routed = torch.zeros(expanded.shape, dtype=torch.bool, device=tokens.device).scatter_(1, chosen, True)
        weights = expanded.float()  # DeepEP takes no others
        self._pending = begin_layout(routed, weights, tokens.shape[1], tokens.dtype, self.ep_context)
        dispatch_ahead(tokens, self._pending)
        return tokens, weights

    def token_dispatch(
        self,
        hidden_states: torch.Tensor,
        probs: Any = None,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = (async_finish, allocate_on_comm_stream)
        if self.ep_context is None:
            return super().token_dispatch(hidden_states, probs, *given)
        assert self._pending is not None and self._given is not None and self._order is not None, "preprocessed before"
        pending, routing, self._pending, self._given = self._pending, self._given, None, None
        try:
            self._layout = pending.finish()
        except (ArenaError, NotSupportedError) as error:  # raised by every rank alike
            self._go_native(str(error))
            self.ep_context = None
            permuted = super().dispatch_preprocess(hidden_states.view(self.hidden_shape), *routing)
            return super().token_dispatch(*permuted, *given)
        if not self.config.gradient_accumulation_fusion:
            hidden_states = awaiting_freed_memory(hidden_states)
        return dispatch_tokens(hidden_states, probs, self._layout, self.ep_context, self._order)

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.ep_context is None:
            return super().dispatch_postprocess(hidden_states, probs)
        assert self._layout is not None, "dispatched before"
        probs = probs.double() if self.config.moe_router_dtype == "fp64" else probs
        return hidden_states, self._layout.tokens_per_expert, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states if self.ep_context is not None else super().combine_preprocess(hidden_states)

    def token_combine(
        self, hidden_states: torch.Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> torch.Tensor:
        if self.ep_context is None:
            return super().token_combine(hidden_states, async_finish, allocate_on_comm_stream)
        layout, self._layout = self._layout, None
        assert layout is not None and self._order is not None, "dispatched before"
        return combine_rows(hidden_states, layout, self.ep_context, self._order)
