"""Estimates of messages between stages, and of the step of a pipeline: slots, bubbles, messages in the way."""

from __future__ import annotations

from ditron_train.costs import Estimate, beside_us, message_us, rail_us, send_us
from ditron_train.runtime.rates import MachineRates, NetworkRates


def sent(
    num_bytes: float, ranks: int, rates: MachineRates, *, both_ways: bool = True, network: NetworkRates | None = None
) -> Estimate:
    """A message that nothing covers; across nodes both are NCCL's, which ours leaves one block."""
    if network is not None:
        exchange_us = rail_us(num_bytes, network)
        return Estimate(exchange_us, exchange_us, 0.0, exchange_us)
    exchange_us = send_us(num_bytes, rates, ranks=ranks, both_ways=both_ways)
    return Estimate(exchange_us, message_us(num_bytes, rates), 0.0, exchange_us)


def beside_message(gemm_us: float, num_bytes: float, ranks: int, rates: MachineRates) -> Estimate:
    """GEMMs with a message to the next rank beside them, until both are done."""
    native_us = send_us(num_bytes, rates, ranks=ranks, both_ways=True)
    ours_us = message_us(num_bytes, rates)
    return Estimate(
        beside_us(gemm_us, native_us, rates.p2p_share),
        beside_us(gemm_us, ours_us, rates.copy_share),
        gemm_us,
        native_us,
    )


def num_slots(microbatches: int, stages: int, chunks: int = 1) -> float:
    """Times that a stage's forward and backward of a microbatch fit into a step of 1F1B, bubbles among them; with
    several chunks a stage the bubbles are shorter by so much."""
    return microbatches + (stages - 1) / chunks


def pipeline_step(
    stage: Estimate,
    message: Estimate,
    *,
    microbatches: int,
    stages: int,
    chunks: int = 1,
    overlaps: bool = False,
    bubble: Estimate | None = None,
) -> Estimate:
    """A step whose stages take ``stage`` for forward and backward of a microbatch; each chunk sends a message forward
    and one backward, which Megatron's path waits for unless it ``overlaps``. Ours are started as soon as they can be.

    ``bubble``: a stage's time that the others wait for while the pipeline fills, where the longest stage has more.
    """
    if stages == 1:
        return stage * microbatches
    bubble = stage if bubble is None else bubble
    whole = stage * microbatches + bubble * (num_slots(microbatches, stages, chunks) - microbatches)
    messages = 2 * (microbatches * chunks + stages - 1)
    at_ends = 2 * (stages - 1)
    waited = at_ends if overlaps else messages
    ours_waited = at_ends if overlaps or chunks > 1 else messages  # between chunks there is another one's work to do
    return whole + Estimate(
        waited * message.native_us, ours_waited * message.ditron_us, 0.0, messages * message.exchange_us
    )
