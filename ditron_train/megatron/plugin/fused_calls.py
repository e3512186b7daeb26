"""How often the fused path has run in this process, by feature: its decisions at each call are counted."""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from ditron_train.policy.gate import INTERFACE_ERRORS

#: What decides at a call which path runs: module, name in it, feature. An answer of the gate says which; of the others
#: anything but None is the fused path.
_DECISIONS = (
    ("ditron_train.megatron.tp.layers", "route", "tp"),
    ("ditron_train.megatron.sp.attention_exchange", "route_exchange", "sp"),
    ("ditron_train.megatron.sp.projections", "route_projections", "sp"),
    ("ditron_train.megatron.sp.output", "route_output", "sp"),
    ("ditron_train.megatron.ep.dispatcher", "DitronMoEAlltoAllTokenDispatcher._context_for", "ep"),
    ("ditron_train.megatron.ep.gathered_dispatcher", "DitronMoEAllGatherTokenDispatcher._context_for", "ep"),
    ("ditron_train.megatron.ep.flex_dispatcher", "DitronMoEFlexTokenDispatcher._context_for", "ep"),
    ("ditron_train.megatron.pp.communicator", "DitronP2PCommunicator._context", "pp"),
    ("ditron_train.megatron.muon.optimizer", "DitronTensorParallelMuon._direction", "muon"),
    ("ditron_train.megatron.adam.optimizer", "route_step", "adam"),
    ("ditron_train.megatron.loss.cross_entropy", "route_loss", "loss"),
    ("ditron_train.megatron.det.first_step", "step_without_fill", "det"),
    ("ditron_train.megatron.det.embedding", "route_embedding", "det"),
)
_TE_DECISIONS = (
    ("ditron_train.megatron.tp.te_layers", "route", "tp"),
    ("ditron_train.megatron.tp.te_layers", "answer_in_fp8", "tp"),
    ("ditron_train.megatron.sp.te_attention", "route_exchange", "sp"),
    ("ditron_train.megatron.sp.te_all_gather", "route_all_gather", "sp"),
)
#: What tries the fused path to compare it, through the decisions above.
_PROBES = (
    ("ditron_train.megatron.ep.dispatcher", "DitronMoEAlltoAllTokenDispatcher._ask_policy", "ep"),
    ("ditron_train.megatron.ep.gathered_dispatcher", "DitronMoEAllGatherTokenDispatcher._ask_policy", "ep"),
    ("ditron_train.megatron.ep.flex_dispatcher", "DitronMoEFlexTokenDispatcher._ask_policy", "ep"),
)


class FusedCalls:
    """How often the fused path has run, by feature; not while the policy tries it."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._paused = 0
        self._installed: set[str] = set()

    def take(self) -> dict[str, int]:
        """What was counted since it was asked last."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def install(self, features: Iterable[str]) -> None:
        """Counts the calls of ``features`` from now on; does nothing for those that are counted already."""
        from megatron.core.extensions.transformer_engine import HAVE_TE

        added, self._installed = set(features) - self._installed, self._installed | set(features)
        decisions = _DECISIONS + (_TE_DECISIONS if HAVE_TE else ())
        for module, name, feature in (*decisions, *_PROBES):
            if feature in added:
                wrapper = functools.partial(self._counting, feature)
                _wrap(module, name, self._pausing if (module, name, feature) in _PROBES else wrapper)

    def _counting(self, feature: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            is_fused = result is not None and getattr(result, "is_fused", True)
            self._counts[feature] += is_fused and not self._paused
            return result

        return counted

    def _pausing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def paused(*args: Any, **kwargs: Any) -> Any:
            self._paused += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._paused -= 1

        return paused


def _wrap(module: str, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    with suppress(*INTERFACE_ERRORS):  # a feature that this Megatron-core lacks the interfaces for runs natively
        owner: Any = importlib.import_module(module)
        *owners, last = name.split(".")
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, last, wrapper(getattr(owner, last)))


#: Of this process.
FUSED_CALLS = FusedCalls()
