"""Rows of an embedding and their gradient against PyTorch's deterministic ones, bit for bit."""

from __future__ import annotations

import pytest
import torch

from ditron_train.embedding import lookup, unsupported_reason
from ditron_train.embedding.lookup import _AHEAD, _BLOCK
from ditron_train.runtime.device import is_interpreter
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.values import have_same_bits
from tests.support import quick_interpreter

pytestmark = pytest.mark.skipif(not is_interpreter(), reason="runs in Triton's interpreter")
NUM_WORDS = 40
TOKENS = {
    "one": lambda generator: torch.tensor([3]),
    "one word": lambda generator: torch.full((2 * _AHEAD + 1,), 39),
    "as many as are read at a time": lambda generator: torch.full((_AHEAD,), 0),
    "none of this rank": lambda generator: torch.tensor([-7, 40, -1]),
    "of all ranks": lambda generator: torch.randint(-NUM_WORDS, 2 * NUM_WORDS, (60, 3), generator=generator),
    "frequent words": lambda generator: (200 ** torch.rand(4, 50, generator=generator)).long() - 1,
    "not contiguous": lambda generator: torch.randint(-5, 45, (30, 4), generator=generator).t(),
}


@pytest.fixture(autouse=True, scope="module")
def _repaired_interpreter():
    quick_interpreter.install()


@pytest.fixture(autouse=True)
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _gradients(words, dtype, features, values=None):
    """By PyTorch and from here, with a gradient as Megatron makes it: of other ranks' words it is zero."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(NUM_WORDS, features, generator=generator).to(dtype)
    is_elsewhere = (words < 0) | (words >= NUM_WORDS)
    index = words.masked_fill(is_elsewhere, 0)
    gradient = torch.randn(*words.shape, features, generator=generator) if values is None else values
    found = []
    for path in (lambda x: x[index], lambda x: lookup(x, index, is_elsewhere)):
        leaf = weight.clone().requires_grad_()
        result = path(leaf) * 1
        result[is_elsewhere] = 0.0
        result.backward(gradient.to(dtype))
        found += [result.detach(), leaf.grad]
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
def test_rows_and_gradient_have_pytorchs_bits(tokens, dtype):
    words = tokens(torch.Generator().manual_seed(1))
    features = _BLOCK + 1 if words.dim() == 1 else 16
    rows, gradient, own_rows, own_gradient = _gradients(words, dtype, features)
    assert have_same_bits(rows, own_rows) and have_same_bits(gradient, own_gradient)
    assert own_gradient.dtype == dtype


def test_each_sum_is_rounded_in_the_order_of_tokens():
    """256 + 1 is 256 in bf16, 1 + 1 + ... is not."""
    values = torch.tensor([256.0, *[1.0] * 8, -256.0])[:, None].expand(10, 4)
    _, gradient, _, own = _gradients(torch.zeros(10, dtype=torch.int64), torch.bfloat16, 4, values)
    assert have_same_bits(gradient, own) and own[0].eq(0).all()
    _, gradient, _, own = _gradients(torch.zeros(10, dtype=torch.int64), torch.bfloat16, 4, values.flip(0))
    assert have_same_bits(gradient, own) and own[0].eq(8).all()


def test_zeros_subnormals_and_what_is_no_number_keep_their_bits():
    values = torch.tensor([-0.0, 0.0, 1e-40, -1e-40, float("inf"), float("-inf"), float("nan"), -0.0])
    for one in values:
        for words in (torch.tensor([5, -1, 5]), torch.tensor([5])):
            wanted, found = _gradients(words, torch.bfloat16, 2, one.expand(len(words), 2))[1::2]
            assert torch.equal(wanted.isnan(), found.isnan())
            assert have_same_bits(wanted.nan_to_num(), found.nan_to_num())


def test_a_gradient_with_strides():
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(0, NUM_WORDS, (6, 5), generator=generator)
    gradient = torch.randn(6, 8, 5, generator=generator).transpose(1, 2)
    wanted, found = _gradients(words, torch.float32, 8, gradient)[1::2]
    assert have_same_bits(wanted, found)


@pytest.mark.parametrize(
    "weight, words",
    [
        (torch.zeros(3, 4, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(3, 4), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(3, 4), torch.zeros(0, dtype=torch.int64)),
        (torch.zeros(3), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64, device="meta")),
    ],
)
def test_what_is_not_covered_is_refused(weight, words):
    assert unsupported_reason(weight, words)
    with pytest.raises(NotSupportedError):
        lookup(weight, words)


def test_an_index_counts_from_the_end_as_pytorchs():
    generator = torch.Generator().manual_seed(4)
    index, grad = torch.tensor([-1, 2, -3, 2, 39, 37]), torch.randn(6, 8, generator=generator)
    leaves = [torch.zeros(NUM_WORDS, 8, requires_grad=True) for _ in range(2)]
    leaves[0][index].backward(grad)
    lookup(leaves[1], index).backward(grad)
    assert have_same_bits(leaves[0].grad, leaves[1].grad)
    with pytest.raises(IndexError):
        lookup(leaves[1], torch.tensor([NUM_WORDS]))


def test_second_derivatives_are_refused():
    leaf = torch.zeros(3, 4, requires_grad=True)
    with pytest.raises(NotSupportedError, match="second derivatives"):
        torch.autograd.grad(lookup(leaf, torch.tensor([1])).sum(), leaf, create_graph=True)
