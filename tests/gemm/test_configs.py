"""Tile sizes by shape."""

from __future__ import annotations

import pytest
import torch

from ditron_train.gemm import choose_config
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
