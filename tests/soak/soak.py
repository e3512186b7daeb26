"""Long runs: what they add up to (counts, speed, memory, epochs), and where that is written."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.files import parse_json, read_regular, replace_file
from ditron_train.symm.control import TICKET_UNIT_LOG2
from ditron_train.tools.results import Stamp, result_path
from ditron_train.tp.context import TPContext

MAX_DRIFT_BYTES = 1 << 20
_WRAP = 2**31
_MAX_NAMED = 20
_SAMPLES = 20


@dataclass
class Soak:
    """Summary of a long run; the same on every rank but for memory, which is this rank's.

    Attributes:
        what: Of its file.
        planned: How many were asked for.
        done: How many ran, fewer where the time was up.
        compared: Results that were compared with native's, of all ops.
        natively: Of ``done``, those that a training job would run natively, so that nothing was compared.
        different: Descriptions of the first that differed in a bit.
        num_different: How many did.
        by_kind: ``done`` by op and dtype.
        seconds: Of the whole run.
        first_epoch: Epoch in front of the first launch.
        last_epoch: The largest that an op has reached; above ``2**31 - 1`` where the run has crossed the wrap; 0 until
            its end.
        host_bytes: Resident memory of this rank, sampled through the run after its first tenth, of ``ops`` after the
            first call of each.
        device_bytes: Memory that torch holds for tensors on this rank's GPU, sampled alike.
    """

    what: str
    planned: int
    first_epoch: int
    done: int = 0
    compared: int = 0
    natively: int = 0
    num_different: int = 0
    different: list[str] = field(default_factory=list)
    by_kind: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    last_epoch: int = 0
    host_bytes: list[int] = field(default_factory=list)
    device_bytes: list[int] = field(default_factory=list)

    @property
    def host_drift_bytes(self) -> int:
        """Resident memory at the end above that after the first tenth."""
        return _drift(self.host_bytes)

    @property
    def device_drift_bytes(self) -> int:
        """Likewise of the GPU's memory; 0 without one."""
        return _drift(self.device_bytes)

    @property
    def crossed_the_wrap(self) -> bool:
        """Whether epochs went past ``2**31 - 1``, where they turn negative."""
        return self.first_epoch < _WRAP <= self.last_epoch

    def count(self, kind: str, compared: int, *, ops: int = 1, native: bool = False) -> None:
        """So many more are done."""
        self.done += ops
        self.compared += compared
        self.natively += native
        self.by_kind[kind] = self.by_kind.get(kind, 0) + ops

    def differs(self, description: str) -> None:
        """A bit differed."""
        self.num_different += 1
        if len(self.different) < _MAX_NAMED:
            self.different.append(description)

    def sentence(self) -> str:
        """For people."""
        rate = f"{self.done / max(self.seconds, 1e-9) * 60:,.0f} a minute"
        equal = "every bit is equal" if self.compared else "nothing was compared"
        verdict = f"{self.num_different} DIFFERENT" if self.num_different else equal
        reached = f"to {self.last_epoch}" if self.last_epoch else "on"
        epochs = f"epochs {self.first_epoch} {reached}" + (", across 2**31" if self.crossed_the_wrap else "")
        drift = f"memory drift {self.host_drift_bytes / 2**20:.2f} MiB" if self.host_bytes else "memory not read"
        drift += f", of the GPU {self.device_drift_bytes / 2**20:.2f} MiB" if self.device_bytes else ""
        return f"{self.done:,} of {self.planned:,} ops in {self.seconds:.0f} s ({rate}), {self.compared:,} " \
               f"results compared, {self.natively:,} native: {verdict}; {epochs}; {drift}"  # fmt: skip


def _drift(samples: Sequence[int]) -> int:
    return samples[-1] - samples[0] if samples else 0


def last_epoch(context: TPContext) -> int:
    """The largest that an op of a context has reached."""
    channels = (context.gather_channel, context.scatter_channel)
    return max(int(channel.tickets[0]) for channel in channels) >> TICKET_UNIT_LOG2


class SoakMeter:
    """Clock and memory samples of one soak.

    Args:
        soak: Where samples go.
        device: This rank's.
        limit_s: Time after which no rank begins another (rank 0's clock decides; None: no limit).
        before_reading: Called in front of every memory sample, at the same op on every rank.
    """

    _AGREE_EVERY_S = 1.0  # gloo, which CPUs and shared GPUs have, takes milliseconds, and memory for its own records

    def __init__(
        self,
        soak: Soak,
        device: torch.device,
        limit_s: float | None,
        *,
        before_reading: Callable[[], None] = lambda: None,
    ) -> None:
        self._soak = soak
        self._before_reading = before_reading
        self._device = device
        self._limit_s = limit_s
        self._start_s = time.monotonic()
        self._agreed_share = 0.0  # of the time that there is, by rank 0's clock
        self._agree_at = 0  # so many ops done
        self._next_sample = 0.1

    def time_is_up(self) -> bool:
        """Whether to stop, the same on every rank (collective now and then where there is a limit)."""
        self._soak.seconds = self._seconds()
        done, seconds = self._soak.done, self._soak.seconds
        if self._limit_s is None or done < self._agree_at:
            return False
        ahead = done / max(seconds, 1e-3) * min(self._AGREE_EVERY_S, self._limit_s / 50)
        agreed = torch.tensor([seconds / self._limit_s, max(ahead, 1.0)], device=self._device)
        dist.broadcast(agreed, src=0)
        self._agreed_share, ahead = agreed.tolist()
        self._agree_at = done + int(ahead)
        return self._agreed_share > 1.0

    def sample(self) -> None:
        """Reads memory, if it is time to: by the share of ops that are done, or of the time that is over."""
        share = max(self._soak.done / self._soak.planned, self._agreed_share)
        if share >= self._next_sample:
            self._next_sample = max(self._next_sample, share) + 1.0 / _SAMPLES
            self._read()

    def finish(self, last_epoch: int) -> None:
        """The end of the run."""
        self._read()
        self._soak.seconds = self._seconds()
        self._soak.last_epoch = last_epoch

    def _seconds(self) -> float:
        return time.monotonic() - self._start_s

    def _read(self) -> None:
        self._before_reading()
        gc.collect()
        _give_back_free_memory()
        if os.path.exists("/proc/self/statm"):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self._soak.host_bytes.append(pages * os.sysconf("SC_PAGE_SIZE"))
        if self._device.type == "cuda":
            self._soak.device_bytes.append(torch.cuda.memory_allocated(self._device))


def _give_back_free_memory() -> None:
    """What the C library keeps for later would hide how much is in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def _derived(soak: Soak) -> dict[str, int | bool]:
    """What a file says of a run beside its fields."""
    drifts = {"host_drift_bytes": soak.host_drift_bytes, "device_drift_bytes": soak.device_drift_bytes}
    return {**drifts, "crossed_the_wrap": soak.crossed_the_wrap}


def write_soak(folder: Path, stamp: Stamp, soak: Soak) -> Path:
    """Writes ``<folder>/<device>x<count>/soak/<what>.json`` and returns its path."""
    path = result_path(folder, stamp, soak.what)
    path = path.parent / "soak" / path.name
    path.parent.mkdir(parents=True, exist_ok=True)
    summary = {**asdict(soak), "seconds": round(soak.seconds, 1), **_derived(soak), "sentence": soak.sentence()}
    path.write_text(json.dumps({"stamp": asdict(stamp), "summary": summary}, indent=1) + "\n", encoding="utf-8")
    return path


def add_piece(path: Path, soak: Soak) -> None:
    """Adds a long run to a file of the pieces that continue one another, and sums them up.

    Raises:
        SettingError: The file is another one.
    """
    pieces = []
    if path.exists():
        try:
            pieces = list(parse_json(read_regular(path))["pieces"])
            if not all(isinstance(piece["done"], int) and isinstance(piece["by_kind"], dict) for piece in pieces):
                raise ValueError("done")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SettingError(f"{path} holds no pieces of a long run: {error!r}") from None
    pieces.append({**asdict(soak), **_derived(soak)})
    counts = {name: sum(piece[name] for piece in pieces) for name in ("done", "compared", "num_different", "seconds")}
    counts["host_drift_bytes"] = sum(piece["host_drift_bytes"] for piece in pieces)
    counts["device_drift_bytes"] = sum(_drift(piece.get("device_bytes", [])) for piece in pieces)
    kinds = dict.fromkeys(kind for piece in pieces for kind in piece["by_kind"])
    by_kind = {kind: sum(piece["by_kind"].get(kind, 0) for piece in pieces) for kind in kinds}
    content = {"total": {**counts, "by_kind": by_kind}, "pieces": pieces}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(content, indent=1) + "\n")
