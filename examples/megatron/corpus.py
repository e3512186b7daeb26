"""Text as bytes: the user's own file, or the sources and documentation that come with Python."""

from __future__ import annotations

import os
import sysconfig
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["CorpusError", "Corpus", "load_corpus"]

_MAX_BYTES = 4 << 20


class CorpusError(RuntimeError):
    """The text cannot be read, is too short, or is not the same on every rank."""


def _python_text() -> bytes:
    """Documentation first (``pydoc``'s topics), then the standard library's modules by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [root / "pydoc_data" / "topics.py", *sorted(root.glob("*.py"))]
    parts, size = [], 0
    for path in files:
        if size >= _MAX_BYTES:
            break
        if path.is_file():
            parts.append(path.read_bytes())
            size += len(parts[-1])
    return b"\n".join(parts)[:_MAX_BYTES]


def _read(path: str | None) -> tuple[bytes, str | None]:
    try:
        data = _python_text() if path is None else Path(path).read_bytes()
    except OSError as error:
        return b"", f"cannot read --data {path}: {os.strerror(error.errno) if error.errno else error}"
    return data, None


def load_corpus(path: str | None, sequence_length: int) -> Corpus:
    """Reads the text on every rank and makes sure that all ranks read the same.

    Args:
        path: A file of the user's, or None for the text that comes with Python.
        sequence_length: Tokens of a sample; the text must hold at least two samples.

    Raises:
        CorpusError: The same words on every rank, whichever rank failed.
    """
    data, problem = _read(path)
    if problem is None and len(data) < 2 * (sequence_length + 1):
        problem = (
            f"the text ({path or 'of Python itself'}) has {len(data)} bytes, {2 * (sequence_length + 1)} are needed"
        )
    found: list[tuple[str | None, int, int]] = [(None, 0, 0)] * dist.get_world_size()
    dist.all_gather_object(found, (problem, len(data), zlib.crc32(data)))
    failed = [f"rank {rank}: {entry[0]}" for rank, entry in enumerate(found) if entry[0]]
    if failed:
        raise CorpusError(failed[0] + (f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""))
    if len({entry[1:] for entry in found}) > 1:
        raise CorpusError(f"the ranks read different texts: sizes {[entry[1] for entry in found]} bytes")
    return Corpus(data, sequence_length)


class Corpus:
    """Samples of a text: byte ``i`` is token ``i``."""

    def __init__(self, data: bytes, sequence_length: int) -> None:
        self.num_bytes = len(data)
        self.sequence_length = sequence_length
        self._tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def batch(self, step: int, batch_size: int, data_rank: int, device: torch.device) -> dict[str, torch.Tensor]:
        """The samples of `step` for data-parallel rank `data_rank`: always the same ones.

        Returns:
            ``tokens``, ``labels`` and ``position_ids`` (int64) and ``loss_mask`` (fp32), each ``[batch, sequence]``.
        """
        generator = torch.Generator().manual_seed(step * 100_003 + data_rank)
        limit = self.num_bytes - self.sequence_length
        starts = torch.randint(0, limit, (batch_size, 1), generator=generator)
        window = self._tokens[starts + torch.arange(self.sequence_length + 1)].long().to(device)
        tokens, labels = window[:, :-1].contiguous(), window[:, 1:].contiguous()
        positions = torch.arange(self.sequence_length, device=device).expand_as(tokens).contiguous()
        return {
            "tokens": tokens,
            "labels": labels,
            "position_ids": positions,
            "loss_mask": torch.ones(tokens.shape, dtype=torch.float32, device=device),
        }
