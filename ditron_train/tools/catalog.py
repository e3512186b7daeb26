"""Every op that is accelerated, by subpackage, and how it is measured and tuned: what ``verify``, ``bench``,
``trace``, ``tune``, ``doctor`` and the tests iterate over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ditron_train.policy import Op
from ditron_train.tools.cases.case import BenchCase, MegatronGroups

if TYPE_CHECKING:
    from ditron_train.tools.session import BenchSession
    from ditron_train.tools.tune.space import SearchSpace

_CASES = "ditron_train.tools.cases"
#: Modules whose ``CASES`` are the ops that tools measure by themselves; those that need megatron-core count if it is
#: installed.
PACKAGES: dict[str, tuple[str, ...]] = {
    "tp": (f"{_CASES}.tp_gemm", f"{_CASES}.tp_linear"),
    "sp": (f"{_CASES}.sp",),
    "ep": (f"{_CASES}.ep_moves", f"{_CASES}.ep_gemm", f"{_CASES}.ep_gathered"),
    "pp": (f"{_CASES}.pp",),
    "muon": (f"{_CASES}.muon",),
    "loss": (f"{_CASES}.vocabulary",),
    "det": (f"{_CASES}.vocabulary",),
    "adam": (f"{_CASES}.adam",),
}
#: Modules whose ``fp8_cases`` of a recipe are the ops that tools measure in it; they need Transformer Engine.
FP8_PACKAGES: dict[str, tuple[str, ...]] = {"tp": (f"{_CASES}.tp_fp8",), "ep": (f"{_CASES}.ep_fp8_rows",)}
#: Modules whose ``OPS`` layers ask the gate about; those that need what is not installed do not count.
_ASKED: dict[str, tuple[str, ...]] = {
    "tp": ("ditron_train.megatron.tp.spec", "ditron_train.megatron.tp.fp8_spec"),
    "sp": ("ditron_train.megatron.sp.spec",),
    "ep": (
        "ditron_train.megatron.ep.spec",
        "ditron_train.megatron.ep.pair_spec",
        "ditron_train.megatron.ep.gathered_spec",
        "ditron_train.megatron.ep.fp8_rows_spec",
    ),
    "pp": ("ditron_train.pp.spec",),
    "muon": ("ditron_train.optim.plans",),
    "adam": ("ditron_train.megatron.adam.optimizer",),
    "loss": ("ditron_train.megatron.loss.cross_entropy",),
    "det": ("ditron_train.megatron.det.embedding",),
}
#: Modules whose ``SPACES`` are the choices of ops.
_SPACES: dict[str, tuple[str, ...]] = {
    "tp": ("ditron_train.tools.tune.tp_space",),
    "sp": ("ditron_train.tools.tune.sp_space",),
    "ep": ("ditron_train.tools.tune.ep_moves_space", "ditron_train.tools.tune.ep_space"),
}
_NOT_FUSED = ("megatron", "transformer_engine", "transformer_engine_torch")
_added: list[tuple[BenchCase[Any, Any], SearchSpace[Any, Any] | None]] = []


def add_case(case: BenchCase[Any, Any], space: SearchSpace[Any, Any] | None = None) -> None:
    """An op of somebody else's: every tool has it from now on."""
    _added.append((case, space))


def remove_case(case: BenchCase[Any, Any]) -> None:
    """Undoes ``add_case``."""
    _added[:] = [pair for pair in _added if pair[0] is not case]


def cases_of(package: str, fp8: str | None = None) -> list[BenchCase[Any, Any]]:
    """The ops of a subpackage that tools measure; ``fp8``: those in a recipe, which needs Transformer Engine."""
    if fp8 is not None:
        return [case for name in FP8_PACKAGES.get(package, ()) for case in import_module(name).fp8_cases(fp8)]
    known = [*_collect(PACKAGES.get(package, ()), "CASES"), *(case for case, _ in _added)]
    return [case for case in known if case.op.name.split()[0] == package]


def spaces_of(package: str) -> list[SearchSpace[Any, Any]]:
    """The choices of a subpackage's ops."""
    added = [space for _, space in _added if space is not None and space.case.op.name.split()[0] == package]
    return [*_collect(_SPACES.get(package, ()), "SPACES"), *added]


def ops_of(package: str) -> list[Op[Any, Any]]:
    """Every op of a subpackage once: what tools measure, and what layers ask the gate about."""
    ops = [*(case.op for case in cases_of(package)), *_collect(_ASKED.get(package, ()), "OPS")]
    return list(dict.fromkeys(ops))


def _collect(modules: Sequence[str], name: str) -> list[Any]:
    found: list[Any] = []
    for module in modules:
        try:
            found += getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in _NOT_FUSED:
                raise
    return found


@contextmanager
def megatron_groups(groups: MegatronGroups | None, session: BenchSession) -> Iterator[None]:
    """Megatron's groups with all ranks in the one that ops are measured in (`BenchCase.groups`); nothing for None."""
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
