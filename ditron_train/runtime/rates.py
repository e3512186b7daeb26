"""What a machine moves and multiplies in a second: the numbers behind every estimate of a time."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MachineRates", "default_rates"]


@dataclass(frozen=True)
class MachineRates:
    """Rates and latencies of one GPU and its links to the others of its node.

    Attributes:
        gemm_tflops: Of a large bf16 GEMM, every multiprocessor at work.
        link_gbps: Of one copy engine to a peer, and the most that all peers together send to one GPU.
        nccl_gbps: Bytes that a rank receives in NCCL's all-gather or reduce-scatter, per second.
        nccl_latency_us: What such a collective takes with hardly any bytes.
        memory_gbps: Of device memory, reads and writes together.
        push_sm_gbps: Of one multiprocessor that stores to a peer.
        start_us: From the launch of an overlapped op to its first byte on a link: kernel, start signals, copy.
        chunk_us: What one more chunk costs: its signal, for which the copy engine stops.
    """

    gemm_tflops: float
    link_gbps: float
    nccl_gbps: float
    nccl_latency_us: float
    memory_gbps: float
    push_sm_gbps: float
    start_us: float = 10.0
    chunk_us: float = 5.0

    @property
    def gemm_flop_per_us(self) -> float:
        """``gemm_tflops`` in the unit of estimates."""
        return self.gemm_tflops * 1e6


# The first is measured (4 GPUs, NVLink); of the others no machine was there: dense bf16 and memory rates of the data
# sheets times 0.75, links by the same ratio of measured to stated speed. ``python -m ditron_train tune`` measures.
_HOPPER = MachineRates(
    gemm_tflops=750, link_gbps=370, nccl_gbps=288, nccl_latency_us=16, memory_gbps=3600, push_sm_gbps=42
)
_BY_TARGET = {
    "sm_80": MachineRates(
        gemm_tflops=230, link_gbps=245, nccl_gbps=190, nccl_latency_us=18, memory_gbps=1500, push_sm_gbps=20
    ),
    "sm_90": _HOPPER,
    "sm_100": MachineRates(
        gemm_tflops=1600, link_gbps=740, nccl_gbps=560, nccl_latency_us=16, memory_gbps=6000, push_sm_gbps=60
    ),
    "hip": MachineRates(
        gemm_tflops=500, link_gbps=300, nccl_gbps=230, nccl_latency_us=25, memory_gbps=4000, push_sm_gbps=20
    ),
    "interpreter": MachineRates(
        gemm_tflops=0.001, link_gbps=1, nccl_gbps=1, nccl_latency_us=500, memory_gbps=4, push_sm_gbps=1
    ),
}


def default_rates(target: str) -> MachineRates:
    """Rates to estimate with where none were measured; ``target`` as of ``runtime.device.kernel_target``."""
    return _BY_TARGET[target]
