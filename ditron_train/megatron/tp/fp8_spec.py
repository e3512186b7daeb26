"""Tensor parallel linear layers of Transformer Engine in FP8, declared for the policy.

What is compared is a layer's forward and backward from quantized operands on: gather, products and reduce-scatter, by
the functions that Transformer Engine's own layers call and by the fused path. Quantizing is Transformer Engine's
either way, but for the largest amax of all ranks that the recipe tensorwise asks for. Imported only if Transformer
Engine is installed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformer_engine_torch as tex
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

from ditron_train.gemm.order_probe import order_probe_matrix
from ditron_train.megatron.shared.devices import unsupported_reason_fp8_on_device
from ditron_train.megatron.tp.linear_call import decide_with_library
from ditron_train.megatron.tp.spec import Kind
from ditron_train.megatron.tp.te_blocks import travel_options
from ditron_train.megatron.tp.te_coverage import FP8_RECIPES, unsupported_reason_fp8_sizes
from ditron_train.megatron.tp.te_fp8 import Scaling, backward_pass, forward_pass
from ditron_train.megatron.tp.te_passes import gather, multiply, passing, scatter
from ditron_train.policy import Decision, Function, Op, Trial
from ditron_train.policy.op import is_forward_only
from ditron_train.runtime.errors import MismatchError
from ditron_train.runtime.values import normal_values
from ditron_train.stream.driver import has_driver
from ditron_train.symm.exchange import exchange
from ditron_train.tp.all_reduce import largest_of_ranks
from ditron_train.tp.context import TPContext, get_tp_context


class Fp8Call(NamedTuple):
    """One call of a linear layer in FP8 on this rank.

    Attributes:
        x: Input ``[s, b, K]`` or ``[tokens, K]``, bf16: of ``column`` the local part of the sequence.
        weight: This rank's ``[N, K]``.
        group: Tensor parallel group.
        grad_format: Of gradients: ``E4M3`` or ``E5M2``. The others are E4M3.
        is_frozen: Whether the weight needs no gradient.
        scaling: What a scale is for.
        recipe: Its name: by some, quantizing asks the peers.
        has_bias: Whether a bias is added to the product before it is rounded.
    """

    x: torch.Tensor
    weight: torch.Tensor
    group: dist.ProcessGroup
    grad_format: str
    is_frozen: bool
    scaling: Scaling = "tensor"
    recipe: str = ""
    has_bias: bool = False

    @property
    def has_blocks(self) -> bool:
        """Whether a tensor has many scales."""
        return self.scaling != "tensor"

    @property
    def reduces_amax(self) -> bool:
        """Whether what is gathered is quantized by the largest value of all ranks."""
        return self.recipe == FP8_RECIPES[0]


@dataclass(frozen=True)
class _Operands:
    """Quantized operands of one forward and backward, the quantizer of what is gathered in backward, and this rank's
    largest value of what is gathered."""

    call: Fp8Call
    x: Any
    weight: Any
    grad: Any
    quantizer: Any
    bias: torch.Tensor | None
    amax: torch.Tensor
    is_forward: bool = False


class Fp8LinearOp(Op[Fp8Call, TPContext]):
    """Gather, product and their backward (``column``), or product, reduce-scatter and theirs (``row``). A recipe is a
    part of the call."""

    decides_forward = True
    is_observed = True
    synchronizes = True
    looks_at_host = True  # Transformer Engine keeps the host busy in FP8

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.name = f"tp {kind} fp8"

    def key(self, call: Fp8Call) -> tuple[Hashable, ...]:
        return (tuple(call.x.shape), *_kind_of(call))

    def family(self, call: Fp8Call) -> tuple[tuple[Hashable, ...], int] | None:
        world_size = dist.get_world_size(call.group)
        rows = call.x.shape[:-1].numel() * (world_size if self.kind == "column" else 1)
        return (_kind_of(call), rows) if rows and world_size > 1 else None

    def at_rows(self, call: Fp8Call, rows: int) -> Fp8Call:
        local = rows // dist.get_world_size(call.group) if self.kind == "column" else rows
        x, weight = (call.x.new_empty(()).expand(shape) for shape in ((local, call.x.shape[-1]), call.weight.shape))
        return call._replace(x=x, weight=weight)

    def check_ranks_agree(self, call: Fp8Call) -> None:
        """Asks all ranks of the group whether they call a layer alike (collective): quantizing is collective by some
        recipes, so ranks that differ would wait for each other for ever.

        Raises:
            MismatchError: They do not; the same on every rank.
        """
        shapes = f"{tuple(call.x.shape)} {call.x.dtype} x {tuple(call.weight.shape)} {call.weight.dtype}"
        options = f"{call.recipe or call.scaling}, gradients {call.grad_format}{_switches(call)}"
        gathered = exchange(call.group, f"{shapes}, {options}")
        if len(set(gathered)) > 1:
            ranks = "; ".join(f"rank {rank}: {words}" for rank, words in enumerate(gathered))
            raise MismatchError(f"{self.name}: the ranks called it with different arguments. {ranks}")

    def unsupported_reason(self, call: Fp8Call) -> str | None:
        sizes = call.x, call.weight, dist.get_world_size(call.group)
        return unsupported_reason_fp8_sizes(self.kind, *sizes, has_blocks=call.has_blocks) or unsupported_device(
            call.x.device
        )

    def make_context(self, call: Fp8Call) -> TPContext:
        return get_tp_context(call.group, call.x.device)

    def decide(self, call: Fp8Call, context: TPContext) -> Decision:
        """Products of blocks are the library's in any case."""
        ask = super().decide
        return ask(call, context) if call.has_blocks else decide_with_library(lambda: ask(call, context), context)

    def trial(self, call: Fp8Call, context: TPContext) -> Trial:
        """On random values, which are timed, and on order-probe inputs (nothing of the job is quantized again, since
        quantizers remember)."""
        is_forward = is_forward_only(self)
        timed, probed = (
            replace(_operands(self.kind, call, context, order_probe=one), is_forward=is_forward)
            for one in (False, True)
        )
        runs = [
            (lambda one=one: _run(self.kind, one, None), lambda one=one: _run(self.kind, one, context))
            for one in (timed, probed)
        ]
        return Trial(self.describe(call, context), *runs[0], torch.bfloat16, runs[1:])

    def describe(self, call: Fp8Call, context: TPContext) -> str:
        sizes = f"{call.x.shape[:-1].numel()}x{call.x.shape[-1]} {'x'.join(map(str, call.weight.shape))}"
        options = f"{call.recipe or call.scaling}{_switches(call)}{context.way}"
        return f"{self.name} {sizes} gradients {call.grad_format}, {options}"

    def describe_shape(self, call: Fp8Call) -> str:
        return f"at {tuple(call.x.shape)} x {tuple(call.weight.shape)} "

    def peak_bytes(self, call: Fp8Call) -> int:
        """As counted: operands of two sets of data with their transposes, and what is gathered,
        multiplied and summed of all ranks' rows by both paths, in FP8 and in 16 bits."""
        (n, k), rows = call.weight.shape, call.x.shape[:-1].numel()
        rows *= dist.get_world_size(call.group) if self.kind == "column" else 1
        return 8 * rows * k + 10 * n * k + 8 * rows * n

    def inputs(self, call: Fp8Call) -> tuple[torch.Tensor, torch.Tensor]:
        return call.x, call.weight

    def native(self, call: Fp8Call) -> Function:
        """On operands of its own."""
        return lambda x, weight: _run(self.kind, _operands(self.kind, call, self.make_context(call)), None)

    def fused(self, call: Fp8Call, context: TPContext) -> Function:
        """On operands of its own."""
        return lambda x, weight: _run(self.kind, _operands(self.kind, call, context), context)


def _kind_of(call: Fp8Call) -> tuple[Hashable, ...]:
    return (
        tuple(call.weight.shape),
        call.x.dtype,
        call.weight.dtype,
        call.x.device,
        call.grad_format,
        call.is_frozen,
        call.scaling,
        call.recipe,
        call.has_bias,
        torch.are_deterministic_algorithms_enabled(),
    )


def _switches(call: Fp8Call) -> str:
    return f"{', frozen' if call.is_frozen else ''}{', bias' if call.has_bias else ''}"


def _operands(kind: Kind, call: Fp8Call, context: TPContext, *, order_probe: bool = False) -> _Operands:
    (n, k), rank, world_size = call.weight.shape, context.rank, context.world_size
    rows = call.x.shape[:-1].numel()
    grad_rows = rows * world_size if kind == "column" else rows // world_size
    device, block = call.x.device, min(rows, grad_rows)

    def made(shape: tuple[int, int], seed: int, signed: Any, row_block: int, quantizer: Any) -> Any:
        if order_probe:
            values = order_probe_matrix(shape, torch.bfloat16, device, seed=seed, signed=signed, row_block=row_block)
        else:
            values = normal_values(shape, torch.bfloat16, device, seed)
        return quantizer(values)

    is_column, has_blocks = kind == "column", call.has_blocks
    by_columns = has_blocks and not call.is_frozen  # of what travels; of one scale the transpose is made behind it
    of_x, of_grad = (
        _quantizer(call, name, columnwise=by_columns if payload else True, payload=payload)
        for name, payload in (("E4M3", is_column), (call.grad_format, not is_column))
    )
    x = made((rows, k), 1 + rank, "rows", block, of_x)
    weight = made((n, k), 101 + rank, "columns", n, _quantizer(call, "E4M3", num_dimensions=2))
    grad = made((grad_rows, n), 201 + rank, "columns", block, of_grad)
    bias = normal_values((n,), torch.bfloat16, device, 301 + rank) if call.has_bias else None
    amax = torch.full((1,), 1.0 / (1 + rank) if order_probe else 3.0 + rank, device=device)
    return _Operands(call, x, weight, grad, of_x if is_column else of_grad, bias, amax)


def _run(kind: Kind, operands: _Operands, context: TPContext | None) -> Sequence[torch.Tensor]:
    """Results and gradients, step by step as Transformer Engine's layers have them; None: natively."""
    call, quantizer = operands.call, operands.quantizer
    features = call.weight.shape[0], call.weight.shape[1]
    fast = dict(out_dtype=torch.bfloat16, use_split_accumulator=call.has_blocks)
    reduced = [_largest(operands, context)] if call.reduces_amax else []
    with torch.no_grad(), passing(forward_pass(kind, context, call.scaling, features)):
        if kind == "column":
            quantizer.set_usage(rowwise=True, columnwise=False)
            total, _ = gather(operands.x, call.group, quantizer=quantizer)
            y, *_ = multiply(operands.weight, total, bias=operands.bias, **fast)
        else:
            y, *_ = multiply(operands.weight, operands.x, **fast)
            y, _ = scatter(y, call.group)
    if operands.is_forward:
        return [y, *reduced]
    with torch.no_grad(), passing(backward_pass(kind, context, call.scaling, features)):
        gradients = (_column_gradients if kind == "column" else _row_gradients)(operands)
    return [y, *gradients, *reduced]


def _largest(operands: _Operands, context: TPContext | None) -> torch.Tensor:
    amax = operands.amax.clone()
    if context is None:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=operands.call.group)
    else:
        largest_of_ranks(amax, context=context)
    return amax


def _column_gradients(operands: _Operands) -> list[torch.Tensor]:
    call, total, work = operands.call, None, None
    if not call.is_frozen:
        operands.quantizer.set_usage(rowwise=not call.has_blocks, columnwise=call.has_blocks)
        total, work = gather(operands.x, call.group, async_op=True, quantizer=operands.quantizer)
    dgrad, *_ = multiply(operands.weight, operands.grad, layout="NN", **_GRADIENT)
    dgrad, dgrad_work = scatter(dgrad, call.group, async_op=True)
    if work is not None:
        work.wait()
    wgrad = [] if total is None else [_wgrad(total, operands.grad)]
    dgrad_work.wait()
    return [dgrad, *wgrad]


def _row_gradients(operands: _Operands) -> list[torch.Tensor]:
    call = operands.call
    operands.quantizer.set_usage(rowwise=True, columnwise=call.has_blocks and not call.is_frozen)
    total, _ = gather(operands.grad, call.group, quantizer=operands.quantizer)
    dgrad, *_ = multiply(operands.weight, total, layout="NN", **_GRADIENT)
    return [dgrad] if call.is_frozen else [dgrad, _wgrad(operands.x, total)]


_GRADIENT: dict[str, Any] = dict(grad=True, out_dtype=torch.bfloat16, use_split_accumulator=True)


def _wgrad(x: Any, grad: Any) -> torch.Tensor:
    for operand in (x, grad):
        operand.update_usage(columnwise_usage=True)
    wgrad, *_ = multiply(x, grad, layout="NT", **_GRADIENT)
    return wgrad


def _quantizer(
    call: Fp8Call, name: str, *, columnwise: bool = True, payload: bool = False, num_dimensions: int = 1
) -> Any:
    """One that nobody else has, and that asks no peer."""
    if not call.has_blocks:
        return tensor_quantizer(name, call.x.device, columnwise=columnwise)
    quantizer = Float8BlockQuantizer(
        getattr(tex.DType, f"kFloat8{name}"),
        rowwise=True,
        columnwise=columnwise,
        force_pow_2_scales=call.scaling == "block",
        block_scaling_dim=num_dimensions,
        **travel_options(payload),
    )
    quantizer.internal = True
    return quantizer


def tensor_quantizer(name: str, device: torch.device, *, columnwise: bool) -> Any:
    """One of one scale a tensor that nobody else has, and that asks no peer."""
    quantizer = Float8CurrentScalingQuantizer(getattr(tex.DType, f"kFloat8{name}"), device, columnwise=columnwise)
    quantizer.internal = True
    return quantizer


def unsupported_device(device: torch.device) -> str | None:
    """Why products of FP8 are not covered on a device, or None."""
    reason = unsupported_reason_fp8_on_device(device)
    if reason is None and device.type != "cpu" and not has_driver():
        return "cuda-bindings is not installed"
    return reason


FP8_COLUMN, FP8_ROW = Fp8LinearOp("column"), Fp8LinearOp("row")
OPS: Sequence[Op[Any, Any]] = (FP8_COLUMN, FP8_ROW)
