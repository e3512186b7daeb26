"""Gathered inputs of column layers that stay where they arrived until backward has read them
(``DITRON_KEEP_GATHERED``).

A rank that keeps an input does not gather it in backward, and its peers do not send it. So all ranks have to make the
same decision without communicating. They do, since every decision here depends only on the sequence of the group's
calls, and not on this rank's free memory or the graphs that it still refers to.
"""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ditron_train.gemm.operands import padded_columns
from ditron_train.runtime.device import is_capturing
from ditron_train.runtime.errors import ArenaError
from ditron_train.runtime.logs import log_once
from ditron_train.symm.arena import SymmetricArena

#: The most shapes of kept inputs, by place. Ranks agree on each once and remember it, as far as there is room
#: (``MAX_KNOWN_SHAPES``): sequences of ever new lengths would take all of it.
_MOST_SHAPES = 256
#: After so many later calls a kept input is no longer kept: its model is gone, most likely.
_MOST_CALLS = 1 << 14
_MOST_SEEN = 1 << 16  # of weights that are new at each call


class _Place:
    """A buffer of the arena and its last holder, whose rows are valid until another input gets the buffer."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self.name, self.num_bytes = name, num_bytes
        self.holder: KeptInput | None = None
        self.is_free = True


class KeptInput:
    """The gathered input of one call, [rows of all ranks, K]; without a buffer if there was no room for it."""

    def __init__(self, owner: KeptInputs, call: tuple[int, int], shape: tuple[int, int], x: torch.Tensor) -> None:
        self._owner, self._shape, self._num_columns, self._dtype = owner, shape, x.shape[-1], x.dtype
        self.layer, self.number = call
        self.place: _Place | None = None

    @property
    def buffer(self) -> str | None:
        """Name of the arena's buffer that its rows are gathered into; None if there is no room."""
        return None if self.place is None else self.place.name

    def rows(self) -> torch.Tensor | None:
        """All rows, if they are still there: a view that is valid until the next forward after ``release``."""
        if self.place is None or self.place.holder is not self:
            return None
        return self._owner.arena.tensor(self.place.name, self._shape, self._dtype).local[:, : self._num_columns]

    def release(self) -> None:
        """Its backward has read it: later work on the stream may reuse its place. Older calls of the same layer lose
        their places, too: pipelines run backward in the order of the forward passes, so theirs will never come."""
        self._owner.release(self)


class KeptInputs:
    """Places for the gathered inputs of one group, up to a number of bytes on each rank.

    Args:
        arena: The group's arena; places are allocated as they are needed (collective) and stay.
        most_bytes: Limit of the places together.
    """

    def __init__(self, arena: SymmetricArena, most_bytes: int) -> None:
        self.arena = arena
        self._left_bytes = self._most_bytes = most_bytes
        self._places: list[_Place] = []
        self._layers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._num_layers = self._num_calls = 0
        self._seen: set[tuple[int, int, int, torch.dtype]] = set()  # shapes by layer
        self._shapes: set[tuple[str, int, int, torch.dtype]] = set()  # by place
        self._waiting: dict[int, list[KeptInput]] = {}  # those with a place, by layer, the oldest first

    def reserve(self, x: torch.Tensor, weight: torch.Tensor) -> KeptInput | None:
        """Reserves a place for all ranks' rows of ``x`` [s / W, ..., K] in a call of the layer of ``weight``.

        A layer's first call of a shape gets no place: this way all layers allocate the memory that they cannot do
        without first, and captured graphs, in which nothing is kept, have run the kernels that they launch. Returns
        None if nothing is to be kept: if no weight gradient will be computed, if saved tensors have hooks
        (``torch.utils.checkpoint``, offloading), or in a captured graph, which would hold its place for ever.
        """
        if not (torch.is_grad_enabled() and weight.requires_grad) or _are_saved_tensors_hooked():
            return None
        if x.dim() == 0 or x.numel() == 0:
            return None
        if is_capturing(self.arena.device):
            return None
        columns = padded_columns(x.shape[-1], x.dtype)
        rows = x.shape[:-1].numel() * self.arena.world_size
        self._num_calls += 1
        layer = self._layer_of(weight)
        is_first = (seen := (layer, rows, columns, x.dtype)) not in self._seen
        if is_first and len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen.add(seen)
        kept = KeptInput(self, (layer, self._num_calls), (rows, columns), x)
        place = None if is_first else self._place_of(rows * columns * x.dtype.itemsize)
        kept.place = place if place is not None and self._may_hold((place.name, *seen[1:])) else None
        if kept.place is not None:
            kept.place.holder, kept.place.is_free = kept, False
            self._waiting.setdefault(kept.layer, []).append(kept)
        return kept

    def release(self, kept: KeptInput) -> None:
        """As ``KeptInput.release``; a second call does nothing."""
        waiting = self._waiting.get(kept.layer, [])
        while waiting and waiting[0].number <= kept.number:
            place = waiting.pop(0).place
            assert place is not None
            place.is_free = True
        if not waiting:
            self._waiting.pop(kept.layer, None)

    def _layer_of(self, weight: torch.Tensor) -> int:
        """A number for each weight. Ranks would not agree on its address, which another weight may have later."""
        number: int | None = self._layers.get(weight)
        if number is None:
            self._num_layers += 1
            number = self._layers[weight] = self._num_layers
        return number

    def _may_hold(self, shape: tuple[str, int, int, torch.dtype]) -> bool:
        if shape not in self._shapes and len(self._shapes) >= _MOST_SHAPES:
            return False
        self._shapes.add(shape)
        return True

    def _reclaim_old(self) -> None:
        """Frees the places of calls that have waited for their backward for long; if it does come, it gathers."""
        for waiting in list(self._waiting.values()):
            if waiting[0].number + _MOST_CALLS < self._num_calls:
                self.release(waiting[0])

    def _place_of(self, num_bytes: int) -> _Place | None:
        """The smallest free place that is large enough, else a new one if there is memory for it."""
        if num_bytes > self._left_bytes:
            self._reclaim_old()
        fitting = [place for place in self._places if place.is_free and place.num_bytes >= num_bytes]
        if fitting:
            return min(fitting, key=lambda place: place.num_bytes)
        if num_bytes > self._left_bytes:
            return None
        place = _Place(f"tp.kept.{len(self._places)}", num_bytes)
        try:
            self.arena.tensor(place.name, (num_bytes,), torch.uint8)
        except ArenaError as error:  # on every rank alike
            self._left_bytes = 0
            log_once(f"keep {self.arena.group_name} full", f"no more inputs are kept for backward: {error}", name="tp")
            return None
        self._left_bytes -= num_bytes
        self._places.append(place)
        log_once(
            f"keep {self.arena.group_name}",
            f"gathered inputs are kept for backward (DITRON_KEEP_GATHERED): up to {self._most_bytes / 2**20:.0f} MiB "
            f"on each rank in group {self.arena.group_name}, the first takes {num_bytes / 2**20:.1f} MiB",
            name="tp",
        )
        return place


def _are_saved_tensors_hooked() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
