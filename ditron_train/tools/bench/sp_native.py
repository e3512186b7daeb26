"""What ``bench sp`` compares with: Ulysses by cuBLAS and NCCL, pipelined as Transformer Engine's attention does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ditron_train.sp import HeadsLayout

__all__ = ["NativeUlysses"]

Reorder = Callable[[torch.Tensor], torch.Tensor]


class NativeUlysses:
    """Projections and exchanges with ``all_to_all_single``; while one part travels, the next is packed and the last
    reordered.

    Args:
        group: The sequence parallel group.
        device: Where activations live.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        chunks = [chunk for rank in range(self.world_size) for chunk in (rank, 2 * self.world_size - 1 - rank)]
        self._chunks = torch.tensor(chunks, device=device)  # chunk that lies at each place after the exchange
        self._places = torch.argsort(self._chunks)

    def to_heads(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[s / W, b, h, d] of every part -> [s, b, h / W, d]."""
        world = self.world_size

        def pack(x: torch.Tensor) -> torch.Tensor:
            return x.view(*x.shape[:2], world, x.shape[2] // world, x.shape[3]).movedim(2, 0).contiguous()

        def reorder(x: torch.Tensor) -> torch.Tensor:
            _, s, b, h, d = x.shape
            return x.view(2 * world, s // 2, b, h, d).index_select(0, self._places).view(world * s, b, h, d)

        return self._pipelined(parts, pack, reorder)

    def to_sequence(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[s, b, h / W, d] of every part -> [s / W, b, h, d]."""
        world = self.world_size

        def pack(x: torch.Tensor) -> torch.Tensor:
            s, b, h, d = x.shape
            chunks = x.view(2 * world, s // (2 * world), b, h, d).index_select(0, self._chunks)
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

    def gemm_a2a(self, x: torch.Tensor, weight: torch.Tensor, layout: HeadsLayout) -> list[torch.Tensor]:
        """GEMM, split, an all-to-all and a reorder for each part."""
        return self.to_heads(self.split(torch.matmul(x, weight.t()), layout))

    def gemm_one_a2a(self, x: torch.Tensor, weight: torch.Tensor, layout: HeadsLayout) -> list[torch.Tensor]:
        """The same with one all-to-all of all parts, which native does not do."""
        mixed = torch.matmul(x, weight.t())
        whole = mixed.view(*mixed.shape[:2], self.world_size, layout.num_columns)
        (heads,) = self.to_heads([whole])
        grouped = heads.view(*heads.shape[:2], layout.num_groups, sum(layout.widths))
        parts = torch.split(grouped, list(layout.widths), dim=3)
        return [part.reshape(*heads.shape[:2], -1, head_dim) for part, head_dim in zip(parts, layout.head_dims)]

    def a2a_gemm(self, attended: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Reorder, all-to-all, GEMM."""
        return torch.matmul(self.to_sequence([attended])[0].flatten(2), weight.t())
