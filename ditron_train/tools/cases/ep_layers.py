"""The MoE layers that tools measure, with their routings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ditron_train.data import load_workloads
from ditron_train.policy.op import Call, Context
from ditron_train.tools.arguments import refuse
from ditron_train.tools.cases.case import BenchCase, ModelSizes, RunEnvironment, Shape

_SKEWED = 1.0  # exponent of the skewed routing


def moe_layer(model: str, tokens: int, hidden: int, ffn_hidden: int, num_experts: int, topk: int) -> Shape:
    """One MoE layer: tokens of each rank, experts of all ranks, evenly routed."""
    names = ("tokens_per_rank", "hidden", "ffn_hidden", "num_experts", "topk")
    sizes = dict(zip(names, (tokens, hidden, ffn_hidden, num_experts, topk), strict=True))
    return Shape(model, sizes, {"zipf": 0.0, "deterministic": False})


def with_routings(layers: Sequence[Shape], *, deterministic: Sequence[str] = ()) -> list[Shape]:
    """Every layer evenly routed and with experts chosen by Zipf's law of this exponent; then those of the models
    ``deterministic`` without fused permutation in PyTorch's deterministic mode, whatever is installed."""
    routed = [
        Shape(layer.model + (f", Zipf {one:g}" if one else ""), layer.sizes, {**layer.options, "zipf": one})
        for layer in layers
        for one in (0.0, _SKEWED)
    ]
    alone = [layer for layer in layers if layer.model in deterministic]
    return routed + [
        Shape(f"{layer.model}, deterministic", layer.sizes, {**layer.options, "deterministic": True})
        for layer in alone
    ]


def moe_layers(world_size: int, on_gpu: bool) -> list[Shape]:
    """The published layers whose experts the ranks can share out; a small one if kernels are interpreted."""
    if not on_gpu:
        return [moe_layer("small", 24, 32, 48, 4 * world_size, 2)]
    data = load_workloads()
    ep = data["ep"]
    tokens, topk, hidden = ep["tokens_per_rank"], ep["topk"], ep["hidden"]
    sizes = "hidden", "intermediate", "num_experts", "topk"
    layers = [
        moe_layer("facts", tokens, hidden, 2048, 128, topk),
        moe_layer("Qwen3-235B", tokens, 4096, 1536, 128, topk),
        moe_layer("Qwen3-30B", tokens, 2048, 768, 128, topk),
        moe_layer("weak scaling", tokens, hidden, 2048, ep["weak_scaling_experts_per_rank"] * world_size, topk),
        moe_layer("strong scaling", tokens, hidden, 2048, ep["strong_scaling_experts_total"], topk),
        *(
            moe_layer(one["model"], one["num_tokens"] // world_size, *map(one.get, sizes))
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


def unsupported_layer(layer: Shape, world_size: int) -> str | None:
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
        bool [num_tokens, num_experts] with ``topk`` True a row; fp32 probabilities, 0 if not routed.
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


def routing_of(layer: Shape, environment: RunEnvironment, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The routing map and probabilities of this rank's tokens in a layer.

    Raises:
        SettingError: The layer does not divide over the ranks.
    """
    refuse(unsupported_layer(layer, environment.world_size))
    tokens, num_experts, topk = (layer.sizes[name] for name in ("tokens_per_rank", "num_experts", "topk"))
    options: dict[str, Any] = dict(exponent=layer.options["zipf"], device=environment.device)
    return zipf_routing(tokens, num_experts, topk, **options, seed=1000 * seed + environment.rank)


class MoeCase(BenchCase[Call, Context]):
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

    def unsupported_shape(self, shape: Shape, world_size: int) -> str | None:
        return unsupported_layer(shape, world_size)
