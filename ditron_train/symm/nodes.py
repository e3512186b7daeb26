"""Groups that span nodes: the ranks of a node, the rails between nodes, and who is missing if one does not come.

A *rail* is the ranks with the same local rank on their nodes, whose adapters face each other. Between nodes the
process group's backend moves data, which knows no deadline and names nobody: gloo breaks off or waits for half an
hour, NCCL waits until its watchdog ends the process. So the host waits by a deadline of its own when it has to wait
anyway; who cannot go on, whatever stopped it, answers a *roll call* in the group's store, and all who answer name the
same rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from ditron_train.runtime.errors import ArenaError, DitronError, NotSupportedError, PeerTimeoutError
from ditron_train.runtime.flight_recorder import note_error
from ditron_train.runtime.groups import GroupCache, unwrapped
from ditron_train.runtime.settings import get_settings
from ditron_train.symm.channel import check_all
from ditron_train.symm.exchange import exchange, first_missing, on_all_ranks, store_of
from ditron_train.symm.groups import make_group
from ditron_train.symm.transport import node_of_process

_ROLL_CALL_S = 2.0  # after the deadline of what was waited for: the last to notice began to wait a little later
_ASK_S = 0.5  # how often who waits asks whether the others have given up
_POLL_S, _MOST_POLL_S = 1e-4, 0.05

_Result = TypeVar("_Result")

_nodes: GroupCache[dist.ProcessGroup, list[int]] = GroupCache()
_groups: GroupCache[dist.ProcessGroup, NodeGroups] = GroupCache()


def node_of_each_rank(group: dist.ProcessGroup) -> list[int]:
    """Number of the node of each rank, by group rank (collective the first time). A torchrun agent counts as one."""
    group = unwrapped(group)
    if group not in _nodes:
        names = exchange(group, node_of_process())
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        _nodes[group] = [numbers[name] for name in names]
    return _nodes[group]


def num_nodes(group: dist.ProcessGroup) -> int:
    """Over how many nodes the ranks of ``group`` are spread (collective the first time)."""
    return max(node_of_each_rank(group)) + 1


def spans_nodes(group: dist.ProcessGroup) -> bool:
    """Whether that is more than one."""
    return num_nodes(group) > 1


def forget_nodes() -> None:
    """Asks again who is where."""
    _nodes.clear()
    _groups.clear()


def node_groups(group: dist.ProcessGroup) -> NodeGroups | None:
    """The groups of a group that spans nodes, None if it is inside one (collective the first time).

    Raises:
        NotSupportedError: Nodes with different numbers of ranks, or ranks that are not grouped by node; on every rank
            alike.
    """
    group = unwrapped(group)
    if not spans_nodes(group):
        return None
    if group not in _groups:
        _groups[group] = NodeGroups(group)
    return _groups[group]


class AnnouncedAlongRail(NamedTuple):
    """Which nodes have failed, on its way along the rails: ``start_telling``.

    Attributes:
        failure: Why this node has, if it has.
        of_nodes: uint8 [nodes]: whether each has.
        work: What ``NodeGroups.wait`` takes.
    """

    failure: Exception | None
    of_nodes: torch.Tensor
    work: Any


class NodeGroups:
    """The groups of a group that spans nodes (constructed collectively).

    Attributes:
        group: All ranks, node by node.
        node_group: Those of this rank's node.
        rail: Those with this rank's local rank on their nodes.
        num_nodes, local_size: Nodes, and ranks of each.
        node, local: This rank's node, and its place there.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        nodes = node_of_each_rank(group)
        self.num_nodes = max(nodes) + 1
        self.local_size = len(nodes) // self.num_nodes
        if nodes != [rank // self.local_size for rank in range(len(nodes))] or len(nodes) % self.num_nodes:
            raise NotSupportedError(
                f"the group's ranks are not equal blocks of neighbours on its nodes: they are on nodes {nodes}"
            )
        self.group, self._rank = group, dist.get_rank(group)
        self.node, self.local = divmod(self._rank, self.local_size)
        first = self.node * self.local_size
        self.node_group = make_group(group, list(range(first, first + self.local_size)), "ditron_node")
        self.rail = make_group(group, list(range(self.local, len(nodes), self.local_size)), "ditron_rail")
        self._roll_call = _RollCall(group, self.local_size)
        self._has_streams = "nccl" in str(dist.get_backend(group))
        self._error: PeerTimeoutError | None = None

    def exchange_along_rail(
        self,
        rows: torch.Tensor,
        out_splits: list[int] | None = None,
        in_splits: list[int] | None = None,
        *,
        for_host: bool = False,
    ) -> torch.Tensor:
        """Rows from every node of the rail, in the order of nodes; equal shares without splits.

        Args:
            rows: [rows, ...], by the node that they go to.
            out_splits, in_splits: Rows from, and for, each node.
            for_host: The host reads them next, so it waits for them by the deadline.

        Raises:
            PeerTimeoutError: A rank did not arrive (CPU: here; GPU: at the next exchange that the host waits for).
        """
        with self.naming("an exchange between nodes"):
            out, work = self.start_along_rail(rows, out_splits, in_splits)
            self.wait(work, for_host=for_host)
        return out

    def start_along_rail(
        self, rows: torch.Tensor, out_splits: list[int] | None = None, in_splits: list[int] | None = None
    ) -> tuple[torch.Tensor, Any]:
        """The same on its way: where the rows will be, and what ``wait`` takes."""
        out = rows.new_empty(rows.shape[0] if out_splits is None else sum(out_splits), *rows.shape[1:])
        work = dist.all_to_all_single(out, rows.contiguous(), out_splits, in_splits, group=self.rail, async_op=True)
        return out, work

    def on_every_node(self, what: str, step: Callable[[], _Result], device: torch.device) -> _Result:
        """``step()``, which the ranks of each node do among themselves, behind which every node knows that all have
        done it (collective; inside ``naming``).

        Args:
            what: The step in words.
            step: If it fails it raises ``ArenaError`` or ``NotSupportedError`` on every rank of the node.
            device: Where the nodes' words travel.

        Raises:
            ArenaError: It failed on a node; the same on every rank.
        """
        failure, result = None, None
        try:
            result = step()
        except (ArenaError, NotSupportedError) as error:
            failure = error
        self.finish_telling(what, self.start_telling(failure, device))
        return cast(_Result, result)

    def start_telling(self, failure: Exception | None, device: torch.device) -> AnnouncedAlongRail:
        """Tells the other nodes whether this one has failed, which each of its ranks knows: by one byte along each
        rail, since a node without a rank that failed would wait for rows of one that has turned to native."""
        failed = torch.full((self.num_nodes,), failure is not None, dtype=torch.uint8, device=device)
        return AnnouncedAlongRail(failure, *self.start_along_rail(failed))

    def finish_telling(self, what: str, announced: AnnouncedAlongRail) -> None:
        """Waits for the other nodes' words; only if one has failed the reasons follow, through the store.

        Raises:
            ArenaError: A node has failed at ``what``; the same on every rank.
        """
        self.wait(announced.work, for_host=True)

        def tell() -> None:
            if announced.failure is not None:
                raise announced.failure

        if bool(announced.of_nodes.any()):
            on_all_ranks(self.group, what, tell, (ArenaError, NotSupportedError))

    def wait(self, work: Any, *, for_host: bool = False) -> None:
        """Waits for an operation of ``node_group`` or ``rail``: the current stream, or by the deadline the host."""
        if for_host or not self._has_streams:
            deadline_s, pause_s, asked_s = time.monotonic() + get_settings().timeout_s, _POLL_S, time.monotonic()
            while not work.is_completed():
                check_all(self.node_group.group_name)  # of kernels that have waited a deadline before this one
                now_s = time.monotonic()
                if now_s > asked_s + _ASK_S:  # others may have given up, and will send nothing more
                    asked_s, deadline_s = now_s, 0.0 if self._roll_call.has_begun() else deadline_s
                if now_s > deadline_s:
                    raise _Late("the deadline has passed")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MOST_POLL_S)
        work.wait()

    @contextmanager
    def naming(self, op: str) -> Iterator[None]:
        """Names the rank that is missing if what is done inside cannot go on without it.

        Args:
            op: What is done, in words.

        Raises:
            PeerTimeoutError: The same rank on every rank of the group that answers.
            RuntimeError: Whatever a backend raises that says nothing of a lost peer, as it is.
        """
        if self._error is not None:
            raise self._error
        begun_s = time.monotonic()
        try:
            yield
        except PeerTimeoutError as error:
            if error is self._error:
                raise
            self._raise(op, error, begun_s)
        except DitronError:
            raise
        except RuntimeError as error:
            if not (isinstance(error, _Late) or _is_lost(error)):
                raise
            self._raise(op, error, begun_s)

    def _raise(self, op: str, cause: Exception, begun_s: float) -> None:
        timeout_s = get_settings().timeout_s
        self._error = PeerTimeoutError(
            op=op,
            group=self.group.group_name,
            waiting_rank=self._rank,
            missing_rank=self._roll_call.missing_rank(max(begun_s + timeout_s, time.monotonic()) + _ROLL_CALL_S),
            chunk=-1,
            expected_epoch=1,
            seen_epoch=0,
            timeout_s=timeout_s,
        )
        note_error(self._error, self.group.group_name)
        raise self._error from cause


class _Late(RuntimeError):
    """The deadline has passed."""


#: What gloo and NCCL say of a peer or a connection that is gone, or that did not come in time.
_LOST = (
    "closed by peer", "connection closed", "reset by peer", "broken pipe", "connection refused", "no route to host",
    "network is unreachable", "pair closure", "connect timeout", "read timeout", "timed out waiting",
    "connection timed out", "operation timed out", "collective operation timeout", "ncclremoteerror",
    "remote process exited", "communicator was aborted",
)  # fmt: skip


def _is_lost(error: RuntimeError) -> bool:
    """Whether a backend says that a connection, or its peer, is gone or too late.

    NCCL raises ``DistBackendError`` for everything: a wrong call, no memory and a failed GPU say nothing of a peer.
    Gloo raises plain ``RuntimeError`` that names the place in its sources.
    """
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    text = str(error).lower()
    is_of_backend = isinstance(error, dist.DistBackendError) or (type(error) is RuntimeError and "gloo" in text)
    return is_of_backend and any(words in text for words in _LOST)


class _RollCall:
    """Who of a group still answers; once in the group's life, since nothing goes on without the missing rank."""

    def __init__(self, group: dist.ProcessGroup, local_size: int) -> None:
        self._rank, self._world_size, self._local_size = dist.get_rank(group), dist.get_world_size(group), local_size
        self._store = dist.PrefixStore("roll call", store_of(group))

    def has_begun(self) -> bool:
        """Whether a rank has given up: who still waits answers now, however late it began to wait."""
        return self._holds("begun")

    def _holds(self, key: str) -> bool:
        try:
            return self._store.check([key])
        except RuntimeError:  # the store is gone: its host is
            return True

    def missing_rank(self, deadline_s: float) -> int:
        """Answers; the first rank that does not, the same for all that do. If the store is gone it is rank 0, which
        holds it or whose agent does; if all answer, the exchange was too slow for the deadline, and it is a rank of
        the next node."""
        pause_s = _POLL_S
        try:
            self._store.set("begun", "1")
            self._store.set(f"here/{self._rank}", "1")
            self._store.add("number", 1)
            while not self._holds("missing"):
                if self._store.add("number", 0) >= self._world_size or time.monotonic() > deadline_s:
                    found = first_missing(self._store, [f"here/{peer}" for peer in range(self._world_size)])
                    if found is None:
                        found = (self._rank + self._local_size) % self._world_size
                    self._store.compare_set("missing", "", str(found))
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MOST_POLL_S)
            return int(self._store.get("missing"))
        except RuntimeError:
            return 0
