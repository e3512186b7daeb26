"""The stamp of a benchmark that runs here, now."""

from __future__ import annotations

import torch

from ditron_train.data.provenance import collect_provenance
from ditron_train.tools.results import Stamp


def collect_stamp(device: torch.device, count: int, **settings: object) -> Stamp:
    """Returns the stamp of a benchmark that runs here, now.

    Args:
        device: This rank's device.
        count: Number of ranks.
        settings: Options of the benchmark that belong to its results.
    """
    return Stamp(**collect_provenance(device, count, **settings))
