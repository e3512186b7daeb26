"""What the workers of the FP8 tests run: ours in the code of a stand-in for Transformer Engine's linear layer.

The stand-in is built as Transformer Engine is: a module whose forward calls an autograd function, whose code calls
``gather_along_first_dim``, ``general_gemm`` and ``reduce_scatter_along_first_dim`` by these names, and a quantizer
with one scale a tensor that remembers each use. Operands are integers below 4 and scales powers of two: everything is
exact.
"""

from __future__ import annotations

import sys
import types

import torch
import torch.distributed as dist

from ditron_train.cpu import interpreter
from tests.support.processes import run_workers_once

_OPERANDS = """
import enum
import torch
import torch.distributed as dist

DType = enum.Enum("DType", ["kFloat8E4M3", "kFloat8E5M2"])
TYPES = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}


class Storage:
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

    def values(self, rowwise):
        data = self._data.reshape(-1, self._data.shape[-1]) if rowwise else self._transpose
        return data.view(TYPES[self._fp8_dtype]).float() * self._scale_inv


class Float8CurrentScalingQuantizer:
    def __init__(self, fp8_dtype, device, *, columnwise=True, group=None):
        self.dtype, self.rowwise_usage, self.columnwise_usage, self.group = fp8_dtype, True, columnwise, group
        self.amax, self.scale, self.history, self.internal = torch.zeros(1), torch.ones(1), [], False

    def set_usage(self, *, rowwise=None, columnwise=None):
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def __call__(self, values):
        self.amax.copy_(values.detach().abs().max())
        if self.group is not None:
            dist.all_reduce(self.amax, op=dist.ReduceOp.MAX, group=self.group)
        self.scale.copy_(2.0 ** -torch.ceil(torch.log2(self.amax)) * 4)
        self.history.append((self.amax.item(), self.rowwise_usage, self.columnwise_usage))
        data = (values.detach().float() * self.scale).to(TYPES[self.dtype]).view(torch.uint8)
        transpose = data.reshape(-1, data.shape[-1]).t().contiguous() if self.columnwise_usage else None
        return Storage(data, 1 / self.scale, self.dtype, transpose, self)
"""

_DISTRIBUTED = """
import torch
import torch.distributed as dist
from transformer_engine.pytorch.tensor.float8_tensor import Storage


class Done:
    def wait(self):
        pass


def gather_along_first_dim(inp, process_group, async_op=False, quantizer=None):
    if not isinstance(inp, Storage):
        columnwise = quantizer.columnwise_usage
        quantizer.set_usage(rowwise=True, columnwise=False)
        inp = quantizer(inp)
        quantizer.set_usage(columnwise=columnwise)
    parts = [torch.empty_like(inp._data) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(parts, inp._data, group=process_group)
    return Storage(torch.cat(parts), inp._scale_inv, inp._fp8_dtype, None, quantizer), Done() if async_op else None


def reduce_scatter_along_first_dim(inp, tp_group, async_op=False):
    parts = [torch.empty_like(inp) for _ in range(dist.get_world_size(tp_group))]
    dist.all_gather(parts, inp.contiguous(), group=tp_group)
    own = [part.chunk(len(parts))[dist.get_rank(tp_group)] for part in parts]
    return sum(part.float() for part in own).to(inp.dtype), Done() if async_op else None
"""

_OPS = """
CALLS = []


def general_gemm(A, B, layout="TN", grad=False, out_dtype=None, out=None, use_split_accumulator=False):
    product = B.values(layout[1] == "N") @ A.values(layout[0] == "T").t()
    CALLS.append((layout, tuple(product.shape), use_split_accumulator))
    if out is not None:
        return out.copy_(product), None, None, None
    product = product.to(out_dtype)
    return (product.view(*B._data.shape[:-1], -1) if layout == "TN" else product), None, None, None
"""

_BASE = """
from transformer_engine.pytorch.distributed import gather_along_first_dim


class TransformerEngineBaseModule:
    @staticmethod
    def grad_output_preprocess(ctx, grad_output, row_parallel_mode, quantizer):
        grad_output = grad_output.reshape(-1, grad_output.shape[-1]).contiguous()
        if row_parallel_mode:
            return gather_along_first_dim(grad_output, ctx.group, quantizer=quantizer)[0], None
        return quantizer(grad_output), None
"""

_LINEAR = """
import functools
import torch
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.distributed import gather_along_first_dim, reduce_scatter_along_first_dim
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.tensor.float8_tensor import DType, Float8CurrentScalingQuantizer


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, inp, layer):
        total = layer.inputs
        total.set_usage(rowwise=True, columnwise=layer.mode == "row")
        rows = total(inp)
        matrix = layer.weights(weight)
        gathered = rows
        if layer.mode == "column":
            gathered, _ = gather_along_first_dim(rows, layer.group, quantizer=total)
        out, *_ = general_gemm(matrix, gathered, out_dtype=torch.bfloat16)
        if layer.mode == "column":
            gathered.clear()
        else:
            out, _ = reduce_scatter_along_first_dim(out, layer.group)
        if ctx is not None:
            ctx.layer, ctx.group, ctx.shape, ctx.kept = layer, layer.group, inp.shape, (rows, matrix)
            ctx.requires_dgrad, ctx.requires_wgrad = inp.requires_grad, weight.requires_grad
        return out

    @staticmethod
    def backward(ctx, grad_output):
        layer, (rows, matrix) = ctx.layer, ctx.kept
        is_column, options = layer.mode == "column", dict(grad=True, out_dtype=torch.bfloat16)
        layer.grads.set_usage(rowwise=True, columnwise=True)
        grad, _ = TransformerEngineBaseModule.grad_output_preprocess(ctx, grad_output, not is_column, layer.grads)
        total, work, dgrad, wgrad = rows, None, None, None
        if is_column and ctx.requires_wgrad:
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
        return wgrad, None if dgrad is None else dgrad.view(ctx.shape), None


def undecorated(function):
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))


class Linear(torch.nn.Module):
    def __init__(self, weight, mode, group):
        super().__init__()
        self.weight, self.mode, self.group = torch.nn.Parameter(weight), mode, group
        makes = lambda dtype, shared: Float8CurrentScalingQuantizer(dtype, None, group=group if shared else None)
        self.inputs = makes(DType.kFloat8E4M3, mode == "column")
        self.weights = makes(DType.kFloat8E4M3, False)
        self.grads = makes(DType.kFloat8E5M2, mode == "row")

    @undecorated
    def forward(self, inp, is_first_microbatch=None):
        if torch.is_grad_enabled():
            return _Linear.apply(self.weight, inp, self)
        return _Linear.forward(None, self.weight, inp, self)
"""

_MODULES = {
    "transformer_engine": "",
    "transformer_engine.pytorch": "",
    "transformer_engine.pytorch.tensor": "",
    "transformer_engine.pytorch.module": "",
    "transformer_engine.pytorch.tensor.float8_tensor": _OPERANDS,
    "transformer_engine.pytorch.distributed": _DISTRIBUTED,
    "transformer_engine.pytorch.cpp_extensions": _OPS,
    "transformer_engine.pytorch.module.base": _BASE,
    "transformer_engine.pytorch.module.linear": _LINEAR,
}


def _install(change: tuple[str, str]) -> types.ModuleType:
    """The stand-in, with one string in its code replaced by another."""
    for name, source in _MODULES.items():
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = []
        exec(source.replace(*change), module.__dict__)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    sys.modules["transformer_engine_torch"] = sys.modules["transformer_engine.pytorch.tensor.float8_tensor"]
    return sys.modules["transformer_engine.pytorch.module.linear"]


def _classes(change: tuple[str, str] = ("", "")) -> tuple[type, type]:
    """A layer as megatron-core derives it from Transformer Engine's, and ours."""
    import ditron_train.megatron.tp.spec  # noqa: F401  (megatron-core looks for the real one)

    interpreter.install()
    linear = _install(change)
    from ditron_train.megatron.tp.te_fp8 import overlapped_base

    class Native(linear.Linear):
        def forward(self, x):
            return super().forward(x, is_first_microbatch=True)

    class Ours(Native, overlapped_base(Native)):
        pass

    return Native, Ours


def _integers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _passes(layer: torch.nn.Module, mode: str, run: object) -> list[torch.Tensor]:
    """Results and gradients of calls with and without gradients of either operand, and what quantizers keep."""
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    for step, (of_x, of_weight) in enumerate([(True, True), (True, False), (False, True), (False, False)]):
        layer.weight.requires_grad_(of_weight)
        x = _integers((16, 2, 32) if mode == "column" else (32, 2, 32), 10 * step + rank).requires_grad_(of_x)
        with torch.set_grad_enabled(of_x or of_weight):
            y = run(layer, x)
        found.append(y.detach().clone())
        if of_x or of_weight:
            y.backward(_integers(y.shape, 100 + step + rank))
            found += [tensor.grad.clone() for tensor in (x, layer.weight) if tensor.grad is not None]
        layer.weight.grad = None
    assert world == 2
    return found


def compare_layers(mode: str) -> tuple[list[tuple[str, tuple[int, int], bool]], ...]:
    """Asserts equal results and equal states of quantizers; returns the products of Transformer Engine's in both."""
    native, ours = _classes()
    from ditron_train.megatron.tp.te_fp8 import overlapping, why_not_code
    from ditron_train.tp import get_tp_context

    assert why_not_code(native) is None and why_not_code(ours) is None
    context = get_tp_context(None, torch.device("cpu"))
    calls = sys.modules["transformer_engine.pytorch.cpp_extensions"].CALLS

    def overlapped(layer, x):
        with overlapping(mode, context):
            return layer(x)

    products, results, states = [], [], []
    for made, run in ((native, lambda layer, x: layer(x)), (ours, lambda layer, x: layer(x)), (ours, overlapped)):
        layer = made(_integers((48, 32), 7 + dist.get_rank()), mode, dist.group.WORLD)
        calls.clear()
        results.append(_passes(layer, mode, run))
        products.append(list(calls))
        quantizers = (layer.inputs, layer.weights, layer.grads)
        states.append([(one.history, one.amax.item(), one.scale.item()) for one in quantizers])
    for found, state in zip(results[1:], states[1:]):
        assert len(found) == len(results[0]) and all(map(torch.equal, found, results[0]))
        assert state == states[0]
    assert products[1] == products[0], "it is overlapped only where it is asked for"
    return products[0], products[2]


def refused_code(change: tuple[str, str]) -> str | None:
    """Why the stand-in, with one string replaced, cannot be overlapped."""
    _, ours = _classes(change)
    from ditron_train.megatron.tp.te_fp8 import why_not_code

    return why_not_code(ours)


def spec_on_cpu(kind: str) -> list[str]:
    """The trial of the policy: what it compares has the shapes of results and gradients."""
    _classes()
    from ditron_train.megatron.tp.fp8_spec import FP8_COLUMN, FP8_ROW, Fp8Call

    spec, said = {"column": FP8_COLUMN, "row": FP8_ROW}[kind], []
    group = dist.group.WORLD
    for x, frozen in (((32, 64), False), ((32, 64), True), ((8, 64), False)):
        call = Fp8Call(torch.empty(x).bfloat16(), torch.empty(48, 64).bfloat16(), group, "E5M2", frozen)
        reason = spec.why_not(call)
        if reason is not None:
            said.append(reason)
            continue
        trial = spec.trial(call, spec.context(call))
        for first, second in [(trial.megatron, trial.fused), *trial.also]:
            expected, found = first(), second()
            assert [one.shape for one in expected] == [one.shape for one in found]
            assert all(torch.isfinite(one).all() for one in found)
            # What Transformer Engine multiplies has equal bits on the CPU, too.
            assert all(map(torch.equal, expected[1:], found[1:]))
        said.append(f"{trial.words}: {[tuple(one.shape) for one in expected]}")
    return said


def run(function, *arguments, num_workers=2):
    """In workers that end with it: what is put into modules ends with them."""
    outcomes = run_workers_once(num_workers, function, *arguments)
    for outcome in outcomes:
        assert outcome.ok, outcome.traceback
    return [outcome.value for outcome in outcomes]
