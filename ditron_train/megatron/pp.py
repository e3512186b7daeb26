"""Pipeline parallelism: megatron-core's communicator with the messages moved by copy engines (feature ``pp``).

A subclass of ``P2PCommunicator`` whose ``_communicate``, the one method behind all of its public ones, sends and receives
through ``ditron_train.pp``; signatures, timers and attributes are inherited. What differs for the better:

- A send does not hold up the stream that computes, with or without ``overlap_p2p_comm``: the storage of what is sent is
  kept until it is out, so freeing it right after the call (``deallocate_pipeline_outputs``) is safe. With CUDA graphs, whose
  static buffers the next replay overwrites, the stream does wait.
- No device sync: neither after a batch (``batch_p2p_sync``) nor for shapes (``variable_seq_lengths``) inside a node.

The schedules make a communicator every step; slots and flags belong to the group and live across steps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from ditron_train.megatron.routing import log_native
from ditron_train.pp import PipelineContext, exchange, get_pipeline_context
from ditron_train.pp.messages import Header, num_bytes_of
from ditron_train.runtime.errors import ArenaError, NotSupportedError

__all__ = ["DitronP2PCommunicator", "class_map", "stop"]

#: Groups whose context could not be made, and why; the same on every rank of the group.
_refused: dict[dist.ProcessGroup, str] = {}


def _device() -> torch.device:
    current = torch.cuda.current_device()
    return current if isinstance(current, torch.device) else torch.device("cuda", current)


def _uses_cuda_graphs(config: Any) -> bool:
    flags = ("enable_cuda_graph", "external_cuda_graph")
    return getattr(config, "cuda_graph_impl", "none") != "none" or any(getattr(config, flag, False) for flag in flags)


def _reason_for_native(group: dist.ProcessGroup, config: Any) -> str | None:
    """Why this group and configuration are not covered; a function of what all of its ranks see alike."""
    if group.size() < 2:
        return "one stage"
    if config.use_ring_exchange_p2p:
        return "use_ring_exchange_p2p"
    if any("full_iteration" in str(scope) for scope in getattr(config, "cuda_graph_scope", None) or ()):
        return "the whole iteration is captured in a CUDA graph"
    return _refused.get(group)


class DitronP2PCommunicator(P2PCommunicator):
    """``P2PCommunicator`` by copy engine inside a node and by a communicator of its own between nodes."""

    def __init__(self, pp_group: dist.ProcessGroup, config: Any) -> None:
        super().__init__(pp_group, config)
        self._variable_shapes = bool(config.variable_seq_lengths or getattr(config, "mtp_standalone", False))
        self._join_sends = _uses_cuda_graphs(config)
        self._first_call = True

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Any]:
        """See ``P2PCommunicator._communicate``; ``tensor_shape`` counts only as the largest where shapes vary."""
        expected = self._expected(recv_prev or recv_next, tensor_shape)
        context = self._context(expected, tensor_send_next, tensor_send_prev)
        if context is None:
            return super()._communicate(
                tensor_send_next=tensor_send_next,
                tensor_send_prev=tensor_send_prev,
                recv_prev=recv_prev,
                recv_next=recv_next,
                tensor_shape=tensor_shape,
                wait_on_reqs=wait_on_reqs,
            )
        assert wait_on_reqs or not self.config.batch_p2p_comm
        handles = exchange(
            context,
            send_next=tensor_send_next,
            send_prev=tensor_send_prev,
            recv_prev=expected if recv_prev else None,
            recv_next=expected if recv_next else None,
            variable_shapes=self._variable_shapes,
        )
        received = {
            # A leaf of its own: the handle fills the storage later, which must not count as a change of this leaf.
            name: handles[name].tensor.detach().requires_grad_(True)
            for name in ("recv_prev", "recv_next")
            if name in handles
        }
        if wait_on_reqs:
            for name, handle in handles.items():
                if name in received or self._join_sends:
                    handle.wait()
        return received.get("recv_prev"), received.get("recv_next"), None if wait_on_reqs else handles

    def _expected(self, receives: bool, tensor_shape: Any) -> Header | None:
        if not receives:
            return None
        if self.config.pipeline_dtype is None:
            raise RuntimeError("pipeline_dtype must be set for a stage that receives")
        if tensor_shape is None:
            raise RuntimeError("tensor_shape (seq_length, micro_batch_size, hidden_size) must be given for a receive")
        return Header(tuple(tensor_shape), self.config.pipeline_dtype)

    def _context(self, expected: Header | None, *sent: torch.Tensor | None) -> PipelineContext | None:
        """The group's context with room for this call's messages; None for the native path.

        Every stage sends or receives something before it depends on another stage, so the first call of each step, and
        so of the group, is a point that all ranks reach: contexts are made, and slots grow, there and only there.
        """
        reason = _reason_for_native(self.pp_group, self.config)
        first, self._first_call = self._first_call, False
        if reason is None:
            try:
                context = get_pipeline_context(self.pp_group, _device(), with_network=self._variable_shapes)
                sizes = [tensor.numel() * tensor.element_size() for tensor in sent if tensor is not None]
                if expected is not None:
                    sizes.append(num_bytes_of(expected.shape, expected.dtype))
                if first and max(sizes, default=0) > context.slot_bytes:
                    context.reserve(max(sizes))
                return context
            except (ArenaError, NotSupportedError) as error:
                if not first:
                    raise
                reason = _refused[self.pp_group] = str(error)
        log_native("pp", reason)
        return None


def class_map() -> dict[type, type]:
    """The communicator that megatron-core's schedules construct."""
    return {P2PCommunicator: DitronP2PCommunicator}


def stop() -> None:
    """Forgets what was refused, so that a later `apply` tries again."""
    _refused.clear()
