"""How often the fused path has run in this process, by feature: its decisions at each call are counted."""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

#: What decides at a call whether ours runs: module, name in it, feature. Not None: ours.
_DECISIONS = (
    ("ditron_train.megatron.tp.layers", "route", "tp"),
    ("ditron_train.megatron.sp.attention_exchange", "route_exchange", "sp"),
    ("ditron_train.megatron.sp.projections", "route_projections", "sp"),
    ("ditron_train.megatron.sp.output", "route_output", "sp"),
    ("ditron_train.megatron.ep.dispatcher", "DitronMoEAlltoAllTokenDispatcher._context_for", "ep"),
    ("ditron_train.megatron.ep.gathered_dispatcher", "DitronMoEAllGatherTokenDispatcher._context_for", "ep"),
    ("ditron_train.megatron.pp.communicator", "DitronP2PCommunicator._context", "pp"),
    ("ditron_train.megatron.muon.optimizer", "DitronTensorParallelMuon._direction", "muon"),
)
_TE_DECISIONS = (
    ("ditron_train.megatron.tp.te_layers", "route", "tp"),
    ("ditron_train.megatron.tp.te_layers", "answer_in_fp8", "tp"),
    ("ditron_train.megatron.sp.te_attention", "route_exchange", "sp"),
)
#: What tries ours to compare it.
_PROBES = (
    ("ditron_train.megatron.ep.dispatcher", "DitronMoEAlltoAllTokenDispatcher._ask_policy"),
    ("ditron_train.megatron.ep.gathered_dispatcher", "DitronMoEAllGatherTokenDispatcher._ask_policy"),
)


class FusedCalls:
    """How often ours has run, by feature; not while the policy tries it."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._paused = 0

    def take(self) -> dict[str, int]:
        """What was counted since it was asked last."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def install(self) -> None:
        """Counts from now on."""
        from megatron.core.extensions.transformer_engine import HAVE_TE

        for module, name, feature in _DECISIONS + (_TE_DECISIONS if HAVE_TE else ()):
            _wrap(module, name, functools.partial(self._counting, feature))
        for module, name in _PROBES:
            _wrap(module, name, self._pausing)

    def _counting(self, feature: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self._counts[feature] += result is not None and not self._paused
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
    owner: Any = importlib.import_module(module)
    *owners, last = name.split(".")
    for part in owners:
        owner = getattr(owner, part)
    setattr(owner, last, wrapper(getattr(owner, last)))
