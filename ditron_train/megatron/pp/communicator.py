"""Pipeline parallelism: megatron-core's communicator with the messages moved by copy engines (feature ``pp``).

A subclass of ``P2PCommunicator`` whose ``_communicate``, which all of its public methods call, sends and
receives through ``ditron_train.pp``; signatures, timers and attributes are inherited. What differs for the better:

- A send does not hold up the stream that computes, with or without ``overlap_p2p_comm``: the storage of what is sent
  is kept until it is out, so freeing it right after the call (``deallocate_pipeline_outputs``) is safe. With CUDA
  graphs, those of torch.compile too, whose static buffers the next replay overwrites, the stream does wait.
- What is received is used where the copy engine put it, without a copy of its own (not with CUDA graphs, offloading,
  or expert-parallel overlap, which resize it or use it on other streams).
- No device sync: neither after a batch (``batch_p2p_sync``) nor for shapes (``variable_seq_lengths``) inside a node.
  Messages larger than those that their step began with, which go natively, have native's.

The schedules make a communicator every step; slots (receive buffers) and flags belong to the group and live across
steps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from ditron_train.megatron.compat.config import captures_iteration
from ditron_train.megatron.shared.devices import current_device
from ditron_train.megatron.shared.in_place import EqualsBaseClass
from ditron_train.policy import gate, log_native
from ditron_train.policy.gate import FAILURES, reason_all_failed
from ditron_train.policy.self_check import self_check
from ditron_train.pp import PipelineContext, exchange, get_pipeline_context
from ditron_train.pp.channel import turns_of_stages
from ditron_train.pp.messages import Header, num_bytes_of
from ditron_train.pp.spec import MESSAGE, MessageCall
from ditron_train.runtime.device import replays_compiled_graphs
from ditron_train.runtime.errors import ArenaError, NotSupportedError
from ditron_train.runtime.groups import GroupCache
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.runtime.settings import get_settings

#: Groups whose context could not be made, and why; the same on every rank of the group.
_refused: GroupCache[dist.ProcessGroup, str] = GroupCache()


def _uses_cuda_graphs(config: Any) -> bool:
    flags = ("enable_cuda_graph", "external_cuda_graph")
    return getattr(config, "cuda_graph_impl", "none") != "none" or any(getattr(config, flag, False) for flag in flags)


def _uses_other_streams(config: Any) -> bool:
    """Whether received activations are used on streams that their allocator has to be told of, or resized."""
    flags = ("overlap_moe_expert_parallel_comm", "fine_grained_activation_offloading", "cpu_offloading")
    return any(getattr(config, flag, False) for flag in flags)


def unsupported_reason_group(group: dist.ProcessGroup, config: Any) -> str | None:
    """Why this group and configuration are not covered; a function of what all of its ranks see alike."""
    if group.size() < 2:
        return "one stage"
    if config.use_ring_exchange_p2p:
        return "use_ring_exchange_p2p"
    if captures_iteration(config):
        return "the whole iteration is captured in a CUDA graph"
    return _refused.get(group)


@outside_compile
class DitronP2PCommunicator(P2PCommunicator, metaclass=EqualsBaseClass, native=P2PCommunicator):
    """``P2PCommunicator`` by the paths of ``pp.paths``: by default copy engines inside a node, a communicator of its
    own beyond."""

    def __init__(self, pp_group: dist.ProcessGroup, config: Any) -> None:
        super().__init__(pp_group, config)
        self._variable_shapes = bool(config.variable_seq_lengths or getattr(config, "mtp_standalone", False))
        self._join_sends = _uses_cuda_graphs(config)
        self._may_lease = not (self._join_sends or _uses_other_streams(config))
        self._turns = turns_of_stages(self.pp_group.size())  # of hosts when stages meet for the first time
        self._first_call = True
        self._reason: str | None = None
        self._open = [0, 0]  # activations to the next and from the previous stage whose gradients are still to go back
        self._step_is_over = False
        self._with_gradients = False  # at the last call

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
        """See ``P2PCommunicator._communicate``; if shapes vary ``tensor_shape`` counts only as the largest, which
        ``()`` does not say."""
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
        if torch.is_grad_enabled():  # none go back in an evaluation
            self._open[0] += (tensor_send_next is not None) - recv_next
            self._open[1] += recv_prev - (tensor_send_prev is not None)
            self._step_is_over = self._open == [0, 0]
        given: dict[str, Any] = {
            "send_next": tensor_send_next,
            "send_prev": tensor_send_prev,
            "recv_prev": expected if recv_prev else None,
            "recv_next": expected if recv_next else None,
        }
        large = {name: one for name, one in given.items() if one is not None and not _fits(context, one)}
        fitting = {name: one for name, one in given.items() if name not in large}
        handles = exchange(context, **fitting, variable_shapes=self._variable_shapes, may_lease=self._may_lease)
        names: list[str] = [name for name in ("recv_prev", "recv_next") if name in handles]
        received: dict[str, torch.Tensor] = {}
        for name in names:
            tensor = handles[name].tensor
            assert tensor is not None
            received[name] = tensor.requires_grad_(True)
        requests: dict[str, Any] = {}
        if large:  # behind the start of the fused path, since it may block
            of_large, requests = self._communicate_large(large, tensor_shape, wait_on_reqs)
            received.update(of_large)
        if wait_on_reqs:
            join_sends = self._join_sends or replays_compiled_graphs(context.device)
            for name, handle in handles.items():
                if name in names or join_sends:
                    handle.wait()
        return received.get("recv_prev"), received.get("recv_next"), None if wait_on_reqs else {**handles, **requests}

    def _communicate_large(
        self, large: dict[str, Any], tensor_shape: Any, wait_on_reqs: bool
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Natively what is larger than a slot: what is received, and the requests if they are not waited for, by name.

        Message by message, not call by call: at the other end a message may be sent together with others, or alone.
        """
        log_native("pp", "messages that are larger than the first ones of their step")
        previous, following, requests = super()._communicate(
            tensor_send_next=large.get("send_next"),
            tensor_send_prev=large.get("send_prev"),
            recv_prev="recv_prev" in large,
            recv_next="recv_next" in large,
            tensor_shape=tensor_shape,
            wait_on_reqs=wait_on_reqs,
        )
        received = {"recv_prev": previous, "recv_next": following}
        return {name: received[name] for name in received if name in large}, requests or {}

    def _bytes_with_room(self, message: torch.Tensor | Header) -> int:
        """Of a message; if lengths vary, of one with as many tokens as ``DITRON_ROWS`` says."""
        num_bytes, rows, most_rows = _num_bytes(message), math.prod(message.shape[:-1]), get_settings().rows
        if not self._variable_shapes or most_rows is None or not rows:
            return num_bytes
        shards = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        return max(num_bytes, num_bytes // rows * -(-most_rows // shards))

    def _num_leases(self) -> int:
        """As many received activations as the first stage of the schedule holds, one in transit, and one that the
        model holds on to: what native allocates, too. None if all are copied out into memory of torch's.
        """
        if not self._may_lease:
            return 0
        stages, chunks = self.pp_group.size(), self.config.virtual_pipeline_model_parallel_size or 1
        if chunks == 1:
            return stages + 2
        group = getattr(self.config, "microbatch_group_size_per_vp_stage", None) or stages
        return 2 * (stages - 1) + (chunks - 1) * group + 1 + 2

    def _expected(self, receives: bool, tensor_shape: Any) -> Header | None:
        if not receives:
            return None
        if self.config.pipeline_dtype is None:
            raise RuntimeError("pipeline_dtype must be set for a stage that receives")
        if tensor_shape is None:
            raise RuntimeError("tensor_shape (seq_length, micro_batch_size, hidden_size) must be given for a receive")
        return Header(tuple(tensor_shape), self.config.pipeline_dtype)

    def _made_context(self) -> PipelineContext:
        """The group's context (collective at its first call, which stages reach one after another: each when its
        whole first forward is compiled).

        Raises:
            ArenaError, NotSupportedError: It cannot be made, on every rank alike, whether that was foreseen or not.
        """
        try:
            return get_pipeline_context(
                self.pp_group,
                current_device(),
                with_network=self._variable_shapes,
                num_leases=self._num_leases(),
                turns=self._turns,
            )
        except FAILURES as error:
            raise NotSupportedError(reason_all_failed("pp", error, self.pp_group, self._turns)) from error

    def _failed_self_check(self) -> str | None:
        """What comes before the context, and whether the gate is asked or not (collective as ``_made_context``)."""
        return self_check(self.pp_group, current_device(), self._turns)

    def _begins_step(self) -> bool:
        """Whether a training step is known to be over before this call, or training and evaluation to alternate: of
        two evaluations in a row nothing tells where the first ends."""
        begins = self._step_is_over or self._with_gradients != torch.is_grad_enabled()
        self._step_is_over, self._with_gradients = False, torch.is_grad_enabled()
        return begins

    def _context(self, expected: Header | None, *sent: torch.Tensor | None) -> PipelineContext | None:
        """The group's context with room for this call's messages; None for the native path.

        Every stage sends or receives something before it depends on another stage, so the first call of each step, and
        so of the group, is a point that all ranks reach: contexts are made, slots grow, and new sizes are decided on
        there. What that call decides holds for the step, or as long as the communicator is kept: other calls may wait
        for each other.
        """
        first, self._first_call = self._first_call, False
        is_next_step = self._begins_step()
        if not first:
            if self._reason is not None:
                return None
            context = self._made_context()
            if is_next_step and context.channel is not None:
                context.channel.begin_step(context.world_size, is_new=False)
            if context.slot_bytes:  # else it was closed and made anew, on all ranks
                return context
        messages = [message for message in (expected, *sent) if message is not None]
        num_bytes = max((self._bytes_with_room(message) for message in messages), default=0)
        self._reason = unsupported_reason_group(self.pp_group, self.config) or self._failed_self_check()
        if self._reason is None:
            try:
                context = self._made_context()
                self._reason = _agree_on_size(context, num_bytes, self._variable_shapes)
                if self._reason is None:
                    return context
            except (ArenaError, NotSupportedError) as error:
                self._reason = _refused[self.pp_group] = str(error)
        log_native("pp", self._reason)
        return None


def _num_bytes(message: torch.Tensor | Header) -> int:
    return num_bytes_of(tuple(message.shape), message.dtype)


def _fits(context: PipelineContext, message: torch.Tensor | Header) -> bool:
    """Whether ``exchange`` takes a message, which both of its ends find alike."""
    return context.network is not None or _num_bytes(message) <= context.slot_bytes


def _agree_on_size(context: PipelineContext, num_bytes: int, variable_shapes: bool) -> str | None:
    """Makes room for messages of ``num_bytes``; why they go natively, or None (collective if the size is new).

    Messages of shapes that vary are not compared: there native's device sync for each shape is what the fused path
    does without. Stages know different sizes of them (since 0.17 none but the first of the first stage, without
    interleaving), so slots begin with those of the first step; what is larger takes the network until they have grown.
    """
    call = MessageCall(context, num_bytes)
    is_new = not context.slot_bytes if variable_shapes else not gate.knows(MESSAGE, call)
    if context.channel is not None:
        context.channel.begin_step(context.world_size, is_new)
    if variable_shapes:
        if is_new:
            context.reserve(num_bytes)
        context.grow_to_last_sizes()
        return None
    if num_bytes > context.slot_bytes or is_new:
        call = call._replace(is_alike=context.reserve(num_bytes))
    return gate.answer_for(MESSAGE, call).reason


def class_map() -> dict[type, type]:
    """The communicator that megatron-core's schedules construct."""
    return {P2PCommunicator: DitronP2PCommunicator}


def stop() -> None:
    """Forgets what was refused, so that a later `apply` tries again; what was decided by measuring is kept."""
    _refused.clear()
