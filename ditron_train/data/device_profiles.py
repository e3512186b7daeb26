"""Profiles: the rates of one kind of GPU, or of a network, as a readable JSON file.

    {"format": "ditron_train profile 1", "device": "NVIDIA H200", "target": "sm_90", "num_sms": 132,
     "about": "...", "made_with": {...}, "rates": {"gemm_tflops": 787.0, ...}}

The package has one for each kind of GPU (``nvidia-h200``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

import torch

from ditron_train.data.rates import MachineRates, NetworkRates
from ditron_train.data.tuning_table import shipped_name
from ditron_train.runtime.device import device_name, kernel_target, num_sms
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.files import parse_json

_NETWORKS = "networks.json"
#: Whose rates stand for a kind of device that no profile was made on.
_BY_TARGET = {"sm_80": "nvidia-a100", "sm_90": "nvidia-h200", "sm_100": "nvidia-b200", "hip": "amd-mi300x"}
_MEMORY = re.compile(r"-(sxm\d-)?\d+gb(-hbm\w+)?$")  # at the end of a device's name
#: What a rate of a profile is at least and at most: estimates divide by it.
LEAST_RATE, MOST_RATE = 1e-9, 1e15
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
        about: Where the rates are from, in words.
    """

    machine: Machine
    rates: MachineRates
    about: str = ""


def _folder() -> Any:
    return resources.files("ditron_train.data").joinpath("profiles")


def shipped_profiles() -> list[str]:
    """Names of the profiles in the package."""
    names = (file.name for file in _folder().iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json") and name != _NETWORKS)


@lru_cache(maxsize=64)
def _shipped(name: str) -> Profile | None:
    file = _folder().joinpath(f"{name}.json")
    if not file.is_file():
        return None
    content = parse_json(file.read_bytes())
    machine = Machine(content["device"], content["target"], content["num_sms"])
    return Profile(machine, MachineRates(**content["rates"]), content.get("about", ""))


def profile_named(name: str) -> Profile:
    """The profile that ``name`` says: its own, or its end (``h200``).

    Raises:
        SettingError: There is none.
    """
    names = shipped_profiles()
    matching = [one for one in names if one == name.lower() or one.partition("-")[2] == name.lower()]
    found = _shipped(matching[0]) if matching else None
    if found is None:
        raise SettingError(f"no profile is called {name}: {', '.join(names)}")
    return found


def profile_of_device(device: str) -> Profile | None:
    """The package's profile of a GPU by its full name, or None. The size of the memory, which names of modules on
    NVLink end with, is left out: ``NVIDIA H100 80GB HBM3``, ``NVIDIA A100-SXM4-80GB``."""
    name = shipped_name(device).removesuffix(".json")
    return _shipped(name) or _shipped(_MEMORY.sub("", name))


def default_rates(target: str) -> MachineRates:
    """Rates to estimate with if none were measured; ``target`` as of ``runtime.device.kernel_target``."""
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
        gbps = float(name)
    except ValueError:
        gbps = 0.0
    if not LEAST_RATE <= gbps <= MOST_RATE:
        raise SettingError(f"no network is called {name}: {', '.join(known)}, or GB/s of one GPU")
    return NetworkRates(gbps)
