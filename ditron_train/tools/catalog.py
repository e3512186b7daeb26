"""Every op that is accelerated, by room: what ``verify``, ``bench``, ``tune`` and the tests iterate over."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ditron_train.policy import OpSpec
from ditron_train.policy.spec import MegatronGroups

if TYPE_CHECKING:
    from ditron_train.tools.session import BenchSession

#: Modules whose ``SPECS`` make up a room; those that need megatron-core count where it is installed.
ROOMS: dict[str, tuple[str, ...]] = {
    "tp": ("ditron_train.tp.spec", "ditron_train.megatron.tp.routing"),
    "sp": ("ditron_train.sp.spec", "ditron_train.sp.exchange_spec", "ditron_train.megatron.sp.spec"),
    "ep": (
        "ditron_train.megatron.ep.movement_spec",
        "ditron_train.ep.spec",
        "ditron_train.megatron.ep.spec",
        "ditron_train.megatron.ep.pair_spec",
        "ditron_train.megatron.ep.gathered_spec",
    ),
    "pp": ("ditron_train.pp.spec",),
    "muon": ("ditron_train.optim.spec", "ditron_train.optim.plans"),
}
#: Modules whose ``fp8_specs`` of a recipe are the ops that a room has in it; they need Transformer Engine.
FP8_ROOMS: dict[str, tuple[str, ...]] = {
    "tp": ("ditron_train.tools.fp8.products", "ditron_train.tools.fp8.layers"),
    "ep": ("ditron_train.megatron.ep.fp8_rows_spec",),
}
_added: list[OpSpec[Any, Any]] = []


def add_spec(spec: OpSpec[Any, Any]) -> None:
    """An op of somebody else's: every tool has it from now on."""
    _added.append(spec)


def remove_spec(spec: OpSpec[Any, Any]) -> None:
    """Undoes ``add_spec``."""
    _added.remove(spec)


def specs_of(room: str, fp8: str | None = None) -> list[OpSpec[Any, Any]]:
    """The ops of a room; ``fp8``: those that it has in a recipe, which needs Transformer Engine."""
    if fp8 is not None:
        return [spec for name in FP8_ROOMS.get(room, ()) for spec in importlib.import_module(name).fp8_specs(fp8)]
    found: list[OpSpec[Any, Any]] = []
    for name in ROOMS.get(room, ()):
        try:
            found += importlib.import_module(name).SPECS
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "megatron":
                raise
    return [*found, *(spec for spec in _added if spec.name.split()[0] == room)]


@contextmanager
def megatron_groups(groups: MegatronGroups | None, session: BenchSession) -> Iterator[None]:
    """Megatron's groups with all ranks in the one that ops are measured in (`OpSpec.groups`); nothing for None."""
    if groups == "tensor":
        from ditron_train.tools.bench.megatron_tp import megatron_world

        with megatron_world(session):
            yield
    elif groups == "expert":
        from ditron_train.tools.bench.megatron_ep import expert_parallel_world

        with expert_parallel_world():
            yield
    else:
        yield
