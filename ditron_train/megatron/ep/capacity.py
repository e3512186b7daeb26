"""``DITRON_EP_CAPACITY``: room for a fixed number of rows, so that the host never waits for sizes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import HAVE_TE

from ditron_train.ep import EPContext
from ditron_train.ep.few_rows import NEVER, OTHER_BITS
from ditron_train.megatron.ep.coverage import why_not_beside
from ditron_train.megatron.ep.experts import why_not_called
from ditron_train.megatron.ep.pair_spec import fewest_rows_of_layer
from ditron_train.megatron.ep.spec import warns_of_few_rows
from ditron_train.megatron.shared.interfaces import why_otherwise
from ditron_train.policy.gate import INTERFACE_ERRORS
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.settings import get_settings
from ditron_train.symm.exchange import exchange


class FixedCapacity:
    """The room that a dispatcher's experts get.

    Attributes:
        factor: Times the rows of even routing; None: exact sizes, with a host sync.
    """

    def __init__(self, factor: float | None = None) -> None:
        self.factor = factor
        self._reason: str | None = None  # why there is none although it was asked for
        self._is_agreed = False
        self._fewest_rows: int | None = None  # of an expert, for its products to have native bits
        self._has_warned = False

    def take_setting(self, experts: Any, tp_size: int, *, is_apart: bool) -> None:
        """The capacity that the setting asks for, if ``experts`` can do without sizes on the host."""
        factor = get_settings().ep_capacity
        if factor is None:
            return
        reason = why_not_beside(tp_size)
        if reason is None and is_apart:
            reason = "overlap_moe_expert_parallel_comm is on"
        if reason is None and not HAVE_TE:
            reason = "Transformer Engine is not installed"
        if reason is None:
            reason = _why_not_experts(experts)
        if reason is None:
            self.factor = factor
            log_once(f"ep capacity {factor}", f"ep: room for {factor:g} times the rows of even routing, no host sync")
        else:
            self._give_up(reason)

    def drop(self) -> None:
        """Exact sizes from now on, whatever the setting asks for; on all ranks alike."""
        self.factor = self._reason = None

    def look_at(self, experts: Any) -> None:
        """Exact sizes from now on where an adapter or a hook has come to experts since their capacity was decided. It
        is called with counts that the host does not have, and with rows behind the last that nobody has written."""
        reason = None if self.factor is None else why_not_called(experts, is_decided=self._is_agreed)
        if reason is not None:
            self._give_up(reason)

    def measure(self, experts: Any, like: torch.Tensor, group: dist.ProcessGroup) -> None:
        """From how many rows of an expert on our products of rows ``like`` these have native bits, since with a fixed
        capacity all are ours; exact sizes where they never have, or where another rank has them (collective the first
        time)."""
        if not self._is_agreed and (self.factor is not None or self._reason is not None):
            self._is_agreed = True
            reasons = [reason for reason in exchange(group, self._reason) if reason is not None]
            if reasons and self.factor is not None:
                self._give_up(reasons[0])
        if self.factor is None or self._fewest_rows is not None:
            return
        self._fewest_rows = fewest_rows_of_layer(experts, like, group)
        if self._fewest_rows == NEVER and get_settings().policy in ("strict", "bits"):
            self._give_up(OTHER_BITS)

    def warn(self, context: EPContext) -> None:
        """Says once where an expert had too few rows."""
        if self.factor is not None and not self._has_warned:
            self._has_warned = warns_of_few_rows(context, self._fewest_rows or 0)

    def _give_up(self, reason: str) -> None:
        self.factor, self._reason = None, reason
        log_once(f"ep exact {reason}", f"ep: exact sizes with a host sync in spite of DITRON_EP_CAPACITY: {reason}")


def _why_not_experts(experts: Any) -> str | None:
    try:
        from ditron_train.megatron.ep.te_experts import why_not_capacity

        return why_not_capacity(experts)
    except INTERFACE_ERRORS as error:
        return why_otherwise("Transformer Engine", error)
