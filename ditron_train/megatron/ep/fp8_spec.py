"""Products of Transformer Engine's experts in FP8, forward's and those of gradients of rows, declared for the policy.
Imported only where Transformer Engine is installed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformer_engine_torch as tex
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

from ditron_train.ep.expert_functions import FEWEST_ROWS
from ditron_train.gemm.revealing import revealing_matrix
from ditron_train.megatron.ep.coverage import why_not_fp8_weight
from ditron_train.megatron.ep.te_fp8 import ExpertProduct, multiply
from ditron_train.megatron.shared.devices import why_not_fp8_on_device
from ditron_train.policy import Function, OpSpec
from ditron_train.policy.probe import Run
from ditron_train.policy.spec import Trial
from ditron_train.runtime.transformer_engine import grouped_gemm
from ditron_train.runtime.values import normal_values

_STEP = 16  # rows of an expert are padded to multiples of it
_MOST_TRIED = 8  # experts: more cost memory, and show nothing else
_MOST_ROWS = 4096  # of one


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
        reason = why_not_fp8_weight(call.x.dtype, call.weight)
        return why_not_fp8_on_device(call.x.device) if reason is None else reason

    def context(self, call: Fp8ExpertsCall) -> object:
        """See `OpSpec`: a mark, the op has no memory of its own."""
        return _DECIDED

    def words(self, call: Fp8ExpertsCall, context: object) -> str:
        sizes = "x".join(map(str, call.weight.shape))
        return f"{self.name} {call.product} {call.num_experts} experts {sizes} {call.row_format}"

    def where(self, call: Fp8ExpertsCall) -> str:
        return f"{call.product} at {tuple(call.weight.shape)} {call.row_format} "

    def trial(self, call: Fp8ExpertsCall, context: object) -> Trial:
        """See `OpSpec`: random values, which are timed, and values that show the order of sums, for experts of several
        sizes."""
        count = min(call.num_experts, _MOST_TRIED)
        fewest = -(-FEWEST_ROWS // _STEP) * _STEP
        mean = max(fewest, min(call.x.shape[:-1].numel() // call.num_experts // _STEP * _STEP, _MOST_ROWS))
        sizes = [fewest + (mean - fewest) * index // count // _STEP * _STEP for index in range(count)]
        pairs = [self.pair(call, [mean] * count, reveals=False)]
        pairs += [self.pair(call, sizes, reveals=reveals) for reveals in (False, True)]
        return Trial(self.words(call, context), *pairs[0], also=pairs[1:])

    def pair(self, call: Fp8ExpertsCall, splits: list[int], *, reveals: bool) -> tuple[Run, Run]:
        """Transformer Engine's products and ours of experts with so many rows; ``reveals``: of values that show the
        order of sums. Ours are Transformer Engine's where an expert has too few rows."""
        (n, k), device, is_dgrad = call.weight.shape, call.x.device, call.product == "dgrad"

        def made(shape: tuple[int, int], seed: int, signed: Any) -> torch.Tensor:
            if reveals:
                return revealing_matrix(shape, torch.bfloat16, device, seed=seed, signed=signed)
            return normal_values(shape, torch.bfloat16, device, seed)

        # The sum's index is signed in one operand alone: the other way round of a weight that is taken transposed.
        values = made((sum(splits), n if is_dgrad else k), 1, "columns" if is_dgrad else "rows")
        quantizers = [_quantizer(call, call.row_format, columnwise=False) for _ in splits]
        rows = tex.split_quantize(values, splits, quantizers)
        weights = [
            _quantizer(call, "E4M3", columnwise=is_dgrad)(made((n, k), 2 + i, "columns")) for i in range(len(splits))
        ]

        def run(is_ours: bool) -> list[torch.Tensor]:
            with torch.no_grad():
                out = torch.empty(len(values), k if is_dgrad else n, dtype=torch.bfloat16, device=device)
                options: dict[str, Any] = dict(single_output=True, use_split_accumulator=is_dgrad)
                if is_dgrad:
                    options.update(layout="NN", grad=True)
                if not (is_ours and multiply(call.product, weights, rows, out, split_accumulator=is_dgrad)):
                    grouped_gemm(weights, rows, [out], out.dtype, m_splits=splits, **options)
            return [out]

        return lambda: run(False), lambda: run(True)

    def inputs(self, call: Fp8ExpertsCall) -> Sequence[torch.Tensor]:
        return call.x, call.weight

    def megatron(self, call: Fp8ExpertsCall) -> Function:
        """See `OpSpec`: on operands of its own."""
        return lambda x, weight: self.trial(call, _DECIDED).megatron()

    def fused(self, call: Fp8ExpertsCall, context: object) -> Function:
        """See `OpSpec`: on operands of its own."""
        return lambda x, weight: self.trial(call, context).fused()


def _quantizer(call: Fp8ExpertsCall, name: str, *, columnwise: bool) -> Any:
    """Of the recipe tensorwise: products of delayed scaling are the same."""
    return Float8CurrentScalingQuantizer(getattr(tex.DType, f"kFloat8{name}"), call.x.device, columnwise=columnwise)


_DECIDED = object()
FP8_EXPERTS = Fp8ExpertsSpec()
