"""Why a dispatcher of tokens runs natively (part of feature ``ep``): by its configuration, by a call's tensors, in a
capture, for want of a context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.ep import EPContext, RailContext, get_ep_context, get_rail_context
from ditron_train.ep.context import DTYPES
from ditron_train.megatron.compat.config import captures_dispatch, unsupported_reason_dispatcher
from ditron_train.runtime.device import is_interpreter
from ditron_train.runtime.errors import ArenaError, NotSupportedError
from ditron_train.runtime.groups import GroupCache
from ditron_train.runtime.settings import get_settings

#: Of a dispatcher that the policy compares with the fused path.
COMPARED = "it is what the fused path is compared with"
#: Of the GEMMs of a layer with the flex dispatcher.
APART = "rows are added up at each rank before they return"
#: Of the GEMMs of a layer whose pieces a schedule plan runs.
IN_NODES = "overlap_moe_expert_parallel_comm runs movement and GEMMs in nodes of their own"
#: Options that are native in groups that span nodes.
_NOT_OVER_NODES = (
    "moe_pad_expert_input_to_capacity",
    "moe_router_padding_for_quantization",
    "overlap_moe_expert_parallel_comm",
)
# Where peer memory was found not to reach all ranks: it is not tried again at every step.
_by_rails: GroupCache[tuple[dist.ProcessGroup, torch.device], bool] = GroupCache()


def unsupported_reason_fp8_recipe(names: Sequence[str]) -> str | None:
    """Why rows of experts in FP8 are quantised by Transformer Engine, by their recipe, or None.

    Args:
        names: Of the recipe's class, then of those that it is derived from.
    """
    if "Float8CurrentScaling" in names:
        return None
    return f"only tensorwise scaling has grouped quantization, the recipe is {names[0]}"


def unsupported_reason_fp8_options(*, is_plain: bool, has_fp8_parameters: bool) -> str | None:
    """Why rows of experts in FP8 are quantised by Transformer Engine, by the layer's options, or None.

    Args:
        is_plain: Whether the layer has neither quantization parameters nor a bias, and nothing is offloaded.
        has_fp8_parameters: Whether the weights are kept in FP8.
    """
    if has_fp8_parameters:
        return "the parameters are FP8 (--fp8-param-gather)"
    return None if is_plain else "the layer has quantization parameters or a bias, or activations are offloaded"


def unsupported_reason_fp8_rows(dtype: torch.dtype) -> str | None:
    """Why rows of ``dtype`` are quantised to FP8 by Transformer Engine, or None."""
    return None if dtype == torch.bfloat16 else f"{dtype} is not covered"


def unsupported_reason_kind(kind: str) -> str | None:
    """Why a ``moe_token_dispatcher_type`` is Megatron's, or None."""
    if kind in ("alltoall", "allgather", "flex"):
        return None
    return f"moe_token_dispatcher_type is {kind!r} (alltoall, allgather and flex are covered)"


def unsupported_reason_gathered(dispatcher: Any) -> str | None:
    """Why a configuration of the allgather dispatcher runs natively, or None."""
    if dispatcher.tp_size * dispatcher.ep_size == 1:
        return "one rank holds all experts"
    return unsupported_reason_dispatcher(dispatcher)


def unsupported_reason_flex(dispatcher: Any) -> str | None:
    """Why a configuration of the flex dispatcher runs natively, or None."""
    config = dispatcher.config
    if config.moe_flex_dispatcher_backend != "deepep":
        return f"moe_flex_dispatcher_backend is {config.moe_flex_dispatcher_backend!r} (deepep is covered)"
    # The last two came later: the permutation pads each expert's rows for Transformer Engine's fused products.
    for name in (
        *("moe_expert_capacity_factor", "moe_router_padding_for_quantization", "moe_shared_expert_overlap"),
        *("use_transformer_engine_op_fuser", "moe_use_grouped_tensor"),
    ):
        if getattr(config, name, False):
            return f"{name} is {getattr(config, name)} with the flex dispatcher"
    if config.overlap_moe_expert_parallel_comm:
        return "overlap_moe_expert_parallel_comm runs the flex dispatcher beside another microbatch"
    if captures_dispatch(config):
        return "the layer is captured in a CUDA graph, which its host sync does not allow"
    return unsupported_reason_dispatcher(dispatcher)


def unsupported_reason_config(dispatcher: Any) -> str | None:
    """Why a configuration runs natively, or None."""
    config = dispatcher.config
    if dispatcher.ep_size == 1:
        return "the expert parallel group has one rank"
    if config.moe_router_padding_for_quantization and config.moe_pad_expert_input_to_capacity:
        return "moe_router_padding_for_quantization and moe_pad_expert_input_to_capacity are both on"
    # A dispatch holds registers until its peers send, an AG-GEMM shared memory of all multiprocessors: ranks could
    # wait in a circle (``schedule``).
    others = config.tensor_model_parallel_size * config.context_parallel_size * dispatcher.tp_size
    if config.overlap_moe_expert_parallel_comm and others > 1:
        return (
            "overlap_moe_expert_parallel_comm runs it beside tensor or context parallel kernels that wait for peers, "
            "too"
        )
    reason = unsupported_reason_dispatcher(dispatcher)
    if reason is not None:
        return reason
    if captures_dispatch(config):
        return "the layer is captured in a CUDA graph, which its host sync does not allow"
    return None


def unsupported_reason_beside(slices: int) -> str | None:
    """Why rows of experts that so many tensor parallel ranks share move apart from the experts' GEMMs, or None."""
    return f"experts are split over {slices} tensor parallel ranks" if slices > 1 else None


def unsupported_reason_tensors(
    hidden_states: torch.Tensor, probs: torch.Tensor, expert_capacity: int | None, *, gathered: bool = False
) -> str | None:
    """Why tokens and probabilities of these types, so many of them, are not covered, or None. ``gathered``: they go to
    all ranks, and results are added up in the type of the probabilities."""
    if gathered and (0 in hidden_states.shape or hidden_states.shape[-1] * hidden_states.element_size() % 16):
        return f"tokens {tuple(hidden_states.shape)} of {hidden_states.dtype} are none, or not of whole 16 bytes"
    if expert_capacity is not None and expert_capacity > len(probs):
        return f"{len(probs)} tokens do not fill an expert's capacity of {expert_capacity}"
    if hidden_states.device.type == "cpu" and not is_interpreter():
        return "the tensors are on the CPU and Triton's interpreter is off"
    for tensor in (hidden_states, probs):
        if tensor.dtype not in DTYPES:
            return f"{tensor.dtype} is not covered"
    return None


def unsupported_reason_captured(*, is_decided: bool, is_sized: bool, slices: int) -> str | None:
    """Why a call is native while a CUDA graph is being captured, or None.

    Args:
        is_decided: Whether the policy has been asked about such layers, and there is room for so many tokens.
        is_sized: Whether the host knows all sizes: tokens are padded to capacity, or there is a fixed capacity.
        slices: Tensor parallel ranks that experts are split over.
    """
    if not is_decided:
        return "a layer was first called so while a CUDA graph was being captured (run a warm-up step before)"
    if not is_sized or slices > 1:
        return "a CUDA graph is being captured, which the host sync for its sizes does not allow"
    return None


def shares_with_collectives(config: Any) -> bool:
    """Whether shared experts gather and reduce over tensor parallel ranks while tokens move."""
    return bool(config.moe_shared_expert_overlap and config.tensor_model_parallel_size > 1)


def context_of_layer(dispatcher: Any, device: torch.device) -> EPContext | RailContext:
    """The context of a dispatcher's group (collective at its first use): by peer memory if that reaches all ranks,
    else, or if ``DITRON_EP_RAILS=on``, by rails.

    Raises:
        ArenaError, NotSupportedError: It cannot be had, on every rank alike.
    """
    config, over_nodes = dispatcher.config, None
    arguments = (dispatcher.ep_group, device, dispatcher.num_experts, config.moe_router_topk)
    rails = get_settings().ep_rails
    place = dispatcher.ep_group, device
    if rails == "on" or (rails == "auto" and place in _by_rails):
        over_nodes = get_rail_context(*arguments)
    if over_nodes is None:
        try:
            context = get_ep_context(*arguments)
            if shares_with_collectives(config):
                context.leave_room()
            if config.overlap_moe_expert_parallel_comm:
                context.run_concurrently()
            return context
        except (ArenaError, NotSupportedError):
            over_nodes = get_rail_context(*arguments) if rails == "auto" else None
            if over_nodes is None:
                raise
            _by_rails[place] = True
    for option in _NOT_OVER_NODES:
        if getattr(config, option):
            raise NotSupportedError(f"{option} is on in a group that spans nodes")
    if dispatcher.tp_size > 1:
        raise NotSupportedError("experts are split over tensor parallel ranks in a group that spans nodes")
    if shares_with_collectives(config):
        over_nodes.inner.leave_room()
    return over_nodes
