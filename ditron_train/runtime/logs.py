"""Logging: one line a decision, on rank 0 of the job."""

from __future__ import annotations

import logging
import os

_ROOT = "ditron_train"
_MAX_SEEN = 4096  # keys that name a shape may be ever new ones
_seen: dict[tuple[str, str], str] = {}


def get_logger(name: str = _ROOT) -> logging.Logger:
    """Returns the package's logger, or a child of it for ``name``; handlers and levels are the application's."""
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


def _is_first_rank() -> bool:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def log_once(key: str, message: str, *, name: str = _ROOT, level: int = logging.INFO) -> None:
    """Logs ``message`` the first time that ``key`` is seen in this process, on rank 0 of the job only."""
    if (name, key) in _seen:
        return
    if len(_seen) >= _MAX_SEEN:
        _seen.clear()
    _seen[name, key] = message
    if _is_first_rank():
        get_logger(name).log(level, message)


def forget_decisions() -> None:
    """Every line is logged once more: for tools that look at parts of a run."""
    _seen.clear()


def decisions() -> list[str]:
    """What `log_once` was told of ops that run by the fused path or by Megatron's, and why, in order; on every rank,
    also on those that log nothing."""
    return [message for message in _seen.values() if ": fused, " in message or ": native, " in message]
