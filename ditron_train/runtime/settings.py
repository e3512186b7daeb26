"""Every ``DITRON_*`` environment variable, stated once.

``SETTINGS`` is the table from which ``docs/reference/settings.md`` is made; ``get_settings()`` reads the environment
at the time of the call, so nothing is read on import and a test can set a variable.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any

from ditron_train.runtime.errors import SettingError

__all__ = ["SETTINGS", "Setting", "Settings", "get_settings", "under_policy", "unknown_variables"]


class _OneOf:
    """Parses a word that is one of a few."""

    def __init__(self, *choices: str) -> None:
        self.choices = choices

    def __call__(self, text: str) -> str:
        if text not in self.choices:
            raise ValueError(f"must be one of {', '.join(self.choices)}")
        return text


@dataclass(frozen=True)
class Setting:
    """One environment variable: how it is called, parsed, what it is when unset, and what it does; ``kind``: what its
    values are, unless a few words; ``former``: its old name, which is still read, with a warning."""

    variable: str
    parse: Callable[[str], Any]
    default: Any
    help: str
    kind: str = ""
    former: str | None = None

    @property
    def type_name(self) -> str:
        """What a value is."""
        return ", ".join(self.parse.choices) if isinstance(self.parse, _OneOf) else self.kind


def _number(kind: Callable[[str], Any], allowed: Callable[[Any], bool], words: str) -> Callable[[str], Any]:
    """Parses a number of a ``kind`` (``float`` or ``int``); what is none gets the same ``words`` as one that is not
    allowed."""

    def parse(text: str) -> Any:
        with suppress(ValueError):
            value = kind(text)
            if allowed(value):
                return value
        raise ValueError(f"must be {words}")

    return parse


# The largest leave room for a product of two of them: what is counted in nanoseconds, bytes or rows stays a number.
_MOST, _MOST_COUNT = 1e30, 2**31 - 1
_positive_float = _number(float, lambda value: 0 < value <= _MOST, f"a number above 0, at most {_MOST:g}")
_seconds = _number(float, lambda value: 0.001 <= value <= _MOST, f"a number of seconds from 0.001 to {_MOST:g}")
_positive_int = _number(int, lambda value: 0 < value <= _MOST_COUNT, f"a whole number from 1 to {_MOST_COUNT}")
_count = _number(int, lambda value: 0 <= value <= _MOST_COUNT, f"a whole number from 0 to {_MOST_COUNT}")


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def _num_bytes(text: str) -> int:
    digits = text.strip().rstrip("kKmMgGiIbB")
    unit = text.strip()[len(digits) :].lower()
    if unit in ("b",):
        unit = ""
    with suppress(ValueError, OverflowError):
        value = int(float(digits) * _UNITS.get(unit, 0))
        if value > 0:
            return value
    raise ValueError("must be a size above 0 such as 268435456, 256M or 2GiB")


def _setting(*words: Any, **more: Any) -> Any:
    """A field of `Settings`: as of a `Setting`."""
    return field(metadata={"setting": Setting(*words, **more)})


@dataclass(frozen=True)
class Settings:
    """Values of all settings at one moment."""

    features: str | None = _setting(
        "DITRON",
        str,
        None,
        "Features to switch on, as after `--ditron`, in any program that trains with megatron-core: where the hook is "
        "armed (`python -m ditron_train hook`), by `enable`, or by `apply_args` if the arguments name none.",
        kind="names",
    )
    transport: str = _setting(
        "DITRON_TRANSPORT",
        _OneOf("auto", "torch", "nvshmem", "shm"),
        "auto",
        "Where symmetric memory comes from. auto: shm for CPU processes, torch inside one node, nvshmem across nodes "
        "where nvshmem4py is installed. torch: of one torchrun agent's ranks, and none across agents. Without "
        "Megatron, groups that are a part of the job want `ditron_train.symm.start_nvshmem()` on every rank before.",
    )
    timeout_s: float = _setting(
        "DITRON_TIMEOUT_S",
        _seconds,
        100.0,
        "Deadline of every wait on a peer; past it PeerTimeoutError is raised on every surviving rank. What ranks "
        "agree on between their hosts, before the first call of a kind, may take 30 s at least.",
        kind="seconds",
    )
    arena_bytes: int | None = _setting(
        "DITRON_ARENA_BYTES",
        _num_bytes,
        None,
        "Cap on the symmetric memory of one process group (unset: no cap); what does not fit runs natively under "
        "Megatron. With the nvshmem transport it is also the reserve that is allocated once (unset: 2 GiB).",
        kind="size",
    )
    keep_gathered_mib: int = _setting(
        "DITRON_KEEP_GATHERED",
        _count,
        0,
        "Symmetric memory of each rank, in a tensor parallel group inside a node, that gathered inputs of column "
        "layers (bf16, fp16) stay in until backward has read them: they are gathered once, not twice. Read when a "
        "group is first used. 0: none is kept, as natively.",
        kind="MiB",
    )
    pp_slots: int = _setting(
        "DITRON_PP_SLOTS",
        _positive_int,
        2,
        "Buffers of each direction between pipeline stages that messages are copied out of; each holds the largest "
        "message.",
        kind="count",
    )
    pp_leases: int | None = _setting(
        "DITRON_PP_LEASES",
        _count,
        None,
        "Buffers between pipeline stages that received activations stay in until they are let go of, instead of being "
        "copied (gradients: at most 3). Unset: as many as the first stage of the schedule holds, and 2. 0: every "
        "message is copied.",
        kind="count",
        former="DITRON_PP_LOANS",
    )
    pp_path: str = _setting(
        "DITRON_PP_PATH",
        _OneOf("auto", "copy", "kernel", "nvshmem", "nccl"),
        "auto",
        "How messages reach a neighbouring pipeline stage. copy: copy engines; kernel: at most 8 programs that store "
        "into its memory (both inside a node); nvshmem: put-with-signal; nccl: one block. auto: copy inside a node, "
        "kernel where streams cannot signal there; between nodes nvshmem with `DITRON_TRANSPORT=nvshmem`, else nccl.",
    )
    muon_sharding: str = _setting(
        "DITRON_MUON_SHARDING",
        _OneOf("auto", "native", "cost"),
        "auto",
        "How dist_muon deals matrices out to data-parallel ranks. native: as megatron-core does. cost: balanced by "
        "the time of their step; the norm of all gradients then sums in another order. auto: cost where gradients are "
        "not clipped by that norm and `--ckpt-format` is not `torch`, else native.",
    )
    policy: str = _setting(
        "DITRON_POLICY",
        _OneOf("strict", "fast", "bits", "force"),
        "strict",
        "When the fused path runs instead of native. strict: where its bits equal native's and its time is lower, on "
        "this machine at this shape. fast: where its time is lower. bits: where its bits equal native's. force: "
        "wherever it can.",
    )
    plan: str | None = _setting(
        "DITRON_PLAN",
        str,
        None,
        "JSON file with the decisions of an earlier run, which are then not measured again; new ones are added to it.",
        kind="file",
    )
    rows: int | None = _setting(
        "DITRON_ROWS",
        _positive_int,
        None,
        "The most tokens of a microbatch (over all tensor parallel ranks), for jobs whose lengths vary: bits are "
        "proven at each length, times are measured per range of lengths from the first microbatch on, and symmetric "
        "memory is reserved once. More tokens run natively. Unset: from the third length of a layer on; memory grows.",
        kind="tokens",
    )
    audit: int = _setting(
        "DITRON_AUDIT",
        _count,
        0,
        "Every so many fused calls of a linear layer, the call is computed by both paths and the bits are compared on "
        "all ranks; after a difference the layer is native. It costs both paths, forward and backward, and a host "
        "sync. 0: never.",
        kind="calls",
    )
    tuning: str | None = _setting(
        "DITRON_TUNING",
        str,
        None,
        "Table of tile sizes and ways of moving data, as `python -m ditron_train tune` writes it. Unset: the one that "
        "ships for this GPU, if there is one. off, and whatever a table does not hold: a cost model chooses.",
        kind="file, off",
    )
    ep_capacity: float | None = _setting(
        "DITRON_EP_CAPACITY",
        _positive_float,
        None,
        "Expert parallel without a host sync: rows that a rank has room for, as a multiple of those it gets when "
        "routing is even. More is an error on every rank, never dropped. Unset: exact sizes, one host sync a layer, "
        "as natively.",
        kind="factor",
    )
    ep_rails: str = _setting(
        "DITRON_EP_RAILS",
        _OneOf("auto", "on", "off"),
        "auto",
        "Expert parallel over several nodes. A token crosses to a node once, along its rail, and is fanned out inside "
        "(tried on simulated nodes only). auto: where the policy finds it quicker than natively. on: where its bits "
        "are native's. off: natively.",
    )
    fp8_rows: str = _setting(
        "DITRON_FP8_ROWS",
        _OneOf("on", "off"),
        "on",
        "Rows of experts in FP8 under tensorwise scaling. on: all experts' are quantised at once, where the policy "
        "finds that equal and faster. off: by Transformer Engine, expert by expert.",
    )
    wgrad: str = _setting(
        "DITRON_WGRAD",
        _OneOf("on", "off"),
        "on",
        "Megatron's gradient accumulation fusion where apex is not installed. on: the launcher, `apply` and feature "
        "`wgrad` provide the module that Megatron asks for. off: Megatron raises its error.",
    )
    loss: str = _setting(
        "DITRON_LOSS",
        _OneOf("on", "off"),
        "on",
        "Megatron's unfused cross entropy. on: with any feature it is computed in fewer passes where that is bitwise "
        "identical and faster. off: by Megatron.",
    )
    det: str = _setting(
        "DITRON_DET",
        _OneOf("on", "off"),
        "on",
        "PyTorch's fill of new tensors in Megatron's deterministic mode. on: with any feature it is switched off once "
        "the first step has shown that no bit depends on it. off: it stays.",
    )
    batch_numbers: str = _setting(
        "DITRON_BATCH_NUMBERS",
        _OneOf("host", "gpu"),
        "host",
        "Numbers that Megatron-LM's training tells tensor parallel ranks with each microbatch. host: from host to "
        "host, so that no host waits for its GPU. gpu: by the GPU, as Megatron does.",
    )
    postmortem: str | None = _setting(
        "DITRON_POSTMORTEM",
        str,
        None,
        "Where each rank keeps its last 1,000 calls, whatever ends it; `python -m ditron_train postmortem` reads "
        "them. Across nodes a folder that they share. Unset: a temporary folder, emptied at a normal end.",
        kind="folder, off",
    )
    versions: str = _setting(
        "DITRON_VERSIONS",
        _OneOf("newer", "strict"),
        "newer",
        "What becomes of a library that is newer than those that were tried. newer: it is tried, after one warning "
        "and a self-check. strict: it is refused.",
    )


#: All of them, by name of the field.
SETTINGS: dict[str, Setting] = {one.name: one.metadata["setting"] for one in fields(Settings)}


def _by_former_name(setting: Setting) -> str | None:
    text = os.environ.get(setting.former or "")
    if text:
        warnings.warn(f"{setting.former} is now called {setting.variable}", FutureWarning, stacklevel=1)
    return text


def get_settings() -> Settings:
    """Reads the environment.

    Raises:
        SettingError: A variable does not parse; names the variable, the value and what is allowed.
    """
    values: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        text = os.environ.get(setting.variable) or _by_former_name(setting)
        try:
            values[name] = setting.parse(text) if text else setting.default
        except ValueError as error:
            raise SettingError(f"{setting.variable}={text!r}: {error}") from None
    return Settings(**values)


def unknown_variables(names: Iterable[str] | None = None) -> list[str]:
    """``DITRON_*`` variables (of ``names``, else of the environment) that no setting reads: most likely misspelt
    ones."""
    known = {name for setting in SETTINGS.values() for name in (setting.variable, setting.former)}
    names = os.environ if names is None else names
    return sorted(n for n in names if n.startswith("DITRON_") and n not in known and not n.startswith("DITRON_TEST_"))


@contextmanager
def under_policy(mode: str) -> Iterator[None]:
    """``DITRON_POLICY`` is ``mode`` for a while."""
    previous = os.environ.get("DITRON_POLICY")
    os.environ["DITRON_POLICY"] = mode
    try:
        yield
    finally:
        del os.environ["DITRON_POLICY"]
        if previous is not None:
            os.environ["DITRON_POLICY"] = previous
