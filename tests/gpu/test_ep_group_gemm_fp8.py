"""Grouped GEMMs of FP8 operands on a Hopper GPU against one cuBLASLt product an expert, and against Transformer
Engine's grouped calls: equal bits."""

from __future__ import annotations

import random

import pytest
import torch

from ditron_train.ep.group_gemm_fp8 import ExpertRows, group_gemm_fp8
from ditron_train.gemm.configs import GemmConfig
from ditron_train.gemm.revealing import revealing_matrix

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)

LAYERS = [(4096, 7168), (7168, 2048), (2816, 2048), (2048, 1408), (512, 1024)]
CONFIGS = {"own_choice": None, "square": GemmConfig(128, 128, 128, 8, 4), "tall": GemmConfig(256, 128, 128, 8, 3)}


def values(shape, seed, reveals, signed):
    """``reveals``: pairs of values that cancel, which shows the order of sums."""
    device = torch.device("cuda")
    if reveals:
        return revealing_matrix(shape, torch.bfloat16, device, seed=seed, signed=signed)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)


def counts_of(draw):
    return [16 * draw.choice([0, 17, 18, 40, 75, 128]) for _ in range(7)] + [272]


def quantised(parts, dtype):
    """In e4m3 or e5m2 with a scale each, in memory of its own."""
    limit = torch.finfo(dtype).max
    tops = [part.abs().max().float() if len(part) else torch.ones((), device="cuda") for part in parts]
    data = [(part.float() * (limit / top)).to(dtype) for part, top in zip(parts, tops)]
    return ExpertRows(data, [(top / limit).reshape(1) for top in tops])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
@pytest.mark.parametrize("split", [False, True], ids=["fast", "split"])
@pytest.mark.parametrize("reveals", [False, True], ids=["random", "order_of_sums"])
def test_products_have_the_bits_of_cublas(reveals, split, config):
    """Rows padded to 16 as Megatron pads them; with a split accumulator in e5m2, as gradients are."""
    draw, different = random.Random(5), []
    for seed, (n, k) in enumerate(LAYERS):
        counts = counts_of(draw)
        x = values((sum(counts), k), 100 * seed, reveals, "rows")
        rows = quantised(x.split(counts), torch.float8_e5m2 if split else torch.float8_e4m3fn)
        weights = [values((n, k), 100 * seed + 1 + i, reveals, "columns") for i in range(len(counts))]
        weights = quantised(weights, torch.float8_e4m3fn)
        y = group_gemm_fp8(rows, weights, split_accumulator=split, config=config)
        for part, x_part, a, weight, b in zip(y.split(counts), *rows[:2], *weights[:2]):
            if len(part):
                scaled = dict(scale_a=a, scale_b=b, out_dtype=torch.bfloat16)
                expected = torch._scaled_mm(x_part, weight.t(), use_fast_accum=not split, **scaled)
                different += [] if torch.equal(part, expected) else [(len(part), n, k)]
    assert not different


@pytest.mark.parametrize("product, grad_format", [("forward", "E5M2"), ("dgrad", "E5M2"), ("dgrad", "E4M3")])
def test_products_have_the_bits_of_transformer_engine(device, monkeypatch, product, grad_format):
    """From what it has quantised, on random values and on values that show the order of sums."""
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    from ditron_train.megatron.ep import te_fp8
    from ditron_train.megatron.ep.fp8_spec import FP8_EXPERTS, Fp8ExpertsCall

    calls = []
    monkeypatch.setattr(te_fp8, "group_gemm_fp8", lambda *a, **kw: calls.append(a) or group_gemm_fp8(*a, **kw))
    for n, k in ((4096, 7168), (7168, 2048), (2816, 2048), (1024, 512)):
        x = torch.empty(0, k, device=device, dtype=torch.bfloat16)
        call = Fp8ExpertsCall(x, x.new_empty(n, k), 7, None, product, grad_format)
        assert FP8_EXPERTS.why_not(call) is None
        draw = random.Random(n)
        for reveals in (False, True):
            native, ours = FP8_EXPERTS.pair(call, counts_of(draw), reveals=reveals)
            calls.clear()  # which were of the choice of tiles
            found = ours()
            assert calls and all(map(torch.equal, found, native())), (n, k, reveals)


def test_an_expert_with_few_rows_is_refused():
    from ditron_train.runtime.errors import NotSupportedError

    weights = quantised([values((256, 256), seed, False, None) for seed in range(2)], torch.float8_e4m3fn)
    rows = quantised(list(values((272, 256), 9, False, None).split([256, 16])), torch.float8_e4m3fn)
    with pytest.raises(NotSupportedError, match="fewer rows than a tile"):
        group_gemm_fp8(rows, weights)
