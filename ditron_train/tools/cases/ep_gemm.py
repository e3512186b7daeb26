"""The experts' GEMMs as tools measure them: forward, dgrad and wgrad over the experts of a rank, against Transformer
Engine's, or one cuBLAS product each; and the MoE layers that tools measure.

They are timed with the host ahead: for 15 experts a call costs the host more natively than with one kernel
(docs/measurements/ep.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ditron_train.ep.grouped_gemm import GroupOp, group_gemm, group_wgrad, row_tiles
from ditron_train.ep.plan import Product, RowProduct, min_rows_here, native_products, triton_wgrad_has_native_bits
from ditron_train.gemm.configs import GemmConfig
from ditron_train.policy import Function, Op
from ditron_train.tools.cases.case import Pass, RunEnvironment, Shape
from ditron_train.tools.cases.ep_layers import MoeCase, routing_of

#: What rows and tuning tables call the products.
NAMES: dict[Product, GroupOp] = {"forward": "group_gemm", "dgrad": "group_dgrad", "wgrad": "group_wgrad"}


class GroupCall(NamedTuple):
    """Rows of this rank's experts.

    Attributes:
        x: [rows, K].
        grad: [rows, N].
        weights: One [N, K] an expert.
        tokens_per_expert: On the device.
        counts: The same on the host.
        min_rows: Of any expert of any rank; None if every sum is exact.
        native: native.
        group: The expert-parallel group.
    """

    x: torch.Tensor
    grad: torch.Tensor
    weights: list[torch.Tensor]
    tokens_per_expert: torch.Tensor
    counts: list[int]
    min_rows: int | None
    native: Callable[..., Any]
    group: dist.ProcessGroup


class GroupGemmOp(Op[GroupCall, None]):
    """One product of every expert's rows; nothing is sent."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self.name = f"ep {NAMES[product]}"

    def inputs(self, call: GroupCall) -> Sequence[torch.Tensor]:
        return call.x, call.grad

    def native(self, call: GroupCall) -> Function:

        def function(x: torch.Tensor, grad: torch.Tensor) -> Sequence[torch.Tensor]:
            result: Any = call.native(x, grad, call.weights)
            return result if self.product == "wgrad" else [result]

        return function

    def fused(self, call: GroupCall, context: None) -> Function:
        return self.run_as(call, None)

    def run_as(self, call: GroupCall, candidate: GemmConfig | None) -> Function:
        weights = call.weights

        def function(x: torch.Tensor, grad: torch.Tensor) -> Sequence[torch.Tensor]:
            tiles = row_tiles(call.tokens_per_expert, sum(call.counts))
            if self.product == "wgrad":
                return group_wgrad(grad, x, tiles, config=candidate).unbind()
            if self.product == "dgrad":
                return [group_gemm(grad, weights, tiles, transpose=False, config=candidate)]
            return [group_gemm(x, weights, tiles, config=candidate)]

        return function

    def sizes(self, call: GroupCall) -> tuple[int, int, int, int]:
        """Experts, and rows, N and K of the product."""
        n, k = call.weights[0].shape
        if self.product == "dgrad":
            n, k = k, n
        return len(call.weights), call.x.shape[0], n, k


class GroupGemmCase(MoeCase[GroupCall, None]):
    """Against Transformer Engine's grouped GEMM, or one cuBLAS product for each expert."""

    op: GroupGemmOp

    def __init__(self, product: Product) -> None:
        super().__init__(GroupGemmOp(product))
        self.row = NAMES[product]
        self.measured: Pass = "forward" if product == "forward" else "backward"

    def shapes_of_layer(self, layer: Shape) -> list[Shape]:
        """Both weights of an expert; the deterministic mode changes nothing of them."""
        if layer.options["deterministic"]:
            return []
        hidden, ffn_hidden = layer.sizes["hidden"], layer.sizes["ffn_hidden"]
        return [
            Shape(layer.model, {**layer.sizes, "n": n, "k": k}, layer.options)
            for n, k in ((2 * ffn_hidden, hidden), (hidden, ffn_hidden))
        ]

    def no_row_reason(self, call: GroupCall) -> str | None:
        """What a layer leaves native."""
        weight = call.weights[0]
        if call.min_rows is None or (self.op.product == "wgrad" and triton_wgrad_has_native_bits(*weight.shape)):
            return None
        products = [RowProduct(tuple(weight.shape), len(call.weights), transpose) for transpose in (True, False)]
        if self.op.product != "wgrad":
            products = products[:1] if self.op.product == "forward" else products[1:]
        if call.min_rows >= max(min_rows_here(product, weight.dtype, weight.device) for product in products):
            return None
        return f"an expert has {call.min_rows} rows, where a layer leaves it native"

    def sample(self, shape: Shape, environment: RunEnvironment, seed: int) -> GroupCall:
        """Collective."""
        routed, _ = routing_of(shape, environment, seed)
        total, device = routed.sum(0), environment.device
        dist.all_reduce(total, group=environment.group)
        counts = total.view(environment.world_size, -1)[environment.rank].tolist()
        n, k = shape.sizes["n"], shape.sizes["k"]
        generator = torch.Generator(device).manual_seed(1000 * seed + environment.rank)

        def values(*size: int) -> torch.Tensor:
            if device.type == "cpu":  # small integers: exact in every order of a sum
                return torch.randint(-3, 4, size, device=device, generator=generator).to(environment.dtype)
            return torch.empty(size, dtype=environment.dtype, device=device).normal_(generator=generator)

        x, grad, weights = values(sum(counts), k), values(sum(counts), n), [values(n, k) for _ in counts]
        native = native_products(counts, n, k, environment.dtype, device)[self.op.product]
        min_rows = _min_rows(total, device)
        return GroupCall(
            x, grad, weights, torch.tensor(counts, device=device), counts, min_rows, native, environment.group
        )

    def backward(self, call: GroupCall, context: None, *, is_fused: bool) -> Function | None:
        """A gradient is a product of its own."""
        if self.op.product == "forward":
            return None
        return self.op.fused(call, context) if is_fused else self.op.native(call)


def _min_rows(counts: torch.Tensor, device: torch.device) -> int | None:
    """What decides whether a layer takes our GEMMs; None on CPU, where the values are integers and every sum exact."""
    return None if device.type == "cpu" else int(counts[counts > 0].min())


CASES: Sequence[GroupGemmCase] = tuple(GroupGemmCase(product) for product in NAMES)
