"""Symmetric products and the addmm product in the interpreter: exact on small integers, equal to whole products on any
data."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ditron_train.gemm import GemmConfig, matmul_nt
from ditron_train.optim import plans, products
from ditron_train.optim.plans import plan_products
from ditron_train.optim.products import ProductPlan, addmm, gram, newton_schulz_step, scaled_square
from ditron_train.optim.triangles import triangle_tiles, triangle_waves
from ditron_train.runtime.device import is_interpreter
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.logs import decisions, forget_decisions
from tests.support import quick_interpreter

pytestmark = pytest.mark.skipif(not is_interpreter(), reason="runs in Triton's interpreter")

WIDE = GemmConfig(32, 64, 32, 4, 1, group_m=2)
SQUARE = GemmConfig(32, 32, 32, 4, 1, group_m=3)


@pytest.fixture(autouse=True, scope="module")
def _repaired_interpreter():
    quick_interpreter.install()


def integers(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def symmetric(size, dtype, seed):
    a = integers(size, size, dtype=dtype, seed=seed)
    return torch.tril(a) + torch.tril(a, -1).t()


DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
CONFIGS = st.sampled_from([None, WIDE, SQUARE])


@given(st.integers(1, 150), st.integers(1, 150), DTYPES, CONFIGS)
@settings(max_examples=40, deadline=None)
def test_gram_is_exact_and_symmetric(m, n, dtype, config):
    x = integers(m, n, dtype=dtype, seed=m)
    result = gram(x, config=config)
    assert torch.equal(result, (x.float() @ x.float().t()).to(dtype))
    assert torch.equal(result, result.t())


@given(st.integers(1, 150), DTYPES, CONFIGS)
@settings(max_examples=30, deadline=None)
def test_scaled_square_is_exact_and_symmetric(m, dtype, config):
    a = symmetric(m, dtype, seed=m)
    result = scaled_square(a, -2.5, 0.5, config=config)  # factors that keep every value exact in fp32
    assert torch.equal(result, (-2.5 * a.float() + 0.5 * (a.float() @ a.float())).to(dtype))
    assert torch.equal(result, result.t())


@given(
    st.integers(1, 100),
    st.integers(1, 150),
    st.integers(1, 90),
    DTYPES,
    st.sampled_from([None, GemmConfig(32, 256, 32, 4, 1)]),
)
@settings(max_examples=30, deadline=None)
def test_addmm_is_exact(m, n, k, dtype, config):
    add, a, b = (integers(*shape, dtype=dtype, seed=m) for shape in ((m, n), (m, k), (k, n)))
    result = addmm(add, a, b, alpha=0.5, beta=1.5, config=config)
    assert torch.equal(result, (1.5 * add.float() + 0.5 * (a.float() @ b.float())).to(dtype))


@pytest.mark.parametrize("num_programs", [1, 2, 3, 4, 8, 20])
def test_addmm_with_a_halved_tail_is_exact(num_programs):
    config = GemmConfig(16, 256, 32, 4, 1, group_m=2)
    add, a, b = (integers(*shape, dtype=torch.float32, seed=1) for shape in ((40, 600), (40, 48), (48, 600)))
    out = torch.full((40, 600), float("nan"))
    products._launch_addmm(add, a, b, out, 0.5, 1.5, config, num_programs)
    assert torch.equal(out, 1.5 * add + 0.5 * (a @ b))


@pytest.mark.parametrize("m, n", [(96, 64), (100, 200), (33, 70)])
def test_half_the_tiles_give_the_bits_of_the_whole_product(m, n, products_rounded_once):
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(1))
    whole = matmul_nt(x, x, config=SQUARE)
    half = gram(x, config=SQUARE)
    assert torch.equal(half, whole) and torch.equal(half, half.t())


def test_strided_operands_are_copied():
    x = integers(40, 30, dtype=torch.bfloat16, seed=1)
    assert torch.equal(gram(x.t().contiguous().t()), gram(x))
    b, strided = symmetric(40, torch.bfloat16, 2), x.t().contiguous().t()
    assert torch.equal(addmm(strided, b, strided, alpha=1.0, beta=2.0), addmm(x, b, x, alpha=1.0, beta=2.0))


def test_nan_reaches_every_element_that_it_should():
    x = integers(40, 30, dtype=torch.float32, seed=1)
    x[7, 3] = float("nan")
    nan = gram(x).isnan()
    assert bool(nan[7].all()) and bool(nan[:, 7].all()) and int(nan.sum()) == 2 * 40 - 1


@pytest.mark.parametrize(
    "call",
    [
        lambda: gram(torch.zeros(0, 4)),
        lambda: gram(torch.zeros(4, 4, dtype=torch.float64)),
        lambda: scaled_square(torch.zeros(4, 5), 1.0, 1.0),
        lambda: addmm(torch.zeros(4, 5), torch.zeros(5, 5), torch.zeros(5, 5), alpha=1.0, beta=1.0),
        lambda: addmm(torch.zeros(4, 5), torch.zeros(4, 4), torch.zeros(4, 5).bfloat16(), alpha=1.0, beta=1.0),
        lambda: addmm(torch.zeros(4, 5), torch.zeros(4, 0), torch.zeros(0, 5), alpha=1.0, beta=1.0),
        lambda: plan_products(8, 8, torch.float32, torch.device("cpu"), "sometimes"),
    ],
)
def test_bad_input_raises(call):
    with pytest.raises(NotSupportedError):
        call()


def test_plans():
    cpu = torch.device("cpu")
    assert plan_products(4096, 4096, torch.bfloat16, cpu) == plan_products(8, 8, torch.float32, cpu)
    assert not plan_products(4096, 4096, torch.bfloat16, cpu).use_gram
    assert plan_products(8, 8, torch.float32, cpu, "force").use_square
    assert not plan_products(8, 8, torch.float32, cpu, "native").use_update


def test_the_quickest_tiles_with_equal_bits_are_planned(monkeypatch):
    """Of three tiles the quickest has other bits; the products' own kernels run, their times are made up."""
    other = GemmConfig(64, 64, 32, 4, 1)
    cost_us = {None: 10.0, SQUARE: 8.0, WIDE: 5.0, other: 1.0}
    asked = []

    def gram_of(x, config=None):
        asked.append(config)
        return gram(x, config=config) + (config == other)

    def device_us(function, device):
        asked.clear()
        function()
        return cost_us[asked[0] if asked else None]

    monkeypatch.setattr(plans, "gram", gram_of)
    monkeypatch.setattr(plans, "_COEFFICIENTS", (4.0, -0.5, 0.25))  # every sum is exact
    monkeypatch.setattr(plans, "_device_us", device_us)
    monkeypatch.setattr(plans, "symmetric_choices", lambda *shape: [SQUARE, WIDE, other])
    x = integers(40, 64, dtype=torch.float32, seed=1)
    plan, words, step_us = plans._measure_products(x, [x, x.t().contiguous().t()])
    assert plan.uses == (True, False, False) and plan.configs[:2] == (WIDE, SQUARE)
    assert words[0] == "gram: 2.00x (32x64 by 4 warps)" and step_us == 5.0 + 10.0 + 10.0
    steps = [newton_schulz_step(x, 2.0, 0.5, 0.25, p) for p in (plan, ProductPlan(False, False, False, ""))]
    assert torch.equal(*steps)


def test_choices_of_tiles():
    assert products.symmetric_choices(4096, 4096, torch.bfloat16, torch.device("cpu")) == [
        products._symmetric_config(4096, 4096, torch.bfloat16, "interpreter", 1)
    ]
    small = [products._symmetric_config(size, size, torch.bfloat16, "sm_90", 132) for size in (512, 1024, 1408, 1536)]
    assert small == [products._SMALL] * 3 + [products._SQUARE]
    of_addmm = [
        products._addmm_config(m, n, m, torch.bfloat16, "sm_90", 132)
        for m, n in ((512, 2048), (1024, 1024), (1024, 2688))
    ]
    assert of_addmm[:2] == [products._SMALL_ADDMM] * 2 != of_addmm[2:]


@pytest.mark.parametrize("num_programs", [1, 2, 3, 4, 5, 8, 9, 11, 14, 16, 40])
@pytest.mark.parametrize("size", [128, 132, 160])
def test_quartered_tiles_give_the_bits_of_whole_ones(num_programs, size):
    a, add = symmetric(size, torch.float32, 1), symmetric(size, torch.float32, 2)
    out = torch.full((size, size), float("nan"))
    products._launch_symmetric(a, add, out, 0.5, 1.5, SQUARE, True, num_programs)
    assert torch.equal(out, 1.5 * add + 0.5 * (a @ a))
    out.fill_(float("nan"))
    products._launch_symmetric(a, a, out, 1.0, 0.0, SQUARE, False, num_programs)
    assert torch.equal(out, a @ a)


@given(st.integers(1, 6000), st.sampled_from([(128, 128), (128, 256), (16, 16)]), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_tiles_and_quarters_cover_the_triangle_once(size, blocks, num_programs):
    tiles, num_whole = triangle_tiles(size, *blocks, 8, num_programs)
    half_m, half_n = blocks[0] // 2, blocks[1] // 2
    covered = set()
    for row, col in tiles[:num_whole].tolist():
        covered |= {(2 * row + i, 2 * col + j) for i in (0, 1) for j in (0, 1)}
    quarters = {tuple(tile) for tile in tiles[num_whole:].tolist()}
    assert len(quarters) == len(tiles) - num_whole and not quarters & covered
    assert not quarters or (num_whole % num_programs == 0 and blocks[0] == blocks[1])
    rows = -(-size // half_m)
    triangle = {(i, j) for i in range(rows) for j in range((min((i + 1) * half_m, size) - 1) // half_n + 1)}
    assert triangle <= covered | quarters
    assert triangle_waves(size, *blocks, 8, num_programs) <= -(-(num_whole + len(quarters)) // num_programs)


def test_the_last_tiles_of_a_2048_matrix_are_quartered():
    tiles, num_whole = triangle_tiles(2048, 128, 128, 8, 132)
    assert (num_whole, len(tiles) - num_whole) == (132, 12)  # four tiles on the diagonal, three quarters each
    assert (
        triangle_tiles(4096, 128, 128, 8, 132)[1] == 528 and len(triangle_tiles(3072, 128, 128, 8, 132)[0]) > 264 + 36
    )
    assert products._symmetric_config(2048, 2048, torch.bfloat16, "sm_90", 132) == products._SQUARE


def test_the_tile_is_the_one_whose_waves_take_less_time():
    # 4096: 528 square tiles are exactly 4 waves of 132, 272 wide ones are 3; 8192: 1056 wide ones are exactly 8
    assert products._symmetric_config(4096, 4096, torch.bfloat16, "sm_90", 132) == products._SQUARE
    assert products._symmetric_config(8192, 8192, torch.bfloat16, "sm_90", 132) == products._WIDE


@pytest.mark.parametrize("uses_gram", [True, False])
def test_products_that_were_chosen_stand_among_a_jobs_decisions(monkeypatch, uses_gram):
    chosen = ProductPlan(uses_gram, False, False, reason="gram: 1.80x")
    monkeypatch.setattr(plans, "_measure", lambda *arguments: chosen)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    forget_decisions()
    call = plans.StepCall(64, 256, torch.bfloat16, torch.device("cpu"), False)
    assert plans.NewtonSchulzOp().make_context(call) is chosen
    path = "fused" if uses_gram else "native"
    assert decisions() == [f"Newton-Schulz 64 x 256: {path}, gram: 1.80x"]
