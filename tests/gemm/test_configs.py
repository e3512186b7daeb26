"""Tile sizes by shape, and the predicate and probe of bits."""

from __future__ import annotations

import pytest
import torch

from ditron_train.gemm import bits, choose_config, known_bits, probe_bits
from ditron_train.runtime.device import is_interpreter
from ditron_train.runtime.errors import NotSupportedError


def test_large_shapes_take_wide_tiles_and_small_ones_square_tiles():
    large = choose_config(8192, 8192, 8192, torch.bfloat16, "sm_90")
    assert (large.block_m, large.block_n, large.block_k, large.num_warps, large.num_stages) == (128, 256, 64, 8, 4)
    assert large.split_store and large.store_block == (128, 128)
    small = choose_config(1024, 1024, 1024, torch.bfloat16, "sm_90")
    assert small.block_n == 128 and not small.split_store and small.store_block == (128, 128)


def test_a_tail_of_at_most_half_a_wave_is_halved():
    config = choose_config(8192, 1792, 4096, torch.bfloat16, "sm_90")  # 448 wide tiles: 3 waves of 132 and 52 tiles
    assert config.block_n == 256 and config.num_whole_tiles(8192, 1792, 132) == 396
    assert config.num_whole_tiles(8192, 4096, 132) == 1024  # 7 waves and 100 tiles
    square = choose_config(1024, 1024, 1024, torch.bfloat16, "sm_90")
    assert square.num_whole_tiles(1024, 1024, 132) == 64


@pytest.mark.parametrize("size, block", [(1, 16), (16, 16), (17, 32), (100, 128), (5000, 128)])
def test_the_interpreter_takes_the_smallest_tile_that_holds_the_shape(size, block):
    config = choose_config(size, size, size, torch.float32, "interpreter")
    assert (config.block_m, config.block_n) == (block, block)


def test_what_has_no_kernel_raises():
    with pytest.raises(NotSupportedError, match="float32"):
        choose_config(128, 128, 128, torch.float32, "sm_90")
    with pytest.raises(NotSupportedError, match="sm_70"):
        choose_config(128, 128, 128, torch.bfloat16, "sm_70")


def test_known_bits_says_only_what_was_measured():
    assert known_bits(8192, 3584, 8192, "nt", torch.bfloat16) is True
    assert known_bits(8192, 8192, 3584, "nn", torch.bfloat16) is True
    assert known_bits(256, 1024, 8192, "nt", torch.bfloat16) is False
    assert known_bits(8192, 8192, 16, "nn", torch.bfloat16) is False  # what no probe could see
    for unknown in (
        (8192, 3583, 8192, "nt", torch.bfloat16),
        (8192, 3584, 8192, "tn", torch.bfloat16),
        (8192, 3584, 8192, "nt", torch.float16),
        (1024, 1024, 8192, "nt", torch.bfloat16),
    ):
        assert known_bits(*unknown) is None
    assert known_bits(8192, 3584, 8192, "nt", torch.bfloat16, target="sm_100") is None


@pytest.mark.skipif(not is_interpreter(), reason="runs in Triton's interpreter")
def test_the_probe_compares_once_and_remembers(monkeypatch):
    calls = []

    def product(a, b):
        calls.append((a.shape, a.stride(), b.shape, b.stride()))
        return torch.matmul(a, b.t())

    monkeypatch.setattr(bits, "_probed", {})
    monkeypatch.setitem(bits._OPS, "nt", product)
    assert probe_bits(24, 40, 32, "nt", torch.float32, "cpu")
    assert probe_bits(24, 40, 32, "nt", torch.float32, "cpu")
    assert calls == [((24, 32), (32, 1), (40, 32), (32, 1))]
    assert probe_bits(24, 40, 32, "nt", torch.float32, "cpu", a_row_stride=48)
    assert calls[1][1] == (48, 1)
    monkeypatch.setitem(bits._OPS, "nt", lambda a, b: torch.matmul(a, b.t()).nextafter(torch.tensor(9.0)))
    assert not probe_bits(24, 40, 33, "nt", torch.float32, "cpu")
    assert not probe_bits(24, 40, 33, "nt", torch.float32, "cpu")


@pytest.mark.skipif(not is_interpreter(), reason="runs in Triton's interpreter")
def test_the_probe_leaves_the_random_state_alone_and_refuses_nonsense():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    probe_bits(8, 8, 8, "tn", torch.float32, "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(NotSupportedError, match="layout"):
        probe_bits(8, 8, 8, "tt", torch.float32, "cpu")
    with pytest.raises(NotSupportedError, match="stride"):
        probe_bits(8, 8, 8, "nt", torch.float32, "cpu", a_row_stride=4)
