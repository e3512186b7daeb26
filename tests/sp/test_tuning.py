"""How the tiles of an A2A-GEMM are dealt to the programs that push first and to the others; what hides a push."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ditron_train.gemm.configs import GemmConfig
from ditron_train.sp.transfer_sizes import deal_of, hides_gather
from tests.support.orders_of_tiles import tiles_of_program

WIDE = GemmConfig(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=4)


@given(st.integers(0, 12), st.integers(1, 12), st.integers(0, 300), st.integers(0, 300))
def test_every_tile_is_computed_once(num_push, num_early, early_tiles, shared_tiles):
    num_programs, num_tiles = num_push + num_early, early_tiles + shared_tiles
    dealt = [
        tiles_of_program(program, num_push, num_programs, early_tiles, num_tiles) for program in range(num_programs)
    ]
    assert sorted(tile for own in dealt for tile in own) == list(range(num_tiles))
    assert all(own == sorted(own) for own in dealt)
    for own in dealt[:num_push]:  # those that push first: no tile of those that are dealt to the others alone
        assert all(tile >= early_tiles for tile in own)


@given(st.integers(1, 300), st.integers(1, 200), st.integers(1, 300), st.sampled_from([2, 4, 8]))
def test_a_deal_fits_the_machine(tiles_m, tiles_n, k_tiles, world_size):
    m, n, k = 128 * tiles_m, 256 * tiles_n, 64 * k_tiles
    num_push, early_tiles = deal_of(m, n, k, world_size, WIDE, 132, 2)
    assert 0 < num_push < 132 and 0 <= early_tiles <= tiles_m * tiles_n
    assert early_tiles % (132 - num_push) == 0 or early_tiles == tiles_m * tiles_n


def test_a_weight_gradient_hides_a_push_that_is_shorter():
    assert hides_gather(8192, 8192, 10240, 2)  # 64 heads, 8 groups: 1.5 and 0.8 ms for 8192 rows
    assert not hides_gather(2048, 2048, 6144, 2)
