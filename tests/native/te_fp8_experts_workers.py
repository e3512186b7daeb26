"""What the workers of the tests of FP8 experts run: the fused path in the code of a stand-in for Transformer Engine's
``GroupedLinear``, which calls ``split_quantize`` and ``general_grouped_gemm`` by these names. Operands are integers
below 4 and scales powers of two: everything is exact."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import te_fp8_workers
import torch
import torch.distributed as dist
from te_stand_in import modules

from tests.support import quick_interpreter

_MORE_OPERANDS = """
def split_quantize(tensor, splits, quantizers):
    return [quantizer(part) if len(part) else quantizer.empty(part) for part, quantizer in
            zip(tensor.split(splits), quantizers)]


def empty(self, part):
    transpose = torch.empty(part.shape[1], 0, dtype=torch.uint8) if self.columnwise_usage else None
    return Storage(torch.empty(part.shape, dtype=torch.uint8), torch.ones(1), self.dtype, transpose, self)


class Float8CurrentScalingQuantizer(Float8CurrentScalingQuantizer):
    # With Transformer Engine's own rule for scales, of powers of two.

    def __init__(self, fp8_dtype, device, *, columnwise=True, force_pow_2_scales=True, amax_epsilon=0.0):
        super().__init__(fp8_dtype, device, columnwise=columnwise)
        self.force_pow_2_scales, self.amax_epsilon, self.use_existing_amax = force_pow_2_scales, amax_epsilon, False

    def quantize(self, values):
        self.amax.copy_(torch.where(values.isnan(), 0.0, values.abs()).max())
        bounded = self.amax.clamp(min=self.amax_epsilon)
        largest = 448.0 if self.dtype is DType.kFloat8E4M3 else 57344.0
        scale = torch.full_like(bounded, largest).div(bounded).clamp(max=torch.finfo(torch.float32).max)
        if self.force_pow_2_scales:
            scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
        self.scale.copy_(torch.where((bounded > 0) & bounded.isfinite(), scale, 1.0))
        return self.cast(values)

class Float8Tensor(Storage):
    def __init__(self, shape, dtype, **fields):
        super().__init__(**fields)
        assert list(shape) == list(self._data.shape) and dtype == torch.bfloat16


Float8CurrentScalingQuantizer.empty = Float8Quantizer.empty = empty
"""

_WITHOUT_NUMBERS = """

class Float8CurrentScalingQuantizer(Float8CurrentScalingQuantizer):
    # From 2.16 on it keeps no numbers.

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        del self.amax, self.scale, self.use_existing_amax

    def quantize(self, values):
        self.amax, self.scale = torch.zeros(1), torch.ones(1)
        made = super().quantize(values)
        del self.amax, self.scale
        return made
"""

_OPS = """
import torch


def general_grouped_gemm(A, B, out, out_dtype, layout="TN", m_splits=None, grad=False, bias=None, use_bias=False,
                         use_split_accumulator=False, single_output=False, accumulate=False):
    CALLS.append((layout, tuple(m_splits), use_split_accumulator))
    products = [b.values(layout[1] == "N") @ a.values(layout[0] == "T").t() for a, b in zip(A, B)]
    if single_output:
        out[0].copy_(torch.cat(products))
    else:
        for into, product in zip(out, products):
            into.copy_(product)
    return out, None, None
"""

_GROUPED = """
import torch
import transformer_engine.pytorch.tensor.float8_tensor as tex
from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm
from transformer_engine.pytorch.tensor.float8_tensor import DType, Float8CurrentScalingQuantizer, Float8Quantizer


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inp, m_splits, layer, *weights):
        for quantizer in layer.inputs:
            quantizer.set_usage(rowwise=True, columnwise=ctx is not None)
        rows = tex.split_quantize(inp, m_splits, layer.inputs)
        matrices = [quantizer(weight) for quantizer, weight in zip(layer.weights, weights)]
        out = torch.empty([sum(m_splits), weights[0].shape[0]], dtype=torch.bfloat16)
        _ = general_grouped_gemm(matrices, rows, [out], torch.bfloat16, single_output=True, m_splits=m_splits,
                                 bias=None, use_bias=False, use_split_accumulator=False)
        if ctx is not None:
            ctx.kept = m_splits, layer, rows, matrices
        return out

    @staticmethod
    def backward(ctx, grad_output):
        m_splits, layer, rows, matrices = ctx.kept
        grads = tex.split_quantize(grad_output.contiguous(), m_splits, layer.grads)
        dgrad = torch.empty(grad_output.shape[0], layer.weight0.shape[1], dtype=torch.bfloat16)
        for matrix in matrices:
            matrix.update_usage(columnwise_usage=True)
        options = dict(m_splits=m_splits, grad=True, use_split_accumulator=True)
        general_grouped_gemm(matrices, grads, [dgrad], torch.bfloat16, single_output=True, layout="NN", **options)
        wgrads = [torch.empty_like(layer.weight0) for _ in matrices]
        general_grouped_gemm(rows, grads, wgrads, torch.bfloat16, layout="NT", **options)
        return dgrad, None, None, *wgrads


class GroupedLinear(torch.nn.Module):
    def __init__(self, weights, recipe):
        super().__init__()
        self.num_gemms = len(weights)
        for index, weight in enumerate(weights):
            self.register_parameter(f"weight{index}", torch.nn.Parameter(weight))
        kinds = [DType.kFloat8E4M3, DType.kFloat8E4M3, DType.kFloat8E5M2]
        self.inputs, self.weights, self.grads = ([self.made(recipe, kind) for _ in weights] for kind in kinds)

    def made(self, recipe, dtype):
        if recipe == "delayed":
            return Float8Quantizer(dtype, torch.tensor([0.5]), torch.zeros(1))
        return Float8CurrentScalingQuantizer(dtype, None)

    def forward(self, inp, m_splits):
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        run, ctx = (_GroupedLinear.apply, []) if torch.is_grad_enabled() else (_GroupedLinear.forward, [None])
        return run(*ctx, inp, m_splits, self, *weights)
"""


def install(change=("", ""), minor=10):
    """The stand-in for 2.``minor``."""
    import ditron_train.megatron.tp.spec  # noqa: F401  (megatron-core looks for the real one)

    quick_interpreter.install()
    sources = modules(minor)
    sources["transformer_engine.pytorch.tensor.float8_tensor"] += _MORE_OPERANDS + (
        _WITHOUT_NUMBERS if minor >= 16 else ""
    )
    sources["transformer_engine.pytorch.cpp_extensions"] += _OPS
    sources["transformer_engine.pytorch.module.grouped_linear"] = _GROUPED
    te_fp8_workers.install(sources, change)
    from ditron_train.megatron.ep import te_quantise

    return te_quantise


#: Rows of the experts, and whether gradients are wanted.
STEPS = (([32, 32, 80], True), ([32, 0, 32], True), ([32, 32, 80], False), ([32, 16, 48], True))


def compare_layers(recipe, minor=10):
    """Native, fused asked for nothing, and with grouped quantization: equal results, gradients and states; the
    products of each, and how often rows were quantised at once."""
    te_quantise = install(minor=minor)
    quantise, quantised = te_quantise.quantise, []

    def counted(*args):
        results = quantise(*args)
        quantised.append(args[1])
        return results

    te_quantise.quantise = counted
    native = type("Native", (sys.modules["transformer_engine.pytorch.module.grouped_linear"].GroupedLinear,), {})
    fused = type("The fused path", (native, te_quantise.grouped_base()), {})
    assert te_quantise.unsupported_reason_code() is None
    calls, seen = sys.modules["transformer_engine.pytorch.cpp_extensions"].CALLS, []
    shape = (48, 32)
    kinds = frozenset([te_quantise.RowsKind(32, "E4M3", True, 0.0), te_quantise.RowsKind(48, "E5M2", True, 0.0)])
    for made, asked in ((native, frozenset()), (fused, frozenset()), (fused, kinds)):
        layer = made([te_fp8_workers._integers(shape, 7 + index) for index in range(3)], recipe)
        found = []
        calls.clear()
        for step, (splits, has_grad) in enumerate(STEPS):
            x = te_fp8_workers._integers((sum(splits), shape[1]), step).requires_grad_(has_grad)
            with te_quantise.grouped_quantization(asked), torch.set_grad_enabled(has_grad):
                y = layer(x, splits)
            found.append(y.detach().clone())
            if has_grad:
                y.backward(te_fp8_workers._integers(y.shape, 50 + step))
                found += [x.grad, *(weight.grad.clone() for weight in layer.parameters())]
                layer.zero_grad()
        quantizers = [*layer.inputs, *layer.weights, *layer.grads]
        kept = [
            [getattr(quantizer, name).item() for name in ("amax", "scale") if hasattr(quantizer, name)]
            for quantizer in quantizers
        ]
        used = quantizers if not asked or recipe == "delayed" else layer.weights  # rows by others' casts
        seen.append((found, kept, [one.history for one in used], list(calls)))
    for found, state, *_ in seen[1:]:
        assert len(found) == len(seen[0][0]) and all(map(torch.equal, found, seen[0][0]))
        assert state == seen[0][1]
    histories = [history for _, _, history, _ in seen]
    assert all(history == histories[0] for history in histories[:-1])
    assert histories[-1] == histories[0] or histories[-1] == histories[0][3:6]
    return [calls for *_, calls in seen], quantised


def refused_code(change):
    """Why the code of the stand-in, with one string replaced, cannot quantise by another function."""
    return install(change).unsupported_reason_code()


def rows_spec_on_cpu():
    """The trials of how rows are quantised: equal, and found out where they are not; what is not covered, and what is
    not multiplied on one of the ranks."""
    install()
    from ditron_train.ep import grouped_quantization
    from ditron_train.megatron.ep import fp8_rows_spec, te_quantise
    from ditron_train.megatron.ep.fp8_rows_spec import FP8_ROWS, Fp8RowsCall
    from ditron_train.policy.probe import same_bits
    from ditron_train.runtime.errors import NotSupportedError

    logged, keys, multiply = [], set(), fp8_rows_spec.grouped_gemm
    for kind, width, are_grads, dtype in (
        ((32, "E4M3", True, 0.0), 48, False, torch.bfloat16),
        ((48, "E5M2", False, 0.5), 32, True, torch.bfloat16),
        ((48, "E5M2", False, 0.0), 32, True, torch.float32),
    ):
        x = torch.empty(200, kind[0]).to(dtype)
        call = Fp8RowsCall(x, 3, dist.group.WORLD, te_quantise.RowsKind(*kind), width, are_grads)
        keys.add(FP8_ROWS.key(call))
        logged.append(FP8_ROWS.unsupported_reason(call))
        if logged[-1] is not None:
            continue
        fp8_rows_spec.grouped_gemm = noted = mock.Mock(side_effect=multiply)
        trial = FP8_ROWS.trial(call, FP8_ROWS.make_context(call))
        first = ("NN", True) if are_grads else (None, None)
        options = [one.kwargs for one in noted.call_args_list]
        kinds = [(option.get("layout"), option.get("use_split_accumulator")) for option in options]
        assert kinds == [first, ("NT", True)] * 2, kinds
        pairs = [(trial.native, trial.fused), *trial.extra_cases]
        assert trial.host_counts and all(same_bits(native(), fused()) for native, fused in pairs)
        logged[-1] = trial.description
        with mock.patch.dict(grouped_quantization._LARGEST, {one: 100.0 for one in grouped_quantization._LARGEST}):
            assert not any(same_bits(native(), fused()) for native, fused in pairs)
            with pytest.raises(NotSupportedError, match="are not multiplied: products differ"):
                FP8_ROWS.make_context(call)
        if dist.get_rank() == 1:
            fp8_rows_spec.grouped_gemm = mock.Mock(side_effect=RuntimeError("cuBLAS refuses\nat a line"))
        with pytest.raises(NotSupportedError, match="are not multiplied: cuBLAS refuses$"):  # on both ranks
            FP8_ROWS.make_context(call)
        fp8_rows_spec.grouped_gemm = multiply
        made = te_quantise.new_quantizer(call.kind, None)
        with mock.patch.object(type(made), "__init__", lambda self, *args, **options: None):
            lacks = "this version's quantizers have no with_amax_reduction, force_pow"
            assert FP8_ROWS.unsupported_reason(call).startswith(lacks)
    assert len(keys) == len(logged)
    return logged


def rows_in_tools():
    """What ``verify --fp8`` walks: the experts' rows at a layer's four shapes, equal, and found out where they are
    not."""
    install()
    from ditron_train.ep import grouped_quantization
    from ditron_train.policy import fused_results, native_results
    from ditron_train.policy.probe import same_bits
    from ditron_train.tools.cases import RunEnvironment
    from ditron_train.tools.catalog import cases_of

    assert cases_of("ep", "blockwise") == cases_of("ep", "delayed") == []
    (case,) = cases_of("ep", "tensorwise")
    place, seen = RunEnvironment(dist.group.WORLD, torch.device("cpu"), torch.bfloat16), []
    for shape in case.shapes(2, False):
        if shape.options["deterministic"]:
            continue
        assert case.unsupported_shape(shape, 2) is None
        call = case.sample(shape, place, 1)
        context = case.op.make_context(call)
        native, fused = native_results(case.op, call), fused_results(case.op, call, context)
        assert case.no_row_reason(call) is None and same_bits(native, fused) and len(native) == len(fused) > 0
        with mock.patch.dict(grouped_quantization._LARGEST, {one: 100.0 for one in grouped_quantization._LARGEST}):
            assert not same_bits(native, fused_results(case.op, call, context))
        seen.append((tuple(call.x.shape), call.kind.columns, call.width, call.kind.fp8_format))
    return seen


def rows_kept_apart():
    """What the log says, once each, of rows that are left to Transformer Engine; they are asked for twice."""
    install()
    from ditron_train.megatron.ep import te_quantise
    from ditron_train.runtime.logs import decisions

    tex, logged, quantised = sys.modules["transformer_engine_torch"], [], []
    make = te_quantise.quantised_rows
    te_quantise.quantised_rows = lambda *args, **options: (quantised.append(args), make(*args, **options))[1]
    fused = te_quantise.Quantising(frozenset([te_quantise.RowsKind(32, "E4M3", True, 0.0)]))
    assert fused.DType is tex.DType, "all else is Transformer Engine's"
    rows = te_fp8_workers._integers((48, 32), 3)

    def made(**changed):
        quantizer = tex.Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, None)
        for name, value in changed.items():
            setattr(quantizer, name, value)
        return quantizer

    delayed = tex.Float8Quantizer(tex.DType.kFloat8E4M3, torch.ones(1), torch.zeros(1))
    for given, second in (
        (rows, made()),
        (rows.view(48, 1, 32), made()),
        (rows, delayed),
        (rows, made(amax_epsilon=0.5)),
        (rows, made(use_existing_amax=True)),
        (rows, made(columnwise_usage=False)),
    ):
        before, seen = len(decisions()), len(quantised)
        for _ in range(2):
            first, last = fused.split_quantize(given, [16, 32], [made(), second])
            assert len(first._data) == 16 and len(last._data) == 32
        logged.append((len(quantised) == seen + 2, decisions()[before:]))
        assert len(quantised) in (seen, seen + 2)
    before, seen = len(decisions()), len(quantised)
    split, tex.split_quantize = tex.split_quantize, mock.Mock()
    fused.split_quantize(rows, [16, 32], [made(), made()], disable_bulk_allocation=False)  # as from 2.12 on
    assert len(quantised) == seen + 1 and not tex.split_quantize.called
    fused.split_quantize(rows, [16, 32], [made(), made()], disable_bulk_allocation=True)
    assert len(quantised) == seen + 1 and tex.split_quantize.called
    tex.split_quantize = split
    logged.append((False, decisions()[before:]))
    return logged


def recipes():
    """Which recipes have grouped quantization, by their class."""
    install()
    from ditron_train.megatron.ep.coverage import unsupported_reason_fp8_recipe

    owners = {"TEFloat8CurrentScaling": "Float8CurrentScaling"}
    names = ("Float8CurrentScaling", "TEFloat8CurrentScaling", "DelayedScaling", "Float8BlockScaling")
    made = {name: type(name, (type(owners.get(name, "Recipe"), (), {}),), {})() for name in names}
    lines = {name: [one.__name__ for one in type(recipe).__mro__] for name, recipe in made.items()}
    return [name for name, line in lines.items() if unsupported_reason_fp8_recipe(line) is None]
