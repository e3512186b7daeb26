"""The op of this subpackage: send to and receive from the two neighbours of a pipeline stage.

Timeline of ``send_recv`` on a stage, in forward (slot: a receive buffer of the next stage):

    native   compute   | forward of microbatch 0 |                         | forward of microbatch 1 |
    native   NCCL      |                         | send and receive        |
    fused    copies    |                         | 0 to the next stage |   | 1 to the next stage |
    fused    waits     |                         | ^ its slot is free  |   | ^ its slot is free  |
    fused    compute   | forward of microbatch 0 | forward of microbatch 1 |
    fused    waits     | ^ data of microbatch 0  | ^ data of microbatch 1  |
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from ditron_train.pp.context import PipelineContext
from ditron_train.pp.endpoints import Incoming, Receiver
from ditron_train.pp.messages import BACKWARD, FORWARD, Header, num_bytes_of
from ditron_train.pp.network import NetworkWork
from ditron_train.runtime.device import is_capturing
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.stream.events import StreamEvent, current_stream

_NAMES = ("send_next", "send_prev", "recv_prev", "recv_next")
_SENDS = (("send_next", FORWARD), ("send_prev", BACKWARD))
_RECEIVES = (("recv_prev", FORWARD), ("recv_next", BACKWARD))


@outside_compile
class Handle:
    """A message that was enqueued."""

    def __init__(
        self, tensor: torch.Tensor | None = None, sent: StreamEvent | None = None, device: torch.device | None = None
    ) -> None:
        self._tensor, self._sent, self._device = tensor, sent, device
        self._receiver: Receiver | None = None
        self._incoming: Incoming | None = None
        self._placeholder: torch.Tensor | None = None
        self._work: NetworkWork | None = None

    @classmethod
    def receiving(cls, receiver: Receiver, header: Header, placeholder: torch.Tensor) -> Handle:
        """Of the next message on a lane."""
        handle = cls(None)
        handle._receiver, handle._incoming, handle._placeholder = receiver, receiver.post(header), placeholder
        return handle

    @property
    def tensor(self) -> torch.Tensor | None:
        """What is received, None for a send. Before ``wait`` it has a shape and type but no memory of its own;
        ``wait`` gives it the memory that the message is in, with the contents there for what the current stream does
        from then on. Streams other than that one must be done with it when its last user lets go of it
        (``record_stream`` does nothing).
        """
        if self._tensor is None and self._incoming is not None:
            assert self._placeholder is not None
            self._tensor = torch.empty_like(self._placeholder)
            self._tensor.data = self._placeholder.expand(self._incoming.header.shape)
        return self._tensor

    def wait(self) -> None:
        """Received: the current stream waits for the arrival. Sent: it waits for the copy, so that the tensor may be
        overwritten afterwards; to free it, no wait is needed. On the CPU the call blocks instead.

        A receive blocks the host until the neighbour's host has enqueued the message, never for the device.

        Raises:
            PeerTimeoutError: The neighbour did not come in time (if only its device did not, the next op raises).
            MismatchError: The neighbour sent something else.
        """
        if self._receiver is not None:
            assert self._incoming is not None
            received = self._receiver.take(self._incoming)
            if self._tensor is None:
                self._tensor = received
            else:
                self._tensor.data = received
        if self._sent is not None:
            assert self._device is not None
            self._sent.hold(current_stream(self._device))
        if self._work is not None:
            self._work.wait()


@dataclass
class _Batch:
    """Network operations of one call on one lane."""

    send: tuple[torch.Tensor, int] | None = None
    receive: tuple[torch.Tensor, int] | None = None
    handles: list[Handle] = field(default_factory=list)


@outside_compile
def exchange(
    context: PipelineContext,
    *,
    send_next: torch.Tensor | None = None,
    send_prev: torch.Tensor | None = None,
    recv_prev: Header | None = None,
    recv_next: Header | None = None,
    variable_shapes: bool = False,
    may_lease: bool = True,
) -> dict[str, Handle]:
    """Sends tensors to the next and the previous stage and receives from them; all four are optional.

    Sends start at once, in the order next, previous; they follow what the current stream has done and do not hold it
    up (with more than two on their way, the oldest has to be out first). Receives are tensors that get their contents
    when their handle's ``wait`` is called (``endpoints`` says why not before). The tensors that are sent must not be
    written to until their handle's ``wait``; they may be freed.

    Args:
        context: Of the pipeline group; ``context.reserve`` must have made room for the messages.
        recv_prev: Shape and dtype of the message from the previous stage. A message of another shape with as many
            elements is reshaped to this one.
        recv_next: The same of the message from the next stage.
        variable_shapes: Take the shape that the sender has instead of the expected one. Blocks the host until the
            sender has enqueued the message, but never syncs the device inside a node. The same on all stages.
        may_lease: Whether what is sent may stay in the slot at the receiver; otherwise the receiver copies it into
            memory of torch's allocator, for users that work on it on other streams or resize its storage.

    Returns:
        Handles by the names of the arguments that were given.

    Raises:
        PeerTimeoutError, MismatchError: Recorded by any rank of the node since the last call.
        NotSupportedError: A message is larger than a slot and the context has no network; a CUDA graph is being
            captured.
    """
    if is_capturing(context.device):
        raise NotSupportedError("messages between pipeline stages cannot be captured in a CUDA graph")
    given = (send_next, send_prev, recv_prev, recv_next)
    context.records.record_own(
        "exchange", *(word for name, one in zip(_NAMES, given) if one is not None for word in (name, tuple(one.shape)))
    )
    context.check()
    sends = {FORWARD: send_next, BACKWARD: send_prev}
    expected = {FORWARD: recv_prev, BACKWARD: recv_next}
    handles: dict[str, Handle] = {}
    batches = {FORWARD: _Batch(), BACKWARD: _Batch()}
    for name, lane in _SENDS:
        tensor = sends[lane]
        if tensor is not None:
            handles[name] = _send(context, lane, tensor, batches[lane], may_lease)
    for name, lane in _RECEIVES:
        sent_header = (
            _exchange_network_headers(context, lane, sends[lane], expected[lane]) if variable_shapes else None
        )
        header = expected[lane]
        if header is not None:
            if variable_shapes:
                header = replace(header, shape=_shape_from_sender(context, lane, sent_header))
            handles[name] = _receive(context, lane, header, batches[lane])
    for lane, batch in batches.items():
        if batch.handles:
            assert context.network is not None
            work = context.network.batch(lane, batch.send, batch.receive)
            for handle in batch.handles:
                handle._work = work
    return handles


def _send(context: PipelineContext, lane: int, tensor: torch.Tensor, batch: _Batch, may_lease: bool) -> Handle:
    sender = context.local_senders[lane]
    num_bytes = tensor.numel() * tensor.element_size()
    if sender is not None and num_bytes <= context.slot_bytes:
        return Handle(sent=sender.send(tensor, may_lease=may_lease), device=tensor.device)
    data = tensor.detach().contiguous()
    if sender is not None:
        _require_network(context, num_bytes)
        sender.announce(Header(tuple(data.shape), data.dtype, by_network=True))
    batch.send = (data, context.routes.target(lane))
    handle = Handle()
    batch.handles.append(handle)
    return handle


def _shape_from_sender(context: PipelineContext, lane: int, sent_header: Header | None) -> tuple[int, ...]:
    receiver = context.local_receivers[lane]
    header = sent_header if receiver is None or not receiver.header_on_host else receiver.next_header()
    assert header is not None
    return header.shape


def _receive(context: PipelineContext, lane: int, header: Header, batch: _Batch) -> Handle:
    receiver = context.local_receivers[lane]
    num_bytes = num_bytes_of(header.shape, header.dtype)
    if receiver is not None and num_bytes <= context.slot_bytes:
        return Handle.receiving(receiver, header, context.placeholder(header.dtype))
    if receiver is not None:
        _require_network(context, num_bytes)
        receiver.expect(Header(header.shape, header.dtype, by_network=True))
    tensor = torch.empty(header.shape, dtype=header.dtype, device=context.device)
    handle = Handle(tensor=tensor)
    batch.receive = (tensor, context.routes.source(lane))
    batch.handles.append(handle)
    return handle


def _require_network(context: PipelineContext, num_bytes: int) -> None:
    if context.network is None:
        raise NotSupportedError(
            f"a message of {num_bytes} bytes is larger than the slots of {context.slot_bytes} bytes"
        )
    until = ""
    if context.sizes is not None:
        context.sizes.note(num_bytes)
        until = " until slots have grown"
    log_once(
        "pp large",
        f"pp: messages of more than {context.slot_bytes} bytes, the largest that the first step began with, take the "
        f"network{until}",
        name="pp",
    )


def _exchange_network_headers(
    context: PipelineContext, lane: int, tensor: torch.Tensor | None, expected: Header | None
) -> Header | None:
    """Headers to and from neighbours that no mailbox reaches."""
    send, source = None, None
    sender, receiver = context.local_senders[lane], context.local_receivers[lane]
    if tensor is not None and (sender is None or not sender.header_on_host):
        send = (Header(tuple(tensor.shape), tensor.dtype), context.routes.target(lane))
    if expected is not None and (receiver is None or not receiver.header_on_host):
        source = context.routes.source(lane)
    if send is None and source is None:
        return None
    if context.network is None:
        raise NotSupportedError("shapes that only the sender knows need a context with a network on this path")
    return context.network.exchange_headers(lane, send, source)
