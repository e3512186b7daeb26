"""Tile GEMM in the interpreter: exact on small-integer data, at any shape and stride."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ditron_train.gemm import GemmConfig, aligned_operand, make_descriptor, matmul_nn, matmul_nt
from ditron_train.gemm.operands import empty_aligned, is_aligned
from ditron_train.gemm.ops import gemm_launch
from ditron_train.runtime.device import is_interpreter
from ditron_train.runtime.errors import NotSupportedError
from tests.support import quick_interpreter

pytestmark = pytest.mark.skipif(not is_interpreter(), reason="runs in Triton's interpreter")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, scope="module")
def _repaired_interpreter():
    quick_interpreter.install()


def integers(*shape, dtype, seed):
    """Values -3..3: sums of up to 200 products are exact in fp32, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def strided(tensor, kind):
    """The same values in memory that a descriptor may not be able to describe."""
    rows, cols = tensor.shape
    if kind == "transposed":
        return tensor.t().contiguous().t()
    if kind == "padded":
        wide = torch.full((rows, cols + 3), 7, dtype=tensor.dtype)
        wide[:, :cols] = tensor
        return wide[:, :cols]
    if kind == "offset":
        flat = torch.full((rows * cols + 1,), 7, dtype=tensor.dtype)
        flat[1:] = tensor.reshape(-1)
        return flat[1:].view(rows, cols)
    if kind == "every_other":
        wide = torch.full((rows, 2 * cols), 7, dtype=tensor.dtype)
        wide[:, ::2] = tensor
        return wide[:, ::2]
    return tensor


LAYOUTS = {
    "nt": (matmul_nt, lambda a, b: a @ b.t(), lambda m, n, k: ((m, k), (n, k))),
    "nn": (matmul_nn, lambda a, b: a @ b, lambda m, n, k: ((m, k), (k, n))),
}
KINDS = st.sampled_from(["contiguous", "transposed", "padded", "offset", "every_other"])


@given(
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from(DTYPES),
    st.integers(1, 200),
    st.integers(1, 200),
    st.integers(1, 200),
    KINDS,
    KINDS,
)
@settings(max_examples=60, deadline=None)
def test_any_shape_and_stride_is_exact(layout, dtype, m, n, k, a_kind, b_kind):
    op, reference, shapes = LAYOUTS[layout]
    a_shape, b_shape = shapes(m, n, k)
    a = strided(integers(*a_shape, dtype=dtype, seed=m), a_kind)
    b = strided(integers(*b_shape, dtype=dtype, seed=n), b_kind)
    # exact in fp32; one rounding to the result's type
    assert torch.equal(op(a, b), reference(a.float(), b.float()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_sums_are_made_in_fp32(layout, dtype):
    """Of values of one sign: sums are larger than what the operands' type holds exactly, block by block of K."""
    op, _, shapes = LAYOUTS[layout]
    m, n, k = 20, 24, 1000
    a, b = (integers(*shape, dtype=dtype, seed=seed).abs() + 1 for seed, shape in enumerate(shapes(m, n, k)))
    config = GemmConfig(16, 16, 32, 4, 1)
    assert torch.equal(op(a, b, config=config), LAYOUTS[layout][1](a.float(), b.float()).to(dtype))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize(
    "config",
    [GemmConfig(16, 16, 16, 4, 1), GemmConfig(32, 256, 32, 4, 1, group_m=2), GemmConfig(64, 32, 128, 4, 1, group_m=3)],
)
def test_tile_sizes_do_not_change_bits(layout, config):
    op, _, shapes = LAYOUTS[layout]
    a_shape, b_shape = shapes(150, 300, 100)
    a, b = integers(*a_shape, dtype=torch.bfloat16, seed=1), integers(*b_shape, dtype=torch.bfloat16, seed=2)
    assert torch.equal(op(a, b, config=config), op(a, b))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("num_programs", [1, 2, 3, 4, 5, 8, 9, 17, 30])
def test_a_halved_tail_covers_every_element_once(layout, num_programs):
    config = GemmConfig(16, 256, 32, 4, 1, group_m=2)
    _, reference, shapes = LAYOUTS[layout]
    m, n, k = 40, 600, 48  # 3 x 3 tiles
    a, b = (integers(*shape, dtype=torch.float32, seed=seed) for seed, shape in enumerate(shapes(m, n, k)))
    out = torch.full((m, n), float("nan"))
    gemm = gemm_launch(m, n, config, layout == "nt", num_programs, (a.dtype, b.dtype), None)
    gemm.launch(*gemm.arguments(a, b, out))
    assert torch.equal(out, reference(a, b))
    tail = 9 % num_programs
    assert config.num_whole_tiles(m, n, num_programs) == (9 - tail if 2 * tail <= num_programs else 9)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("m, n, k", [(0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0)])
def test_empty_operands_give_what_torch_gives(layout, m, n, k):
    op, reference, shapes = LAYOUTS[layout]
    a, b = (torch.zeros(shape) for shape in shapes(m, n, k))
    assert torch.equal(op(a, b), reference(a, b))
    out = torch.full((m, n), 3.0)
    assert op(a, b, out=out) is out and torch.equal(out, torch.zeros(m, n))
    out = torch.full((2, m, n), 3.0)
    assert op(torch.stack([a, a]), b, out=out) is out and torch.equal(out, torch.zeros(2, m, n))


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "padded", "offset", "every_other"])
def test_out_is_written_whatever_its_strides_and_nothing_beside_it(kind):
    a, b = integers(20, 30, dtype=torch.float32, seed=1), integers(27, 30, dtype=torch.float32, seed=2)
    out = strided(torch.zeros(20, 27), kind)
    sevens = (out.untyped_storage().nbytes() // 4) - out.numel()
    assert matmul_nt(a, b, out=out) is out
    assert torch.equal(out, a @ b.t())
    assert int((torch.tensor([], dtype=out.dtype).set_(out.untyped_storage()) == 7).sum()) >= sevens


def test_out_may_share_memory_with_an_operand():
    a, b = integers(32, 32, dtype=torch.float32, seed=1), integers(32, 32, dtype=torch.float32, seed=2)
    expected = a @ b
    assert torch.equal(matmul_nn(a, b, out=a), expected) and torch.equal(a, expected)


@pytest.mark.parametrize("shape", [(3, 5, 24), (24,), (2, 0, 24), (1, 1, 1, 24)])
def test_leading_dimensions_of_x_are_kept(shape):
    x, weight = integers(*shape, dtype=torch.bfloat16, seed=1), integers(40, 24, dtype=torch.bfloat16, seed=2)
    y = matmul_nt(x, weight)
    assert y.is_contiguous() and torch.equal(y, (x.float() @ weight.float().t()).bfloat16())
    out = torch.empty_like(y)
    assert matmul_nt(x, weight, out=out) is out and torch.equal(out, y)
    out = torch.empty(*shape[:-1], 80, dtype=torch.bfloat16)[..., ::2]
    assert matmul_nt(x, weight, out=out) is out and torch.equal(out, y)


@pytest.mark.parametrize(
    "call, word",
    [
        (lambda: matmul_nt(torch.zeros(2, 3), torch.zeros(4, 5)), "3 against 5"),
        (lambda: matmul_nt(torch.zeros(2, 3), torch.zeros(4, 3).half()), "float16"),
        (lambda: matmul_nt(torch.zeros(2, 3).double(), torch.zeros(4, 3).double()), "float64"),
        (lambda: matmul_nt(torch.zeros(2, 3), torch.zeros(3)), "2 dimensions"),
        (lambda: matmul_nt(torch.zeros(()), torch.zeros(3, 3)), "no dimension"),
        (lambda: matmul_nn(torch.zeros(2, 3), torch.zeros(3, 4), out=torch.zeros(2, 3)), "out is"),
        (lambda: matmul_nn(torch.zeros(2, 3), torch.zeros(3, 4), out=torch.zeros(1, 4).expand(2, 4)), "overlaps"),
        (lambda: matmul_nn(torch.zeros(2, 3), torch.zeros(3, 4, device="meta")), "meta"),
    ],
)
def test_bad_input_raises_and_names_what_is_wrong(call, word):
    with pytest.raises(NotSupportedError, match=word):
        call()


def test_aligned_operand_copies_only_what_needs_it():
    plain = torch.zeros(4, 16, dtype=torch.bfloat16)
    assert aligned_operand(plain) is plain
    assert aligned_operand(plain[:, :8]).data_ptr() == plain.data_ptr()
    for tensor in (plain[:, 1:9], plain[:, :5].contiguous(), plain.t(), plain[:, ::2]):
        copy = aligned_operand(tensor)
        assert is_aligned(copy) and torch.equal(copy, tensor) and copy.data_ptr() != tensor.data_ptr()
    assert make_descriptor(torch.zeros(1, 3), (16, 16)).shape == [1, 3]
    assert empty_aligned(3, 5, torch.bfloat16, torch.device("cpu")).stride() == (8, 1)
