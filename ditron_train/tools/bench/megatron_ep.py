"""The native side of ``bench ep``: megatron-core's alltoall or flex dispatcher and MoE layer, beside the same with
``ep``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import build_module

from ditron_train.cpu import megatron_shim as megatron_cpu
from ditron_train.megatron import apply
from ditron_train.megatron.ep.flex_dispatcher import has_deepep
from ditron_train.runtime.settings import under_policy
from ditron_train.tools.arguments import refuse
from ditron_train.tools.bench.layer_passes import LayerPasses, contenders
from ditron_train.tools.cases import RunEnvironment, Shape
from ditron_train.tools.cases.ep_layers import moe_layer, routing_of, unsupported_layer
from ditron_train.tools.cases.ep_moves import config_of_layer, deepep_by_torch, repeating
from ditron_train.tools.fp8.recipes import fp8_options
from ditron_train.tools.results import FP8_PREFIX, Row
from ditron_train.tools.session import BenchSession


@contextmanager
def expert_parallel_world() -> Iterator[None]:
    """Megatron's groups with all ranks in one expert-parallel group; without a GPU megatron-core is made to run
    there."""
    if not torch.cuda.is_available():
        megatron_cpu.install()
    elif not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # the router asks whether it is None, and the name exists only with TE
    with megatron_cpu.parallel_groups(expert_model_parallel_size=dist.get_world_size()):
        yield


def layer_pair(config: TransformerConfig, device: torch.device) -> dict[str, torch.nn.Module]:
    """The MoE layer, native and with ``ep``, with equal weights."""
    spec = get_moe_module_spec(use_te=HAVE_TE, num_experts=config.num_moe_experts, moe_grouped_gemm=HAVE_TE)
    layers: dict[str, Any] = {}
    is_flex = config.moe_token_dispatcher_type == "flex"
    for name, tree in (("native", spec), ("fused", apply(spec, ("ep",)))):
        megatron_cpu.seed(1234)
        with deepep_by_torch() if is_flex and name == "native" else nullcontext():
            layers[name] = build_module(tree, config=config, layer_number=1).to(device)
    if is_flex:
        layers["native"].forward = deepep_by_torch()(layers["native"].forward)
    layers["fused"].load_state_dict(layers["native"].state_dict())
    return layers


def _moe_layers(
    session: BenchSession, layer: Shape, fp8: str | None = None, dispatcher: str = "alltoall"
) -> tuple[LayerPasses, dict[str, torch.nn.Module]]:
    """A MoE layer, native and with ``ep``, and their passes."""
    sizes = layer.sizes
    config = config_of_layer(layer, session.dtype, moe_token_dispatcher_type=dispatcher, **fp8_options(fp8))
    layers = layer_pair(config, session.device)
    generator = torch.Generator(session.device).manual_seed(session.rank)
    shape = (sizes["tokens_per_rank"], 1, sizes["hidden"])
    x, grad = (
        torch.empty(shape, device=session.device, dtype=session.dtype).normal_(generator=generator) for _ in range(2)
    )
    if layer.options["zipf"]:  # a router with random weights routes evenly: this one's choice is given
        world: Any = dist.group.WORLD
        routed, probs = routing_of(layer, RunEnvironment(world, session.device, session.dtype), 0)
        for one in layers.values():
            one.route = lambda hidden_states, padding_mask=None: (probs, routed)  # type: ignore[assignment]
            one.router.requires_grad_(False)
    return LayerPasses(config, x, grad), layers


@contextmanager
def moe_contenders(
    session: BenchSession, fp8: str | None = None
) -> Iterator[dict[str, Callable[[int], list[torch.Tensor]]]]:
    """Forward and backward of one MoE layer, ``native`` and ``fused``, on the same values."""
    on_gpu = session.device.type == "cuda"
    sizes = (8192, 7168, 2048, 128, 8) if on_gpu else (24, 32, 48, 4 * session.world_size, 2)
    layer = moe_layer("traced", *sizes)
    if layer.sizes["num_experts"] % session.world_size:
        refuse(unsupported_layer(layer, session.world_size))
    with expert_parallel_world(), repeating(layer), under_policy("strict"):
        passes, layers = _moe_layers(session, layer, fp8)
        yield contenders(passes.forward_backward, layers)


def layer_rows(
    session: BenchSession, layer: Shape, fp8: str | None = None, dispatcher: str = "alltoall"
) -> Iterator[Row]:
    """The whole layer, forward, and forward and backward, as a user gets it."""
    named = None if dispatcher == "alltoall" else dispatcher if has_deepep() else f"{dispatcher} by torch"
    with repeating(layer), under_policy("strict"):
        passes, layers = _moe_layers(session, layer, fp8, dispatcher)
        dtype = None if fp8 is None else FP8_PREFIX + fp8
        for direction, run in passes.both():
            timed = contenders(run, layers)
            equal = session.equal_layer("ep", timed["fused"], timed["native"])
            timings = session.measure(timed)
            options: dict[str, Any] = dict(comm_sms=_comm_sms(layers["fused"]), dtype=dtype, dispatcher=named)
            yield session.row("moe_layer", direction, layer.model, dict(layer.sizes), timings, equal, **options)


def _comm_sms(layer: Any) -> int:
    context = layer.token_dispatcher.ep_context
    if context is None or context.target == "interpreter":
        return 0
    return context.senders("dispatch", layer.config.hidden_size)
