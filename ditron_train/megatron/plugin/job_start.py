"""What all ranks of a job do together, when Megatron makes its process groups: a point that every rank passes.

They check that all have the same settings (``rank_agreement``), check libraries that nobody has tried
(``self_check``), and start NVSHMEM if features will need it. It starts
on all ranks of a job at once, and layers cannot do that: with pipeline stages, tensor parallel groups come to their
first layer one after the other, each with what the stage before it has computed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ditron_train.hook import watch_models
from ditron_train.megatron.plugin import batches, patching
from ditron_train.megatron.plugin.rank_agreement import check_ranks_agree
from ditron_train.megatron.shared.devices import current_device
from ditron_train.policy.self_check import self_check
from ditron_train.pp.paths import NVSHMEM
from ditron_train.runtime.errors import ArenaError
from ditron_train.runtime.groups import world_group
from ditron_train.runtime.settings import get_settings
from ditron_train.runtime.versions import newer_libraries
from ditron_train.symm import start_nvshmem
from ditron_train.symm.exchange import exchange
from ditron_train.symm.transport import is_one_node, node_of_process

_features: set[str] = set()
_agreed: set[frozenset[str]] = set()
_make_groups = parallel_state.initialize_model_parallel  # the hook's, if it is armed


@functools.wraps(_make_groups)
def _make_groups_and_rendezvous(*args: Any, **kwargs: Any) -> None:
    getattr(_make_groups, "ditron_native", _make_groups)(*args, **kwargs)
    if _features:
        after_groups()


def after_groups() -> None:
    """Megatron has made its groups: all ranks meet, those without a feature, too (collective over WORLD)."""
    _agreed.clear()
    rendezvous()


def before_model() -> None:
    """A model is about to be built: if its groups are not Megatron's own (``HyperCommGrid``), all ranks meet here
    (collective over WORLD the first time with these features)."""
    if _features and dist.is_initialized() and not parallel_state.model_parallel_is_initialized():
        _rendezvous()


def announce(features: Iterable[str]) -> None:
    """From now on these features are on, too: all ranks meet whenever Megatron makes its groups.

    If those are there already, NVSHMEM is started if it is needed, and nothing is compared: a script may switch
    features on for some of its ranks, the stages with experts for instance.
    """
    _features.update(features)
    patching.replace_symbol(_make_groups, _make_groups_and_rendezvous)
    watch_models()
    if parallel_state.model_parallel_is_initialized():
        _start()


def stop() -> None:
    """Forgets the features; what was started stays."""
    _features.clear()
    _agreed.clear()
    batches.stop()


def rendezvous() -> None:
    """Collective over WORLD, the first time with these features; nothing before Megatron's groups are there.

    Raises:
        SettingError: Ranks were told different things; the same on every rank.
        PeerTimeoutError: A rank did not arrive.
    """
    if parallel_state.model_parallel_is_initialized():
        _rendezvous()


def _rendezvous() -> None:
    features = frozenset(_features)
    if features in _agreed:
        return
    check_ranks_agree(features)
    _agreed.add(features)
    if not features:
        return
    if newer_libraries():  # on every rank, or they would not agree
        self_check(world_group(), current_device())
    batches.start()
    _start()


def _start() -> None:
    device = _device() if _is_needed() else None
    if device is not None:
        with suppress(ArenaError):  # on every rank alike; what would have used it says so and runs natively
            start_nvshmem(device)


def _device() -> torch.device | None:
    device = current_device() if torch.cuda.is_available() else None
    return None if device is None or device.type == "cpu" else device


def _is_needed() -> bool:
    """Whether a group of these features takes its memory from NVSHMEM; the same answer on every rank.

    Collective over WORLD, but for the usual job, of one node and without a word about NVSHMEM.
    """
    settings = get_settings()
    is_asked_for = settings.transport == NVSHMEM or ("pp" in _features and settings.pp_path == NVSHMEM)
    if not is_asked_for and (is_one_node() or settings.transport != "auto" or "tp" not in _features):
        return False
    has_groups = parallel_state.model_parallel_is_initialized()  # else they are in a model's collection: unknown here
    group = parallel_state.get_tensor_model_parallel_group() if has_groups else None
    ranks = [] if group is None else dist.get_process_group_ranks(group)
    announced = exchange(world_group(), (is_asked_for, ranks, node_of_process()))
    nodes = [node for _, _, node in announced]
    return any(requested for requested, _, _ in announced) or any(
        len({nodes[rank] for rank in ranks}) > 1 for _, ranks, _ in announced
    )
