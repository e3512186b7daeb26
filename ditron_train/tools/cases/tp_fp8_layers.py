"""Linear layers in FP8 as tools measure them: Megatron's, of Transformer Engine, and the fused path, with all that
they do around the products: scales and their exchange, quantising, transposes, state. Results, gradients and state are
compared."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ditron_train.megatron.tp.spec import Kind
from ditron_train.policy import Function, Op
from ditron_train.runtime.settings import under_policy
from ditron_train.runtime.values import make_values
from ditron_train.tools.cases.case import BenchCase, RunEnvironment, Shape
from ditron_train.tools.cases.tp_gemm import AG_GEMM, GEMM_RS, RecipeCase, local_shapes
from ditron_train.tools.fp8.recipes import fp8_context, fp8_options
from ditron_train.tools.results import FP8_PREFIX


class LayerCall(NamedTuple):
    """One call of a layer on this rank.

    Attributes:
        x: [s, 1, K], of ``column`` the local part of the sequence.
        grad: Of the result.
        native, fused: Megatron's layer and the fused one, with equal weights.
        config: Of both.
        group: Tensor parallel group.
    """

    x: torch.Tensor
    grad: torch.Tensor
    native: Any
    fused: Any
    config: Any
    group: dist.ProcessGroup


def used_state(layer: torch.nn.Module) -> list[torch.Tensor]:
    """What Transformer Engine's quantizers of input, weight and output gradient keep; others never write theirs."""
    found: list[Any] = []
    for name, indices in (("scaling_fwd", (0, 1)), ("scaling_bwd", (0,))):
        quantizers = getattr(layer, "quantizers", {}).get(name, ())
        for index in indices if len(quantizers) else ():
            found += [getattr(quantizers[index], field, None) for field in ("scale", "amax")]
        found.append(getattr(getattr(layer, "fp8_meta", {}).get(name), "amax_history", None))
    return [tensor.clone() for tensor in found if isinstance(tensor, torch.Tensor)]


class LayerOp(Op[LayerCall, Any]):
    """A column or a row layer, forward and backward, with all that it does around its products."""

    def __init__(self, kind: Kind, recipe: str) -> None:
        self.kind = kind
        self.name = f"tp {kind} {FP8_PREFIX}{recipe}"

    def inputs(self, call: LayerCall) -> tuple[torch.Tensor, torch.Tensor]:
        return call.x, call.native.weight

    def route(self, call: LayerCall) -> Any:
        """The answer of the gate, or why the layer does not ask it."""
        from ditron_train.megatron.tp.te_routes import answer_in_fp8, unsupported_reason_fp8

        with fp8_context(call.config):
            reason = unsupported_reason_fp8(call.fused, call.x)
            return reason if reason is not None else answer_in_fp8(call.fused, self.kind, call.x)

    def make_context(self, call: LayerCall) -> Any:
        """None where the layer runs natively."""
        found = self.route(call)
        return None if found is None or isinstance(found, str) else found.context

    def native(self, call: LayerCall) -> Function:
        return lambda x, weight: _step(call.native, call)

    def fused(self, call: LayerCall, context: Any) -> Function:
        return lambda x, weight: _step(call.fused, call)


def _step(layer: Any, call: LayerCall) -> list[torch.Tensor]:
    x = call.x.detach().requires_grad_()
    with torch.enable_grad():
        with fp8_context(call.config):
            y, _ = layer(x)
        gradients = torch.autograd.grad(y, [x, layer.weight], call.grad)
    return [y.detach(), *gradients, *used_state(layer)]


class LayerCase(RecipeCase[LayerCall]):
    """Megatron's layer of Transformer Engine and the fused path; results, gradients and state are compared."""

    op: LayerOp
    measured = "forward_backward"
    groups = "tensor"
    asks_gate = True
    num_sets = 2  # with their layers

    def __init__(self, kind: Kind, recipe: str) -> None:
        super().__init__(LayerOp(kind, recipe), f"{kind}_linear", AG_GEMM if kind == "column" else GEMM_RS, recipe)

    def no_row_reason(self, call: LayerCall) -> str | None:
        found = self.op.route(call)
        if found is None:
            return "the policy keeps it on stock Megatron (the log says why)"
        return found if isinstance(found, str) else None

    def surroundings(self, shape: Shape) -> Any:
        """Whatever has native's bits is fused here, be it faster at this shape or not."""
        return under_policy("bits")

    def sample(self, shape: Shape, environment: RunEnvironment, seed: int) -> LayerCall:
        m, n, k = (shape.sizes[name] for name in "mnk")
        (rows, own_k), (own_n, _) = local_shapes(self.gemm.op.kind, shape, environment.world_size)
        config, native, fused = _layers(self.op.kind, n, k, environment.world_size, self.recipe)
        out_rows = m if self.op.kind == "column" else m // environment.world_size
        sizes = ((rows, 1, own_k), (out_rows, 1, own_n), tuple(native.weight.shape))
        x, grad, weight = (
            make_values(one, torch.bfloat16, environment.device, seed=3 * seed + index, rank=environment.rank)
            for index, one in enumerate(sizes)
        )
        with torch.no_grad():
            for layer in (native, fused):
                layer.weight.copy_(weight / math.sqrt(own_k))
        return LayerCall(x, grad, native, fused, config, environment.group)


def _layers(kind: str, n: int, k: int, world_size: int, recipe: str) -> tuple[Any, Any, Any]:
    """A configuration, Megatron's layer of Transformer Engine, and the fused path; collective."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    from ditron_train.megatron.tp import te_layers
    from ditron_train.tools.layer_config import layer_config

    parallel = dict(tensor_model_parallel_size=world_size, sequence_parallel=world_size > 1)
    sizes = dict(hidden_size=128, num_attention_heads=world_size)
    config = layer_config(torch.bfloat16, **sizes, **parallel, **fp8_options(recipe))
    native = TEColumnParallelLinear if kind == "column" else TERowParallelLinear
    options: dict[str, Any] = {"gather_output": False} if kind == "column" else {"input_is_parallel": True}
    options.update(config=config, init_method=torch.nn.init.normal_, bias=False, skip_bias_add=True, is_expert=False)
    made = [one(k, n, **options) for one in (native, te_layers.class_map()[native])]
    return config, *made


def fp8_cases(recipe: str) -> list[BenchCase[Any, Any]]:
    """Both layers in a recipe."""
    return [LayerCase("column", recipe), LayerCase("row", recipe)]
