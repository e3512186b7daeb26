"""What each feature of ``--ditron`` would do on the machine that the facts describe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ditron_train.runtime.versions import pip_command
from ditron_train.tools.doctor.facts import Facts, island_words


@dataclass(frozen=True)
class FeatureState:
    """``fused``: accelerated here; ``interpreted``: runs, to try it; ``native``: Megatron's own path runs.
    ``ops``: names of the feature's ops."""

    name: str
    about: str
    state: Literal["fused", "interpreted", "native"]
    why: str
    fix: str | None = None
    ops: tuple[str, ...] = ()


def _on_gpus(facts: Facts) -> tuple[str, str | None] | None:
    """Why a feature that needs peers' memory stays native, and the fix; None if nothing stands in its way."""
    if len(facts.gpus) < 2:
        return "one GPU: a group of one rank has nothing to overlap", "start on several GPUs"
    if not facts.islands:
        return "no set of GPUs can reach each other's memory", "see peer access above"
    if any(gpu.capability < (8, 0) for gpu in facts.gpus):
        return "a GPU is older than compute capability 8.0", None
    return None


def _copy_engines(facts: Facts) -> tuple[str, str | None] | None:
    if not facts.has_cuda_bindings:
        return "cuda-bindings is missing: no signals behind copies", pip_command("cuda-bindings")
    return None


Need = Callable[[Facts], "tuple[str, str | None] | None"]
_NEEDS: dict[str, tuple[Need, ...]] = {
    "tp": (_on_gpus,),
    "sp": (_on_gpus,),
    "ep": (_on_gpus,),
    "pp": (_on_gpus, _copy_engines),
}
#: When the other features, which need no peers, are fused.
_FUSED = {
    "loss": "every GPU, for logits in bf16 or fp16",
    "adam": "with Transformer Engine's FusedAdam in the distributed optimizer",
    "det": "in deterministic mode, where no bit depends on the fill",
    "wgrad": "where apex's module is missing and fusion is asked for",
    "muon": "every GPU, where the bits are native's",
}


def _across_nodes(name: str, facts: Facts) -> str:
    """What becomes of groups that span nodes."""
    has_nvshmem = facts.versions.get("nvshmem4py") is not None
    if name == "ep":
        is_off = facts.environment.get("DITRON_EP_RAILS") == "off"
        return "native between nodes (DITRON_EP_RAILS=off)" if is_off else "between nodes along rails where quicker"
    return {
        "tp": "between nodes gathers along rails where quicker" + (", or through NVSHMEM" if has_nvshmem else ""),
        "sp": "between nodes exchanges along rails, projections native",
        "pp": "between nodes through NCCL" + (" or, by DITRON_PP_PATH, NVSHMEM" if has_nvshmem else ""),
    }[name]


def judge_features(facts: Facts) -> list[FeatureState]:
    """Returns one state for each feature; none if torch or Triton is missing,
    without which no feature can be asked for."""
    if any(facts.versions.get(name) is None for name in ("torch", "triton")):
        return []
    from ditron_train.megatron.plugin.arguments import FEATURES

    return [replace(_judge(name, about, facts), ops=_ops_of(name)) for name, about in FEATURES.items()]


def _ops_of(name: str) -> tuple[str, ...]:
    """Of the catalog; none if what they need cannot be loaded, of which a finding speaks."""
    from ditron_train.tools.catalog import ops_of

    try:
        return tuple(op.name.removeprefix(f"{name} ") for op in ops_of(name))
    except (ImportError, OSError, RuntimeError):
        return ()


def _judge(name: str, about: str, facts: Facts) -> FeatureState:
    if facts.versions.get("megatron-core") is None:
        reason = "megatron-core is not installed; ops can be called directly"
        return FeatureState(name, about, "native", reason, pip_command("megatron-core"))
    if not facts.gpus:
        if facts.environment.get("TRITON_INTERPRET") == "1":
            return FeatureState(name, about, "interpreted", "CPU processes over shared memory, Triton's interpreter")
        return FeatureState(name, about, "native", "no GPU, and the interpreter is off", "TRITON_INTERPRET=1")
    if name in _FUSED:
        return FeatureState(name, about, "fused", _FUSED[name])
    for need in _NEEDS[name]:
        obstacle = need(facts)
        if obstacle is not None:
            return FeatureState(name, about, "native", *obstacle)
    all_of_them = [list(range(len(facts.gpus)))]
    where = (
        f"{len(facts.gpus)} GPUs"
        if facts.islands == all_of_them
        else f"groups inside GPUs {island_words(facts.islands)}"
    )
    why = f"{where}, where the bits are native's and it is faster; {_across_nodes(name, facts)}"
    if name == "sp" and facts.versions.get("transformer-engine") is None:
        why += "; with megatron-core's local attention, as Transformer Engine is not installed"
    return FeatureState(name, about, "fused", why)
