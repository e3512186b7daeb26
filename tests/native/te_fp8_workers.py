"""What the workers of the FP8 tests run: the fused path in the code of a stand-in for Transformer Engine's linear
layer.

Operands are integers below 4 by powers of two, and so are scales: everything is exact, and a scale in another's place
is seen.
"""

from __future__ import annotations

import functools
import sys
import time
import types
from collections.abc import Callable
from unittest import mock

import te_sources
import torch
import torch.distributed as dist
from te_stand_in import modules

from tests.support import quick_interpreter
from tests.support.processes import run_workers_once


def install(sources: dict[str, str], change: tuple[str, str]) -> types.ModuleType:
    """A stand-in of modules, with one string in their code replaced by another."""
    for name, source in sources.items():
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = []
        exec(source.replace(*change), module.__dict__)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    sys.modules["transformer_engine_torch"] = sys.modules["transformer_engine.pytorch.tensor.float8_tensor"]
    return sys.modules["transformer_engine.pytorch.module.linear"]


def _classes(change: tuple[str, str] = ("", ""), minor: int = 10) -> tuple[type, type]:
    """A layer as megatron-core derives it from Transformer Engine's, and the fused path."""
    import ditron_train.megatron.tp.spec  # noqa: F401  (megatron-core looks for the real one)

    quick_interpreter.install()
    return _derived(install(modules(minor), change).Linear)


def _derived(linear: type) -> tuple[type, type]:
    from ditron_train.megatron.tp.te_fp8 import overlapped_base

    class Native(linear):
        def forward(self, x):
            return super().forward(x, is_first_microbatch=True)

    class Fused(Native, overlapped_base(Native)):
        pass

    return Native, Fused


def _integers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    values = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    columns, rows = torch.arange(shape[-1]), torch.arange(values[..., 0].numel())
    powers = (rows % 3).view(*shape[:-1], 1) + (columns + columns // 128) % 3 + seed % 2
    return (values * 2.0**powers).bfloat16()


def _passes(layer: torch.nn.Module, shape: tuple[int, ...], run: object) -> tuple[list[torch.Tensor], list]:
    """Results and gradients of calls with and without gradients of either operand, and what quantizers keep."""
    states = []
    rank, found = dist.get_rank(), []
    for step, (of_x, of_weight) in enumerate([(True, True), (True, False), (False, True), (False, False)]):
        layer.weight.requires_grad_(of_weight)
        x = _integers(shape, 10 * step + rank).requires_grad_(of_x)
        with torch.set_grad_enabled(of_x or of_weight):
            y = run(layer, x)
        found.append(y.detach().clone())
        if of_x or of_weight:
            y.backward(_integers(y.shape, 100 + step + rank))
            given = (x, *layer.parameters())
            found += [tensor.grad.clone() for tensor in given if tensor.grad is not None]
        layer.zero_grad()
        for one in (layer.inputs, layer.weights, layer.grads):
            states += [list(one.history), one.rowwise_usage, one.columnwise_usage]
            states += [getattr(one, name).item() for name in ("amax", "scale") if hasattr(one, name)]
        states += [layer.scales.tolist(), layer.amaxes.tolist()]
    return found, states


Products = list[tuple[str, tuple[int, int], bool]]


def compare_layers(mode: str, recipe: str, minor: int) -> tuple[Products, Products]:
    """Asserts equal results and equal states of quantizers after each step; returns the products of Transformer
    Engine's in both, of which 2.``minor`` is stood in for."""
    return _compare(*_classes(minor=minor), mode, recipe)


def compare_sources(mode: str, recipe: str, checkout: str, module: str, name: str) -> tuple[Products, Products]:
    """The same with Transformer Engine's own code of a checkout, of its layer ``name``, around the stand-in's
    operands."""
    import ditron_train.megatron.tp.spec  # noqa: F401  (megatron-core looks for the real one)

    quick_interpreter.install()
    return _compare(*_derived(te_sources.pose(checkout, module, name)), mode, recipe)


def results_behind_memory_errors() -> list[bool]:
    """Whether the rows of a column layer's pass are its own behind one whose result found no memory."""
    _classes()
    import transformer_engine.pytorch.tensor.float8_blockwise_tensor as blocks

    from ditron_train.megatron.tp import te_block_passes, te_passes
    from ditron_train.tp import gather, get_tp_context

    context, dtype = get_tp_context(None, torch.device("cpu")), sys.modules["transformer_engine_torch"].DType
    usage = {"rowwise": True, "columnwise": False}
    of_rows = blocks.Float8BlockQuantizer(dtype.kFloat8E4M3, **usage, block_scaling_dim=1, all_gather_usage=True)
    weight = blocks.Float8BlockQuantizer(dtype.kFloat8E4M3, **usage)(_integers((256, 256), 3))
    right, copy = [], gather.copy_in_sequence

    def late(copies: list, stream: None) -> None:
        time.sleep(0.1 * (dist.get_rank() == 0))
        copy(copies, stream)

    for seed in range(4):
        rows, products = of_rows(_integers((128, 256), 10 * seed + dist.get_rank())), []
        for one in (te_passes.Pass(context), te_block_passes.ColumnForward(context)):
            with mock.patch.object(gather, "copy_in_sequence", late):  # who does not wait has old rows
                total, _ = one.gather(rows, dist.group.WORLD, quantizer=of_rows)
            if seed == 1 and isinstance(one, te_block_passes.ColumnForward):
                product = functools.partial(one.multiply, weight, total, out_dtype=torch.bfloat16)
                with mock.patch.object(torch, "empty", side_effect=MemoryError):
                    right.append(_raises(MemoryError, product))
            else:
                products.append(one.multiply(weight, total, out_dtype=torch.bfloat16)[0])
            one.close()
        right.append(len(products) == 1 or torch.equal(*(one.view(-1, 256) for one in products)))
    return right


def _raises(kind: type[BaseException], function: Callable[[], object]) -> bool:
    try:
        function()
    except kind:
        return True
    return False


def keys_of_products() -> list[bool]:
    """Whether keys of products are of what they depend on, and there are none where that is not known."""
    _classes()
    from ditron_train.megatron.tp.te_passes import product_key

    class Operand:
        def __init__(self, data, quantizer=None, dtype="kFloat8E4M3", scale=None):
            dtype = sys.modules["transformer_engine_torch"].DType[dtype]
            self._fields = {"data": data, "fp8_scale_inv": scale, "fp8_dtype": dtype, "quantizer": quantizer}

        def get_metadata(self):
            return self._fields

    data, other, out = torch.zeros(4, 4), torch.zeros(4, 4), torch.zeros(4, 4)
    options = {"out": out, "out_dtype": torch.bfloat16, "layout": "NN", "grad": True, "bias": None}
    key = product_key([Operand(data)], (), options)
    return [
        key == product_key([Operand(data, object())], (), dict(options)),
        key != product_key([Operand(other)], (), options),
        key != product_key([Operand(data.view(2, 8))], (), options),
        key != product_key([Operand(data, dtype="kFloat8E5M2")], (), options),
        product_key([Operand(data, scale=out)], (), options) != product_key([Operand(data, scale=other)], (), options),
        key != product_key([Operand(data)], (out,), options),
        key != product_key([Operand(data)], (), {**options, "out": other}),
        key != product_key([Operand(data)], (), {**options, "layout": "TN"}),
        len({key, product_key([Operand(data)], (), {**options, "accumulate": True})}) == 2,
        product_key([Operand(data)], (), {**options, "bias": out}) is None,
        product_key([Operand(data)], (), {**options, "grad": False, "bias": out}) is not None,
        product_key([Operand(data)], (), {**options, "gelu": True}) is None,
        product_key([Operand(data)], (), {**options, "quantization_params": object()}) is None,
    ]


def _compare(native: type, calls_of_fused: type, mode: str, recipe: str) -> tuple[Products, Products]:
    from ditron_train.megatron.tp import te_blocks, te_passes
    from ditron_train.megatron.tp.te_fp8 import overlapping, unsupported_reason_code
    from ditron_train.stream.plan import Exchange
    from ditron_train.tp import get_tp_context

    assert (
        unsupported_reason_code(native) is None
        and unsupported_reason_code(calls_of_fused) is None
        and te_blocks.unsupported_reason_form() is None
    )
    reduced = mock.Mock(side_effect=te_passes.largest_of_ranks)
    te_passes.largest_of_ranks = reduced
    context = get_tp_context(None, torch.device("cpu"))
    calls = sys.modules["transformer_engine.pytorch.cpp_extensions"].CALLS

    def overlapped(layer, x):
        te_passes.reduce_amax_in_passes(layer)
        scaling, (n, k) = "block" if recipe == "blockwise" else "tensor", layer.weight.shape
        with overlapping(mode, context, scaling, (n, k)):
            return layer(x)

    block = 128 if recipe == "blockwise" else 32
    shape = (block // 2 if mode == "column" else block // 2 * context.world_size, 2, 2 * block)

    products, results, states, keys = [], [], [], []
    replay = Exchange.replay

    def watched(self, key, *args, **options):
        if options.get("allocates"):  # runs products of Transformer Engine's
            keys.append(key)
        replay(self, key, *args, **options)

    Exchange.replay = watched
    for made, run in (
        (native, lambda layer, x: layer(x)),
        (calls_of_fused, lambda layer, x: layer(x)),
        (calls_of_fused, overlapped),
    ):
        weight = _integers((256 if recipe == "blockwise" else 48, 2 * block), 7 + dist.get_rank())
        bias = (
            _integers((len(weight),), 9 + dist.get_rank()) if mode == "column" else None
        )  # of rows it is added later
        layer = made(weight, mode, dist.group.WORLD, recipe, bias)
        calls.clear()
        for kept, one in zip((results, states), _passes(layer, shape, run)):
            kept.append(one)
        products.append(list(calls))
    for found, state in zip(results[1:], states[1:]):
        assert len(found) == len(results[0]) and all(map(torch.equal, found, results[0]))
        assert state == states[0]
    Exchange.replay = replay
    assert None not in keys, "products of Transformer Engine's can be recorded"
    assert bool(keys) == (mode == "row" or recipe == "blockwise")
    assert products[1] == products[0], "it is overlapped only where it is asked for"
    quantized = len((layer.inputs if mode == "column" else layer.grads).history)
    assert reduced.call_count == (quantized if recipe == "tensorwise" else 0) and quantized
    return products[0], products[2]


def amax_asked_from_cpp() -> list[float]:
    """What C++ gets from the group of a quantizer outside of a pass, in one, in one without a context, and of a group
    of this rank alone in a pass of all."""
    _classes()
    from ditron_train.megatron.tp.te_passes import AmaxGroup, Pass, passing
    from ditron_train.tp import get_tp_context

    group = AmaxGroup(dist.group.WORLD)
    torch._C._distributed_c10d._register_process_group("amaxes", group)
    ops, rank, found = torch.ops._c10d_functional, dist.get_rank(), []
    active = Pass(get_tp_context(None, torch.device("cpu")))
    asked = mock.Mock(side_effect=active.reduce_amax)
    active.reduce_amax = asked
    for one in (None, active, object.__new__(Pass)):
        with passing(one):
            found.append(ops.wait_tensor(ops.all_reduce(torch.tensor([1.0 + rank]), "max", "amaxes")).item())
    assert asked.call_count == 1
    alone = AmaxGroup([dist.new_group([one]) for one in range(dist.get_world_size())][rank])
    torch._C._distributed_c10d._register_process_group(f"amaxes of {rank}", alone)
    with passing(active):
        found.append(ops.wait_tensor(ops.all_reduce(torch.tensor([1.0 + rank]), "max", f"amaxes of {rank}")).item())
    return found


def refused_code(change: tuple[str, str], minor: int) -> str | None:
    """Why the stand-in for 2.``minor``, with one string replaced, cannot be overlapped."""
    _, calls_of_fused = _classes(change, minor)
    from ditron_train.megatron.tp.te_fp8 import unsupported_reason_code

    return unsupported_reason_code(calls_of_fused)


def form_of_blocks(minor: int, change: tuple[str, str]) -> str | None:
    """Why blocks of the stand-in for 2.``minor``, with one string replaced, do not travel by the fused path."""
    _classes(change, minor)
    from ditron_train.megatron.tp.te_blocks import unsupported_reason_form

    return unsupported_reason_form()


def spec_on_cpu(kind: str, scaling: str, minor: int) -> list[str]:
    """The trial of the policy: what it compares has the shapes of results and gradients."""
    _classes(minor=minor)
    from ditron_train.megatron.tp.fp8_spec import FP8_COLUMN, FP8_ROW, Fp8Call

    spec, logged = {"column": FP8_COLUMN, "row": FP8_ROW}[kind], []
    group, size = dist.group.WORLD, 1 if scaling == "tensor" else 8
    for rows, frozen, bias in ((32, False, False), (32, True, kind == "column"), (8, False, False)):
        rows *= size
        x, weight = torch.empty(rows, 64 * size).bfloat16(), torch.empty(48 * size, 64 * size).bfloat16()
        recipe = "Float8CurrentScaling" if scaling == "tensor" else "Float8BlockScaling"
        call = Fp8Call(x, weight, group, "E5M2", frozen, scaling, recipe, has_bias=bias)
        reason = spec.unsupported_reason(call)
        if reason is not None:
            logged.append(reason)
            continue
        trial = spec.trial(call, spec.make_context(call))
        for first, second in [(trial.native, trial.fused), *trial.extra_cases]:
            expected, found = first(), second()
            assert [one.shape for one in expected] == [one.shape for one in found]
            assert (found[-1].numel() == 1) == (scaling == "tensor"), "the amax of all ranks is part of it"
            assert all(torch.isfinite(one).all() for one in found)
            # What Transformer Engine multiplies has equal bits on the CPU, too.
            assert all(map(torch.equal, expected[1:], found[1:]))
        logged.append(f"{trial.description}: {[tuple(one.shape) for one in expected]}")
    return logged


def different_calls(what: str) -> str:
    """What is raised where the ranks call a layer with other shapes, types or recipes."""
    _classes()
    from ditron_train.megatron.tp.fp8_spec import FP8_ROW, Fp8Call
    from ditron_train.runtime.errors import MismatchError

    def call(other: bool) -> Fp8Call:
        x = torch.empty(32 if what == "shape" and other else 64, 64, dtype=torch.bfloat16)
        x = x.half() if what == "type" and other else x
        recipe = "DelayedScaling" if what == "recipe" and other else "Float8CurrentScaling"
        grads = "E4M3" if what == "format" and other else "E5M2"
        return Fp8Call(
            x, torch.empty(48, 64).bfloat16(), dist.group.WORLD, grads, what == "frozen" and other, "tensor", recipe
        )

    FP8_ROW.check_ranks_agree(call(False))
    assert FP8_ROW.key(call(False)) != FP8_ROW.key(call(True))
    try:
        FP8_ROW.check_ranks_agree(call(dist.get_rank() == 1))
    except MismatchError as error:
        return str(error)
    return "accepted"


def recipes() -> dict[str, object]:
    """What scales of a recipe are for, by its class, and why others are not covered."""
    _classes()
    from transformer_engine.pytorch.tensor import float8_blockwise_tensor

    from ditron_train.megatron.tp import te_fp8

    def made(
        name: str, parent: str = "", *, split: bool = False, shape: tuple = (1, 2, 1), pow2: bool = True
    ) -> object:
        recipe = type(name, (type(parent, (), {}),) if parent else (), {})()
        recipe.fp8_gemm_fprop = types.SimpleNamespace(use_split_accumulator=split)
        recipe.x_block_scaling_dim, recipe.w_block_scaling_dim, recipe.grad_block_scaling_dim = shape
        for of in ("fwd_inp", "fwd_weight", "bwd_grad"):
            setattr(recipe, f"fp8_quant_{of}", types.SimpleNamespace(power_2_scale=pow2))
        return recipe

    blocks = "Float8BlockScaling"
    covered = [made("Float8CurrentScaling"), made("TEDelayedScaling", "DelayedScaling"), made(blocks, split=True)]
    covered.append(made("Blocks of any scale", blocks, pow2=False))
    assert all(te_fp8.unsupported_reason_recipe(recipe) is None for recipe in covered)
    others = [made("MXFP8BlockScaling"), made("Precise", "Float8CurrentScaling", split=True)]
    others.append(made("Square", blocks, shape=(2, 1, 1)))
    logged = {type(recipe).__name__: te_fp8.unsupported_reason_recipe(recipe) for recipe in others}
    float8_blockwise_tensor.Float8BlockQuantizer = type("Float8BlockQuantizer", (), {})  # as from 2.12 on
    override = made("Float8CurrentScaling")
    override.backward_override = "high_precision"
    return {
        **logged,
        "covered": {type(recipe).__name__: te_fp8.scaling_of(recipe) for recipe in covered},
        "newer": te_fp8.unsupported_reason_recipe(covered[2]),
        "override": te_fp8.unsupported_reason_recipe(override),
    }


def run(function, *arguments, num_workers=2):
    """In workers that end with it: what is put into modules ends with them."""
    outcomes = run_workers_once(num_workers, function, *arguments)
    for outcome in outcomes:
        assert outcome.ok, outcome.traceback
    return [outcome.value for outcome in outcomes]
