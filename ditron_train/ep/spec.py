"""The experts' GEMMs declared for the tools: forward, dgrad and wgrad over the experts of a rank, against Transformer
Engine's, or one cuBLAS product each; and the MoE layers that tools measure.

They are timed with the host ahead: for 15 experts a call costs the host more natively than with one kernel
(docs/measurements/ep.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ditron_train.data import load_workloads
from ditron_train.ep.grouped_gemm import GroupOp, default_group_config, group_class, group_gemm, group_wgrad, row_tiles
from ditron_train.ep.plan import Product, RowProduct, fewest_rows_here, native_products, own_wgrad_has_native_bits
from ditron_train.gemm.configs import GemmConfig, config_entry, config_variants
from ditron_train.policy import Function, ModelSizes, OpSpec, Place, Shape
from ditron_train.policy.spec import Call, Context
from ditron_train.runtime.device import kernel_target
from ditron_train.runtime.errors import SettingError

_NAMES: dict[Product, GroupOp] = {"forward": "group_gemm", "dgrad": "group_dgrad", "wgrad": "group_wgrad"}
_SKEWED = 1.0  # exponent of the skewed routing


def moe_layer(model: str, tokens: int, hidden: int, ffn_hidden: int, num_experts: int, topk: int) -> Shape:
    """One MoE layer: tokens of each rank, experts of all ranks, evenly routed."""
    names = ("tokens_per_rank", "hidden", "ffn_hidden", "num_experts", "topk")
    sizes = dict(zip(names, (tokens, hidden, ffn_hidden, num_experts, topk), strict=True))
    return Shape(model, sizes, {"zipf": 0.0, "deterministic": False})


def with_routings(layers: Sequence[Shape], *, zipf: float = _SKEWED, deterministic: Sequence[str] = ()) -> list[Shape]:
    """Every layer evenly routed and with experts chosen by Zipf's law of this exponent; then those of the models
    ``deterministic`` without fused permutation in PyTorch's deterministic mode, whatever is installed."""
    routed = [
        Shape(layer.model + (f", Zipf {one:g}" if one else ""), layer.sizes, {**layer.options, "zipf": one})
        for layer in layers
        for one in (0.0, zipf)
    ]
    alone = [layer for layer in layers if layer.model in deterministic]
    return routed + [
        Shape(f"{layer.model}, deterministic", layer.sizes, {**layer.options, "deterministic": True})
        for layer in alone
    ]


def moe_layers(world_size: int, on_gpu: bool) -> list[Shape]:
    """The published layers whose experts the ranks can share out; a small one where kernels are interpreted."""
    if not on_gpu:
        return [moe_layer("small", 24, 32, 48, 4 * world_size, 2)]
    data = load_workloads()
    ep = data["ep"]
    tokens, topk, hidden = ep["tokens_per_rank"], ep["topk"], ep["hidden"]
    layers = [
        moe_layer("facts", tokens, hidden, 2048, 128, topk),
        moe_layer("weak scaling", tokens, hidden, 2048, ep["weak_scaling_experts_per_rank"] * world_size, topk),
        moe_layer("strong scaling", tokens, hidden, 2048, ep["strong_scaling_experts_total"], topk),
        *(
            moe_layer(
                one["model"],
                one["num_tokens"] // world_size,
                one["hidden"],
                one["intermediate"],
                one["num_experts"],
                one["topk"],
            )
            for one in data["moe"]["shapes"]
        ),
    ]
    return [layer for layer in layers if layer.sizes["num_experts"] % world_size == 0]


def layers_of_model(model: ModelSizes, world_size: int) -> list[Shape]:
    """A model's MoE layer with both routings; of a model without experts a published one, without a GPU a small
    one."""
    if model.experts is not None:
        sizes = (model.tokens, model.hidden, model.expert_ffn, model.experts, model.topk)
        return with_routings([moe_layer("custom", *sizes)])
    return with_routings(moe_layers(world_size, torch.cuda.is_available())[:1])


def why_not_layer(layer: Shape, world_size: int) -> str | None:
    """Why ranks cannot share out the experts, or a token not choose among them."""
    num_experts, topk = layer.sizes["num_experts"], layer.sizes["topk"]
    if world_size < 2:
        return "one rank dispatches nothing: ep takes 2 ranks or more"
    if num_experts % world_size:
        return f"{num_experts} experts do not divide over {world_size} ranks"
    if topk > num_experts:
        return f"there are no {topk} experts to choose among {num_experts}"
    return None


def zipf_routing(
    num_tokens: int, num_experts: int, topk: int, *, exponent: float, device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A routing map and its probabilities: expert i is drawn in proportion to (i' + 1) ** -exponent, i' a shuffle of
    i.

    Returns:
        bool [num_tokens, num_experts] with ``topk`` True a row; fp32 probabilities, 0 where not routed.
    """
    # The same popular experts on every rank.
    order = torch.randperm(num_experts, device="cpu", generator=torch.Generator().manual_seed(1))
    popularity = (order + 1.0).pow(-exponent).log().to(device)
    generator = torch.Generator(device).manual_seed(seed)
    uniform = torch.empty(num_tokens, num_experts, device=device).uniform_(1e-6, 1 - 1e-6, generator=generator)
    scores = popularity - (-uniform.log()).log()  # Gumbel: sampling without replacement
    routed = torch.zeros(num_tokens, num_experts, dtype=torch.bool, device=device)
    routed.scatter_(1, scores.topk(topk, dim=1).indices, True)
    probs = torch.where(routed, uniform, 0.0)
    return routed, probs / probs.sum(1, keepdim=True)


def routing_of(layer: Shape, place: Place, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The routing map and probabilities of this rank's tokens in a layer.

    Raises:
        SettingError: The layer does not divide over the ranks.
    """
    why = why_not_layer(layer, place.world_size)
    if why is not None:
        raise SettingError(why)
    tokens, num_experts, topk = (layer.sizes[name] for name in ("tokens_per_rank", "num_experts", "topk"))
    options: dict[str, Any] = dict(exponent=layer.options["zipf"], device=place.device)
    return zipf_routing(tokens, num_experts, topk, **options, seed=1000 * seed + place.rank)


class MoeSpec(OpSpec[Call, Context]):
    """An op of a MoE layer: its shapes are those of layers, with routings."""

    num_sets = 1  # of tokens, which are larger than the L2 cache

    def shapes_of_layer(self, layer: Shape) -> list[Shape]:
        """The op's shapes in a layer with a routing."""
        return [layer]

    def shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        layers = moe_layers(world_size, on_gpu)
        routed = with_routings(layers, deterministic=[layer.model for layer in layers[:1]])
        return [shape for layer in routed for shape in self.shapes_of_layer(layer)]

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> list[Shape]:
        return [shape for layer in layers_of_model(model, world_size) for shape in self.shapes_of_layer(layer)]

    def why_not_shape(self, shape: Shape, world_size: int) -> str | None:
        return why_not_layer(shape, world_size)


class GroupCall(NamedTuple):
    """Rows of this rank's experts.

    Attributes:
        x: [rows, K].
        grad: [rows, N].
        weights: One [N, K] an expert.
        tokens_per_expert: On the device.
        counts: The same on the host.
        fewest_rows: Of any expert of any rank; None where every sum is exact.
        native: Megatron's path.
        group: The expert-parallel group.
    """

    x: torch.Tensor
    grad: torch.Tensor
    weights: list[torch.Tensor]
    tokens_per_expert: torch.Tensor
    counts: list[int]
    fewest_rows: int | None
    native: Callable[..., Any]
    group: dist.ProcessGroup


class GroupGemmSpec(MoeSpec[GroupCall, object]):
    """One product of every expert's rows."""

    is_local = True

    def __init__(self, product: Product) -> None:
        self.product = product
        self.row = _NAMES[product]
        self.name = f"ep {self.row}"
        self.table_op = self.row
        self.measured = "forward" if product == "forward" else "backward"

    def context(self, call: GroupCall) -> object:
        """See `OpSpec`: none; nothing is sent."""
        return self

    def inputs(self, call: GroupCall) -> Sequence[torch.Tensor]:
        return call.x, call.grad

    def shapes_of_layer(self, layer: Shape) -> list[Shape]:
        """See `MoeSpec`: both weights of an expert; the deterministic mode changes nothing of them."""
        if layer.options["deterministic"]:
            return []
        hidden, ffn_hidden = layer.sizes["hidden"], layer.sizes["ffn_hidden"]
        return [
            Shape(layer.model, {**layer.sizes, "n": n, "k": k}, layer.options)
            for n, k in ((2 * ffn_hidden, hidden), (hidden, ffn_hidden))
        ]

    def why_no_row(self, call: GroupCall) -> str | None:
        """See `OpSpec`: what a layer leaves native."""
        weight = call.weights[0]
        if call.fewest_rows is None or (self.product == "wgrad" and own_wgrad_has_native_bits(*weight.shape)):
            return None
        products = [RowProduct(tuple(weight.shape), len(call.weights), transpose) for transpose in (True, False)]
        if self.product != "wgrad":
            products = products[:1] if self.product == "forward" else products[1:]
        if call.fewest_rows >= max(fewest_rows_here(product, weight.dtype, weight.device) for product in products):
            return None
        return f"an expert has {call.fewest_rows} rows, where a layer leaves it native"

    def sample(self, shape: Shape, place: Place, seed: int) -> GroupCall:
        """See `OpSpec` (collective)."""
        routed, _ = routing_of(shape, place, seed)
        total, device = routed.sum(0), place.device
        dist.all_reduce(total, group=place.group)
        counts = total.view(place.world_size, -1)[place.rank].tolist()
        n, k = shape.sizes["n"], shape.sizes["k"]
        generator = torch.Generator(device).manual_seed(1000 * seed + place.rank)

        def values(*size: int) -> torch.Tensor:
            if device.type == "cpu":  # small integers: exact in every order of a sum
                return torch.randint(-3, 4, size, device=device, generator=generator).to(place.dtype)
            return torch.empty(size, dtype=place.dtype, device=device).normal_(generator=generator)

        x, grad, weights = values(sum(counts), k), values(sum(counts), n), [values(n, k) for _ in counts]
        native = native_products(counts, n, k, place.dtype, device)[self.product]
        fewest = _fewest_rows(total, device)
        return GroupCall(x, grad, weights, torch.tensor(counts, device=device), counts, fewest, native, place.group)

    def megatron(self, call: GroupCall) -> Function:

        def function(x: torch.Tensor, grad: torch.Tensor) -> Sequence[torch.Tensor]:
            result: Any = call.native(x, grad, call.weights)
            return result if self.product == "wgrad" else [result]

        return function

    def megatron_backward(self, call: GroupCall) -> Function | None:
        """See `OpSpec`: a gradient is a product of its own."""
        return None if self.product == "forward" else self.megatron(call)

    def fused_backward(self, call: GroupCall, context: object) -> Function | None:
        return None if self.product == "forward" else self.fused(call, context)

    def fused(self, call: GroupCall, context: object) -> Function:
        return self.fused_as(call, context, None)

    def fused_as(self, call: GroupCall, context: object, candidate: GemmConfig | None) -> Function:
        weights = call.weights

        def function(x: torch.Tensor, grad: torch.Tensor) -> Sequence[torch.Tensor]:
            tiles = row_tiles(call.tokens_per_expert, sum(call.counts))
            if self.product == "wgrad":
                return group_wgrad(grad, x, tiles, config=candidate).unbind()
            if self.product == "dgrad":
                return [group_gemm(grad, weights, tiles, transpose=False, config=candidate)]
            return [group_gemm(x, weights, tiles, config=candidate)]

        return function

    def _sizes(self, call: GroupCall) -> tuple[int, int, int, int]:
        """Experts, and rows, N and K of the product."""
        n, k = call.weights[0].shape
        if self.product == "dgrad":
            n, k = k, n
        return len(call.weights), call.x.shape[0], n, k

    def tuned_shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        """See `OpSpec`: of one layer; more would fill the memory."""
        return self.shapes_of_layer(moe_layers(world_size, on_gpu)[0])

    def shape_class(self, call: GroupCall) -> str:
        """See `OpSpec`: of the largest number of rows of any rank, so that the ranks tune alike (collective)."""
        num_experts, rows, n, k = self._sizes(call)
        most = torch.tensor([rows], device=call.x.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=call.group)
        return group_class(num_experts, int(most.item()), n, k)

    def candidates(self, call: GroupCall, context: object, ranked: Sequence[Any]) -> Sequence[GemmConfig]:
        if ranked:
            return []
        target, device = kernel_target(call.x.device), call.x.device
        default = default_group_config(_NAMES[self.product], *self._sizes(call), call.x.dtype, target, device)
        return [default, *config_variants(default, target)]

    def entry(self, call: GroupCall, candidate: GemmConfig, *, is_native: bool) -> dict[str, Any]:
        return {**config_entry(candidate), "native": is_native}


def _fewest_rows(counts: torch.Tensor, device: torch.device) -> int | None:
    """What decides whether a layer takes our GEMMs; None on CPU, where the values are integers and every sum exact."""
    return None if device.type == "cpu" else int(counts[counts > 0].min())


SPECS: Sequence[OpSpec[Any, Any]] = tuple(GroupGemmSpec(product) for product in _NAMES)
