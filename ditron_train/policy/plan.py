"""The plan file: decisions of an earlier run, readable JSON, valid for one machine and one set of libraries.

A plan is refused if it was made on another device or with other libraries or settings (``fingerprint``). Switches of
the process that change the native path's bits or times are not part of this: Megatron sets them after reading its
arguments, and a script at any time. Instead a decision's key names the switches that are not at torch's defaults
(``switches``), so that a plan can hold decisions for several settings of them.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ditron_train import __version__
from ditron_train.data.tuning_table import named_table
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.files import locked, parse_json, read_regular, replace_file
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.settings import SETTINGS, get_settings
from ditron_train.runtime.versions import driver_version, find_versions
from ditron_train.stream.driver import has_driver

_FORMAT = "ditron_train plan 3"
_KEY = re.compile(
    r"(?P<op>(?P<package>tp|sp|ep|pp|loss) \D*).* on (?P<place>\d+ ranks(, [\w-]+)?) "
    r"\((?P<mode>strict|fast|bits)(; [a-z0-9 ,]+)?\)"
)
# Variables that change bits or times. Switches that a process sets itself are in the keys (``switches``).
_VARIABLES = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NVLS_ENABLE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_NTHREADS",
    "NCCL_BUFFSIZE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NVTE_EXT_MARGIN_SM",
    "NVTE_USE_CUTLASS_GROUPED_GEMM",
)
_OWN = ("transport", "pp_slots", "pp_leases", "pp_path", "ep_capacity", "ep_rails")  # likewise, of the fused path
_LIBRARIES = ("triton", "megatron-core", "transformer-engine")


@dataclass(frozen=True)
class Entry:
    """One decision as in the file.

    Attributes:
        host_longer_us: Host time that the fused path adds to the native one, if it is not part of the measured time.
    """

    use_ditron: bool
    reason: str
    bits_equal: bool | None
    native_us: float | None
    ditron_us: float | None
    host_longer_us: float = 0.0


def fingerprint() -> dict[str, Any]:
    """What a plan depends on: device, driver, libraries, the settings that change bits or times, and a tuning table's
    content.

    Raises:
        SettingError: A setting is invalid, or a tuning table cannot be read.
    """
    versions = find_versions()
    found: dict[str, Any] = {"ditron_train": __version__, "torch": torch.__version__}
    found.update({name: versions[name] for name in _LIBRARIES if versions[name] is not None})
    if torch.version.cuda and torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
        found["driver"] = driver_version()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        if not has_driver():  # linear layers multiply by other kernels then, whose bits nobody has compared
            found["copy engines"] = "out of use (cuda-bindings is missing)"
    else:
        found["device"] = platform.machine()
    found.update({name: os.environ[name] for name in _VARIABLES if name in os.environ})
    settings, table = get_settings(), named_table()
    own = ((setting, getattr(settings, name)) for name, setting in SETTINGS.items() if name in _OWN)
    found.update({setting.variable: str(value) for setting, value in own if value != setting.default})
    return found if table is None else {**found, "DITRON_TUNING": table}


def op_of(key: str) -> str:
    """The op that a decision's key begins with: everything before the first size."""
    return re.split(r"\d", key, maxsplit=1)[0].rstrip()


class Plan:
    """Decisions by key; the file is replaced as a whole, so that a reader never sees half of it.

    Attributes:
        made_with: ``fingerprint`` when the file was read. Megatron changes variables of NCCL when it makes its groups,
            so the fingerprint differs later in the same job.
    """

    def __init__(self, path: Path, entries: dict[str, Entry], made_with: dict[str, Any] | None = None) -> None:
        self.path = path
        self.entries = entries
        self.made_with = fingerprint() if made_with is None else made_with
        self._read = frozenset(entries)

    def places_read(self, name: str, mode: str) -> set[str]:
        """Groups (size, order of sums) of which the file held decisions for a subpackage, or for one op, under
        ``mode`` when it was read."""
        found = [_KEY.fullmatch(key) for key in self._read]
        return {
            match["place"]
            for match in found
            if match is not None and match["mode"] == mode and name in (match["package"], match["op"].rstrip())
        }

    def add(self, key: str, entry: Entry) -> None:
        """Adds a decision and writes it to the file, with those that other groups of the job have written meanwhile.

        If the file cannot be written, one log line says so, and later runs probe again.
        """
        self.entries[key] = entry
        try:
            with locked(self.path.with_name(f".{self.path.name[:200]}.lock")):
                self._write({**self._written(), key: entry})
        except OSError as error:
            log_once(
                f"plan {self.path}", f"the plan {self.path} is not added to: {error.strerror}", level=logging.WARNING
            )

    def _written(self) -> dict[str, Entry]:
        """What the file holds now, or what this process knows if the file cannot be read."""
        try:
            return load_plan(self.path, self.made_with).entries
        except SettingError:
            return dict(self.entries)

    def _write(self, entries: dict[str, Entry]) -> None:
        content = {
            "format": _FORMAT,
            "made_with": self.made_with,
            "decisions": {key: asdict(entry) for key, entry in sorted(entries.items())},
        }
        replace_file(self.path, json.dumps(content, indent=1) + "\n")


def _has_times(entry: Entry) -> bool:
    """Whether the times of an entry can be compared with other ranks'."""
    times = [time_us for time_us in (entry.native_us, entry.ditron_us) if time_us is not None]
    return all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in (*times, entry.host_longer_us))


def load_plan(path: Path, made_with: dict[str, Any] | None = None) -> Plan:
    """Reads a plan; if there is no file at the path, returns an empty plan, to be written there.

    Args:
        path: Path of the file.
        made_with: ``fingerprint`` of this process, if it is known.

    Raises:
        SettingError: The file cannot be read or written, is not a plan, or was made with another device or other
            libraries.
    """
    try:
        content = parse_json(read_regular(path))
    except (FileNotFoundError, NotADirectoryError):
        if not os.access(path.parent, os.W_OK):
            raise SettingError(f"cannot write the plan {path}: {path.parent} is not a writable folder") from None
        return Plan(path, {}, made_with)
    except OSError as error:
        raise SettingError(f"cannot read the plan {path}: {error.strerror}") from None
    except ValueError:
        raise SettingError(f"{path} is not a plan: no JSON; name another file") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise SettingError(f"{path} is not a plan of this version ({_FORMAT!r}): delete it or name another file")
    if not isinstance(content.get("made_with"), dict):
        raise SettingError(f"{path} does not say what it was made with: delete it or name another file")
    here = fingerprint() if made_with is None else made_with
    there = content["made_with"]
    stale = [f"{name} was {there.get(name, 'absent')}, is {here.get(name, 'absent')}"
             for name in sorted({*here, *there}) if there.get(name) != here.get(name)]  # fmt: skip
    if stale:
        raise SettingError(f"the plan {path} is stale ({'; '.join(stale)}): delete it or name another file")
    try:
        entries = {key: Entry(**entry) for key, entry in content["decisions"].items()}
    except (TypeError, AttributeError, KeyError):
        raise SettingError(f"the decisions in {path} cannot be read: delete it or name another file") from None
    unclear = [
        key
        for key, entry in entries.items()
        if not isinstance(entry.use_ditron, bool) or not isinstance(entry.reason, str)
    ]
    if unclear:
        raise SettingError(
            f"{path} does not say whether to use the fused path (true or false) and why: {unclear[0]!r}"
        )
    untimed = [key for key, entry in entries.items() if not _has_times(entry)]
    if untimed:
        raise SettingError(f"{path} holds times that are no numbers: {untimed[0]!r}")
    unknown = sorted(key for key in entries if not _KEY.fullmatch(key))
    if unknown:
        raise SettingError(f"{path} decides about an op that is not known: {unknown[0]!r}")
    return Plan(path, entries, here)


_PLAIN_BLAS = ("default", "cublas")


def _is_off(name: str) -> Callable[[], bool]:
    """Whether a default liberty of torch's GEMMs is switched off; False if this torch does not know it."""
    return lambda: not getattr(torch.backends.cuda.matmul, name, True)


def _is_other_blas() -> bool:
    library: Any = torch.backends.cuda.preferred_blas_library()  # an enumeration, of which torch says no names
    return library.name.lower() not in _PLAIN_BLAS


_switches: dict[str, Callable[[], bool]] = {
    "bf16 sums in full": _is_off("allow_bf16_reduced_precision_reduction"),
    "bf16 sums not split": _is_off("allow_bf16_reduced_precision_reduction_split_k"),
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "fp16 accumulation": lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
    "fp16 sums in full": _is_off("allow_fp16_reduced_precision_reduction"),
    "fp16 sums not split": _is_off("allow_fp16_reduced_precision_reduction_split_k"),
    "other blas": _is_other_blas,
}


def add_switch(name: str, is_on: Callable[[], bool]) -> None:
    """Adds a switch of another library that changes the kernels of native GEMMs; ``name``: lower-case letters and
    digits."""
    _switches[name] = is_on


def switches() -> tuple[str, ...]:
    """Names of the switches that are not at torch's defaults, sorted."""
    return tuple(sorted(name for name, is_on in _switches.items() if is_on()))
