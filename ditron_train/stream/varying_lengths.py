"""``VaryingLengths``: buffers for a range of rows, and launches that all lengths share, if lengths vary."""

from __future__ import annotations

from typing import Any

import torch

from ditron_train.runtime.launch import KernelLaunch
from ditron_train.runtime.sizes import top_of_range
from ditron_train.stream.recorder import OpRecorder
from ditron_train.symm.arena import SymmetricArena, SymmetricTensor
from ditron_train.symm.channel import Channel


class VaryingLengths:
    """The part of an ``OpContext`` for lengths that vary.

    Attributes:
        varies: Whether lengths vary (``vary_lengths``).
        most_rows: The most rows of all ranks, if known: buffers are made for them from the start.
    """

    arena: SymmetricArena
    recorder: OpRecorder

    def __init__(self) -> None:
        self.varies, self.most_rows = False, 0
        self.rows_channel: Channel | None = None
        self._launches: dict[tuple[Any, ...], KernelLaunch] = {}

    def vary_lengths(self, most_rows: int | None) -> None:
        """Announces that calls come with ever-new numbers of rows (all ranks call it between the same two calls).

        From then on tiles are chosen per range of rows, buffers are made for the range or for ``most_rows``, kernels
        compare a new number of rows by their start signals, without an agreement, and nothing is recorded as a
        graph."""
        self.varies, self.most_rows = True, max(self.most_rows, most_rows or 0)
        self.recorder.is_enabled = False

    def launch(self, kernel: Any, num_programs: int, constants: dict[str, Any], **options: Any) -> KernelLaunch:
        """A ``KernelLaunch`` of a plan; if lengths vary, the plans of all lengths share it."""
        if not self.varies:
            return KernelLaunch(kernel, num_programs, constants, **options)
        key = (kernel, num_programs, *constants.values(), *options.values())
        if key not in self._launches:
            self._launches[key] = KernelLaunch(kernel, num_programs, constants, **options)
            self._launches[key].is_shared = True
        return self._launches[key]

    def rows_with_room(self, rows: int) -> int:
        """The number of rows that a buffer is made for, or tiles are chosen for, if ``rows`` are needed."""
        return max(top_of_range(rows), self.most_rows) if self.varies else rows

    def roomy(
        self, name: str, num_rows: int, num_columns: int, dtype: torch.dtype, room_rows: int = 0
    ) -> SymmetricTensor:
        """A buffer of the arena, which has room for other lengths if it has to grow and lengths vary: for
        ``room_rows``, by default for as many as ``rows_with_room`` says."""
        if self.arena.capacity_bytes(name) < num_rows * num_columns * dtype.itemsize:
            self.arena.tensor(name, (max(num_rows, room_rows or self.rows_with_room(num_rows)), num_columns), dtype)
        return self.arena.tensor(name, (num_rows, num_columns), dtype)
