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
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.transformer_engine import grouped_gemm
from ditron_train.runtime.values import normal_values

_STEP = 16  # rows of an expert are padded to multiples of it
_NARROW = 128  # columns of what rows are multiplied with
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
        """See `OpSpec`: random values, and such as scales have rules of their own for, with products of them: cuBLAS
        does not multiply all that lies otherwise than Transformer Engine lays it."""
        columns = call.kind.columns
        own = call.x.shape[:-1].numel() // call.num_experts // _STEP * _STEP
        most = _MOST_BYTES // (2 * columns) // call.num_experts // _STEP * _STEP
        sizes = [max(_STEP, min(own, most))] * call.num_experts
        rows = normal_values((sum(sizes), columns), torch.bfloat16, call.x.device, 1)
        unusual = _unusual_rows(columns, call.x.device)
        pairs = [self.pair(call, rows, sizes), self.pair(call, unusual, _SPLITS, multiplies=True)]
        return Trial(self.words(call, context), *pairs[0], also=pairs[1:], host_counts=True)

    def pair(
        self, call: Fp8RowsCall, rows: torch.Tensor, splits: list[int], *, multiplies: bool = False
    ) -> tuple[Run, Run]:
        """Both ways of quantising ``rows``: what each expert with rows gets, and all quantizers' numbers; and what
        Transformer Engine multiplies of them."""

        def run(is_ours: bool) -> list[torch.Tensor]:
            quantizers = [_quantizer(call.kind, call.x.device) for _ in splits]
            made = (quantise if is_ours else tex.split_quantize)(rows, splits, quantizers)
            made = [one for one, size in zip(made, splits) if size]
            found = [tensor for one in made for tensor in (one._data, one._transpose, one._scale_inv)]
            found += [torch.cat([getattr(one, name) for one in quantizers]) for name in ("amax", "scale")]
            if multiplies:
                try:
                    found += _products(call.kind, made, [size for size in splits if size], call.x.device)
                except RuntimeError as error:
                    if isinstance(error, torch.OutOfMemoryError):
                        raise
                    raise NotSupportedError(f"Transformer Engine does not multiply such rows: {error}") from None
            return found

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


def _products(kind: RowsKind, rows: list[Any], splits: list[int], device: torch.device) -> list[torch.Tensor]:
    """Transformer Engine's products of rows with a weight, and of their transposes with those of others."""
    narrow = kind._replace(columns=_NARROW, fp8_format="E4M3")
    weight = _quantizer(narrow, device)(normal_values((_NARROW, kind.columns), torch.bfloat16, device, 3))
    out = torch.empty(sum(splits), _NARROW, dtype=torch.bfloat16, device=device)
    grouped_gemm([weight] * len(splits), rows, [out], out.dtype, m_splits=splits, single_output=True)
    values = normal_values((sum(splits), _NARROW), torch.bfloat16, device, 4)
    others = tex.split_quantize(values, splits, [_quantizer(narrow, device) for _ in splits])
    wgrads = [torch.empty(_NARROW, kind.columns, dtype=torch.bfloat16, device=device) for _ in splits]
    if kind.fp8_format == "E5M2":  # gradients: they are the second operand
        rows, others, wgrads = others, rows, [one.view(kind.columns, _NARROW) for one in wgrads]
    options: dict[str, Any] = dict(layout="NT", grad=True, use_split_accumulator=True)
    grouped_gemm(rows, others, wgrads, out.dtype, m_splits=splits, **options)
    return [out, *wgrads]


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
