"""The tiles of the experts' GEMMs, by a tuning table, else by rule. They change the time, never the bits."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Literal

import torch

from ditron_train.gemm.configs import GemmConfig, choose_config, config_of_entry
from ditron_train.runtime.device import device_name, num_sms
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.tuning_table import active_table, class_of_size

GroupOp = Literal["group_gemm", "group_dgrad", "group_wgrad"]


def group_class(num_experts: int, rows: int, n: int, k: int) -> str:
    """The class of shapes that share a choice: experts of a rank, and their rows, N and K, such as
    ``64 experts 65536x4096x7168``."""
    return f"{num_experts} experts " + "x".join(str(class_of_size(size)) for size in (rows, n, k))


def default_group_config(
    op: GroupOp, num_experts: int, rows: int, n: int, k: int, dtype: torch.dtype, target: str, device: torch.device
) -> GemmConfig:
    """What runs without a table; arguments as of ``choose_group_config``."""
    if op == "group_wgrad":
        return choose_config(n * num_experts, k, rows, dtype, target, num_sms(device))
    return choose_config(max(rows, 1), n, k, dtype, target, num_sms(device))


def choose_group_config(
    op: GroupOp, num_experts: int, rows: int, n: int, k: int, dtype: torch.dtype, target: str, device: torch.device
) -> GemmConfig:
    """The tile of a product of ``num_experts`` experts with ``rows`` rows together.

    Args:
        op: Which product.
        num_experts: Of this rank.
        rows: Of all experts.
        n: Columns of the result; of a weight gradient its rows.
        k: Length of the sums; of a weight gradient its columns.
        dtype, target, device: As ``gemm.configs.choose_config``.

    Raises:
        SettingError: The table cannot be read, or its entry.
    """
    setting = os.environ.get("DITRON_TUNING")
    own = class_of_size(rows)
    # Rows change from step to step and differ between ranks: the next class's tile is nearer than the rule's.
    for size_class in (own, class_of_size(own + 1), class_of_size(2 * own // 3)):
        found = _of_table(setting, op, num_experts, size_class, n, k, device)
        if found is not None:
            return found
    return default_group_config(op, num_experts, rows, n, k, dtype, target, device)


@lru_cache(maxsize=4096)
def _of_table(
    setting: str | None, op: GroupOp, num_experts: int, rows: int, n: int, k: int, device: torch.device
) -> GemmConfig | None:
    """``setting``: which table, so that another one is asked anew."""
    table, name = active_table(device_name(device)), group_class(num_experts, rows, n, k)
    entry = None if table is None else table.find(op, 1, name)
    try:
        return None if entry is None else config_of_entry(entry)
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise SettingError(f"the tuning table's entry of {op}, {name} cannot be read: {error!r}") from None
