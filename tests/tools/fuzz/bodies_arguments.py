"""Public functions with arguments of all kinds, on a group of one rank: what they raise that is no answer."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ditron_train.gemm import matmul_nn, matmul_nt
from ditron_train.optim import Muon, newton_schulz
from ditron_train.optim.products import addmm, gram, scaled_square
from ditron_train.optim.sharding import newton_schulz_cost, shard_by_cost
from ditron_train.schedule import orders
from ditron_train.sp import get_sp_context, output_layout, output_projection, qkv_layout, qkv_projection
from ditron_train.tp import ag_gemm, all_gather, column_linear, gemm_rs, get_tp_context, row_linear

CPU = torch.device("cpu")
SIZES = st.sampled_from([0, 1, 2, 3, 4, 8, 16, 17])
DTYPES = st.sampled_from(
    [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.bool]
)
NUMBERS = st.one_of(st.integers(-3, 40), st.sampled_from([-1, 0, 2**31, -(2**40)]))
FACTORS = st.sampled_from([0.0, 1.0, -2.5])


@st.composite
def tensors(draw: Callable[..., Any], dims: tuple[int, ...] = (0, 1, 2, 2, 2, 3)) -> torch.Tensor:
    """Of any shape, type and strides."""
    shape = [draw(SIZES) for _ in range(draw(st.sampled_from(dims)))]
    tensor = torch.ones(shape).to(draw(DTYPES))
    return tensor.t() if tensor.dim() == 2 and draw(st.booleans()) else tensor


LAYOUTS = st.sampled_from(["nt", "nn", "tt", ""])


def _cases() -> dict[str, tuple[Callable[..., object], list[st.SearchStrategy]]]:
    tp, sp = get_tp_context(dist.group.WORLD, CPU), get_sp_context(dist.group.WORLD, CPU)

    def project(x: torch.Tensor, weight: torch.Tensor, heads: int, groups: int, width: int) -> object:
        return qkv_projection(x, weight, context=sp, layout=qkv_layout(heads, groups, width, 1))

    def out(x: torch.Tensor, weight: torch.Tensor, heads: int, width: int) -> object:
        return output_projection(x, weight, context=sp, layout=output_layout(heads, width, 1))

    two = [tensors(), tensors()]
    return {
        "ag_gemm": (lambda x, w, layout: ag_gemm(x, w, context=tp, layout=layout), [*two, LAYOUTS]),
        "gemm_rs": (lambda x, w, layout: gemm_rs(x, w, context=tp, layout=layout), [*two, LAYOUTS]),
        "all_gather": (lambda x: all_gather(x, context=tp), [tensors()]),
        "column_linear": (lambda x, w: column_linear(x, w, context=tp), two),
        "row_linear": (lambda x, w: row_linear(x, w, context=tp), two),
        "qkv_projection": (project, [*two, NUMBERS, NUMBERS, NUMBERS]),
        "output_projection": (out, [*two, NUMBERS, NUMBERS]),
        "matmul_nt": (matmul_nt, two),
        "matmul_nn": (matmul_nn, two),
        "gram": (gram, [tensors()]),
        "scaled_square": (scaled_square, [tensors(), FACTORS, FACTORS]),
        "addmm": (lambda c, a, b, f: addmm(c, a, b, alpha=f, beta=f), [tensors(), *two, FACTORS]),
        "newton_schulz": (newton_schulz, [tensors()]),
        "Muon": (lambda x, lr: Muon([torch.nn.Parameter(x, x.is_floating_point())], lr=lr), [tensors(), FACTORS]),
        "shard_by_cost": (shard_by_cost, [st.lists(st.floats(), max_size=5), st.integers(-2, 9)]),
        "newton_schulz_cost": (newton_schulz_cost, [NUMBERS, NUMBERS]),
        "arrival_order": (orders.arrival_order, [st.integers(-2, 9), st.integers(-2, 9), st.integers(-2, 9)]),
        "delivery_order": (orders.delivery_order, [st.integers(-2, 9), st.integers(-2, 9), st.integers(-2, 9)]),
        "row_tile_owners": (orders.row_tile_owners, [st.lists(st.integers(-9, 99), max_size=5), st.integers(-2, 64)]),
    }  # fmt: skip


def names() -> list[str]:
    """Of the functions."""
    return list(_cases())


def call_all(examples: int, derandomize: bool) -> dict[str, str]:
    """By function: what was raised that is neither an error of this package nor a ValueError or TypeError, and for
    what."""
    found = {}
    for name, (function, strategies) in _cases().items():
        try:
            _check(function, strategies, examples, derandomize)
        except BaseException:
            found[name] = traceback.format_exc()[-1500:]
    return found


def _check(function: Callable[..., object], strategies: list, examples: int, derandomize: bool) -> None:
    options = dict(deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=derandomize)

    @settings(max_examples=examples, **options)
    @given(st.tuples(*strategies))
    def check(arguments: tuple) -> None:
        try:
            function(*arguments)
        except (ValueError, TypeError) as error:  # SettingError and NotSupportedError are ValueErrors
            assert str(error), "an error without words"

    check()
