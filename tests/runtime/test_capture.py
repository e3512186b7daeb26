"""What replays of a CUDA graph would find: addresses of things that are kept, and nothing that the host does while it
is captured.

Here on the CPU, where the capture is pretended; replays themselves: tests/gpu.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ditron_train.runtime.errors import NotSupportedError

CPU = torch.device("cpu")


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch):
    """Pretends that a graph is being captured, for what a module asks."""

    def pretend(module: object) -> None:
        monkeypatch.setattr(module, "is_capturing", lambda device: True)

    return pretend


def test_tables_that_launches_read_are_kept_for_good():
    from ditron_train.gemm.configs import GemmConfig
    from ditron_train.optim.products import _triangle

    config = GemmConfig(32, 32, 32, 4, 1, group_m=3)
    first = _triangle(64, config, 2, CPU)[0]
    for number in range(300):
        _triangle(32, config, 3 + number, CPU)
    assert _triangle(64, config, 2, CPU)[0] is first


def test_tables_of_experts_are_kept_where_a_capture_has_met_them_else_the_last(captured, monkeypatch):
    from ditron_train.stream import cached_tensors as module

    monkeypatch.setattr(module, "_MOST_TABLES", 4)
    tables = module.DeviceTables(torch.int32)
    known, dropped, last = (tables((0, number), CPU) for number in range(3))
    with monkeypatch.context() as during:
        during.setattr(module, "is_capturing", lambda device: True)
        assert tables((0, 0), CPU) is known
        new = tables((0, 9), CPU)
    for number in range(20, 40):
        assert tables((0, 2), CPU) is last and tables((0, number), CPU).tolist() == [0, number]
    assert len(tables._recent) == 4
    assert tables((0, 0), CPU) is known and tables((0, 9), CPU) is new and tables((0, 1), CPU) is not dropped


def test_a_captured_op_of_experts_keeps_the_buffers_that_grow_later(captured):
    from ditron_train.ep import context as launching

    channel = SimpleNamespace(
        op_name="ep", signature=lambda values: torch.zeros(1), pointers=lambda signature: signature
    )
    shape = SimpleNamespace(num_experts=4, topk=2)
    arena = SimpleNamespace(graph_captured=False)
    context = SimpleNamespace(device=CPU, arena=arena, shape=shape, only_compiles=True, record=lambda *words: None)
    launching.pointers(context, channel, 16, torch.bfloat16, launching.Kind.DISPATCH)
    assert not arena.graph_captured
    captured(launching)
    launching.pointers(context, channel, 16, torch.bfloat16, launching.Kind.DISPATCH)
    assert arena.graph_captured


def test_a_new_signature_is_refused_and_a_known_one_is_not(captured):
    from ditron_train.symm import channel as module

    channel = SimpleNamespace(
        op_name="an op", signature_fields=("rows", "dtype"), arena=SimpleNamespace(device=CPU), signatures={}
    )
    known = module.Channel.signature(channel, (8, torch.bfloat16))
    captured(module)
    assert module.Channel.signature(channel, (8, torch.bfloat16)) is known
    with pytest.raises(NotSupportedError, match="an op: run this shape once before a CUDA graph is captured"):
        module.Channel.signature(channel, (16, torch.bfloat16))
    assert list(channel.signatures) == [(8, torch.bfloat16)]


def test_messages_between_stages_are_refused(captured):
    from ditron_train.pp import ops

    captured(ops)
    with pytest.raises(NotSupportedError, match="cannot be captured"):
        ops.exchange(SimpleNamespace(device=CPU), send_next=torch.zeros(1))


def test_what_layers_keep_for_each_other_is_made_anew(captured):
    pytest.importorskip("megatron.core")
    from ditron_train.megatron.sp import dot_product_attention as sp
    from ditron_train.megatron.sp import packed as sp_packed

    starts = torch.tensor([0, 8, 16])
    packed = SimpleNamespace(
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        qkv_format="thd",
    )
    mask, table = sp._causal_mask(4, CPU), sp_packed.table_of(packed, 2, 8)
    assert sp._causal_mask(4, CPU) is mask and sp_packed.table_of(packed, 2, 8) is table
    captured(sp)
    captured(sp_packed)
    for kept, made in ((mask, sp._causal_mask(4, CPU)), (table, sp_packed.table_of(packed, 2, 8))):
        assert made is not kept and torch.equal(made, kept)


def test_tables_of_positions_that_a_graph_fills_are_its_own(captured, monkeypatch):
    pytest.importorskip("megatron.core")
    from ditron_train.megatron.sp import packed as sp

    monkeypatch.setattr(sp.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(sp.dist, "all_gather", lambda parts, local, group: [part.copy_(local) for part in parts])
    kept, other = torch.arange(8.0).view(4, 2), torch.arange(8.0, 16.0).view(4, 2)
    whole = sp.whole_rotary_table(kept, None)
    captured(sp)
    assert sp.whole_rotary_table(kept, None) is whole, "it was there before the capture"
    made = sp.whole_rotary_table(other, None)
    assert sp.whole_rotary_table(other, None) is not made and torch.equal(made[:2], other[:2])
    sp.forget_tables()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_native_exchanges_take_nothing_from_the_host(monkeypatch, world_size):
    from ditron_train.sp import native

    monkeypatch.setattr(native.dist, "get_world_size", lambda group: world_size)
    expected = [chunk for rank in range(world_size) for chunk in (rank, 2 * world_size - 1 - rank)]

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a copy from the host")

    monkeypatch.setattr(torch, "tensor", refuse)
    assert native.AllToAlls(None, CPU).chunks.tolist() == expected


def test_native_exchanges_make_their_tables_once_but_for_a_graph(captured, monkeypatch):
    from ditron_train.sp import native

    monkeypatch.setattr(native.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(native, "_kept", {})
    with torch.inference_mode():  # an evaluation may come first
        kept = native.all_to_alls_of(None, CPU)
    assert native.all_to_alls_of(None, CPU) is kept and not kept.chunks.is_inference()
    monkeypatch.setattr(native, "_kept", {})
    captured(native)
    made = native.all_to_alls_of(None, CPU)
    assert native.all_to_alls_of(None, CPU) is not made and torch.equal(made.chunks, kept.chunks)
    monkeypatch.setattr(native, "_kept", {(None, CPU): kept})
    assert native.all_to_alls_of(None, CPU) is kept, "it was there before the capture"
