"""The native path around an attention of Ulysses: all-to-alls of the process group, pipelined as Transformer Engine's
attention does it, and cuBLAS products before or after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.runtime.derivatives import refuse_second_derivatives
from ditron_train.runtime.device import is_capturing
from ditron_train.runtime.groups import GroupCache, unwrapped
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.sp.layouts import HeadsLayout
from ditron_train.stream.cached_tensors import CachedTensor

Reorder = Callable[[torch.Tensor], torch.Tensor]


@cache
def _reorder_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class AllToAlls:
    """Exchanges by ``all_to_all_single``; while one part is sent, the next is packed and the last reordered. Nothing
    comes from the host, which a CUDA graph's capture would not allow.

    Args:
        group: The sequence parallel group.
        device: Where activations live.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group)
        self._device = device
        self._stream = _reorder_stream(device)
        with torch.inference_mode(False):  # training comes to them, too
            ranks = torch.arange(self.world_size, device=device)
            chunks = torch.stack((ranks, 2 * self.world_size - 1 - ranks), dim=1).flatten()
            self._chunks, self._places = CachedTensor(chunks), CachedTensor(torch.argsort(chunks))

    @property
    def chunks(self) -> torch.Tensor:
        """Chunk that is at each place after the exchange: every rank's two, rank by rank."""
        return self._chunks.get()

    def to_heads(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[s / W, b, h, d] of every part -> [s, b, h / W, d]."""
        world = self.world_size

        def pack(x: torch.Tensor) -> torch.Tensor:
            return x.view(*x.shape[:2], world, x.shape[2] // world, x.shape[3]).movedim(2, 0).contiguous()

        def reorder(x: torch.Tensor) -> torch.Tensor:
            _, s, b, h, d = x.shape
            return x.view(2 * world, s // 2, b, h, d).index_select(0, self._places.get()).view(world * s, b, h, d)

        return self._pipelined(parts, pack, reorder)

    def to_sequence(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[s, b, h / W, d] of every part -> [s / W, b, h, d]."""
        world = self.world_size

        def pack(x: torch.Tensor) -> torch.Tensor:
            s, b, h, d = x.shape
            chunks = x.view(2 * world, s // (2 * world), b, h, d).index_select(0, self.chunks)
            return chunks.view(world, s // world, b, h, d)

        def reorder(x: torch.Tensor) -> torch.Tensor:
            _, s, b, h, d = x.shape
            return x.movedim(0, 2).contiguous().view(s, b, world * h, d)

        return self._pipelined(parts, pack, reorder)

    def _pipelined(self, parts: Sequence[torch.Tensor], pack: Reorder, reorder: Reorder) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = []
        previous = None
        for part in (*parts, None):
            current = None if part is None else self._start(pack(part.contiguous()))
            if previous is not None:
                outputs.append(self._finish(*previous, reorder))
            previous = current
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return outputs

    def _start(self, packed: torch.Tensor) -> tuple[torch.Tensor, dist.Work, torch.Tensor]:
        out = torch.empty_like(packed)
        return out, dist.all_to_all_single(out, packed, group=self.group, async_op=True), packed

    def _finish(self, out: torch.Tensor, work: dist.Work, packed: torch.Tensor, reorder: Reorder) -> torch.Tensor:
        if self._stream is None:
            work.wait()
            return reorder(out)
        with torch.cuda.stream(self._stream):
            work.wait()
            result = reorder(out)
        for tensor in (out, packed, result):  # kept from reuse by the other stream while in use
            tensor.record_stream(self._stream)
        return result

    def split(self, mixed: torch.Tensor, layout: HeadsLayout) -> list[torch.Tensor]:
        """[s / W, b, columns of all heads] -> the parts, as Megatron splits its mixed QKV."""
        groups = self.world_size * layout.num_groups
        parts = torch.split(mixed.view(*mixed.shape[:2], groups, sum(layout.widths)), list(layout.widths), dim=3)
        return [part.reshape(*mixed.shape[:2], -1, head_dim) for part, head_dim in zip(parts, layout.head_dims)]

    def join(self, parts: Sequence[torch.Tensor], layout: HeadsLayout) -> torch.Tensor:
        """Inverse of ``split``."""
        groups = self.world_size * layout.num_groups
        slices = [part.view(*part.shape[:2], groups, width) for part, width in zip(parts, layout.widths)]
        return torch.cat(slices, dim=3).flatten(2)

    def one_to_heads(self, mixed: torch.Tensor, layout: HeadsLayout) -> list[torch.Tensor]:
        """``to_heads`` of what ``split`` gives, by one all-to-all of all parts, which native does not do."""
        (heads,) = self.to_heads([mixed.view(*mixed.shape[:2], self.world_size, layout.num_columns)])
        grouped = heads.view(*heads.shape[:2], layout.num_groups, sum(layout.widths))
        parts = torch.split(grouped, list(layout.widths), dim=3)
        return [part.reshape(*heads.shape[:2], -1, head_dim) for part, head_dim in zip(parts, layout.head_dims)]


_kept: GroupCache[tuple[dist.ProcessGroup, torch.device], AllToAlls] = GroupCache()


def all_to_alls_of(group: dist.ProcessGroup, device: torch.device) -> AllToAlls:
    """The all-to-alls of a group on a device, made at the first call and kept; in a CUDA graph's capture made anew,
    since what a capture makes is filled by replays."""
    group = unwrapped(group)
    if (group, device) in _kept:
        return _kept[group, device]
    made = AllToAlls(group, device)
    if not is_capturing(device):
        _kept[group, device] = made
    return made


@outside_compile
class _NativeExchange(torch.autograd.Function):
    """One direction of ``AllToAlls``, whose backward is the other."""

    @staticmethod
    def forward(ctx: Any, exchange: AllToAlls, towards_heads: bool, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.towards_heads = exchange, towards_heads
        return tuple((exchange.to_heads if towards_heads else exchange.to_sequence)(parts))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivatives("the all-to-alls of heads and sequence")
        return None, None, *(ctx.exchange.to_sequence if ctx.towards_heads else ctx.exchange.to_heads)(grads)


@outside_compile
def exchange_natively(exchange: AllToAlls, towards_heads: bool, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``to_heads`` or ``to_sequence`` of every part, differentiable."""
    return _NativeExchange.apply(exchange, towards_heads, *parts)
