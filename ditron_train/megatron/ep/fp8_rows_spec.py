"""How rows of Transformer Engine's experts come to FP8 under current scaling, declared for the policy. Imported only
if Transformer Engine is installed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformer_engine_torch as tex

from ditron_train.ep.plan import giving_memory_back
from ditron_train.gemm.transformer_engine import grouped_gemm
from ditron_train.megatron.ep.coverage import unsupported_reason_fp8_rows
from ditron_train.megatron.ep.te_quantise import RowsKind, new_quantizer, quantise, unsupported_reason_quantizers
from ditron_train.megatron.shared.devices import unsupported_reason_fp8_on_device
from ditron_train.policy import Function, Op, Trial
from ditron_train.policy.probe import Run, same_bits
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.values import normal_values
from ditron_train.symm.exchange import exchange

STEP = 16  # rows of an expert are padded to multiples of it
_MULTIPLIED = [128, 16, 144]  # rows of experts that are multiplied
_MOST_BYTES = 1 << 30  # of the rows that are timed
#: Rows of experts that are compared beside those that are timed: whole tiles of the kernels and parts of them, none.
_SPLITS = [128, 16, 0, 144, 256, 32, 16, 16, 16]
_PARTS = ("_data", "_transpose", "_scale_inv")  # of rows in FP8
_NUMBERS = ("amax", "scale")  # that quantizers may keep


class Fp8RowsCall(NamedTuple):
    """One call of a layer of experts on this rank.

    Attributes:
        x: Its input: rows of all experts [..., columns], bf16.
        num_experts: Of this rank.
        group: Expert parallel group.
        kind: Of the rows, or of the gradients of its results.
        width: Columns of the other ones.
        are_grads: Whether it is the gradients'.
    """

    x: torch.Tensor
    num_experts: int
    group: dist.ProcessGroup
    kind: RowsKind
    width: int
    are_grads: bool


class Fp8RowsOp(Op[Fp8RowsCall, None]):
    """Rows by expert in FP8 with their transposes: the scales of all experts at once, against one after the other."""

    name = "ep rows fp8"

    def key(self, call: Fp8RowsCall) -> tuple[Hashable, ...]:
        """Ranks have different rows."""
        return call.kind, call.width, call.are_grads, call.num_experts, call.x.dtype, call.x.device

    def unsupported_reason(self, call: Fp8RowsCall) -> str | None:
        reason = unsupported_reason_fp8_rows(call.x.dtype) or unsupported_reason_fp8_on_device(call.x.device)
        return reason or unsupported_reason_quantizers(call.x.device)

    def make_context(self, call: Fp8RowsCall) -> None:
        """The op has no memory of its own.

        Raises:
            NotSupportedError: Transformer Engine does not multiply what is quantised so, on some rank: cuBLAS does not
                take every layout that differs from Transformer Engine's.
        """
        reasons = [reason for reason in exchange(call.group, _unsupported_products(call)) if reason]
        if reasons:
            raise NotSupportedError(f"{self.describe_shape(call)}are not multiplied: {reasons[0]}")

    def describe(self, call: Fp8RowsCall, context: None) -> str:
        kind = call.kind
        options = f"{kind.fp8_format}{' power of 2' if kind.power_of_2 else ''} epsilon {kind.epsilon:g}"
        return f"{self.name} {call.num_experts} experts of {kind.columns} {options}, host ahead or not"

    def describe_shape(self, call: Fp8RowsCall) -> str:
        return f"rows of {call.kind.columns} in {call.kind.fp8_format} "

    def trial(self, call: Fp8RowsCall, context: None) -> Trial:
        """Random values, and such as scales have rules of their own for."""
        columns, sizes = call.kind.columns, _timed_sizes(call)
        rows = normal_values((sum(sizes), columns), torch.bfloat16, call.x.device, 1)
        pairs = [pair_of(call, rows, sizes), pair_of(call, _unusual_rows(columns, call.x.device), _SPLITS)]
        return Trial(self.describe(call, context), *pairs[0], extra_cases=pairs[1:], host_counts=True)

    def peak_bytes(self, call: Fp8RowsCall) -> int:
        """Rows, both results of them, and what compares them."""
        return 8 * call.kind.columns * (sum(_timed_sizes(call)) + sum(_SPLITS)) + (1 << 20)

    def inputs(self, call: Fp8RowsCall) -> Sequence[torch.Tensor]:
        return (call.x,)

    def native(self, call: Fp8RowsCall) -> Function:
        """Every expert has as many rows."""
        return lambda x: pair_of(call, x, [len(x) // call.num_experts] * call.num_experts)[0]()

    def fused(self, call: Fp8RowsCall, context: None) -> Function:
        return lambda x: pair_of(call, x, [len(x) // call.num_experts] * call.num_experts)[1]()


def pair_of(call: Fp8RowsCall, rows: torch.Tensor, splits: list[int]) -> tuple[Run, Run]:
    """Both ways of quantising ``rows``: what each expert with rows gets, and all quantizers' numbers."""

    def run(is_fused: bool) -> list[torch.Tensor]:
        quantizers = [_quantizer(call.kind, call.x.device) for _ in splits]
        made = (quantise if is_fused else tex.split_quantize)(rows, splits, quantizers)
        of_experts = [getattr(one, name) for one, size in zip(made, splits) if size for name in _PARTS]
        kept = [name for name in _NUMBERS if hasattr(quantizers[0], name)]
        return of_experts + [torch.cat([getattr(quantizer, name) for quantizer in quantizers]) for name in kept]

    return lambda: run(False), lambda: run(True)


def _multiplied(call: Fp8RowsCall) -> tuple[Run, Run]:
    """Transformer Engine's products of rows that were quantised both ways."""
    rows = normal_values((sum(_MULTIPLIED), call.kind.columns), torch.bfloat16, call.x.device, 5)

    def run(is_fused: bool) -> list[torch.Tensor]:
        quantizers = [_quantizer(call.kind, call.x.device) for _ in _MULTIPLIED]
        return _products(call, (quantise if is_fused else tex.split_quantize)(rows, _MULTIPLIED, quantizers))

    return lambda: run(False), lambda: run(True)


def _unsupported_products(call: Fp8RowsCall) -> str | None:
    """Of this rank, or None."""
    try:
        with torch.no_grad(), giving_memory_back(call.x.device):
            native, fused = (run() for run in _multiplied(call))
            return None if same_bits(native, fused) else "products differ"
    except RuntimeError as error:  # of cuBLAS, of memory; what cannot go on fails again
        return str(error).splitlines()[0]
    except NotSupportedError as error:
        return str(error)


def _timed_sizes(call: Fp8RowsCall) -> list[int]:
    """Rows of each expert that are timed: as many as there are."""
    own = call.x.shape[:-1].numel() // call.num_experts // STEP * STEP
    most = _MOST_BYTES // (2 * call.kind.columns) // call.num_experts // STEP * STEP
    return [max(STEP, min(own, most))] * call.num_experts


def _products(call: Fp8RowsCall, rows: list[Any]) -> list[torch.Tensor]:
    """Of ``rows`` with a weight, and of their transposes with those of the other ones, as a layer multiplies them."""
    (columns, *_), width, device = call.kind, call.width, call.x.device
    others_kind = call.kind._replace(columns=width, fp8_format="E4M3")
    count, num_rows = len(_MULTIPLIED), sum(_MULTIPLIED)
    shape = (columns, width) if call.are_grads else (width, columns)
    weight = new_quantizer(others_kind, device)(normal_values(shape, torch.bfloat16, device, 3))
    out = torch.empty(num_rows, width, dtype=torch.bfloat16, device=device)
    options: dict[str, Any] = dict(layout="NN", grad=True, use_split_accumulator=True) if call.are_grads else {}
    grouped_gemm([weight] * count, rows, [out], out.dtype, m_splits=_MULTIPLIED, single_output=True, **options)
    values = normal_values((num_rows, width), torch.bfloat16, device, 4)
    others = tex.split_quantize(values, _MULTIPLIED, [_quantizer(others_kind, device) for _ in _MULTIPLIED])
    inputs, grads = (others, rows) if call.are_grads else (rows, others)
    wgrads = [torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in _MULTIPLIED]
    options = dict(layout="NT", grad=True, use_split_accumulator=True)
    grouped_gemm(inputs, grads, wgrads, out.dtype, m_splits=_MULTIPLIED, **options)
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
    """With numbers of an earlier step."""
    made = new_quantizer(kind, device)
    for name in _NUMBERS:
        if hasattr(made, name):
            getattr(made, name).fill_(1.0)
    return made


FP8_ROWS = Fp8RowsOp()
OPS: Sequence[Op[Any, Any]] = (FP8_ROWS,)
