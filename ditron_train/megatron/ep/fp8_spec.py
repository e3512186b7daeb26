"""The forward of Transformer Engine's experts in FP8, quantising and products, declared for the policy. Imported only
where Transformer Engine is installed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformer_engine_torch as tex
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

from ditron_train.ep.expert_functions import FEWEST_ROWS
from ditron_train.gemm.revealing import revealing_matrix
from ditron_train.megatron.ep.te_fp8 import OneProduct
from ditron_train.policy import Function, OpSpec
from ditron_train.policy.probe import Run
from ditron_train.policy.spec import Trial
from ditron_train.runtime.device import is_interpreter, kernel_target
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.transformer_engine import grouped_gemm

__all__ = ["FP8_EXPERTS", "Fp8ExpertsCall", "Fp8ExpertsSpec"]

_STEP = 16  # rows of an expert are padded to multiples of it
_MOST_TRIED = 8  # experts: more cost memory, and show nothing else
_MOST_ROWS = 4096  # of one


class Fp8ExpertsCall(NamedTuple):
    """One forward of a layer of experts on this rank.

    Attributes:
        x: Rows of all experts [..., K], bf16.
        weight: Of one expert [N, K].
        num_experts: Of this rank.
        group: Expert parallel group.
    """

    x: torch.Tensor
    weight: torch.Tensor
    num_experts: int
    group: dist.ProcessGroup


class Fp8ExpertsSpec(OpSpec[Fp8ExpertsCall, object]):
    """Rows quantised by expert with a scale each, times their weights: one kernel against a call an expert."""

    name, row = "ep experts fp8", "group_gemm"

    def key(self, call: Fp8ExpertsCall) -> tuple[Hashable, ...]:
        """See `OpSpec`: ranks have different rows."""
        return (tuple(call.weight.shape), call.num_experts, call.x.dtype, call.weight.dtype, call.x.device)

    def why_not(self, call: Fp8ExpertsCall) -> str | None:
        """See `OpSpec`."""
        if call.x.dtype != torch.bfloat16 or call.weight.dtype != torch.bfloat16:
            return f"rows are {call.x.dtype} and weights {call.weight.dtype}; covered is bfloat16"
        if call.weight.shape[0] % _STEP or call.weight.shape[1] % _STEP:
            return f"weights {tuple(call.weight.shape)} are no multiples of {_STEP}"
        if call.x.device.type == "cpu":
            return None if is_interpreter() else "the tensors are on the CPU and Triton's interpreter is off"
        try:
            target = kernel_target(call.x.device)
        except NotSupportedError as error:
            return str(error)
        return None if target == "sm_90" else f"products of FP8 are covered on Hopper, not on {target}"

    def context(self, call: Fp8ExpertsCall) -> object:
        """See `OpSpec`: a mark, the op has no memory of its own."""
        return _DECIDED

    def words(self, call: Fp8ExpertsCall, context: object) -> str:
        """See `OpSpec`."""
        return f"{self.name} {call.num_experts} experts {'x'.join(map(str, call.weight.shape))}"

    def trial(self, call: Fp8ExpertsCall, context: object) -> Trial:
        """See `OpSpec`: random values, which are timed, and values that show the order of sums, for experts of several
        sizes."""
        count = min(call.num_experts, _MOST_TRIED)
        fewest = -(-FEWEST_ROWS // _STEP) * _STEP
        mean = max(fewest, min(call.x.shape[:-1].numel() // call.num_experts // _STEP * _STEP, _MOST_ROWS))
        sizes = [fewest + (mean - fewest) * index // count // _STEP * _STEP for index in range(count)]
        pairs = [self._pair(call, [mean] * count, reveals=False)]
        pairs += [self._pair(call, sizes, reveals=reveals) for reveals in (False, True)]
        return Trial(self.words(call, context), *pairs[0], also=pairs[1:])

    def _pair(self, call: Fp8ExpertsCall, splits: list[int], *, reveals: bool) -> tuple[Run, Run]:
        (n, k), device = call.weight.shape, call.x.device

        def made(shape: tuple[int, int], seed: int, signed: Any) -> torch.Tensor:
            if reveals:
                return revealing_matrix(shape, torch.bfloat16, device, seed=seed, signed=signed)
            generator = torch.Generator(device).manual_seed(seed)
            return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)

        def quantizer() -> Any:
            return Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, device, columnwise=False)

        x = made((sum(splits), k), 1, "rows")
        weights = [quantizer()(made((n, k), 2 + index, "columns")) for index in range(len(splits))]
        quantizers = [quantizer() for _ in splits]

        def run(product: OneProduct | None) -> list[torch.Tensor]:
            with torch.no_grad():
                out = torch.empty(len(x), n, dtype=torch.bfloat16, device=device)
                split = tex.split_quantize if product is None else product.split
                rows = split(x, splits, quantizers)
                if product is None or not product.multiply(weights, splits, out):
                    options: dict[str, Any] = dict(single_output=True, use_split_accumulator=False)
                    grouped_gemm(weights, rows, [out], out.dtype, m_splits=splits, **options)
            return [out]

        return lambda: run(None), lambda: run(OneProduct())

    def inputs(self, call: Fp8ExpertsCall) -> Sequence[torch.Tensor]:
        """See `OpSpec`."""
        return call.x, call.weight

    def megatron(self, call: Fp8ExpertsCall) -> Function:
        """See `OpSpec`: on operands of its own."""
        return lambda x, weight: self.trial(call, _DECIDED).megatron()

    def fused(self, call: Fp8ExpertsCall, context: object) -> Function:
        """See `OpSpec`: on operands of its own."""
        return lambda x, weight: self.trial(call, context).fused()


_DECIDED = object()
FP8_EXPERTS = Fp8ExpertsSpec()
