"""How a gather moves its rows: by SM pushes or by copy engines, and with how many programs or chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["GatherPlan", "choose_gather_plan"]


@dataclass(frozen=True)
class GatherPlan:
    """One way to move the rows of an AG-GEMM.

    Attributes:
        mode: ``push`` (SMs beside the GEMM) or ``copy`` (copy engines, no SM).
        push_programs: SMs that push; the GEMM leaves them free.
        num_chunks: Chunks of a shard that copy engines signal separately.
    """

    mode: Literal["push", "copy"]
    push_programs: int = 8
    num_chunks: int = 1


def choose_gather_plan(target: str) -> GatherPlan:
    """Picks the plan of an AG-GEMM.

    Copy engines leave all SMs but one to the GEMM. On 4 H200s, AG-GEMM against NCCL + cuBLAS, M 8192:

        N/4 x K         SM push, 16 SMs   copy engine, 1 / 2 / 4 chunks   limit
        2752 x 4096     1.17x             1.43x / 1.39x / 1.31x           1.75x
        3584 x 4096     1.13x             1.37x / 1.33x / 1.27x           1.60x
        7168 x 8192     1.10x             1.23x / 1.10x / 1.08x           1.21x
        13312 x 16384   1.01x             1.08x / 1.07x / 1.03x           1.11x

    Chunks start the first tiles of a peer earlier, but own rows keep the GEMM busy until then, and every chunk costs two
    driver calls a peer and a gap in the pipelined loop of tiles.
    """
    if target == "interpreter":
        return GatherPlan("push", push_programs=1)
    return GatherPlan("copy", num_chunks=1)
