"""Where and with what something ran: device, versions, commit, settings."""

from __future__ import annotations

import os
import shutil
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import ditron_train
from ditron_train.runtime.device import device_name
from ditron_train.runtime.versions import driver_version, find_versions

_PREFIXES = ("DITRON_", "NCCL_", "NVTE_", "NVSHMEM_", "TORCH_NCCL_")
_VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG", "TRITON_INTERPRET", "PYTORCH_CUDA_ALLOC_CONF")


def nccl_version() -> str | None:
    """Returns the version of the NCCL that torch loads, None in a build without it."""
    if not torch.cuda.is_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def _commit() -> str | None:
    """The commit that this package's files come from, None if they are no git checkout."""
    root = Path(ditron_train.__file__).parent.parent
    if not (root / ".git").exists() or not shutil.which("git"):
        return None
    git = ["git", "-C", str(root)]
    commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "ditron_train"], capture_output=True, text=True).stdout
    return commit + ("+" if changed.strip() else "") if commit else None


def collect_provenance(device: torch.device, count: int, **settings: object) -> dict[str, Any]:
    """Returns what `ditron_train.tools.results.Stamp` holds, of this process, now; only what JSON has.

    Args:
        device: This rank's device.
        count: Number of ranks.
        settings: Options that belong to the results, beside the environment's.
    """
    versions = find_versions()
    on_gpu = device.type == "cuda"
    variables = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES) or name in _VARIABLES
    }
    return {
        "device": device_name(device),
        "count": count,
        "driver": driver_version() if on_gpu else None,
        "torch": str(torch.__version__),
        "triton": versions["triton"] or "",
        "nccl": nccl_version() if on_gpu else None,
        "nvshmem": versions["nvidia-nvshmem"],
        "megatron_core": versions["megatron-core"],
        "transformer_engine": versions["transformer-engine"],
        "ditron_train": ditron_train.__version__,
        "commit": _commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "settings": {**variables, **{name: str(value) for name, value in settings.items()}},
    }
