"""How rows of Transformer Engine's experts come to FP8 under current scaling, declared for the policy. Imported only
where Transformer Engine is installed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformer_engine_torch as tex
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

from ditron_train.megatron.ep.te_quantise import RowsKind, quantise
from ditron_train.megatron.shared.devices import why_not_fp8_on_device
from ditron_train.policy import Function, OpSpec
from ditron_train.policy.probe import Run
from ditron_train.policy.spec import Trial
from ditron_train.runtime.values import normal_values

_STEP = 16  # rows of an expert are padded to multiples of it
_MOST_BYTES = 1 << 30  # of the rows that are timed
#: Rows of experts that are compared beside those that are timed: whole tiles of the kernels and parts of them, none.
_SPLITS = [128, 16, 0, 144, 256, 32, 16, 16, 16]


class Fp8RowsCall(NamedTuple):
    """One call of a layer of experts on this rank.

    Attributes:
        x: Its input: rows of all experts [..., columns], bf16.
        num_experts: Of this rank.
        group: Expert parallel group.
        kind: Of the rows, or of the gradients of its results.
    """

    x: torch.Tensor
    num_experts: int
    group: dist.ProcessGroup
    kind: RowsKind


class Fp8RowsSpec(OpSpec[Fp8RowsCall, object]):
    """Rows by expert in FP8 with their transposes: the scales of all experts at once, against one after the other."""

    name, row, has_rows = "ep rows fp8", "split_quantize", False

    def key(self, call: Fp8RowsCall) -> tuple[Hashable, ...]:
        """See `OpSpec`: ranks have different rows."""
        return call.kind, call.num_experts, call.x.dtype, call.x.device

    def why_not(self, call: Fp8RowsCall) -> str | None:
        if call.x.dtype != torch.bfloat16:
            return f"{call.x.dtype} is not covered"
        return why_not_fp8_on_device(call.x.device)

    def context(self, call: Fp8RowsCall) -> object:
        """See `OpSpec`: a mark, the op has no memory of its own."""
        return _DECIDED

    def words(self, call: Fp8RowsCall, context: object) -> str:
        kind = call.kind
        options = f"{kind.fp8_format}{' power of 2' if kind.power_of_2 else ''} epsilon {kind.epsilon:g}"
        return f"{self.name} {call.num_experts} experts of {kind.columns} {options}, host ahead or not"

    def where(self, call: Fp8RowsCall) -> str:
        return f"rows of {call.kind.columns} in {call.kind.fp8_format} "

    def trial(self, call: Fp8RowsCall, context: object) -> Trial:
        """See `OpSpec`: random values, and such as scales have rules of their own for."""
        columns = call.kind.columns
        own = call.x.shape[:-1].numel() // call.num_experts // _STEP * _STEP
        most = _MOST_BYTES // (2 * columns) // call.num_experts // _STEP * _STEP
        sizes = [max(_STEP, min(own, most))] * call.num_experts
        pairs = [self.pair(call, normal_values((sum(sizes), columns), torch.bfloat16, call.x.device, 1), sizes)]
        pairs.append(self.pair(call, _unusual_rows(columns, call.x.device), _SPLITS))
        return Trial(self.words(call, context), *pairs[0], also=pairs[1:], host_counts=True)

    def pair(self, call: Fp8RowsCall, rows: torch.Tensor, splits: list[int]) -> tuple[Run, Run]:
        """Both ways of quantising ``rows``: what each expert with rows gets, and all quantizers' numbers."""

        def run(is_ours: bool) -> list[torch.Tensor]:
            quantizers = [_quantizer(call.kind, call.x.device) for _ in splits]
            results = (quantise if is_ours else tex.split_quantize)(rows, splits, quantizers)
            parts = [(one._data, one._transpose, one._scale_inv) for one, size in zip(results, splits) if size]
            numbers = [torch.cat([getattr(one, name) for one in quantizers]) for name in ("amax", "scale")]
            return [*(tensor for part in parts for tensor in part), *numbers]

        return lambda: run(False), lambda: run(True)

    def held_bytes(self, call: Fp8RowsCall) -> int:
        """See `OpSpec`: rows, and both results of them."""
        return 4 * _MOST_BYTES

    def inputs(self, call: Fp8RowsCall) -> Sequence[torch.Tensor]:
        return (call.x,)

    def megatron(self, call: Fp8RowsCall) -> Function:
        """See `OpSpec`: on operands of its own."""
        return lambda x: self.trial(call, _DECIDED).megatron()

    def fused(self, call: Fp8RowsCall, context: object) -> Function:
        """See `OpSpec`: on operands of its own."""
        return lambda x: self.trial(call, context).fused()


def _unusual_rows(columns: int, device: torch.device) -> torch.Tensor:
    """Rows of ``_SPLITS``: of zeros alone, of the smallest and the largest numbers, and with what is not finite."""
    rows = normal_values((sum(_SPLITS), columns), torch.bfloat16, device, 2)
    zeros, smallest, not_finite, not_numbers, largest = rows.split(_SPLITS)[-5:]
    zeros.zero_()
    smallest.fill_(1e-40)
    not_finite[1, 0] = float("inf")
    not_numbers[0, -1] = float("nan")
    largest[2, columns // 2] = -torch.finfo(torch.bfloat16).max
    return rows


def _quantizer(kind: RowsKind, device: torch.device) -> Any:
    made = Float8CurrentScalingQuantizer(
        getattr(tex.DType, f"kFloat8{kind.fp8_format}"),
        device,
        columnwise=True,
        force_pow_2_scales=kind.power_of_2,
        amax_epsilon=kind.epsilon,
    )
    made.amax.fill_(1.0)
    made.scale.fill_(1.0)
    return made


_DECIDED = object()
FP8_ROWS = Fp8RowsSpec()
