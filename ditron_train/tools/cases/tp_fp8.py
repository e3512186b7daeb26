"""Tensor parallelism in FP8 as tools measure it; imported only if Transformer Engine is installed.

AG-GEMM and GEMM-RS of quantised operands, against Transformer Engine's gather, product and reduce-scatter one after
the other; and Megatron's linear layers of Transformer Engine with all that they do around the products: scales and
their exchange, quantising, transposes, state. Results, gradients and state are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformer_engine_torch as tex
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

from ditron_train.megatron.tp.spec import Kind as LayerKind
from ditron_train.megatron.tp.te_blocks import travel_options
from ditron_train.megatron.tp.te_fp8 import Scaling, forward_pass
from ditron_train.megatron.tp.te_passes import gather, multiply, passing, scatter
from ditron_train.policy import Function, Op
from ditron_train.runtime.settings import under_policy
from ditron_train.tools.cases.case import BenchCase, Cost, RunEnvironment, Shape
from ditron_train.tools.cases.tp_gemm import AG_GEMM, GEMM_RS, GemmCase, RecipeCase, local_shapes
from ditron_train.tools.fp8.recipes import (
    fp8_context,
    fp8_options,
    unsupported_reason_aligned,
    unsupported_reason_native,
)
from ditron_train.tools.results import FP8_PREFIX
from ditron_train.tp import TPContext, get_tp_context
from ditron_train.tp.choices import Op as Kind
from ditron_train.tp.choices import Problem, wire_bytes


class Fp8Operands(NamedTuple):
    """Quantised operands of this rank, as Transformer Engine holds them.

    Attributes:
        x: [M / W, K] (AG-GEMM) or [M, K].
        weight: [N, K].
        quantizer: Of what is gathered.
        group: Tensor parallel group.
    """

    x: Any
    weight: Any
    quantizer: Any
    group: dist.ProcessGroup


def data_of(operand: Any) -> torch.Tensor:
    """The bytes of a quantised tensor, row by row."""
    fields = operand.get_metadata()
    found: torch.Tensor = fields["data"] if "data" in fields else fields["rowwise_data"]
    return found


def _quantizer(recipe: str, device: torch.device, *, is_weight: bool = False, payload: bool = False) -> Any:
    """One as a layer's, that nobody else has and that asks no peer; delayed scaling differs in where scales are
    from."""
    kind = tex.DType.kFloat8E4M3
    quantizer: Any
    if recipe == "blockwise":
        dimensions = 2 if is_weight else 1
        options = dict(rowwise=True, columnwise=False, block_scaling_dim=dimensions)
        quantizer = Float8BlockQuantizer(kind, **options, **travel_options(payload))
    else:
        quantizer = Float8CurrentScalingQuantizer(kind, device, columnwise=False)
    quantizer.internal = True
    return quantizer


class Fp8GemmOp(Op[Fp8Operands, TPContext]):
    """The forward product of a column (``ag_gemm``) or a row (``gemm_rs``) layer, from quantised operands on."""

    def __init__(self, kind: Kind, recipe: str) -> None:
        self.kind, self.recipe = kind, recipe
        self.name = f"tp {kind} {FP8_PREFIX}{recipe}"

    def device(self, call: Fp8Operands) -> torch.device:
        return data_of(call.x).device

    def make_context(self, call: Fp8Operands) -> TPContext:
        return get_tp_context(call.group, self.device(call))

    def inputs(self, call: Fp8Operands) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes."""
        return data_of(call.x), data_of(call.weight)

    def _run(self, call: Fp8Operands, context: TPContext | None) -> list[torch.Tensor]:
        # Blocks of scales are always multiplied with a split accumulator.
        options: dict[str, Any] = dict(out_dtype=torch.bfloat16, use_split_accumulator=self.recipe == "blockwise")
        scaling: Scaling = "block" if self.recipe == "blockwise" else "tensor"
        features = data_of(call.weight).shape[0], data_of(call.weight).shape[1]
        with (
            torch.no_grad(),
            passing(forward_pass("column" if self.kind == "ag_gemm" else "row", context, scaling, features)),
        ):
            if self.kind == "ag_gemm":
                total, _ = gather(call.x, call.group, quantizer=call.quantizer)
                return [multiply(call.weight, total, **options)[0]]
            partial, *_ = multiply(call.weight, call.x, **options)
            return [scatter(partial, call.group)[0]]

    def native(self, call: Fp8Operands) -> Function:
        return lambda x, weight: self._run(call, None)

    def fused(self, call: Fp8Operands, context: TPContext) -> Function:
        return lambda x, weight: self._run(call, context)


class Fp8GemmCase(RecipeCase[Fp8Operands]):
    """Against Transformer Engine's gather, product and reduce-scatter one after the other."""

    op: Fp8GemmOp

    def __init__(self, gemm: GemmCase, recipe: str) -> None:
        super().__init__(Fp8GemmOp(gemm.op.kind, recipe), gemm.row, gemm, recipe)

    def shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        """Also those that do not divide over the ranks, which are an error."""
        shapes = self.gemm.shapes(world_size, on_gpu)
        return [
            shape
            for shape in shapes
            if unsupported_reason_aligned(self.op.kind, shape, world_size, self.recipe) is None
        ]

    def no_row_reason(self, call: Fp8Operands) -> str | None:
        return unsupported_reason_native(self.recipe)

    def sample(self, shape: Shape, environment: RunEnvironment, seed: int) -> Fp8Operands:
        shapes, is_gathered = local_shapes(self.op.kind, shape, environment.world_size), self.op.kind == "ag_gemm"
        x, weight = environment.values(shapes, 2 * seed, torch.bfloat16)
        quantizer = _quantizer(self.recipe, environment.device, payload=is_gathered)
        matrix = _quantizer(self.recipe, environment.device, is_weight=True)(weight)
        return Fp8Operands(quantizer(x), matrix, quantizer, environment.group)

    def _problem(self, call: Fp8Operands) -> Problem:
        (rows, k), (n, _) = (tuple(one.shape) for one in self.op.inputs(call))
        world_size = dist.get_world_size(call.group)
        m = rows * (world_size if self.op.kind == "ag_gemm" else 1)
        return Problem(self.op.kind, m, n, k, "nt", torch.float8_e4m3fn, world_size)

    def cost(self, call: Fp8Operands, context: TPContext) -> Cost:
        problem = self._problem(call)
        return Cost(wire_bytes(problem), 2.0 * problem.m * problem.n * problem.k)

    def parts(self, call: Fp8Operands, context: TPContext) -> Mapping[str, Callable[[], object]]:
        options: dict[str, Any] = dict(out_dtype=torch.bfloat16, use_split_accumulator=self.recipe == "blockwise")
        if self.op.kind == "ag_gemm":
            total, _ = gather(call.x, call.group, quantizer=call.quantizer)
            return {
                "gemm": lambda: multiply(call.weight, total, **options),
                "comm": lambda: gather(call.x, call.group, quantizer=call.quantizer),
            }
        partial, *_ = multiply(call.weight, call.x, **options)
        return {"gemm": lambda: multiply(call.weight, call.x, **options), "comm": lambda: scatter(partial, call.group)}

    def peers(self, call: Fp8Operands, context: TPContext) -> Mapping[str, Callable[[], object]]:
        """PyTorch's async-TP, which knows one scale a tensor."""
        if self.recipe == "blockwise" or context.target == "interpreter":
            return {}
        return {"async-TP": lambda: self._async_tp(call)}

    def _async_tp(self, call: Fp8Operands) -> torch.Tensor:
        import torch.distributed._symmetric_memory  # noqa: F401  (registers the ops)

        x, weight = (one.view(torch.float8_e4m3fn) for one in self.op.inputs(call))
        scales = [operand.get_metadata()["fp8_scale_inv"].reshape(()) for operand in (call.x, call.weight)]
        name, dtype = call.group.group_name, torch.bfloat16
        if self.op.kind == "ag_gemm":
            fused = torch.ops.symm_mem.fused_all_gather_scaled_matmul
            operands = (x, [weight.t()], scales[0], [scales[1]])
            return fused(*operands, 0, name, [None], [None], [dtype], [True])[1][0]
        sizes = [x.shape[0], weight.shape[0]]
        scattered = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter
        return scattered(x, weight.t(), *scales, "sum", 0, 0, name, sizes, out_dtype=dtype, use_fast_accum=True)


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

    def __init__(self, kind: LayerKind, recipe: str) -> None:
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
        """None if the layer runs natively."""
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

    def __init__(self, kind: LayerKind, recipe: str) -> None:
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
        x, grad, weight = environment.values(sizes, 3 * seed, torch.bfloat16)
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
    """Both products and both layers in a recipe."""
    return [
        Fp8GemmCase(AG_GEMM, recipe),
        Fp8GemmCase(GEMM_RS, recipe),
        LayerCase("column", recipe),
        LayerCase("row", recipe),
    ]
