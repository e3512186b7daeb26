"""Layer-wise sharding: every matrix belongs to one rank, which alone steps it and then sends it to all.

Native sharding deals matrices out by size, gathers all of them at the end into flat buffers as large as the model, and
waits. Here they are dealt out by the cost of their step, and travel one by one, straight into the parameters, while
the next ones are being computed.

Timeline of ``muon`` on any rank of the data parallel group. The fused path computes half of each symmetric product:

    native   compute   | matrix 0           | matrix 1           | matrix 2           |
    native   NCCL      |                                                              | gather of all matrices |
    fused    compute   | matrix 0     | matrix 1     | matrix 2     |
    fused    NCCL      |              | round 0 |    | round 1 |    | round 2 |

Every rank walks the same rounds: in round ``i`` each rank sends the ``i``-th of its matrices, in the order of ranks,
in one launch, so that links carry both directions at once. The round is enqueued once the own ``i``-th matrix is, so
ranks whose matrices cost about the same never wait long, and the order of collectives is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ditron_train.runtime.flight_recorder import records_of
from ditron_train.runtime.groups import broadcast_together
from ditron_train.runtime.logs import get_logger


def newton_schulz_cost(num_rows: int, num_columns: int, num_steps: int = 5) -> float:
    """Cost of a step of one matrix in units of its multiply-adds: the products and, for small ones, the passes over
    it.

    Two symmetric products of half the work and one whole: m * m * (1.5 n + 0.5 m) a step, with m <= n. A pass over
    fp32 data costs about as much as 150 multiply-adds an element on the devices of interest, and there are about 10.
    """
    m, n = min(num_rows, num_columns), max(num_rows, num_columns)
    return num_steps * m * m * (1.5 * n + 0.5 * m) + 1500.0 * m * n


def shard_by_cost(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Deals items out to ranks: the costliest first, each to the rank with the least so far (ties: the lowest rank).

    Returns:
        Indices of each rank's items, costliest first. The same on every rank, since it depends on the arguments alone.
        No rank's load exceeds the mean by more than the costliest item.

    Raises:
        ValueError: No ranks.
    """
    if num_ranks < 1:
        raise ValueError(f"{num_ranks} ranks")
    shards: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(num_ranks), key=lambda r: (loads[r], r))
        shards[rank].append(index)
        loads[rank] += costs[index]
    return shards


def shard_matrices(matrices: Sequence[torch.Tensor], num_steps: int, group: dist.ProcessGroup) -> list[list[int]]:
    """Indices of the matrices that each rank of ``group`` owns, costliest first."""
    costs = [newton_schulz_cost(matrix.shape[0], matrix.shape[1], num_steps) for matrix in matrices]
    return shard_by_cost(costs, dist.get_world_size(group))


def warn_of_foreign_momentum(owned: Sequence[int], has_momentum: Sequence[int]) -> None:
    """Logs, on this rank, that a state was loaded which another rank saved, or one of another number of ranks: it has
    momentum of matrices that are not owned, and none of some that are. (Without a gradient a matrix never has any.)
    """
    bare = set(owned) - set(has_momentum)
    if bare and set(has_momentum) - set(owned):
        get_logger().warning(
            f"muon: {len(bare)} of the {len(owned)} matrices of rank {dist.get_rank()} begin without momentum: the "
            "state that it loads is another rank's, or of another number of ranks"
        )


class LayerShards:
    """The rounds of one step: which rank sends what when.

    Args:
        tensors: What to send, the same order of shapes on every rank, contiguous. Of parameters the data that they
            have when their round comes: an optimizer that is offloaded and brought back gives them other ones.
        shards: Indices of each rank's tensors, ``shard_by_cost``.
        group: Their process group.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], shards: Sequence[Sequence[int]], group: dist.ProcessGroup
    ) -> None:
        assert len(shards) == dist.get_world_size(group)
        self._tensors = list(tensors)
        self._shards = [list(shard) for shard in shards]
        self._group = group
        self.own = self._shards[dist.get_rank(group)]
        self.num_rounds = max((len(shard) for shard in self._shards), default=0)
        self._next_round = 0
        self._pending: list[dist.Work] = []
        self._records = records_of(group.group_name, dist.get_process_group_ranks(group))

    def send_round(self) -> None:
        """Enqueues the next round: the own tensor of this round must be final on the current stream."""
        assert self._next_round < self.num_rounds
        self._records.record("muon.send_round", self._next_round)  # torch's collectives name nobody who is missing
        number = self._next_round
        turns = [(shard[number], rank) for rank, shard in enumerate(self._shards) if number < len(shard)]
        sent = [(self._tensors[index].data, rank) for index, rank in turns]
        self._pending += broadcast_together(sent, self._group)
        self._next_round += 1

    def run(self, step_one: Callable[[int], None]) -> None:
        """Steps the own tensors (``step_one(index)``) and sends each while the next is computed; then waits for all.

        An error of ``step_one`` leaves at once: what was not stepped is not sent. Peers wait for it until the process
        ends or the group's own deadline passes, as natively, rather than go on with old values.
        """
        self._next_round = 0
        for index in self.own:
            step_one(index)
            self.send_round()
        self.finish()

    def send_remaining(self) -> None:
        """Enqueues the rounds that are left: what a rank with fewer matrices must still receive."""
        while self._next_round < self.num_rounds:
            self.send_round()

    def finish(self) -> None:
        """Enqueues the rounds that are left and makes the current stream wait for everything sent."""
        self.send_remaining()
        for work in self._pending:
            work.wait()
        self._pending.clear()
        self._next_round = 0
