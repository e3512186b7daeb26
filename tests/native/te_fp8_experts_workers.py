"""What the workers of the tests of FP8 experts run: ours in the code of a stand-in for Transformer Engine's
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

from ditron_train.cpu import interpreter

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
    def forward(ctx, inp, m_splits, layer, split_accumulator, *weights):
        for quantizer in layer.inputs:
            quantizer.set_usage(rowwise=True, columnwise=ctx is not None)
        rows = tex.split_quantize(inp, m_splits, layer.inputs)
        matrices = [quantizer(weight) for quantizer, weight in zip(layer.weights, weights)]
        out = torch.empty([sum(m_splits), weights[0].shape[0]], dtype=torch.bfloat16)
        _ = general_grouped_gemm(matrices, rows, [out], torch.bfloat16, single_output=True, m_splits=m_splits,
                                 bias=None, use_bias=False, use_split_accumulator=split_accumulator)
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
        return dgrad, None, None, None, *wgrads


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

    def forward(self, inp, m_splits, split_accumulator=False):
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        run, ctx = (_GroupedLinear.apply, []) if torch.is_grad_enabled() else (_GroupedLinear.forward, [None])
        return run(*ctx, inp, m_splits, self, split_accumulator, *weights)
"""


#: Rows that every expert must have in these tests: as many as a tile in the interpreter.
FEWEST_ROWS = 32


def install(change=("", ""), measures_no_rows=True, minor=10):
    """The stand-in for 2.``minor``; ours with few rows, of experts of which cuBLAS would need more: they are not
    measured, which takes the interpreter too long."""
    import ditron_train.megatron.tp.spec  # noqa: F401  (megatron-core looks for the real one)

    interpreter.install()
    sources = modules(minor)
    sources["transformer_engine.pytorch.tensor.float8_tensor"] += _MORE_OPERANDS + (
        _WITHOUT_NUMBERS if minor >= 16 else ""
    )
    sources["transformer_engine.pytorch.cpp_extensions"] += _OPS
    sources["transformer_engine.pytorch.module.grouped_linear"] = _GROUPED
    te_fp8_workers.install(sources, change)
    from ditron_train.megatron.ep import fp8_spec, te_fp8

    if measures_no_rows:
        fp8_spec.fewest_rows_of = lambda call: FEWEST_ROWS
    return te_fp8


#: Rows of the experts, whether gradients are wanted, whether forward has a split accumulator; the last has an expert
#: with fewer rows than it needs.
STEPS = (
    ([32, 32, 80], True, False),
    ([32, 0, 32], True, False),
    ([32, 32, 80], False, False),
    ([32, 32, 80], True, True),
    ([32, 16, 48], True, False),
)


def compare_layers(recipe, minor=10):
    """Native, ours asked for nothing, with each product and both in one kernel, and with rows quantised at once: equal
    results, gradients and states; the calls of each, and how often rows were."""
    te_fp8 = install(minor=minor)
    from ditron_train.megatron.ep import te_quantise

    quantise, quantised = te_quantise.quantise, []

    def counted(*args):
        results = quantise(*args)
        quantised.append(args[1])
        return results

    te_quantise.quantise = counted
    native = type("Native", (sys.modules["transformer_engine.pytorch.module.grouped_linear"].GroupedLinear,), {})
    ours = type("Ours", (native, te_fp8.grouped_base()), {})
    assert te_fp8.why_not_code() is None
    calls, seen = sys.modules["transformer_engine.pytorch.cpp_extensions"].CALLS, []
    shape = (48, 32)
    kinds = frozenset([te_quantise.RowsKind(32, "E4M3", True, 0.0), te_quantise.RowsKind(48, "E5M2", True, 0.0)])
    for products in (None, "", "forward", "dgrad", "forward dgrad", "rows"):
        made = native if products is None else ours
        layer = made([te_fp8_workers._integers(shape, 7 + index) for index in range(3)], recipe)
        found = []
        calls.clear()
        for step, (splits, has_grad, split_accumulator) in enumerate(STEPS):
            x = te_fp8_workers._integers((sum(splits), shape[1]), step).requires_grad_(has_grad)
            chosen = frozenset((one, FEWEST_ROWS) for one in (products or "").split() if one != "rows")
            at_once = te_fp8.AtOnce(chosen, kinds if products == "rows" else frozenset())
            with te_fp8.doing_at_once(at_once):
                with torch.set_grad_enabled(has_grad):
                    y = layer(x, splits, split_accumulator)
            found.append(y.detach().clone())
            if has_grad:
                y.backward(te_fp8_workers._integers(y.shape, 50 + step))
                found += [x.grad, *(weight.grad.clone() for weight in layer.parameters())]
                layer.zero_grad()
        quantizers = [*layer.inputs, *layer.weights, *layer.grads]
        kept = [[getattr(one, name).item() for name in ("amax", "scale") if hasattr(one, name)] for one in quantizers]
        used = quantizers if products != "rows" or recipe == "delayed" else layer.weights  # rows by others' casts
        seen.append((found, kept, [one.history for one in used], list(calls)))
    for found, state, *_ in seen[1:]:
        assert len(found) == len(seen[0][0]) and all(map(torch.equal, found, seen[0][0]))
        assert state == seen[0][1]
    histories = [history for _, _, history, _ in seen]
    assert all(history == histories[0] for history in histories[:-1])
    assert histories[-1] == histories[0] or histories[-1] == histories[0][3:6]
    return [calls for *_, calls in seen], quantised


def refused_code(change):
    """Why the stand-in, with one string replaced, cannot be used, and why its rows are not quantised at once."""
    te_fp8 = install(change)
    reason = te_fp8.why_not_code()
    return reason or te_fp8.why_not_quantised()


def spec_on_cpu():
    """The trials of the policy, and what it does not cover."""
    install()
    from ditron_train.megatron.ep.fp8_spec import FP8_EXPERTS, Fp8ExpertsCall

    calls = sys.modules["transformer_engine.pytorch.cpp_extensions"].CALLS
    said, group, keys = [], dist.group.WORLD, set()
    for sizes, dtype, *options in (
        ((48, 32), torch.bfloat16, "forward", "E5M2"),
        ((48, 32), torch.bfloat16, "forward", "E5M2", 20),
        ((48, 32), torch.bfloat16, "dgrad", "E5M2"),
        ((48, 32), torch.bfloat16, "dgrad", "E4M3"),
        ((40, 32), torch.bfloat16),
        ((48, 32), torch.float32),
    ):
        num_experts = options.pop() if len(options) > 2 else 3
        x, weight = torch.empty(200, sizes[1]).to(dtype), torch.empty(sizes).to(dtype)
        call = Fp8ExpertsCall(x, weight, num_experts, group, *options)
        keys.add(FP8_EXPERTS.key(call))
        said.append(FP8_EXPERTS.why_not(call))
        if said[-1] is None:
            context = FP8_EXPERTS.context(call)
            trial = FP8_EXPERTS.trial(call, context)
            assert trial.host_counts
            for first, second in [(trial.megatron, trial.fused), *trial.also]:
                (expected,) = first()
                calls.clear()
                (found,) = second()
                assert expected.shape == found.shape and torch.isfinite(found).all() and not calls
            said[-1] = trial.words
    assert len(keys) == len(said)
    return said


def rows_spec_on_cpu():
    """The trials of how rows are quantised: equal, and found out where they are not; what is not covered, and what is
    not multiplied on one of the ranks."""
    install()
    from ditron_train.ep import fp8_rows
    from ditron_train.megatron.ep import fp8_rows_spec, te_quantise
    from ditron_train.megatron.ep.fp8_rows_spec import FP8_ROWS, Fp8RowsCall
    from ditron_train.policy.probe import same_bits
    from ditron_train.runtime.errors import NotSupportedError

    said, keys, multiply = [], set(), fp8_rows_spec.grouped_gemm
    for kind, width, are_grads, dtype in (
        ((32, "E4M3", True, 0.0), 48, False, torch.bfloat16),
        ((48, "E5M2", False, 0.5), 32, True, torch.bfloat16),
        ((48, "E5M2", False, 0.0), 32, True, torch.float32),
    ):
        x = torch.empty(200, kind[0]).to(dtype)
        call = Fp8RowsCall(x, 3, dist.group.WORLD, te_quantise.RowsKind(*kind), width, are_grads)
        keys.add(FP8_ROWS.key(call))
        said.append(FP8_ROWS.why_not(call))
        if said[-1] is not None:
            continue
        fp8_rows_spec.grouped_gemm = noted = mock.Mock(side_effect=multiply)
        trial = FP8_ROWS.trial(call, FP8_ROWS.context(call))
        first = ("NN", True) if are_grads else (None, None)
        options = [one.kwargs for one in noted.call_args_list]
        kinds = [(one.get("layout"), one.get("use_split_accumulator")) for one in options]
        assert kinds == [first, ("NT", True)] * 2, kinds
        pairs = [(trial.megatron, trial.fused), *trial.also]
        assert trial.host_counts and all(same_bits(native(), ours()) for native, ours in pairs)
        said[-1] = trial.words
        with mock.patch.dict(fp8_rows._LARGEST, {one: 100.0 for one in fp8_rows._LARGEST}):
            assert not any(same_bits(native(), ours()) for native, ours in pairs)
            with pytest.raises(NotSupportedError, match="are not multiplied: products differ"):
                FP8_ROWS.context(call)
        if dist.get_rank() == 1:
            fp8_rows_spec.grouped_gemm = mock.Mock(side_effect=RuntimeError("cuBLAS refuses\nat a line"))
        with pytest.raises(NotSupportedError, match="are not multiplied: cuBLAS refuses$"):  # on both ranks
            FP8_ROWS.context(call)
        fp8_rows_spec.grouped_gemm = multiply
        made = te_quantise.new_quantizer(call.kind, None)
        with mock.patch.object(type(made), "__init__", lambda self, *args, **options: None):
            lacks = "this version's quantizers have no with_amax_reduction, force_pow"
            assert FP8_ROWS.why_not(call).startswith(lacks)
    assert len(keys) == len(said) and FP8_ROWS.has_rows is False
    return said


def rows_kept_apart():
    """What the log says, once each, of rows that are left to Transformer Engine; they are asked for twice."""
    install()
    from ditron_train.megatron.ep import te_quantise
    from ditron_train.runtime.logs import decisions

    tex, said, quantised = sys.modules["transformer_engine_torch"], [], []
    make = te_quantise.quantised_rows
    te_quantise.quantised_rows = lambda *args, **options: (quantised.append(args), make(*args, **options))[1]
    ours = te_quantise.Quantising(frozenset([te_quantise.RowsKind(32, "E4M3", True, 0.0)]))
    assert ours.DType is tex.DType, "all else is Transformer Engine's"
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
            first, last = ours.split_quantize(given, [16, 32], [made(), second])
            assert len(first._data) == 16 and len(last._data) == 32
        said.append((len(quantised) == seen + 2, decisions()[before:]))
        assert len(quantised) in (seen, seen + 2)
    before, seen = len(decisions()), len(quantised)
    split, tex.split_quantize = tex.split_quantize, mock.Mock()
    ours.split_quantize(rows, [16, 32], [made(), made()], disable_bulk_allocation=False)  # as from 2.12 on
    assert len(quantised) == seen + 1 and not tex.split_quantize.called
    ours.split_quantize(rows, [16, 32], [made(), made()], disable_bulk_allocation=True)
    assert len(quantised) == seen + 1 and tex.split_quantize.called
    tex.split_quantize = split
    said.append((False, decisions()[before:]))
    return said


def measured_rows(kind):
    """From how many rows on products are ours, of two sizes, where one differs on rank 1 or cannot be computed."""
    install(measures_no_rows=False)
    from ditron_train.megatron.ep import fp8_spec
    from ditron_train.runtime.errors import NotSupportedError

    fp8_spec.MOST_ROWS, fp8_spec.tried_rows = 300, lambda *_: [160, 288]

    def own(call, weights, rows, splits, fewest):
        if kind == "none" and dist.get_rank() == 1:
            return None
        out = fp8_spec._native_product(call, weights, rows, splits)
        assert len(splits) == 3 and splits[-1] == 0 and fewest == 0
        if kind == "differs" and dist.get_rank() == 1:
            out[: splits[0], 0] += 1
        return out

    fp8_spec._own_product = own
    call = fp8_spec.Fp8ExpertsCall(
        torch.empty(200, 32).bfloat16(), torch.empty(48, 32).bfloat16(), 3, dist.group.WORLD
    )
    try:
        fp8_spec.FP8_EXPERTS.context(call)
    except NotSupportedError as error:
        return str(error)
    return fp8_spec.fewest_rows_of(call)


def recipes():
    """Whether a recipe has one scale a tensor, by its class."""
    install()
    from ditron_train.megatron.ep.coverage import why_not_fp8_recipe

    owners = {"TEDelayedScaling": "DelayedScaling"}
    names = ("Float8CurrentScaling", "TEDelayedScaling", "Float8BlockScaling", "MXFP8BlockScaling")
    made = {name: type(name, (type(owners.get(name, "Recipe"), (), {}),), {})() for name in names}
    lines = {name: [one.__name__ for one in type(recipe).__mro__] for name, recipe in made.items()}
    return [name for name, line in lines.items() if why_not_fp8_recipe(line) is None]


def kept_apart():
    """What the log says, once each, of products that are left to Transformer Engine; they are asked for twice."""
    te_fp8 = install()
    from ditron_train.runtime.logs import decisions

    tex, said = sys.modules["transformer_engine_torch"], []
    e4m3, e5m2 = (
        tex.Float8CurrentScalingQuantizer(kind, None) for kind in (tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2)
    )
    shape, count = (48, 32), 2
    weights = [te_fp8_workers._integers(shape, 7 + index) for index in range(count)]
    rows = te_fp8_workers._integers((96, shape[1]), 3).split([48, 48])
    of_weights, of_rows = ([e4m3(one) for one in side] for side in (weights, rows))
    as_bf16 = sys.modules["transformer_engine.pytorch.tensor.float8_tensor"].Quantized()
    for first, second, dtype, changed in (
        (of_weights, of_rows, torch.bfloat16, {}),
        (of_weights, [of_rows[0], e5m2(rows[1])], torch.bfloat16, {}),
        ([of_weights[0], e5m2(weights[1])], of_rows, torch.bfloat16, {}),
        ([e5m2(one) for one in weights], of_rows, torch.bfloat16, {}),
        ([of_weights[0], as_bf16], of_rows, torch.bfloat16, {}),
        (of_weights, of_rows, torch.float32, {}),
        (of_weights, of_rows, torch.bfloat16, {"split_accumulator": True}),
        (of_weights, of_rows, torch.bfloat16, {"fewest_rows": 64}),
    ):
        before = len(decisions())
        options = {"split_accumulator": False, "fewest_rows": FEWEST_ROWS, **changed}
        for _ in range(2):
            out = torch.zeros(96, shape[0], dtype=dtype)
            is_ours = te_fp8.multiply("forward", first, second, out, **options)
            assert is_ours == out.any().item(), "of what is left nothing is written"
        said.append((is_ours, decisions()[before:]))
    products = te_fp8._stand_in(frozenset([("forward", FEWEST_ROWS)]))
    before = len(decisions())
    for _ in range(2):
        apart = [torch.zeros(48, shape[0], dtype=torch.bfloat16) for _ in rows]
        products(of_weights, of_rows, apart, torch.bfloat16, m_splits=[48, 48])
        assert all(one.any() for one in apart), "Transformer Engine's call"
    said.append((False, decisions()[before:]))
    return said
