"""Products of Transformer Engine's experts in FP8, forward's and those of gradients of rows, declared for the policy.
Imported only where Transformer Engine is installed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformer_engine_torch as tex
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

from ditron_train.ep.few_rows import (
    MOST_ROWS,
    NEVER,
    OTHER_BITS,
    fewest_rows,
    giving_memory_back,
    rows_at_once,
    tried_rows,
)
from ditron_train.gemm.revealing import revealing_matrix
from ditron_train.megatron.ep.coverage import why_not_fp8_weight
from ditron_train.megatron.ep.few_rows import most_of_ranks
from ditron_train.megatron.ep.te_fp8 import ExpertProduct, multiply
from ditron_train.megatron.shared.devices import why_not_fp8_on_device
from ditron_train.policy import Function, OpSpec
from ditron_train.policy.probe import Run
from ditron_train.policy.spec import Trial
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.groups import GroupCache
from ditron_train.runtime.transformer_engine import grouped_gemm
from ditron_train.runtime.values import normal_values

_STEP = 16  # rows of an expert are padded to multiples of it
_MOST_TRIED = 8  # weights: more cost memory, and show nothing else
_MOST_BYTES = 1 << 30  # of the rows that are timed
_LEAST_TRIED = 128  # rows of an expert: our kernel has tiles of as many


class Fp8ExpertsCall(NamedTuple):
    """One call of a layer of experts on this rank.

    Attributes:
        x: Its input: rows of all experts [..., K], bf16.
        weight: Of one expert [N, K].
        num_experts: Of this rank.
        group: Expert parallel group.
        product: Forward's, or the gradients of ``x``.
        grad_format: Of gradients: ``E4M3`` or ``E5M2``. The others are E4M3.
    """

    x: torch.Tensor
    weight: torch.Tensor
    num_experts: int
    group: dist.ProcessGroup
    product: ExpertProduct = "forward"
    grad_format: str = "E4M3"

    @property
    def row_format(self) -> str:
        """Of the rows that are multiplied."""
        return "E4M3" if self.product == "forward" else self.grad_format


class Fp8ExpertsSpec(OpSpec[Fp8ExpertsCall, object]):
    """Quantised rows by expert times the experts' weights: one kernel against a call an expert."""

    name, row = "ep experts fp8", "group_gemm"

    def key(self, call: Fp8ExpertsCall) -> tuple[Hashable, ...]:
        """See `OpSpec`: ranks have different rows."""
        sizes = (tuple(call.weight.shape), call.num_experts, call.x.dtype, call.weight.dtype, call.x.device)
        return (*sizes, call.product, call.row_format)

    def why_not(self, call: Fp8ExpertsCall) -> str | None:
        return why_not_fp8_weight(call.x.dtype, call.weight) or why_not_fp8_on_device(call.x.device)

    def context(self, call: Fp8ExpertsCall) -> object:
        """See `OpSpec`: a mark, the op has no memory of its own.

        Raises:
            NotSupportedError: The products have other bits at all sizes that count, on some rank.
        """
        if fewest_rows_of(call) == NEVER:
            raise NotSupportedError(f"{self.where(call)}{OTHER_BITS}")
        return _DECIDED

    def words(self, call: Fp8ExpertsCall, context: object) -> str:
        sizes = "x".join(map(str, call.weight.shape))
        return f"{self.name} {call.product} {call.num_experts} experts {sizes} {call.row_format}, host ahead or not"

    def where(self, call: Fp8ExpertsCall) -> str:
        return f"{call.product} at {tuple(call.weight.shape)} {call.row_format} "

    def trial(self, call: Fp8ExpertsCall, context: object) -> Trial:
        """See `OpSpec`: random values, which are timed for as many experts as there are, and values that show the
        order of sums, for experts of several sizes. They have to be faster on an idle device, too: Transformer
        Engine quantises expert by expert, so the host may not be ahead there (two H100s, 64 experts a rank: calls that
        took the device 3 and 6 % less made the layer 10 % slower), and ours launch nothing before the host has looked
        at all experts, where Transformer Engine's first product runs at once."""
        count, fewest = min(call.num_experts, _MOST_TRIED), -(-fewest_rows_of(call) // _STEP) * _STEP
        own = call.x.shape[:-1].numel() // call.num_experts // _STEP * _STEP
        mean = max(fewest, min(own, MOST_ROWS))
        sizes = [fewest + (mean - fewest) * index // count // _STEP * _STEP for index in range(count)]
        most_rows = _MOST_BYTES // (2 * max(call.weight.shape))  # of all experts, bf16
        timed_experts = max(1, min(call.num_experts, most_rows // fewest))
        timed_rows = max(fewest, min(own, most_rows // timed_experts) // _STEP * _STEP)
        pairs = [self.pair(call, [timed_rows] * timed_experts, reveals=False)]
        pairs += [self.pair(call, sizes, reveals=reveals) for reveals in (False, True)]
        return Trial(self.words(call, context), *pairs[0], also=pairs[1:], host_counts=True)

    def pair(self, call: Fp8ExpertsCall, splits: list[int], *, reveals: bool) -> tuple[Run, Run]:
        """Transformer Engine's products and ours of experts with so many rows; ``reveals``: of values that show the
        order of sums. Ours are Transformer Engine's where an expert has too few rows. Of more than a few experts some
        have the same weights."""
        rows = _quantised_rows(call, _values(call, sum(splits), 1, reveals), splits)
        made = [_quantised_weight(call, 2 + index, reveals) for index in range(min(len(splits), _MOST_TRIED))]
        weights = [made[index % len(made)] for index in range(len(splits))]
        fewest = fewest_rows_of(call)

        def run(is_ours: bool) -> list[torch.Tensor]:
            out = _own_product(call, weights, rows, splits, fewest) if is_ours else None
            return [_native_product(call, weights, rows, splits) if out is None else out]

        return lambda: run(False), lambda: run(True)

    def held_bytes(self, call: Fp8ExpertsCall) -> int:
        """See `OpSpec`: three sets of weights, as wide as they are tried, with their transposes, and of rows."""
        return 6 * _MOST_TRIED * call.weight.numel() + 4 * _MOST_BYTES

    def inputs(self, call: Fp8ExpertsCall) -> Sequence[torch.Tensor]:
        return call.x, call.weight

    def megatron(self, call: Fp8ExpertsCall) -> Function:
        """See `OpSpec`: on operands of its own."""
        return lambda x, weight: self.trial(call, _DECIDED).megatron()

    def fused(self, call: Fp8ExpertsCall, context: object) -> Function:
        """See `OpSpec`: on operands of its own."""
        return lambda x, weight: self.trial(call, context).fused()


_known: GroupCache[tuple[Any, ...], int] = GroupCache()


def fewest_rows_of(call: Fp8ExpertsCall) -> int:
    """How many rows each expert must have for this product to add up as Transformer Engine's does, on every rank;
    measured once, and never less than a tile (collective the first time)."""
    key = (tuple(call.weight.shape), call.num_experts, call.product, call.row_format, call.x.device, call.group)
    if key not in _known:
        with torch.no_grad(), giving_memory_back(call.x.device):
            try:
                here = max(_fewest_rows_here(call), _LEAST_TRIED)
            except (NotSupportedError, torch.OutOfMemoryError):
                here = NEVER
        _known[key] = most_of_ranks(here, call.x.device, call.group)
    return _known[key]


def _fewest_rows_here(call: Fp8ExpertsCall) -> int:
    weight = _quantised_weight(call, 2, True)

    def native(batch: torch.Tensor, splits: list[int]) -> torch.Tensor:
        return _native_product(call, [weight] * len(splits), _quantised_rows(call, batch, splits), splits)

    def own(batch: torch.Tensor, splits: list[int]) -> torch.Tensor:
        out = _own_product(call, [weight] * len(splits), _quantised_rows(call, batch, splits), splits, 0)
        if out is None:
            raise NotSupportedError(OTHER_BITS)
        return out

    row_bytes = 2 * max(call.weight.shape)  # of the results, in bf16
    rows, tried = _values(call, MOST_ROWS, 1, True), tried_rows(_LEAST_TRIED, _STEP)
    return fewest_rows(native, own, rows, tried, call.num_experts, rows_at_once(row_bytes))


def _values(call: Fp8ExpertsCall, num_rows: int, seed: int, reveals: bool) -> torch.Tensor:
    """Rows to multiply. The sum's index is signed in one operand alone: the other way round of a weight that is taken
    transposed."""
    is_dgrad, device = call.product == "dgrad", call.x.device
    shape = (num_rows, call.weight.shape[0 if is_dgrad else 1])
    if not reveals:
        return normal_values(shape, torch.bfloat16, device, seed)
    return revealing_matrix(shape, torch.bfloat16, device, seed=seed, signed="columns" if is_dgrad else "rows")


def _quantised_rows(call: Fp8ExpertsCall, values: torch.Tensor, splits: list[int]) -> list[Any]:
    quantizers = [_quantizer(call, call.row_format, columnwise=False) for _ in splits]
    rows: list[Any] = tex.split_quantize(values, splits, quantizers)
    return rows


def _quantised_weight(call: Fp8ExpertsCall, seed: int, reveals: bool) -> Any:
    n, k = call.weight.shape
    if reveals:
        values = revealing_matrix((n, k), torch.bfloat16, call.x.device, seed=seed, signed="columns")
    else:
        values = normal_values((n, k), torch.bfloat16, call.x.device, seed)
    return _quantizer(call, "E4M3", columnwise=call.product == "dgrad")(values)


def _result(call: Fp8ExpertsCall, splits: list[int]) -> torch.Tensor:
    columns = call.weight.shape[1 if call.product == "dgrad" else 0]
    return torch.empty(sum(splits), columns, dtype=torch.bfloat16, device=call.x.device)


def _native_product(call: Fp8ExpertsCall, weights: Any, rows: Any, splits: list[int]) -> torch.Tensor:
    out, is_dgrad = _result(call, splits), call.product == "dgrad"
    options: dict[str, Any] = dict(layout="NN", grad=True) if is_dgrad else {}
    with torch.no_grad():
        grouped_gemm(
            weights, rows, [out], out.dtype, m_splits=splits, single_output=True, use_split_accumulator=is_dgrad,
            **options,
        )  # fmt: skip
    return out


def _own_product(call: Fp8ExpertsCall, weights: Any, rows: Any, splits: list[int], fewest: int) -> torch.Tensor | None:
    """None where it is left to Transformer Engine."""
    out, is_dgrad = _result(call, splits), call.product == "dgrad"
    with torch.no_grad():
        is_ours = multiply(call.product, weights, rows, out, split_accumulator=is_dgrad, fewest_rows=fewest)
    return out if is_ours else None


def _quantizer(call: Fp8ExpertsCall, name: str, *, columnwise: bool) -> Any:
    """Of the recipe tensorwise: products of delayed scaling are the same."""
    return Float8CurrentScalingQuantizer(getattr(tex.DType, f"kFloat8{name}"), call.x.device, columnwise=columnwise)


_DECIDED = object()
FP8_EXPERTS = Fp8ExpertsSpec()
