"""Tables that an attention keeps for later calls, on whichever streams these come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("megatron.core")

from ditron_train.megatron.sp import dot_product_attention, packed  # noqa: E402
from ditron_train.megatron.sp.nodes import NodesContext  # noqa: E402

CPU = torch.device("cpu")


class _OnDevice(TorchDispatchMode):
    """Names what runs on the device, here ``meta``."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(isinstance(one, torch.Tensor) and one.is_meta for one in args):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_the_table_of_several_nodes_is_whole_when_it_is_returned() -> None:
    """It is kept for streams that do not wait for each other, and the host waits for the copy that brings it."""
    context = object.__new__(NodesContext)
    context.world_size, context._num_nodes, context._per_node = 4, 2, 2
    context.node, context._tables = SimpleNamespace(device=torch.device("meta")), {}
    with _OnDevice() as mode:
        table = context._table(6, None)
    assert mode.names == [] and table.shape == (2, 12) and table.dtype == torch.int32 and table.is_contiguous()
    context.node.device, context._tables = CPU, {}
    chunks = [[0, 7, 2, 5], [1, 6, 3, 4]]  # of each rank of a node: its own, then those of its rail's other rank
    assert context._table(6, None).tolist() == [
        [3 * chunk + row for chunk in of_rank for row in range(3)] for of_rank in chunks
    ]


def test_layers_that_are_computed_again_gather_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """They get RoPE's table detached: another tensor of the same memory."""
    gathered: list[torch.Tensor] = []

    def all_gather(parts: list[torch.Tensor], local: torch.Tensor, group: Any) -> None:
        gathered.append(local.clone())
        for part in parts:
            part.copy_(local)

    monkeypatch.setattr(packed.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(packed.dist, "all_gather", all_gather)
    whole_of = packed.whole_rotary_table
    try:
        local = torch.arange(16.0).view(8, 2)
        whole = whole_of(local, None)
        assert whole_of(local.detach(), None) is whole and len(gathered) == 1
        assert torch.equal(whole_of(local[2:6].detach(), None)[:2], local[2:4]) and len(gathered) == 2
        del local
        for number in range(3):  # whatever memory it gets
            local = torch.full((8, 2), float(number))
            assert torch.equal(whole_of(local, None)[:4], local[:4]) and len(gathered) == 3 + number
        assert len(packed._TablesOf._entries) <= 2, "the others' memory is gone"
    finally:
        packed.forget_tables()


def test_kept_tables_are_asked_for_by_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the device makes behind what one stream has: RoPE's, a causal mask, the rows of packed sequences."""
    asked: list[torch.Tensor] = []

    class Kept:
        def __init__(self, tensor: torch.Tensor) -> None:
            self._tensor = tensor

        def get(self) -> torch.Tensor:
            asked.append(self._tensor)
            return self._tensor

    for module in (dot_product_attention, packed):
        monkeypatch.setattr(module, "CachedTensor", Kept)
    monkeypatch.setattr(packed.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(packed.dist, "all_gather", lambda parts, local, group: [part.copy_(local) for part in parts])
    local, starts = torch.arange(8.0).view(4, 2), torch.tensor([0, 8, 16])
    batch = SimpleNamespace(
        cu_seqlens_q=starts, cu_seqlens_kv=starts, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None
    )
    dot_product_attention._kept_causal_mask.cache_clear()
    try:
        makers = (
            lambda: packed.whole_rotary_table(local, None),
            lambda: dot_product_attention._causal_mask(5, CPU),
            lambda: packed.table_of(batch, 2, 8),
        )
        for make in makers:
            first = make()
            asked.clear()
            assert make() is first and len(asked) == 1 and asked[0] is first
        local.add_(1)  # positions of another batch, in the same buffer
        assert torch.equal(packed.whole_rotary_table(local, None)[:2], local[:2])
    finally:
        packed.forget_tables()
        dot_product_attention._kept_causal_mask.cache_clear()
        packed._last_table.clear()
