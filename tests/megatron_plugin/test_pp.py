"""When the stream that computes waits for what it sends."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core")


@pytest.mark.parametrize("graphs", [False, True])
def test_sends_are_waited_for_where_compiled_code_replays_graphs(monkeypatch, graphs):
    """A later replay writes into what was sent."""
    from ditron_train.megatron.pp import communicator as pp

    def get_manager(device_index: int, create_if_none_exists: bool = True) -> object | None:
        assert device_index == 0 and not create_if_none_exists
        return object() if graphs else None

    waited = []
    handles = {name: SimpleNamespace(tensor=torch.zeros(2), wait=lambda name=name: waited.append(name))
               for name in ("send_next", "recv_prev")}  # fmt: skip
    communicator = pp.DitronP2PCommunicator.__new__(pp.DitronP2PCommunicator)
    communicator.config = SimpleNamespace(pipeline_dtype=torch.float32, batch_p2p_comm=False)
    communicator._variable_shapes, communicator._join_sends, communicator._may_lease = False, False, True
    communicator._open = [0, 0]
    communicator._context = lambda *arguments: SimpleNamespace(
        device=torch.device("cuda", 0), network=None, slot_bytes=8
    )
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", SimpleNamespace(get_manager=get_manager))
    monkeypatch.setattr(pp, "exchange", lambda context, **arguments: handles)
    communicator._communicate(
        tensor_send_next=torch.zeros(2), tensor_send_prev=None, recv_prev=True, recv_next=False, tensor_shape=(2,)
    )
    assert sorted(waited) == (["recv_prev", "send_next"] if graphs else ["recv_prev"])
