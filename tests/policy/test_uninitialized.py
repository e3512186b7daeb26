"""Fills of new tensors: which operators allocate, in backward too, and who is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ditron_train.policy.uninitialized import FillNewTensors, fills_new_tensors, is_filling, torch_fill

NEW = {
    "empty": lambda x: torch.empty(4),
    "empty_like": lambda x: torch.empty_like(x),
    "empty_strided": lambda x: torch.empty_strided((2, 2), (2, 1)),
    "empty_permuted": lambda x: torch.empty_permuted((2, 2), (1, 0)),
    "new_empty": lambda x: x.new_empty(4),
    "new_empty_strided": lambda x: x.new_empty_strided((2,), (1,)),
    "by type": lambda x: torch.FloatTensor(4),
    "resize_": lambda x: torch.empty(0).resize_(4),
}


@pytest.mark.parametrize("make", NEW.values(), ids=NEW)
def test_new_tensors_are_filled(make):
    x = torch.ones(2, 2)
    with FillNewTensors(is_finite=False):
        assert bool(make(x).isnan().all()) and is_filling()
    with FillNewTensors(is_finite=True) as mode:
        values = make(x)
    assert bool(values.isfinite().all()) and len(set(values.flatten().tolist())) == 1 and mode.count >= 1
    assert not is_filling()


@pytest.mark.parametrize(
    ("dtype", "filled", "finite"),
    [
        (torch.int32, 2**31 - 1, 1),
        (torch.uint8, 255, 1),
        (torch.bool, True, False),
        (torch.bfloat16, None, 0.75),
        (torch.float8_e4m3fn, None, 0.75),
    ],
)
def test_values_are_those_of_pytorch_and_others(dtype, filled, finite):
    with FillNewTensors(is_finite=False):
        value = torch.empty(1, dtype=dtype).float()
    assert bool(value.isnan()) if filled is None else value == torch.tensor([filled], dtype=dtype).float()
    with FillNewTensors(is_finite=True):
        assert torch.empty(1, dtype=dtype).float() == finite


def test_what_a_tensor_holds_stays_where_it_grows():
    x = torch.arange(4.0)
    with FillNewTensors(is_finite=False) as mode:
        x.resize_(2)
        assert mode.count == 0
        x.resize_(8)
    assert x[:4].tolist() == [0, 1, 2, 3] and bool(x[4:].isnan().all())


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return torch.empty_like(grad)  # which nobody writes


def test_backward_and_the_origin():
    x = torch.ones(3, requires_grad=True)
    with FillNewTensors(is_finite=True, limit=1) as mode:
        torch.autograd.backward(_Doubled.apply(x), torch.ones(3))
    assert x.grad.tolist() == [0.75] * 3
    lines = Path(__file__).read_text().split("\n")
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("# which nobody writes"))
    assert mode.origin == f"aten.empty_like.default at {__file__}:{line}"


def test_a_limit():
    with FillNewTensors(is_finite=True, limit=1) as mode, torch_fill(True):
        first, second = torch.zeros(4).resize_(2).new_empty(2), torch.zeros(2).new_empty(2)
    assert first.tolist() == [0.75] * 2 and mode.count == 2 and second.shape == (2,)


def test_memory_that_overlaps_itself_is_left():
    with FillNewTensors(is_finite=True):
        assert torch.empty_strided((2, 2), (0, 1)).shape == (2, 2)


def test_pytorchs_own_fill():
    assert not fills_new_tensors()
    torch.use_deterministic_algorithms(True)
    try:
        assert fills_new_tensors()
        with torch_fill(False):
            assert not fills_new_tensors()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_compiled_code_stays_compiled():
    """Under another mode ``torch.compile`` runs eager code, also afterwards."""
    torch._dynamo.reset()
    compiled, runs = [], []

    def backend(graph, inputs):
        compiled.append(graph)
        return lambda *args: runs.append(graph) or graph.forward(*args)

    function = torch.compile(lambda x: x.sin() + 1, backend=backend)
    x = torch.ones(2)
    function(x)
    with FillNewTensors(is_finite=True):
        function(x)
    function(x)
    assert (len(compiled), len(runs)) == (1, 3)
