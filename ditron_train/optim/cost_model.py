"""Estimates of Muon: one matrix's Newton-Schulz steps, and the step of all matrices on one rank or several.

native   three whole products a step, by cuBLAS; all matrices are gathered when every rank is done
fused    the two symmetric products by half; each matrix travels while the next one is computed
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ditron_train.costs.estimate import Estimate
from ditron_train.costs.exchanges import Span, beside_us, ring_us
from ditron_train.costs.products import cublas_us, pass_us, throttled_us, tile_us
from ditron_train.data.device_profiles import Machine
from ditron_train.data.rates import MachineRates
from ditron_train.gemm.configs import choose_config
from ditron_train.optim.sharding import newton_schulz_cost, shard_by_cost

_STEPS = 5
_SYMMETRIC_BLOCK = 128  # rows and columns of a tile of a symmetric product
# Bytes that each parameter of 4 bytes costs a step outside of the products: decay, momentum and its interpolation, the
# norm, two changes of type, the scale, the update. Native passes over the matrix for each.
_NATIVE_BYTES = 84
_FUSED_BYTES = 57


def _symmetric_us(m: int, k: int, machine: Machine, rates: MachineRates) -> float:
    """A product [m, k] @ [k, m] of which the lower triangle is computed."""
    rows = -(-m // _SYMMETRIC_BLOCK)
    tiles = rows * (rows + 1) // 2
    config = choose_config(_SYMMETRIC_BLOCK, _SYMMETRIC_BLOCK, k, torch.bfloat16, machine.target, machine.num_sms)
    share = tiles * tile_us(k, config, machine.num_sms, rates)
    waves = -(-tiles // machine.num_sms) / (tiles / machine.num_sms)
    return rates.launch_us + throttled_us(share * waves / machine.num_sms, rates)


def newton_schulz(rows: int, columns: int, machine: Machine, rates: MachineRates) -> Estimate:
    """Five steps on one matrix, with its norm and changes of type."""
    m, n = min(rows, columns), max(rows, columns)
    gram, square, product = (cublas_us(*sizes, machine, rates) for sizes in ((m, m, n), (m, m, m), (m, n, m)))
    added_us = pass_us(2 * m * m, rates) + pass_us(2 * m * n, rates)  # what the second and third product are added to
    fused_us = min(gram, _symmetric_us(m, n, machine, rates)) + min(square, _symmetric_us(m, m, machine, rates))
    fused_us += product + added_us - 3 * rates.launch_us  # recorded in one graph
    around_us = pass_us(4 * m * n, rates) + pass_us(8 * m * n, rates) + pass_us(6 * m * n, rates)
    whole_us = _STEPS * (gram + square + product + added_us) + around_us
    return Estimate(whole_us, _STEPS * fused_us + around_us)


def _shards(
    matrices: Sequence[tuple[int, int]], span: Span, machine: Machine, rates: MachineRates
) -> list[tuple[Estimate, int]]:
    """Newton-Schulz steps of each rank's matrices, and how many elements these have."""
    found = []
    for shard in shard_by_cost([newton_schulz_cost(*matrix) for matrix in matrices], span.ranks):
        products = Estimate.alike(0.0)
        for index in shard:
            products += newton_schulz(*matrices[index], machine, rates)
        found.append((products, sum(matrices[index][0] * matrices[index][1] for index in shard)))
    return found


def muon_step(matrices: Sequence[tuple[int, int]], span: Span, machine: Machine, rates: MachineRates) -> Estimate:
    """A step of fp32 ``matrices``, dealt out over the ranks; a fused matrix is stepped in parts of its own."""
    native_us, fused_us = 0.0, 0.0
    for products, elements in _shards(matrices, span, machine, rates):
        native_us = max(native_us, products.native_us + pass_us(_NATIVE_BYTES * elements, rates))
        fused_us = max(fused_us, products.ditron_us + pass_us(_FUSED_BYTES * elements, rates))
    if span.ranks == 1:
        return Estimate(native_us, fused_us)
    num_bytes = 4.0 * sum(rows * columns for rows, columns in matrices)
    gather_us = ring_us(num_bytes, span, rates)
    flat_us = pass_us(2 * num_bytes * (span.ranks + 1) / span.ranks, rates)  # into flat buffers and out of them
    # One rank after another sends, and receives what it sends: all bytes pass, not those of the others alone.
    sent_us = gather_us * span.ranks / (span.ranks - 1)
    fused_us = beside_us(fused_us, sent_us, rates.p2p_share)
    return Estimate(native_us + gather_us + flat_us, fused_us)
