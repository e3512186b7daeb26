"""Profiles: the rates of one kind of GPU, or of a network, as a readable JSON file.

    {"format": "ditron_train profile 1", "device": "NVIDIA H200", "target": "sm_90", "num_sms": 132,
     "memory_gib": 140.4, "made_with": {...}, "rates": {"gemm_tflops": 787.0, ...}}

Those of the package are named by device (``nvidia-h200``). ``python -m ditron_train bench profile`` writes one.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ditron_train.runtime.device import device_name, kernel_target, num_sms
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.files import parse_json, read_regular, save_text
from ditron_train.runtime.rates import MachineRates, NetworkRates
from ditron_train.runtime.tuning_table import shipped_name

_FORMAT = "ditron_train profile 1"
_NETWORKS = "networks.json"
#: Whose rates stand for a kind of device that no profile was made on.
_BY_TARGET = {"sm_80": "nvidia-a100", "sm_90": "nvidia-h200", "sm_100": "nvidia-b200", "hip": "amd-mi300x"}
_MEMORY = re.compile(r"-(sxm\d-)?\d+gb(-hbm\w+)?$")  # at the end of a device's name
_TARGETS = ("interpreter", *_BY_TARGET)
#: What a rate of a profile is at least and at most: estimates divide by it.
LEAST_RATE, MOST_RATE = 1e-9, 1e15
_MOST_SMS = 100_000
_INTERPRETER = MachineRates(
    gemm_tflops=0.001, link_gbps=1, nccl_gbps=1, nccl_latency_us=500, memory_gbps=4, push_sm_gbps=1
)


@dataclass(frozen=True)
class Machine:
    """What a choice depends on beside the shape: the device's name, its kernels' ``TARGET`` and multiprocessors."""

    device: str
    target: str
    num_sms: int


def machine_of(device: torch.device) -> Machine:
    """The machine that ``device`` is.

    Raises:
        NotSupportedError: As ``kernel_target``.
    """
    return Machine(device_name(device), kernel_target(device), num_sms(device))


@dataclass(frozen=True)
class Profile:
    """One kind of GPU.

    Attributes:
        machine: Its name, target and multiprocessors.
        rates: What it moves and multiplies.
        memory_gib: Memory of one GPU.
        about: Where the rates are from, in words.
        made_with: Versions and date, for people.
    """

    machine: Machine
    rates: MachineRates
    memory_gib: float
    about: str = ""
    made_with: dict[str, str] = field(default_factory=dict, compare=False)

    def to_text(self) -> str:
        """The file: one line a rate."""
        head: dict[str, Any] = {"format": _FORMAT, **asdict(self.machine), "memory_gib": self.memory_gib}
        head.update(about=self.about, made_with=self.made_with)
        lines = [f' "{name}": {json.dumps(value)}' for name, value in head.items()]
        rates = ",\n".join(f'  "{name}": {value:.6g}' for name, value in asdict(self.rates).items())
        return "{\n" + ",\n".join(lines) + ',\n "rates": {\n' + rates + "\n }\n}\n"

    def save(self, path: Path) -> None:
        """Writes the file at once.

        Raises:
            SettingError: The path cannot be written.
        """
        save_text(path, self.to_text(), "the profile")


def _parse(text: str, name: str) -> Profile:
    try:
        content = parse_json(text)
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        unknown = set(content["rates"]) - {one.name for one in fields(MachineRates)}
        if unknown:
            raise ValueError(f"no rates are called {', '.join(sorted(unknown))}")
        rates = MachineRates(**{key: _number(key, value) for key, value in content["rates"].items()})
        about, made_with = content.get("about", ""), content.get("made_with", {})
        if not all(isinstance(one, str) for one in (content["device"], about, *made_with, *made_with.values())):
            raise ValueError("its device, what it is about and what it was made with have to be texts")
        if content["target"] not in _TARGETS:
            raise ValueError(f"its target has to be one of {', '.join(_TARGETS)}")
        num_sms = content["num_sms"]
        if type(num_sms) is not int or not 0 < num_sms <= _MOST_SMS:
            raise ValueError(f"num_sms has to be a whole number from 1 to {_MOST_SMS}")
        machine = Machine(content["device"], content["target"], num_sms)
        return Profile(machine, rates, _number("memory_gib", content["memory_gib"]), about, made_with)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SettingError(f"{name} is no profile of a device: {error}") from None


def _number(name: str, value: Any) -> float:
    """A rate that estimates can be divided by."""
    if type(value) not in (int, float) or not LEAST_RATE <= value <= MOST_RATE:
        raise ValueError(f"{name} has to be a number from {LEAST_RATE:g} to {MOST_RATE:g}")
    return float(value)


def _folder() -> Any:
    return resources.files("ditron_train.data").joinpath("profiles")


def shipped_profiles() -> list[str]:
    """Names of the profiles in the package."""
    names = (file.name for file in _folder().iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json") and name != _NETWORKS)


@lru_cache(maxsize=64)
def _shipped(name: str) -> Profile | None:
    file = _folder().joinpath(f"{name}.json")
    return _parse(file.read_text(encoding="utf-8"), file.name) if file.is_file() else None


def read_profile(path: Path) -> Profile:
    """The profile in a file.

    Raises:
        SettingError: It cannot be read, or is none.
    """
    try:
        return _parse(read_regular(path).decode("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"cannot read the profile {path}: {getattr(error, 'strerror', None) or error}") from None


def profile_named(name: str) -> Profile:
    """The profile that ``name`` says: a file, a name of the package's, or its end (``h200``).

    Raises:
        SettingError: There is none.
    """
    if name.endswith(".json"):
        return read_profile(Path(name))
    names = shipped_profiles()
    matching = [one for one in names if one == name.lower() or one.partition("-")[2] == name.lower()]
    found = _shipped(matching[0]) if matching else None
    if found is None:
        raise SettingError(f"no profile is called {name}: {', '.join(names)}, or a file of bench profile (*.json)")
    return found


def profile_of_device(device: str) -> Profile | None:
    """The package's profile of a GPU by its full name, or None. The size of the memory, which names of modules on
    NVLink end with, is left out: ``NVIDIA H100 80GB HBM3``, ``NVIDIA A100-SXM4-80GB``."""
    name = shipped_name(device).removesuffix(".json")
    return _shipped(name) or _shipped(_MEMORY.sub("", name))


def default_rates(target: str) -> MachineRates:
    """Rates to estimate with where none were measured; ``target`` as of ``runtime.device.kernel_target``."""
    if target == "interpreter":
        return _INTERPRETER
    profile = _shipped(_BY_TARGET[target])
    assert profile is not None, "it is part of the package"
    return profile.rates


def known_rates(machine: Machine) -> MachineRates:
    """Rates of the device's profile, else of its kind of device's."""
    profile = profile_of_device(machine.device)
    return default_rates(machine.target) if profile is None else profile.rates


def network_named(name: str) -> NetworkRates:
    """A network of the package by name, or one GPU's rate in GB/s as a number.

    Raises:
        SettingError: Neither.
    """
    known = parse_json(_folder().joinpath(_NETWORKS).read_bytes())
    if name in known:
        return NetworkRates(**known[name])
    try:
        return NetworkRates(_number("GB/s of one GPU", float(name)))
    except ValueError:
        raise SettingError(f"no network is called {name}: {', '.join(known)}, or GB/s of one GPU") from None
