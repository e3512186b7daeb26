"""Gradients and inputs with strides: the products of our linear layers get operands that are stored as megatron-core's
own layers hand them over, since cuBLAS chooses its kernel by how they are."""

from __future__ import annotations

import importlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ditron_train.runtime.logs import decisions, forget_decisions
from tests.support.processes import run_workers

pytest.importorskip("megatron.core")

from ditron_train.megatron.compat.wgrad import multiplies_rows_of_frozen  # noqa: E402

TOKENS, HIDDEN, FFN = 24, 48, 96
PRODUCTS = ("mm", "bmm", "addmm")
#: Of a result [s, b, n]: the same values, laid out otherwise.
LAYOUTS = {
    "whole": lambda values: values,
    "sequences": lambda values: torch.stack(list(values.unbind(1))).transpose(0, 1),
    "columns": lambda values: torch.cat([values, values], dim=-1)[..., : values.shape[-1]],
    "features first": lambda values: values.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "one number": lambda values: values.new_ones(()).expand(values.shape),
}


class _Operands(TorchDispatchMode):
    """Shapes and strides of what is multiplied."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in PRODUCTS:
            self.found.append((name, *((tuple(one.shape), one.stride()) for one in args[-2:])))
        return func(*args, **(kwargs or {}))


def _integers(*shape, seed):
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def _layer(kind, fused, frozen, sequence_parallel=False):
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig

    from ditron_train.cpu.megatron_shim import CPU_CONFIG
    from ditron_train.megatron.tp.layers import DitronColumnParallelLinear, DitronRowParallelLinear

    classes = {
        "column": (ColumnParallelLinear, DitronColumnParallelLinear),
        "row": (RowParallelLinear, DitronRowParallelLinear),
    }
    settings = {**CPU_CONFIG, "add_bias_linear": False, "sequence_parallel": sequence_parallel}
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, params_dtype=torch.float32,
        tensor_model_parallel_size=dist.get_world_size(), **settings,
    )  # fmt: skip
    options = {"input_is_parallel": True} if kind == "row" else {}
    layer = classes[kind][fused](
        HIDDEN, FFN, config=config, init_method=torch.nn.init.zeros_, bias=False, skip_bias_add=False, **options
    )
    layer.weight.data.copy_(_integers(*layer.weight.shape, seed=dist.get_rank()))
    layer.weight.requires_grad_(not frozen)
    return layer


def _passes(layer, x, layout):
    """Results and gradients, and what is multiplied in forward and in backward."""
    x = x.detach().requires_grad_()
    with _Operands() as forward:
        y, _ = layer(x)
    grad = LAYOUTS[layout](_integers(*y.shape, seed=50))
    with _Operands() as backward:
        y.backward(grad)
    gradients = [x.grad] if layer.weight.grad is None else [x.grad, layer.weight.grad]
    return [y.detach(), *gradients], forward.found, backward.found


def _compare(kind, frozen, batch, sequence_parallel=False):
    """By layout: whether the products of backward had the same operands; the results always have the same bits."""
    from ditron_train.policy import gate
    from tests.support.model_parallel import model_parallel

    found, world_size = {}, dist.get_world_size()
    forget_decisions()
    gemm_ar = importlib.import_module("ditron_train.tp.gemm_ar")
    # Else cuBLAS multiplies in front of so small an all-reduce.
    with mock.patch.object(gemm_ar, "PUSH_BYTES", 0), model_parallel(tensor_model_parallel_size=world_size):
        native, fused = (_layer(kind, is_fused, frozen, sequence_parallel) for is_fused in (False, True))
        inputs = HIDDEN // (world_size if kind == "row" else 1)
        x = _integers(TOKENS // (world_size if sequence_parallel else 1), batch, inputs, seed=7)
        for layout in LAYOUTS:
            (expected, _, of_native), (results, _, of_fused) = (_passes(one, x, layout) for one in (native, fused))
            assert len(expected) == len(results) and all(map(torch.equal, expected, results)), layout
            assert of_native, "something is multiplied"
            found[layout] = of_native == of_fused
            native.weight.grad = fused.weight.grad = None
        (answer,) = gate.answers(f"tp {kind}" + " ar" * (not sequence_parallel))
        assert answer.context is not None
    return found, decisions()


def _compare_inputs(batch):
    """A row layer's forward on each layout: what native and fused multiply."""
    from tests.support.model_parallel import model_parallel

    found = {}
    forget_decisions()
    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        native, fused = (_layer("row", is_fused, False) for is_fused in (False, True))
        for layout, laid in LAYOUTS.items():
            x = laid(_integers(TOKENS, batch, HIDDEN // dist.get_world_size(), seed=7 + dist.get_rank()))
            with torch.no_grad(), _Operands() as of_native:
                expected, _ = native(x)
            with torch.no_grad(), _Operands() as of_fused:
                y, _ = fused(x)
            assert torch.equal(y, expected) and of_native.found, layout
            found[layout] = of_native.found == of_fused.found
    return found, decisions()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_products_of_gradients_get_them_as_they_lie_natively(kind, batch):
    for frozen in (False, True) if kind == "row" else (False,):
        for found, lines in run_workers(2, _compare, kind, frozen, batch, kind == "column"):
            assert found == dict.fromkeys(LAYOUTS, True)
            assert not [line for line in lines if "strides" in line]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_frozen_layer_multiplies_gradients_with_strides_as_natively(batch):
    """One whose gradient is stored whole, or is made so, has a kernel of its own, which the policy has compared."""
    fused = {"whole", "sequences"} if multiplies_rows_of_frozen() else {"whole"}
    for found, lines in run_workers(2, _compare, "column", True, batch, True):
        assert found == {layout: layout not in fused for layout in LAYOUTS}
        assert len([line for line in lines if line.startswith("tp column: native, a gradient with strides")]) == 1


def _without_copy_engines(batch):
    from ditron_train.tp import linear

    with mock.patch.object(linear, "can_copy", lambda context: False):
        return _compare("column", False, batch, True)


def test_without_copy_engines_gradients_with_strides_are_multiplied_as_natively():
    """The kernel that takes their place was compared on gradients that are stored whole."""
    for found, lines in run_workers(2, _without_copy_engines, 2):
        assert not found["whole"] and found["columns"] and found["features first"] and found["one number"]
        assert len([line for line in lines if line.endswith("without copy engines, which need cuda-bindings")]) == 1


@pytest.mark.parametrize("batch", [1, 2])
def test_a_row_layer_multiplies_inputs_with_strides_as_natively(batch):
    for found, lines in run_workers(2, _compare_inputs, batch):
        assert found == {layout: layout != "whole" for layout in LAYOUTS}
        assert len([line for line in lines if line == "tp row: native, the input has strides"]) == 1
