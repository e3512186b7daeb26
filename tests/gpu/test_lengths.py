"""Linear layers at ever-new lengths against Megatron's own, bit for bit, decisions and proofs included."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
pytest.importorskip("megatron.core")

from test_megatron_tp import (  # noqa: E402
    _assert_same,
    _build,
    _config,
    _forward_backward,
    tensor_parallel,  # noqa: F401
)

from ditron_train.policy import gate  # noqa: E402
from ditron_train.runtime.errors import DitronError  # noqa: E402
from ditron_train.tp.context import get_tp_context  # noqa: E402

BUDGET = 2048
SIZES = {"column": (1024, 512), "row": (512, 1024)}


@pytest.fixture(autouse=True)
def _afresh(monkeypatch):
    gate.forget("tp")
    monkeypatch.setenv("DITRON_ROWS", str(BUDGET))
    yield
    gate.forget("tp")


def _pair(kind):
    n, k = SIZES["column" if "column" in kind else "row"]
    return [_build(kind, index, n, k, _config(), False, False) for index in (0, 1)], k


def _lengths(count, seed=1):
    world_size = dist.get_world_size()
    return [
        rng.randrange(160 * world_size, BUDGET + 1, world_size) for rng in [random.Random(seed)] for _ in range(count)
    ]


@pytest.mark.parametrize("policy", ["bits", "strict"])
@pytest.mark.parametrize("kind", ["column", "row", "te_column", "te_norm_column", "te_row"])
def test_every_length_has_megatrons_bits(tensor_parallel, all_equal, monkeypatch, kind, policy):  # noqa: F811
    monkeypatch.setenv("DITRON_POLICY", policy)
    (native, fused), k = _pair(kind)
    for seed, tokens in enumerate(_lengths(60)):
        expected = _forward_backward(kind, native, tokens, k, torch.bfloat16, seed)
        for layer in (native, fused):
            layer.zero_grad()
        _assert_same(
            all_equal, expected, _forward_backward(kind, fused, tokens, k, torch.bfloat16, seed), (kind, tokens)
        )
        for layer in (native, fused):
            layer.zero_grad()
    (family,) = gate.lengths.families.values()
    assert family.is_open and family.reason is None and len(family.proven) >= 50
    different = [rows for rows, is_equal in family.proven.items() if not is_equal]
    if dist.get_rank() == 0:
        print(f"\n{kind}: {len(family.proven)} lengths proven, other bits at {sorted(different)}")
    assert len(different) < len(family.proven) / 2


def test_a_new_length_compiles_nothing_and_takes_no_symmetric_memory(tensor_parallel, monkeypatch):  # noqa: F811
    import triton

    monkeypatch.setenv("DITRON_POLICY", "bits")
    layers = [(kind, _pair(kind)[0][1], _pair(kind)[1]) for kind in ("column", "row")]

    def run(lengths):
        for tokens in lengths:
            for kind, layer, k in layers:
                _forward_backward(kind, layer, tokens, k, torch.bfloat16, tokens)

    world_size = dist.get_world_size()
    every_range = [tokens for top in range(1152, BUDGET + 1, 128) for tokens in range(top - 112, top + 1, 16)]
    run(tokens // world_size * world_size for tokens in every_range)
    context = get_tp_context(layers[0][1].tp_group)
    held, recorded, compiled = context.arena.num_bytes, len(context.recorder.sequences._recordings), []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **seen: compiled.append(seen))
    run((tokens - 8) // world_size * world_size for tokens in every_range)
    assert not compiled and context.arena.num_bytes == held
    assert len(context.recorder.sequences._recordings) == recorded


def test_another_order_of_a_sum_at_one_length_is_native_there(tensor_parallel, all_equal, monkeypatch):  # noqa: F811
    """A stand-in for a library that splits the sum at one number of rows."""
    from ditron_train.megatron.shared.product_proof import ProductProof

    monkeypatch.setenv("DITRON_POLICY", "bits")
    right, split = ProductProof._forward, 1024

    def forward(self, x, weight):
        if len(x) != split or dist.get_rank() != 0:
            return right(self, x, weight)
        half = x.shape[1] // 2
        return right(self, x[:, :half].contiguous(), weight[:, :half].contiguous()) + right(
            self, x[:, half:].contiguous(), weight[:, half:].contiguous()
        )

    monkeypatch.setattr(ProductProof, "_forward", forward)
    (_, fused), k = _pair("row")
    for tokens in (896, split, 1152):
        _forward_backward("row", fused, tokens, k, torch.bfloat16, tokens)
    (family,) = gate.lengths.families.values()
    assert family.proven[split] is False and family.proven[896] and family.proven[1152]


def test_lengths_that_differ_between_ranks_are_an_error(tensor_parallel, monkeypatch):  # noqa: F811
    from ditron_train.megatron.tp.routing import route

    monkeypatch.setenv("DITRON_POLICY", "bits")
    group = dist.new_group()  # its channels are of no use after the error
    weight = torch.ones(1024, 512, dtype=torch.bfloat16, device="cuda")

    def ask(tokens):
        x = torch.ones(tokens, 1, 512, dtype=torch.bfloat16, device="cuda")
        return route("row", x, weight, group=group, sequence_parallel=True)

    assert ask(1024) is not None
    with pytest.raises(DitronError, match="different arguments"):
        ask(512 + 128 * dist.get_rank())
    gate.forget("tp")
    dist.destroy_process_group(group)


def test_forward_alone_then_training(tensor_parallel, all_equal, monkeypatch):  # noqa: F811
    """Log-probabilities before training: bits and times of a pass are its own."""
    monkeypatch.setenv("DITRON_POLICY", "strict")
    (native, fused), k = _pair("column")
    world_size = dist.get_world_size()
    for tokens in _lengths(80, seed=3):
        x = torch.randn(tokens // world_size, 1, k, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        with torch.no_grad():
            assert all_equal(fused(x)[0], native(x)[0])
    for tokens in _lengths(80, seed=4):
        x = torch.randn(tokens // world_size, 1, k, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        results = []
        for layer in (native, fused):
            y, _ = layer(x)
            results.append([y, *torch.autograd.grad(y, [x, layer.weight], torch.ones_like(y))])
        assert all(all_equal(*pair) for pair in zip(*results))
    (family,) = gate.lengths.families.values()
    assert {has_backward for _, has_backward in family.times} == {False, True}
