"""A stand-in for Transformer Engine's linear layers in FP8, as the sources of its modules.

It is built as Transformer Engine is: a module whose forward calls an autograd function, whose code calls
``gather_along_first_dim``, ``general_gemm`` and ``reduce_scatter_along_first_dim`` by these names, and quantizers with
one scale a tensor (tensorwise, delayed) or one a block, which remember each use. What they keep, and how operands are
stored and sent, is as in Transformer Engine; scales are powers of two.

Its passes are written once, and built as each version builds them (``modules``).
"""

from __future__ import annotations

import textwrap

from te_stand_in_blocks import blocks, gather

_OPERANDS = """
import enum
import torch
import torch.distributed as dist

DType = enum.Enum("DType", ["kFloat8E4M3", "kFloat8E5M2"])
Float8BlockScaleTensorFormat = enum.Enum("Float8BlockScaleTensorFormat", ["GEMM_READY", "COMPACT"])
TYPES = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}


class Quantized:
    pass


class Storage(Quantized):
    def __init__(self, data, fp8_scale_inv, fp8_dtype, data_transpose=None, quantizer=None):
        self._data, self._scale_inv, self._fp8_dtype = data, fp8_scale_inv, fp8_dtype
        self._transpose, self._quantizer = data_transpose, quantizer

    def get_metadata(self):
        names = ("data", "fp8_scale_inv", "fp8_dtype", "data_transpose", "quantizer")
        return dict(zip(names, (self._data, self._scale_inv, self._fp8_dtype, self._transpose, self._quantizer)))

    def update_usage(self, columnwise_usage):
        if self._transpose is None:
            self._transpose = self._data.reshape(-1, self._data.shape[-1]).t().contiguous()

    def clear(self):
        self._data.data = torch.empty(0, dtype=torch.uint8)

    def size(self):
        return self._data.shape

    def values(self, rowwise):
        data = self._data.reshape(-1, self._data.shape[-1]) if rowwise else self._transpose
        return data.view(TYPES[self._fp8_dtype]).float() * self._scale_inv


class Quantizer:
    def __init__(self, fp8_dtype=None, *, rowwise=True, columnwise=True):
        self.dtype, self.rowwise_usage, self.columnwise_usage = fp8_dtype, rowwise, columnwise
        self.history, self.internal, self.optimize_for_gemm = [], False, False

    def set_usage(self, *, rowwise=None, columnwise=None):
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def __call__(self, values):
        values = values.detach().float()
        self.history.append((values.abs().max().item(), self.rowwise_usage, self.columnwise_usage))
        return self.quantize(values)

    def cast(self, values):
        largest = torch.finfo(TYPES[self.dtype]).max
        data = (values * self.scale).clamp(-largest, largest).to(TYPES[self.dtype]).view(torch.uint8)
        transpose = data.reshape(-1, data.shape[-1]).t().contiguous() if self.columnwise_usage else None
        return Storage(data, 1 / self.scale, self.dtype, transpose, self)


class Float8CurrentScalingQuantizer(Quantizer):
    def __init__(self, fp8_dtype, device, *, columnwise=True, group=None):
        super().__init__(fp8_dtype, columnwise=columnwise)
        self.amax, self.scale = torch.zeros(1), torch.ones(1)
        self.with_amax_reduction, self.amax_reduction_group = group is not None, group

    def quantize(self, values):
        self.amax.copy_(values.abs().max())
        if self.with_amax_reduction:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX
            self.amax_reduction_group.allreduce([self.amax], options).wait()
        self.scale.copy_(2.0 ** -torch.ceil(torch.log2(self.amax)) * 4)
        return self.cast(values)


class Float8Quantizer(Quantizer):
    def __init__(self, fp8_dtype, scale, amax):
        super().__init__(fp8_dtype)
        self.scale, self.amax = scale, amax

    def quantize(self, values):
        torch.maximum(self.amax, values.abs().max(), out=self.amax)
        return self.cast(values)
"""

_DISTRIBUTED = """
import torch
import torch.distributed as dist
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import FIELDS, READY, BlockStorage
from transformer_engine.pytorch.tensor.float8_tensor import Storage


class Done:
    def wait(self):
        pass


def all_rows(rows, group):
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, rows, group=group)
    return torch.cat(parts)


def gather_along_first_dim(inp, process_group, async_op=False, quantizer=None):
    handle = Done() if async_op else None
    if hasattr(quantizer, "num_dimensions"):
        return gather_blocks(inp, process_group, quantizer), handle
    if not isinstance(inp, Storage):
        columnwise = quantizer.columnwise_usage
        quantizer.set_usage(rowwise=True, columnwise=False)
        inp = quantizer(inp)
        quantizer.set_usage(columnwise=columnwise)
    return Storage(all_rows(inp._data, process_group), inp._scale_inv, inp._fp8_dtype, None, quantizer), handle


def reduce_scatter_along_first_dim(inp, tp_group, async_op=False):
    rank, parts = dist.get_rank(tp_group), all_rows(inp.contiguous(), tp_group).chunk(dist.get_world_size(tp_group))
    first, *others = [parts[(rank + 1 + step) % len(parts)].chunk(len(parts))[rank] for step in range(len(parts))]
    for part in others:  # NCCL's ring: the next rank first, this one last, rounded at every hop
        first = (first.float() + part.float()).to(inp.dtype)
    return first, Done() if async_op else None
"""

_OPS = """
CALLS = []


def general_gemm(A, B, layout="TN", grad=False, out_dtype=None, out=None, use_split_accumulator=False, bias=None):
    product = B.values(layout[1] == "N") @ A.values(layout[0] == "T").t()
    product = product if bias is None else product + bias.float()
    CALLS.append((layout, tuple(product.shape), use_split_accumulator))
    if out is not None:
        return out.copy_(product), None, None, None
    product = product.to(out_dtype)
    return (product.view(*B.size()[:-1], -1) if layout == "TN" else product), None, None, None
"""

_COMMON = """
def set_quantizer_amax_reduction_group(quantizer, amax_reduction_group):
    if hasattr(quantizer, "with_amax_reduction"):
        quantizer.with_amax_reduction = amax_reduction_group is not None
        quantizer.amax_reduction_group = amax_reduction_group
"""

_BASE = """
from transformer_engine.pytorch.distributed import gather_along_first_dim


class TransformerEngineBaseModule:
    @staticmethod
    def grad_output_preprocess(ctx, grad_output, row_parallel_mode, quantizer):
        grad_output = grad_output.reshape(-1, grad_output.shape[-1]).contiguous()
        if row_parallel_mode:
            return gather_along_first_dim(grad_output, ctx.group, quantizer=quantizer)[0], None
        return quantizer(grad_output), grad_output.sum(dim=0)
"""

# ``{groups_forward}`` and ``{groups_backward}`` are what 2.18 says there.
_PASSES = """\
def forward(ctx, weight, inp, bias, layer):
    {groups_forward}
    total = layer.inputs
    total.set_usage(rowwise=True, columnwise=layer.mode != "column" or layer.has_blocks)
    rows = total(inp)
    matrix = layer.weights(weight)
    gathered = rows
    if layer.mode == "column":
        total.set_usage(columnwise=False)
        gathered, _ = gather_along_first_dim(rows, layer.group, quantizer=total)
    out, *_ = general_gemm(matrix, gathered, out_dtype=torch.bfloat16, bias=bias)
    if layer.mode == "column":
        gathered.clear()
    elif layer.mode == "row":
        out, _ = reduce_scatter_along_first_dim(out, layer.group)
    out = {out}
    if ctx is not None:
        ctx.layer, ctx.group, ctx.shape, ctx.kept = layer, layer.group, inp.shape, (rows, matrix)
        ctx.has_bias = bias is not None
        ctx.requires_dgrad, ctx.requires_wgrad = inp.requires_grad, weight.requires_grad
    return out


def backward(ctx, grad_output):
    layer, (rows, matrix) = ctx.layer, ctx.kept
    {groups_backward}
    is_column, options = layer.mode == "column", dict(grad=True, out_dtype=torch.bfloat16)
    layer.grads.set_usage(rowwise=True, columnwise=True)
    grad, grad_bias = TransformerEngineBaseModule.grad_output_preprocess(
        ctx, grad_output, layer.mode == "row", layer.grads
    )
    total, work, dgrad, wgrad = rows, None, None, None
    if is_column and ctx.requires_wgrad:
        layer.inputs.set_usage(rowwise=not layer.has_blocks, columnwise=layer.has_blocks)
        total, work = gather_along_first_dim(rows, layer.group, async_op=True, quantizer=layer.inputs)
    if ctx.requires_dgrad:
        dgrad, *_ = general_gemm(matrix, grad, layout="NN", use_split_accumulator=True, **options)
        if is_column:
            dgrad, dgrad_work = reduce_scatter_along_first_dim(dgrad, layer.group, async_op=True)
    if work is not None:
        work.wait()
    if ctx.requires_wgrad:
        total.update_usage(columnwise_usage=True)
        grad.update_usage(columnwise_usage=True)
        wgrad, *_ = general_gemm(total, grad, layout="NT", use_split_accumulator=True, **options)
    if is_column and ctx.requires_dgrad:
        dgrad_work.wait()
    layer.update("backward")
    return wgrad, None if dgrad is None else dgrad.view(ctx.shape), grad_bias if ctx.has_bias else None, None
"""

_FUNCTIONS = """
class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, inp, bias, layer):
        kept = {kept}
        out = _linear_forward_impl(kept, weight, inp, bias, layer)
        if ctx is not None:
            ctx.backward_objects = kept
        return out

    @staticmethod
    def backward(ctx, grad_output):
        return _linear_backward(ctx.backward_objects, grad_output)
"""

_LINEAR = """
import functools
import torch
import types
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.distributed import gather_along_first_dim, reduce_scatter_along_first_dim
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
{imports}
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import DType, Float8CurrentScalingQuantizer, Float8Quantizer


{passes}

def undecorated(function):
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))


class Linear(torch.nn.Module):
    def __init__(self, weight, mode, group, recipe, bias=None):
        super().__init__()
        self.bias = None if bias is None else torch.nn.Parameter(bias)
        self.weight, self.mode, self.group = torch.nn.Parameter(weight), mode, group
        self.has_blocks = recipe == "blockwise"
        self.scales, self.amaxes = torch.ones(3), torch.zeros(2, 3)  # of delayed scaling alone
        made = [self.made(recipe, index) for index in range(3)]
        self.inputs, self.weights, self.grads = made
        self.tp_group, self.quantizers = group, dict(scaling_fwd=made[:2], scaling_bwd=made[2:])

    def made(self, recipe, index):
        dtype = DType.kFloat8E5M2 if index == 2 else DType.kFloat8E4M3
        travels = (self.mode, index) in (("column", 0), ("row", 2))
        if recipe == "blockwise":
            options = dict(block_scaling_dim=2 if index == 1 else 1, {travels})
            return Float8BlockQuantizer(dtype, rowwise=True, columnwise=True, **options)
        if recipe == "delayed":
            return Float8Quantizer(dtype, self.scales[index], self.amaxes[0, index])
        return Float8CurrentScalingQuantizer(dtype, None, group=self.group if travels and {keeps_group} else None)

    def group_of(self, mode):
        return self.group if self.mode == mode else None

    def update(self, which):
        places = slice(2, 3) if which == "backward" else slice(0, 2)
        torch.distributed.all_reduce(self.amaxes[0, places], op=torch.distributed.ReduceOp.MAX, group=self.group)
        largest = self.amaxes[:, places].max(0).values
        scales = 2.0 ** -torch.ceil(torch.log2(largest)) * 4
        self.scales[places] = torch.where(largest > 0, scales, self.scales[places])
        self.amaxes[:, places] = self.amaxes[:, places].roll(1, 0)
        self.amaxes[0, places] = 0

    @undecorated
    def forward(self, inp, is_first_microbatch=None):
        if torch.is_grad_enabled():
            y = _Linear.apply(self.weight, inp, self.bias, self)
            self.update("forward")
            return y
        return _Linear.forward(None, self.weight, inp, self.bias, self)
"""

_GROUPS = {
    "imports": "from transformer_engine.pytorch.module._common import set_quantizer_amax_reduction_group",
    "groups_forward": "set_quantizer_amax_reduction_group(layer.inputs, layer.group_of('column'))",
    "groups_backward": "set_quantizer_amax_reduction_group(layer.grads, layer.group_of('row'))",
}


def _linear(minor: int) -> str:
    """The module of ``Linear`` as 2.``minor`` builds it: its passes are methods, from 2.15 on functions; what backward
    needs is in autograd's context, from 2.16 on in an object of its own; quantizers have their group for good, from
    2.18 on they are given it in each pass."""
    says = _GROUPS if minor >= 18 else dict.fromkeys(_GROUPS, "pass")
    out = "out.view(-1, *inp.shape[1:-1], weight.shape[0])" if minor >= 17 else "out"
    passes = _PASSES
    for name, text in {**says, "out": out}.items():
        passes = passes.replace(f"{{{name}}}", text)
    if minor < 15:
        methods = textwrap.indent(passes.replace("def ", "@staticmethod\ndef "), "    ")
        made = f"class _Linear(torch.autograd.Function):\n{methods}"
    else:
        functions = passes.replace("def forward", "def _linear_forward_impl").replace("def back", "def _linear_back")
        made = functions + _FUNCTIONS.replace("{kept}", "ctx" if minor < 16 else "types.SimpleNamespace()")
    source = _LINEAR.replace("{passes}", made).replace("{imports}", says["imports"])
    source = source.replace("{travels}", "all_gather_usage=travels" if minor < 12 else "")
    return source.replace("{keeps_group}", str(minor < 18))


def modules(minor: int = 10) -> dict[str, str]:
    """Sources of a stand-in for 2.``minor`` by name, parents first."""
    return {
        "transformer_engine": "",
        "transformer_engine.pytorch": "",
        "transformer_engine.pytorch.tensor": "",
        "transformer_engine.pytorch.module": "",
        "transformer_engine.pytorch.tensor.float8_tensor": _OPERANDS,
        "transformer_engine.pytorch.tensor.float8_blockwise_tensor": blocks(minor),
        "transformer_engine.pytorch.distributed": _DISTRIBUTED + gather(minor),
        "transformer_engine.pytorch.cpp_extensions": _OPS,
        "transformer_engine.pytorch.module._common": _COMMON,
        "transformer_engine.pytorch.module.base": _BASE,
        "transformer_engine.pytorch.module.linear": _linear(minor),
    }
