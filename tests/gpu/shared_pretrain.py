"""A Megatron script for ``test_jobs``: ``shared_pretrain.py pretrain_gpt.py <its arguments>`` under torchrun.

Where there are more ranks than GPUs, they share them. That is for bits alone: ranks on one GPU take turns, and NCCL,
to which every rank is a host of its own, joins them by sockets. ``SAVED`` names a folder of folders: a job with
``--ditron-record FOLDER/NAME`` saves in NAME there, since ``compare`` refuses a ``--save`` that its jobs would share.
How often each op ran on a rank stands in FOLDER/NAME/ops<rank>.json.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import shared_gpus  # noqa: E402


def _behind(option: str) -> str | None:
    """The value of an option of the launcher, which takes its own away from ``sys.argv``."""
    words = sys.orig_argv
    return words[words.index(option) + 1] if option in words else None


def _count_ops(path: Path) -> None:
    """Writes there, when the process ends, how often each op has been called."""
    from ditron_train.runtime.flight_recorder import OpRecords

    calls: Counter[str] = Counter()

    def counting(native):
        def counted(self, op, *details):
            calls[op] += 1
            native(self, op, *details)

        return counted

    OpRecords.record, OpRecords.record_own = counting(OpRecords.record), counting(OpRecords.record_own)

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(calls))

    atexit.register(write)


def _take_helpers_of_wheel() -> None:
    """Megatron-LM compiles the helpers of its datasets in a checkout; a wheel of megatron-core has them compiled."""
    from megatron.core.datasets import utils

    if not Path(utils.__file__).with_name("Makefile").is_file():
        utils.compile_helpers = lambda: None


if __name__ == "__main__":
    if shared_gpus.is_needed():
        shared_gpus.pose_as_hosts()
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    saved, record = os.environ.get("SAVED"), _behind("--ditron-record")
    if saved is not None and record is not None:
        sys.argv += ["--save", str(Path(saved) / Path(record).name)]
        _count_ops(Path(record) / f"ops{os.environ['RANK']}.json")
    _take_helpers_of_wheel()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
