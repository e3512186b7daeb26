"""Expert parallelism: megatron-core's alltoall token dispatcher with one push a destination rank (feature ``ep``).

A subclass of the native dispatcher with the same method split, so ``MoELayer``, experts, router, shared experts, their
parameters and checkpoints stay as they are. What is not covered runs the inherited methods: same bits, one log line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.moe.moe_utils import get_capacity
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from ditron_train.ep import (
    EPContext,
    EPHandle,
    ExpertCall,
    Pair,
    PendingLayout,
    RailContext,
    SumOrder,
    begin_layout,
    combine_rows,
    dispatch_ahead,
    dispatch_tokens,
    index_add_order,
    rails,
)
from ditron_train.ep.plan import NEVER, OTHER_BITS
from ditron_train.megatron.compat.config import padded_routing
from ditron_train.megatron.ep.coverage import (
    COMPARED,
    IN_NODES,
    context_of_layer,
    unsupported_reason_beside,
    unsupported_reason_captured,
    unsupported_reason_config,
    unsupported_reason_tensors,
)
from ditron_train.megatron.ep.experts import TEGemm, unsupported_reason_called, unsupported_reason_fused_on_ranks
from ditron_train.megatron.ep.gather import ExpertSlices, all_true, exchange_counts
from ditron_train.megatron.ep.pair_spec import fused_pairs_here, logged_pairs_of_step, min_rows_of_layer, with_limits
from ditron_train.megatron.ep.schedule import in_schedule_node, watch_schedule_nodes
from ditron_train.megatron.ep.spec import IN_PIECES, MOVEMENT, MovementCall, warns_of_min_rows
from ditron_train.megatron.shared.freed_memory import awaiting_freed_memory
from ditron_train.megatron.shared.in_place import EqualsBaseClass
from ditron_train.megatron.shared.interfaces import unsupported_reason_otherwise
from ditron_train.policy import gate, log_native
from ditron_train.policy.gate import INTERFACE_ERRORS
from ditron_train.policy.probe import compares
from ditron_train.runtime.device import is_capturing
from ditron_train.runtime.errors import ArenaError, NotSupportedError
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.runtime.settings import get_settings, under_policy
from ditron_train.symm.exchange import exchange
from ditron_train.symm.nodes import spans_nodes


class FixedCapacity:
    """The fixed number of rows that a dispatcher's experts get (``DITRON_EP_CAPACITY``).

    Attributes:
        factor: A multiple of the rows of even routing; None: exact sizes, with a host sync.
    """

    def __init__(self, factor: float | None = None) -> None:
        self.factor = factor
        self._reason: str | None = None  # why sizes are exact although a capacity was requested
        self._is_agreed = False
        self._min_rows: int | None = None  # of an expert, for its GEMM to be bitwise identical to the native one
        self._has_warned = False

    def take_setting(self, experts: Any, tp_size: int, *, is_apart: bool) -> None:
        """Takes the capacity that the setting requests, if ``experts`` can do without sizes on the host."""
        factor = get_settings().ep_capacity
        if factor is None:
            return
        reason = unsupported_reason_beside(tp_size)
        if reason is None and is_apart:
            reason = "overlap_moe_expert_parallel_comm is on"
        if reason is None and not HAVE_TE:
            reason = "Transformer Engine is not installed"
        if reason is None:
            reason = _unsupported_reason_experts(experts)
        if reason is None:
            self.factor = factor
            log_once(f"ep capacity {factor}", f"ep: room for {factor:g} times the rows of even routing, no host sync")
        else:
            self._use_exact_sizes(reason)

    def drop(self) -> None:
        """Exact sizes from now on, whatever the setting asks for; on all ranks alike."""
        self.factor = self._reason = None

    def look_at(self, experts: Any) -> None:
        """Goes over to exact sizes if experts have got an adapter or a hook since their capacity was decided: it would
        be called with counts that the host does not have, and with unwritten rows after the last one."""
        reason = None if self.factor is None else unsupported_reason_called(experts, is_decided=self._is_agreed)
        if reason is not None:
            self._use_exact_sizes(reason)

    def measure(self, experts: Any, like: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Measures from how many rows of an expert on its fused GEMM is bitwise identical to the native one, for rows
        ``like`` these: with a fixed capacity all experts are fused. Goes over to exact sizes if it never is, or if
        another rank has exact sizes (collective the first time)."""
        if not self._is_agreed and (self.factor is not None or self._reason is not None):
            self._is_agreed = True
            reasons = [reason for reason in exchange(group, self._reason) if reason is not None]
            if reasons and self.factor is not None:
                self._use_exact_sizes(reasons[0])
        if self.factor is None or self._min_rows is not None:
            return
        self._min_rows = min_rows_of_layer(experts, like, group)
        if self._min_rows == NEVER and get_settings().policy in ("strict", "bits"):
            self._use_exact_sizes(OTHER_BITS)

    def warn(self, context: EPContext) -> None:
        """Logs once if an expert had fewer than the minimum rows."""
        if self.factor is not None and not self._has_warned:
            self._has_warned = warns_of_min_rows(context, self._min_rows or 0)

    def _use_exact_sizes(self, reason: str) -> None:
        self.factor, self._reason = None, reason
        log_once(f"ep exact {reason}", f"ep: exact sizes with a host sync in spite of DITRON_EP_CAPACITY: {reason}")


def _unsupported_reason_experts(experts: Any) -> str | None:
    try:
        from ditron_train.megatron.ep.te_experts import unsupported_reason_capacity

        return unsupported_reason_capacity(experts)
    except INTERFACE_ERRORS as error:
        return unsupported_reason_otherwise("Transformer Engine", error)


def _log_native(reason: str | None) -> None:
    if reason not in (None, COMPARED):
        log_once(f"native ep {reason}", f"ep: native dispatcher, {reason}")


def _log_apart(reason: str | None) -> None:
    log_once(f"ep apart {reason}", f"ep: tokens move before and after the experts' GEMMs, {reason}")


def _expert_capacity(dispatcher: Any, num_tokens: int) -> int | None:
    """Tokens that every expert gets from each rank if they are padded to capacity, else None."""
    if not dispatcher.drop_and_pad:
        return None
    sizes = dict(num_experts=dispatcher.num_experts, capacity_factor=dispatcher.moe_expert_capacity_factor)
    return get_capacity(num_tokens=num_tokens * dispatcher.config.moe_router_topk, **sizes)


def _has_room(
    context: EPContext | None,
    probs: torch.Tensor,
    hidden_states: torch.Tensor,
    expert_capacity: int | None,
    factor: float | None,
) -> bool:
    """Whether a call of so many tokens, whose sizes the host knows, has been made before."""
    if context is None:
        return False
    if expert_capacity is None:
        assert factor is not None, "the host knows all sizes"
        room = context.shape.room_for(len(probs), factor)
    else:
        room = context.shape.room_of_experts(len(probs), expert_capacity)
    return context.buffers.has_reserved(room, hidden_states.shape[-1], hidden_states.dtype)


def _slices_of(
    handle: EPHandle | None, shape: tuple[int, int], group: dist.ProcessGroup, device: torch.device, *, fused: bool
) -> ExpertSlices | None:
    """What ranks that hold slices of the same experts exchange; None if one of them has no room for its rows."""
    mine = None if handle is None else handle.tables.sources.view(-1, handle.shape.slots)[: shape[0], : shape[1]]
    counts = exchange_counts(mine, shape, group, device)
    return None if counts is None else ExpertSlices(counts, group, fused=fused, device=device)


def _fused_pairs(
    experts: Any, handle: EPHandle, context: EPContext, tokens: torch.Tensor, order: SumOrder, group: dist.ProcessGroup
) -> frozenset[Pair]:
    """Which pairs of a dispatch or combine and a GEMM run as one kernel; asked once a dispatcher."""
    if not (HAVE_TE and experts is not None and tokens.device.type == "cuda"):
        return frozenset()
    reason = unsupported_reason_fused_on_ranks(experts, tokens.device, group)
    if reason is not None:
        _log_apart(reason)
        return frozenset()
    return fused_pairs_here(experts, handle, context, tokens, order, group=group)


@outside_compile
class DitronMoEAlltoAllTokenDispatcher(
    MoEAlltoAllTokenDispatcher, metaclass=EqualsBaseClass, native=MoEAlltoAllTokenDispatcher
):
    """``MoEAlltoAllTokenDispatcher`` that sends a token once to each rank and copies it to its experts there.

    ``dispatch_preprocess`` exchanges counts on the device, ``token_dispatch`` waits for them (the one host sync that
    native has too) and moves the tokens straight into [local expert, source rank, token] order, ``token_combine``
    returns every row and adds each token's up in the native order. ``dispatch_postprocess`` and ``combine_preprocess``
    have nothing left to move, unless such a pair runs as one kernel, tokens left ahead of the counts, or experts
    are sliced by tensor parallelism: then rows move there.
    """

    shared_experts: Any

    def __init__(
        self, num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: Any = None
    ) -> None:
        super().__init__(num_local_experts, local_expert_indices, config, pg_collection)
        self._arguments = (num_local_experts, local_expert_indices, config, pg_collection)
        self.asks_policy = True
        self._native_because: str | None = unsupported_reason_config(self)
        self.ep_context: EPContext | RailContext | None = None
        self._kept_context: EPContext | None = None
        self._pending: PendingLayout | rails.PendingRailLayout | None = None
        self._layout: EPHandle | rails.RailHandle | None = None
        self._no_room: str | None = None  # why nothing is pending, which tensor parallel ranks learn in token_dispatch
        self._order: SumOrder | None = None
        self._capacity = FixedCapacity()
        self._layer_modules: Mapping[str, torch.nn.Module | None] = {}
        self._pairs: frozenset[Pair] | None = None
        #: Rows of an expert in a step, for the product of each pair to be fused; None: not measured.
        self._limits: dict[Pair, int] | None = None
        self._call: ExpertCall | None = None
        self._slices: ExpertSlices | None = None
        self._slices_agree = self.tp_size == 1
        #: The combined 1F1B schedule calls each method on a stream of its own and frees what it gave to it.
        self._apart = self.config.overlap_moe_expert_parallel_comm
        watch_schedule_nodes()
        if self._apart and self._native_because is None:
            self._pairs = frozenset()
            _log_apart(IN_NODES)
        _log_native(self._native_because)

    @property
    def dispatched(self) -> tuple[EPHandle | rails.RailHandle | None, SumOrder | None]:
        """The handle of the tokens that have been dispatched and not combined yet, and the order of their sums."""
        return self._layout, self._order

    def meet_experts(self, modules: Mapping[str, torch.nn.Module | None]) -> None:
        """Learns what the layer's experts can do: be fused with dispatch and combine, do without sizes on the host.

        ``modules``: the layer's own mapping, which says at every call what its experts are by then."""
        self._layer_modules = modules
        if not self.drop_and_pad:  # padded to capacity, sizes are exact without a host sync
            self._capacity.take_setting(modules["experts"], self.tp_size, is_apart=self._apart)

    @property
    def _experts(self) -> Any:
        return self._layer_modules.get("experts")

    def _context_for(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> EPContext | RailContext | None:
        """The context of this call, or None for the native path; every rank that holds these experts gets the same
        answer."""
        if in_schedule_node() and not self._apart:
            log_native("ep", "a schedule plan runs the layer in pieces, with overlap_moe_expert_parallel_comm off")
            return None
        if self._native_because is None and is_capturing(hidden_states.device):
            is_sized = self.drop_and_pad or self._capacity.factor is not None
            capacity = _expert_capacity(self, len(probs))
            has_room = not is_sized or _has_room(
                self._kept_context, probs, hidden_states, capacity, self._capacity.factor
            )
            is_decided = not self.asks_policy and has_room
            reason = unsupported_reason_captured(is_decided=is_decided, is_sized=is_sized, slices=self.tp_size)
            if reason is not None:
                log_native("ep", reason)
                return None
        context = self._context_of_group(hidden_states, routing_map, probs)
        if not self._slices_agree:  # expert parallel groups side by side decide each for itself
            self._slices_agree = True
            if not all_true(context is not None, self.tp_group, hidden_states.device) and context is not None:
                self._native_because, context = "another tensor parallel rank's expert parallel group is native", None
                _log_native(self._native_because)
        return context

    def _context_of_group(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> EPContext | RailContext | None:
        if self._native_because is None:
            self._native_because = unsupported_reason_tensors(hidden_states, probs, _expert_capacity(self, len(probs)))
        device = hidden_states.device
        if self._native_because is None:
            fused = self.config.moe_permute_fusion
            self._order = "descending" if fused else index_add_order(hidden_states.dtype, device)
            if self._order is None:
                self._native_because = f"index_add_ of {hidden_states.dtype} adds in an order of its own here"
        if self._native_because is None:
            try:
                if self.asks_policy and compares(device):
                    reason = self._ask_policy(hidden_states, routing_map, probs)
                    if not self.asks_policy:
                        self._native_because = reason
                        _log_native(reason)
                    if reason is not None:
                        return None
                kept = self._kept_context
                if kept is not None and kept.device == device and not kept.arena.closed:
                    return kept
                context = context_of_layer(self, device)
                if isinstance(context, RailContext):
                    self._capacity.drop()  # exact sizes, dispatch and combine apart
                    self._pairs = frozenset()
                else:
                    self._kept_context = context
                return context
            except (ArenaError, NotSupportedError) as error:  # raised by every rank alike
                self._native_because = str(error)
        _log_native(self._native_because)
        return None

    def _ask_policy(self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> str | None:
        """Why the policy keeps layers of this kind native here, or None; asked once a dispatcher, but at every call of
        one that nodes run: there the answer may change from step to step, and evaluations run it whole."""
        self.asks_policy = self._apart
        fused, topk = self.config.moe_permute_fusion, self.config.moe_router_topk

        def make(native: bool) -> DitronMoEAlltoAllTokenDispatcher:
            dispatcher = DitronMoEAlltoAllTokenDispatcher(*self._arguments)
            dispatcher.asks_policy = False
            dispatcher._native_because = COMPARED if native else None
            return dispatcher

        group = self.ep_group if self.tp_size == 1 else self.tp_ep_group
        pad_factor = self.moe_expert_capacity_factor if self.drop_and_pad else None
        call = MovementCall(make, hidden_states, routing_map, probs, topk, fused, group, pad_factor)
        settings = get_settings()
        log_decision = settings.ep_rails == "on" and settings.policy == "strict" and spans_nodes(group)
        with under_policy("bits") if log_decision else contextlib.nullcontext():
            return gate.answer_for(IN_PIECES if in_schedule_node() else MOVEMENT, call).reason

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._call = None
        self._capacity.look_at(self._experts)
        self.ep_context = self._context_for(hidden_states, routing_map, probs)
        if self.ep_context is None:
            return super().dispatch_preprocess(hidden_states, routing_map, probs)
        self._capacity.measure(self._experts, hidden_states, self.ep_group)
        self.hidden_shape = hidden_states.shape
        routing_map, padding = padded_routing(self.config, routing_map)
        self.probs, self.routing_map = probs, routing_map
        tokens = hidden_states.view(-1, self.hidden_shape[-1])
        arguments = (routing_map, probs, tokens.shape[1], tokens.dtype, self.ep_context)
        try:
            if isinstance(self.ep_context, RailContext):
                self._pending = rails.begin_layout(*arguments)
            else:
                sizes = dict(
                    capacity_factor=self._capacity.factor, expert_capacity=_expert_capacity(self, len(tokens))
                )
                self._pending = begin_layout(*arguments, **sizes, padding=padding)
                if self._pairs is not None and not self._apart:
                    dispatch_ahead(tokens, self._pending)
        except ArenaError as error:  # of a fixed capacity; raised by every rank of the expert parallel group alike
            self._no_room = str(error)
        if self.shared_experts is not None:
            # The same view as natively, so what they give back is added up before the routed tokens' gradient comes.
            self.shared_experts.pre_forward_comm(tokens.view(self.hidden_shape))
        return (tokens.clone(), probs.clone()) if self._apart else (tokens, probs)

    def token_dispatch(
        self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_states, probs = permutated_local_input_tokens, permuted_probs
        if self.ep_context is None:
            return super().token_dispatch(hidden_states, probs)
        pending, self._pending = self._pending, None
        reason, self._no_room = self._no_room, None
        try:
            self._layout = None if pending is None else pending.finish()
        except (ArenaError, NotSupportedError) as error:  # raised by every rank of the expert parallel group alike
            self._layout, reason = None, str(error)
        if self.tp_size > 1:
            shape = (self.ep_size, self.num_local_experts)
            self._slices = _slices_of(
                self._layout, shape, self.tp_group, hidden_states.device, fused=self.config.moe_permute_fusion
            )
            no_room = reason or "another tensor parallel rank has no room for its rows"
            reason = no_room if self._slices is None else None
        if reason is not None:
            return self._dispatch_natively(hidden_states, probs, reason)
        self._capacity.warn(self.ep_context)
        if not self.config.gradient_accumulation_fusion:
            hidden_states = awaiting_freed_memory(hidden_states)
        self._call = self._expert_call(hidden_states)
        if self._call is not None:
            return hidden_states, probs  # the experts dispatch them
        return dispatch_tokens(hidden_states, probs, self._layout, self.ep_context, self._order)

    def _expert_call(self, hidden_states: torch.Tensor) -> ExpertCall | None:
        """What the experts need to move tokens themselves, or None if the dispatcher moves them."""
        if self._slices is not None:
            _log_apart(unsupported_reason_beside(self.tp_size))
            return None
        if self._pairs is None:
            where = (self._layout, self.ep_context, hidden_states, self._order)
            self._pairs = _fused_pairs(self._experts, *where, group=self.ep_group)
        if not self._pairs:  # rails have none, nor counts by expert
            return None
        changed = unsupported_reason_called(self._experts, is_decided=True)
        if changed is not None:
            _log_apart(changed)
            return None
        if self._limits is None and self._capacity.factor is None:  # a capacity may be given up later
            self._pairs, self._limits = with_limits(self._pairs, self._experts, hidden_states, self.ep_group)
            if not self._pairs:
                return None
        expert_rows = self._layout.expert_rows  # as the counts are, alike
        pairs, min_rows = logged_pairs_of_step(self._pairs, expert_rows, self._limits or {})
        if not pairs:
            return None
        gemm = TEGemm(self._layout.tokens_per_expert.tolist()) if self._capacity.factor is None else None
        few = gemm.some if min_rows and gemm is not None else None
        return ExpertCall(self._layout, self.ep_context, self._order, pairs, gemm, min_rows=min_rows, few=few)

    def _dispatch_natively(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, reason: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Goes over to the native path between preprocessing and dispatch, for good."""
        self._native_because, self.ep_context, self._layout = reason, None, None
        _log_native(self._native_because)
        shared_experts, self.shared_experts = self.shared_experts, None  # they have begun already
        try:
            permuted = super().dispatch_preprocess(hidden_states.view(self.hidden_shape), self.routing_map, probs)
        finally:
            self.shared_experts = shared_experts
        return super().token_dispatch(*permuted)

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, Any, torch.Tensor]:
        hidden_states, probs = global_input_tokens, global_probs
        if self.ep_context is None:
            return super().dispatch_postprocess(hidden_states, probs)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(hidden_states)
        if self._call is not None:
            return hidden_states, self._call, probs
        if self._slices is not None:
            rows, probs = self._slices.gather(hidden_states, probs)
            return rows, self._slices.tokens_per_expert, probs
        if self._apart:
            hidden_states = hidden_states.clone()
        if self._capacity.factor is None:
            return hidden_states, self._layout.tokens_per_expert, probs
        from ditron_train.megatron.ep.te_experts import DeviceCounts

        return hidden_states, DeviceCounts(self._layout), probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.ep_context is None:
            return super().combine_preprocess(hidden_states)
        slices, self._slices = self._slices, None
        return hidden_states if slices is None else slices.scatter(hidden_states, self.probs.dtype)

    def token_combine(
        self, hidden_states: torch.Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> torch.Tensor:
        if self.ep_context is None:
            return super().token_combine(hidden_states, async_finish, allocate_on_comm_stream)
        handle, self._layout = self._layout, None
        call, self._call = self._call, None
        if call is not None:
            return hidden_states  # the experts have combined them
        return combine_rows(hidden_states, handle, self.ep_context, self._order)

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        if self.ep_context is None:
            return super().combine_postprocess(permutated_local_input_tokens)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(permutated_local_input_tokens)
            self.shared_experts.post_forward_comm()
        output = permutated_local_input_tokens.view(self.hidden_shape)
        if self.shared_experts is not None:
            output += self.shared_experts.get_output()
        return output
