"""What a machine moves and multiplies in a second: the numbers behind every estimate of a time.

They stand in profiles, one readable JSON file a kind of GPU (`ditron_train.data.device_profiles`).
"""

from __future__ import annotations

from dataclasses import dataclass

#: Rates that tables of earlier versions hold, and that nothing reads any more.
RETIRED_RATES = frozenset(
    {"gemm_power"}
    | {f"host_{name}_us" for name in "moe expert microbatch layer grouped collective graph step".split()}
)


@dataclass(frozen=True)
class MachineRates:
    """Rates and latencies of one GPU and its links to the others of its node. GB/s are 10^9 bytes a second.

    Attributes:
        gemm_tflops: Of a large bf16 GEMM, every multiprocessor at work.
        link_gbps: Of one copy engine to a peer, and the most that all peers together send to one GPU.
        nccl_gbps: Bytes that a rank of four receives in NCCL's all-gather or reduce-scatter, per second.
        nccl_latency_us: What such a collective of two ranks takes with hardly any bytes.
        memory_gbps: Of device memory, reads and writes together.
        push_sm_gbps: Of one multiprocessor that stores to a peer.
        start_us: From the launch of an overlapped op to its first byte on a link: kernel, start signals, copy.
        chunk_us: What one more chunk costs: its signal, for which the copy engine stops.
        gemm_throttle: What a GEMM takes longer, of its time, at every doubling beyond ``gemm_throttled_from_us``:
            its power lowers the clock.
        gemm_throttled_from_us: From which length on.
        launch_us: Of a kernel that finds the GPU idle.
        nccl_pair_gbps: As ``nccl_gbps``, with two ranks.
        nccl_node_gbps: As ``nccl_gbps``, with eight ranks or more.
        nccl_hop_us: What one more rank adds to ``nccl_latency_us``.
        nccl_share: What a GEMM loses beside NCCL's kernels, of the shorter one's time.
        p2p_share: The same beside NCCL's send and receive, which take more multiprocessors.
        alltoall_gbps: Bytes that leave a rank in NCCL's all-to-all, per second.
        p2p_gbps: Of NCCL's send to one rank, four ranks or more.
        p2p_ring_gbps: The same while as much is received from another rank.
        p2p_pair_gbps: Of NCCL's send between two ranks.
        p2p_latency_us: Of such a message with hardly any bytes.
        message_us: Of a message by copy engine with hardly any bytes, its signals with it.
        copy_share: What a GEMM loses beside copy engines, of the shorter one's time: memory and power.
        pull_sm_gbps: Of one multiprocessor of a GEMM that reads from peers.
        gemm_push_sm_gbps: Of one multiprocessor of a GEMM that stores to peers.
        reorder_gbps: Of device memory when rows or heads change places, reads and writes together.
        attention_tflops: Of causal attention forward, counting half of the square.
        attention_backward_tflops: The same backward, at two and a half times the operations.
        memory_share: What grouped GEMMs lose to memory, of the time that their operands take there.
        p2p_large_gbps: Of NCCL's send of ``p2p_large_bytes`` and more, for which it takes more channels.
        p2p_large_bytes: From which size on.
        attention_deterministic: What the deterministic backward of the attention takes, the other being 1.
        cast_gbps: Of device memory when values are cast to FP8, or transposed in it, reads and writes together.
        fp8_speed: Of a product of FP8 operands, as a multiple of one of 16 bits: one scale a tensor, added up fast.
        fp8_split_share: Of that speed if sums are added up in parts, as the gradients' are.
        fp8_block_share: Of that speed with scales of blocks.
        fp8_block_wgrad_share: The same of weights' gradients, both of whose operands have scales of 1 x 128.
    """

    gemm_tflops: float
    link_gbps: float
    nccl_gbps: float
    nccl_latency_us: float
    memory_gbps: float
    push_sm_gbps: float
    start_us: float = 10.0
    chunk_us: float = 5.0
    gemm_throttle: float = 0.03
    gemm_throttled_from_us: float = 700.0
    launch_us: float = 4.0
    nccl_pair_gbps: float = 225.0
    nccl_node_gbps: float = 335.0
    nccl_hop_us: float = 2.0
    nccl_share: float = 0.27
    p2p_share: float = 0.45
    alltoall_gbps: float = 300.0
    p2p_gbps: float = 254.0
    p2p_ring_gbps: float = 162.0
    p2p_pair_gbps: float = 310.0
    p2p_latency_us: float = 10.0
    message_us: float = 24.0
    copy_share: float = 0.04
    pull_sm_gbps: float = 20.0
    gemm_push_sm_gbps: float = 17.0
    reorder_gbps: float = 1700.0
    attention_tflops: float = 540.0
    attention_backward_tflops: float = 470.0
    memory_share: float = 0.5
    p2p_large_gbps: float = 325.0
    p2p_large_bytes: float = 2e8
    attention_deterministic: float = 1.2
    cast_gbps: float = 3000.0
    fp8_speed: float = 1.9
    fp8_split_share: float = 0.93
    fp8_block_share: float = 0.87
    fp8_block_wgrad_share: float = 0.7

    @property
    def gemm_flop_per_us(self) -> float:
        """``gemm_tflops`` in the unit of estimates."""
        return self.gemm_tflops * 1e6


@dataclass(frozen=True)
class NetworkRates:
    """Links between nodes, as one GPU sees them.

    Attributes:
        gpu_gbps: Bytes a second that one GPU sends to other nodes at most: its share of the node's adapters.
        latency_us: Of a message with hardly any bytes.
        reached: What NCCL reaches of ``gpu_gbps`` with large messages.
    """

    gpu_gbps: float
    latency_us: float = 15.0
    reached: float = 0.9
