"""Transformer Engine's grouped experts with dispatch and combine inside their linear layers (feature ``ep``).

``TEGroupedMLP`` gets rows that have been dispatched and returns rows that are combined later. If a dispatch or combine
and a GEMM run as one kernel, the dispatcher hands over tokens instead, with an ``ExpertCall`` in the place of the
counts, and gets tokens back. Parameters, checkpoints and the activation are the native ones; GEMMs that are not fused
are Transformer Engine's, weight gradients too, unless one kernel for all experts was measured faster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.moe.experts import TEGroupedMLP

from ditron_train.ep.dispatcher import ExpertCall, dispatch_linear, linear_combine
from ditron_train.ep.grouped_gemm import RowTiles, group_wgrad_into
from ditron_train.gemm.transformer_engine import grouped_gemm
from ditron_train.megatron.compat.activation import activate_experts
from ditron_train.megatron.compat.config import unsupported_reason_experts
from ditron_train.megatron.ep.gather import GatheredCall, gather_linear, given_up_on_error, linear_scatter
from ditron_train.megatron.shared.forward_override import calling, unsupported_reason_stand_in
from ditron_train.megatron.shared.in_place import EqualsBaseClass
from ditron_train.megatron.shared.module_hooks import has_hooks
from ditron_train.megatron.shared.wgrad import gradient_in_main_grad, main_grad_of
from ditron_train.runtime.device import HOPPER_AND_NEWER, kernel_target
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.symm.exchange import exchange

_LATE_HOOKS = (
    "ep: hooks that came to experts behind the first step see tokens, where these are fused with their movement"
)
_group: ContextVar[dist.ProcessGroup | None] = ContextVar("ditron_train_experts_group", default=None)


@contextlib.contextmanager
def with_experts_of(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Inside, layers of experts know the expert parallel group that decides about them."""
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)


def experts_group() -> dist.ProcessGroup | None:
    """The group of the experts whose forward runs, or None."""
    return _group.get()


class TEGemm:
    """Transformer Engine's grouped GEMM, called as its ``GroupedLinear`` does.

    Args:
        splits: Rows of each expert.
    """

    def __init__(self, splits: Sequence[int]) -> None:
        self._splits = list(splits)

    def __call__(self, rows: torch.Tensor, weights: Sequence[torch.Tensor], transpose: bool) -> torch.Tensor:
        """rows @ weights[e].T (forward), or rows @ weights[e] (dgrad)."""
        columns = weights[0].shape[0 if transpose else 1]
        out = torch.empty(rows.shape[0], columns, dtype=rows.dtype, device=rows.device)
        _grouped_gemm(weights, rows, [out], self._splits, single_output=True, **_product_options(transpose))
        return out

    def some(
        self,
        rows: torch.Tensor,
        weights: Sequence[torch.Tensor],
        transpose: bool,
        out: torch.Tensor,
        experts: Sequence[int],
    ) -> None:
        """The same for the rows of some experts, written over theirs of ``out``."""
        if experts:
            of_all = (weights, rows.split(self._splits), out.split(self._splits))
            a, b, into = ([one[expert] for expert in experts] for one in of_all)
            sizes = [self._splits[expert] for expert in experts]
            grouped_gemm(a, b, into, rows.dtype, m_splits=sizes, **_product_options(transpose))


def _product_options(transpose: bool) -> dict[str, Any]:
    """Of forward, or of dgrad."""
    return dict(layout="TN" if transpose else "NN", grad=not transpose, use_split_accumulator=not transpose)


def _grouped_gemm(
    a: Sequence[torch.Tensor], rows: torch.Tensor, out: list[torch.Tensor], splits: list[int], **options: Any
) -> None:
    grouped_gemm(a, rows.contiguous().split(splits), out, rows.dtype, m_splits=splits, **options)


class TEWgrad:
    """Transformer Engine's grouped weight gradients, each in a tensor of its own.

    Args:
        splits: Rows of each expert.
    """

    def __init__(self, splits: Sequence[int]) -> None:
        self._splits = list(splits)

    def __call__(
        self, grad: torch.Tensor, rows: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """grad.T @ rows over each expert's rows."""
        return self.into([torch.empty_like(w) for w in weights], grad, rows, accumulate=False)

    def into(
        self, out: list[torch.Tensor], grad: torch.Tensor, rows: torch.Tensor, *, accumulate: bool
    ) -> list[torch.Tensor]:
        """The same added to, or written over, tensors that are there."""
        _grouped_gemm(
            rows.split(self._splits),
            grad,
            out,
            self._splits,
            layout="NT",
            grad=True,
            accumulate=accumulate,
            use_split_accumulator=True,
        )
        return out


class _MainGradWgrad(TEWgrad):
    """Weight gradients of one pass with gradient accumulation fusion, as the layer's own backward treats them.

    They are added to ``main_grad`` (written on the first microbatch if the layer keeps count), and autograd gets a
    dummy if ``grad_added_to_main_grad`` exists, else None.
    """

    def __init__(self, linear: torch.nn.Module, splits: Sequence[int]) -> None:
        super().__init__(splits)
        self._weights = _weights_of(linear)
        self._accumulates = _accumulates(linear)

    def __call__(
        self, grad: torch.Tensor, rows: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        parameters: Sequence[Any] = self._weights
        out = [main_grad_of(parameter) for parameter in parameters]
        accumulate = self._accumulates and not getattr(parameters[0], "overwrite_main_grad", False)
        self.into(out, grad, rows, accumulate=accumulate)
        return [gradient_in_main_grad(parameter, parameter.dtype) for parameter in parameters]


class OwnMainGradWgrad:
    """Likewise by our grouped GEMM, without sizes on the host."""

    def __init__(self, linear: Any) -> None:
        self._weights: Sequence[Any] = _weights_of(linear)
        self._accumulates = _accumulates(linear)

    def __call__(
        self, grad: torch.Tensor, rows: torch.Tensor, tiles: RowTiles, spare_sms: int = 0
    ) -> Sequence[torch.Tensor | None]:
        """grad.T @ rows over each expert's rows, into its ``main_grad``."""
        overwrites = not self._accumulates or getattr(self._weights[0], "overwrite_main_grad", False)
        out = [main_grad_of(parameter) for parameter in self._weights]
        try:
            group_wgrad_into(grad, rows, tiles, out, overwrites=overwrites, spare_sms=spare_sms)
        except NotSupportedError:  # buffers at odd addresses: the same sums by way of fresh ones
            sums = [torch.empty(w.shape, dtype=torch.float32, device=w.device) for w in out]
            group_wgrad_into(grad, rows, tiles, sums, overwrites=True, spare_sms=spare_sms)
            for buffer, total in zip(out, sums):
                buffer.copy_(total) if overwrites else buffer.add_(total)
        return [gradient_in_main_grad(parameter, parameter.dtype) for parameter in self._weights]


def _accumulates(linear: Any) -> bool:
    """Whether a pass adds to ``main_grad``: the first microbatch of a layer that counts them is written over it."""
    return bool(linear.disable_parameter_transpose_cache or not linear.is_first_microbatch)


def triton_wgrad_into(linear: Any) -> OwnMainGradWgrad | None:
    """Where our weight gradients of a layer's next pass go; None: into tensors of their own."""
    into = OwnMainGradWgrad(linear) if linear.fuse_wgrad_accumulation else None
    linear.is_first_microbatch = False
    return into


_Call = TypeVar("_Call", ExpertCall, GatheredCall)


def _call_of(linear: Any, call: _Call) -> _Call:
    """``call`` with the weight gradients of one layer's pass."""
    if isinstance(call, ExpertCall) and (call.gemm is None or "group_wgrad" in call.fused):
        return dataclasses.replace(call, into=triton_wgrad_into(linear))
    splits = call.layout.tokens_per_expert.tolist()
    wgrad = _MainGradWgrad(linear, splits) if linear.fuse_wgrad_accumulation else TEWgrad(splits)
    linear.is_first_microbatch = False
    return dataclasses.replace(call, wgrad=wgrad)


@cache
def _weight_names(num: int) -> tuple[str, ...]:
    return tuple(f"weight{index}" for index in range(num))


def _weights_of(linear: Any) -> list[torch.nn.Parameter]:
    """The experts' weights. A module's own look-up takes eight times as long, and there are many experts."""
    known, names = linear._parameters, _weight_names(linear.num_gemms)
    return [known[name] if name in known else getattr(linear, name) for name in names]


@outside_compile
class DitronTEGroupedMLP(TEGroupedMLP, metaclass=EqualsBaseClass, native=TEGroupedMLP):
    """``TEGroupedMLP`` that takes tokens and an ``ExpertCall`` too, and returns tokens then."""

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: Any,
        permuted_probs: torch.Tensor,
        **kwargs: Any,  # of newer versions: buffers of dispatchers that are not fused
    ) -> Any:
        if isinstance(tokens_per_expert, GatheredCall):
            return self._forward_gathered(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        if not isinstance(tokens_per_expert, ExpertCall):
            with with_experts_of(getattr(self, "ep_group", None)):
                return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs, **kwargs)
        first, second = (_call_of(linear, tokens_per_expert) for linear in (self.linear_fc1, self.linear_fc2))
        # As calls of the two layers, whose hooks gather their weights with --overlap-param-gather.
        with calling(
            self.linear_fc1, lambda x: dispatch_linear(x, permuted_probs, _weights_of(self.linear_fc1), first)
        ) as linear:
            y, row_probs = linear(permuted_local_hidden_states)
        h = activate_experts(self, y, row_probs.unsqueeze(-1))
        with calling(self.linear_fc2, lambda x: linear_combine(x, _weights_of(self.linear_fc2), second)) as linear:
            return linear(h), None

    def _forward_gathered(self, x: torch.Tensor, call: GatheredCall, probs: torch.Tensor) -> Any:
        """The same between a gather and a reduce-scatter."""
        holders = [call]  # of the started gather
        with given_up_on_error(lambda: holders[0].take_started()):
            gemm = TEGemm(call.layout.tokens_per_expert.tolist())
            call.gemm, call.few = gemm, gemm.some if call.min_rows else None
            first, second = (_call_of(linear, call) for linear in (self.linear_fc1, self.linear_fc2))
            second.started = None  # it gathers in backward alone
            holders[0] = first
            with calling(self.linear_fc1, lambda x: gather_linear(x, _weights_of(self.linear_fc1), first)) as linear:
                y = linear(x)
        h = activate_experts(self, y, probs.unsqueeze(-1))
        with calling(self.linear_fc2, lambda x: linear_scatter(x, _weights_of(self.linear_fc2), second)) as linear:
            return linear(h), None


def unsupported_reason_called(experts: torch.nn.Module, *, is_decided: bool = False) -> str | None:
    """Why these experts are given rows and counts on the host, as natively, or None.

    To be asked at every call: an adapter, a quantizer or a hook may come to the experts, or to one of their layers,
    long after the layer was built.

    Args:
        is_decided: Whether ranks that differ end the job, since they have agreed before: hooks count then that
            Megatron registers, on all ranks. Others may be of one rank alone, as when the first one logs.
    """
    if not isinstance(experts, DitronTEGroupedMLP):
        return f"{type(experts).__name__} computes expert by expert"
    reason = unsupported_reason_experts(experts)
    if reason is not None:
        return reason
    linears = (experts.linear_fc1, experts.linear_fc2)
    for module in (experts, *linears):
        reason = unsupported_reason_stand_in(module)
        if reason is not None:
            return reason
        if has_hooks(module):
            if not is_decided or has_hooks(module, of="megatron."):
                return "hooks on the experts look at their rows"
            log_once("ep late hooks", _LATE_HOOKS, level=logging.WARNING)
    if any(linear.te_quant_params is not None for linear in linears):
        return "the experts are quantised"
    # Grouped layers have it since Transformer Engine 2.11; each step says anew whether it is on.
    is_debugged = any(linear.is_debug_iter() for linear in linears if hasattr(linear, "is_debug_iter"))
    return "Transformer Engine's debugging is on" if is_debugged else None


def unsupported_reason_options(config: Any, *more: str) -> str | None:
    """Which of the options that experts as one kernel do not have is on, or one of ``more``, in words; or None."""
    wgrads = ("delay_wgrad_compute", "overlap_dispatch_backward_with_experts_wgrad")
    for option in ("fp8", "fp4", "add_bias_linear", *wgrads, *more):
        if getattr(config, option, None):
            return f"{option} is on"
    return None


def unsupported_reason_fused(experts: Any, device: torch.device) -> str | None:
    """Why the GEMMs of these experts are not fused with dispatch or combine, or None."""
    reason = unsupported_reason_called(experts)
    if reason is not None:
        return reason
    config = experts.config
    if kernel_target(device) not in HOPPER_AND_NEWER:
        return f"measured on Hopper and newer only, this is {kernel_target(device)}"
    if config.params_dtype not in (torch.bfloat16, torch.float16):
        return f"{config.params_dtype} is not covered"
    reason = unsupported_reason_options(config, "moe_apply_probs_on_input", "cpu_offloading")
    if reason is not None:
        return reason
    if experts.activation_recompute:
        return "moe_act is recomputed"
    if experts.offload_expert_fc1 or experts.offload_moe_act:
        return "fine_grained_activation_offloading is on"
    if config.bias_activation_fusion and (
        not config.gated_linear_unit or experts.activation_func not in (F.silu, quick_gelu)
    ):
        return "the activation has no fused form natively"
    return None


def unsupported_reason_fused_on_ranks(experts: Any, device: torch.device, group: dist.ProcessGroup) -> str | None:
    """The same, of any rank of ``group`` (collective): one may have wrapped its experts, or hooks on them, alone."""
    gathered = exchange(group, unsupported_reason_fused(experts, device))
    return next((reason for reason in gathered if reason is not None), None)
