"""Tensor parallel linear layers: megatron-core's own with the communication overlapped (feature ``tp``).

Subclasses of the native layers. Constructors, parameters, attributes, checkpoints, extra state and ``repr`` are
inherited; only the call differs, and it falls back to the inherited one for whatever is not covered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from ditron_train.megatron.compat.config import unsupported_reason_arguments, unsupported_reason_weight
from ditron_train.megatron.shared.in_place import EqualsBaseClass
from ditron_train.megatron.shared.interfaces import classes_of_te
from ditron_train.megatron.shared.wgrad import NativeWgrad, bias_of
from ditron_train.megatron.tp.routing import op_of, route
from ditron_train.megatron.tp.spec import linear_of
from ditron_train.policy import gate, log_native, observed
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.tp.linear import column_linear, is_whole


@outside_compile
class DitronColumnParallelLinear(ColumnParallelLinear, metaclass=EqualsBaseClass, native=ColumnParallelLinear):
    """``ColumnParallelLinear`` whose gather of the input (and reduce-scatter of its gradient) overlaps with the GEMM.

    Forward ``[s/W, b, K] -> [s, b, N/W]``: all-gather fused with ``x @ weight.T``. Backward: the gather of the input
    overlaps with dgrad (``grad @ weight``, by cuBLAS), the reduce-scatter of dX with the native wgrad. If the weight
    is frozen, or rows cannot be copied by copy engines, dgrad is fused with its reduce-scatter instead. Native without
    sequence parallelism.
    """

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        answer = None
        # The native forward passes everything by keyword: other callers get the native path. The tokens of experts are
        # exchanged by their dispatcher.
        is_candidate = not args and not self.explicit_expert_comm and _communicates(kwargs)
        if is_candidate and self._is_covered(input, weight, kwargs):
            answer = route(
                "column", input, weight, group=kwargs["tp_group"], sequence_parallel=kwargs["sequence_parallel"],
                is_frozen=not weight.requires_grad,
            )  # fmt: skip
        if answer is None or not answer.is_fused:
            native = super()._forward_impl
            return observed(answer, input, lambda: native(input, weight, *args, **kwargs))
        wgrad = NativeWgrad(
            weight,
            kwargs["gradient_accumulation_fusion"],
            kwargs.get("grad_output_buffer"),
            kwargs.get("wgrad_deferral_limit"),
        )
        options = dict(context=answer.context, bias=bias_of(weight, kwargs["bias"]), wgrad=wgrad)
        return observed(answer, input, lambda: column_linear(input, weight, **options))

    def _is_covered(self, input: torch.Tensor, weight: torch.Tensor, arguments: Mapping[str, Any]) -> bool:
        reason = unsupported_reason_weight(weight) or unsupported_reason_arguments(input, arguments)
        if reason is not None:
            log_native("tp column", reason)
        return reason is None


def _communicates(arguments: Mapping[str, Any]) -> bool:
    """Whether a column layer communicates: not if its gradient is not reduced (``disable_grad_reduce``), nor if it is
    not split."""
    return bool(arguments.get("sequence_parallel") or arguments.get("allreduce_dgrad"))


def _unsupported_reason_input(x: torch.Tensor) -> str | None:
    """Why a row layer is native because of the strides of its input, or None: cuBLAS chooses its kernel by them, and
    the policy has compared the paths for inputs without gaps only."""
    return None if is_whole(x) else "the input has strides"


@outside_compile
class DitronRowParallelLinear(RowParallelLinear, metaclass=EqualsBaseClass, native=RowParallelLinear):
    """``RowParallelLinear`` whose reduce-scatter of the output (and gather of its gradient) overlaps with the GEMM.

    Forward ``[s, b, K/W] -> [s/W, b, N]``: ``x @ weight.T`` fused with the reduce-scatter, the bias added after it.
    Backward: gather of the output gradient fused with ``grad @ weight``; the native wgrad uses the gathered gradient,
    too. Without sequence parallelism ``x @ weight.T`` is fused with its all-reduce, and nothing is gathered.
    """

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        is_candidate = self.input_is_parallel and not self.explicit_expert_comm
        is_candidate = is_candidate and self.config._cpu_offloading_context is None
        answer, reason = None, unsupported_reason_weight(self.weight)
        if reason is None and is_candidate:
            reason = _unsupported_reason_input(input_)
        if reason is not None:
            log_native("tp row", reason)
        elif is_candidate:
            answer = route("row", input_, self.weight, group=self.tp_group, sequence_parallel=self.sequence_parallel)
        if answer is None or not answer.is_fused:
            native = super().forward
            return observed(answer, input_, lambda: native(input_))
        wgrad = NativeWgrad(self.weight, self.gradient_accumulation_fusion)
        linear = linear_of(op_of("row", self.sequence_parallel))
        context = answer.context
        output = observed(answer, input_, lambda: linear(input_, self.weight, context=context, wgrad=wgrad))
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None


def class_map() -> dict[type, type]:
    """The native classes and the fused ones; Transformer Engine's are among them if it is installed."""
    classes: dict[type, type] = {
        ColumnParallelLinear: DitronColumnParallelLinear,
        RowParallelLinear: DitronRowParallelLinear,
    }
    if HAVE_TE:
        classes.update(classes_of_te("tp", _classes_of_te))
    return classes


def _classes_of_te() -> dict[type, type]:
    from ditron_train.megatron.tp import te_layers

    return te_layers.class_map()


def stop() -> None:
    """Forget what was decided about shapes; symmetric memory stays with its process group."""
    gate.forget("tp")
