"""Judges facts: each check returns findings, each finding that is not well has a fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.settings import get_settings, unknown_variables
from ditron_train.runtime.versions import (
    SUPPORTED,
    interpreted_specifier,
    is_newer,
    is_supported,
    pip_command,
    specifier_here,
    version_problems,
)
from ditron_train.tools.doctor.facts import Facts, island_words

Level = Literal["ok", "note", "warning", "error"]
_SMALL_SHM_BYTES = 256 << 20
# Settings that name NCCL's rings themselves.
_OWN_RINGS = ("NCCL_GRAPH_FILE", "NCCL_RINGS")
# NCCL algorithms whose sums do not follow the ring order that GEMM-RS reproduces.
_OTHER_ORDERS = {"tree", "nvls", "nvlstree", "collnet", "collnetdirect", "collnetchain", "pat"}
_ALGORITHMS = {"ring", *_OTHER_ORDERS}


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``error``: something does not work; ``warning``: slower, or native instead of the fused
    path."""

    topic: str
    level: Level
    text: str
    fix: str | None = None


def find_problems(facts: Facts) -> list[Finding]:
    """Returns all findings, good ones included, in the order of the report."""
    of_gpus = (_gpus, _links, _peers, _multicast, _nccl, _connections, _nvshmem)
    return [finding for check in (_versions, *of_gpus, _copies, _shm, _tools, _settings) for finding in check(facts)]


def _versions(facts: Facts) -> list[Finding]:
    findings = []
    for entry in SUPPORTED:
        version = facts.versions.get(entry.name)
        specifier, interpreted = (of(entry, facts.versions) for of in (specifier_here, interpreted_specifier))
        if version is None:
            level: Level = "error" if entry.required else "note"
            findings.append(Finding("versions", level, f"{entry.name} is not installed", pip_command(entry.name)))
        elif is_newer(entry, version):
            text = f"{entry.name} {version} is other than what was tried ({specifier}: {entry.why})"
            findings.append(Finding("versions", "warning", text, pip_command(entry.name, specifier)))
        elif not is_supported(entry, version, specifier):
            fix = pip_command(entry.name, specifier) if entry.distributions else f"use one in {specifier}"
            text = f"{entry.name} {version} is outside {specifier} ({entry.why})"
            findings.append(Finding("versions", "error", text, fix))
        elif not facts.gpus and not is_supported(entry, version, interpreted):
            text = (
                f"{entry.name} {version} is too new for Triton's interpreter, all that runs without "
                f"a GPU ({entry.why})"
            )
            findings.append(Finding("versions", "warning", text, pip_command(entry.name, interpreted)))
        else:
            findings.append(Finding("versions", "ok", f"{entry.name} {version} (supported: {specifier})"))
    known = {problem for problem in version_problems(facts.versions) if "mix that no index gives" in problem}
    return findings + [Finding("versions", "error", *problem.rsplit("; ", 1)) for problem in known]


def _gpus(facts: Facts) -> list[Finding]:
    if not facts.gpus and facts.versions.get("torch") is None:
        return []  # nothing sees them
    if not facts.gpus and facts.driver:
        return [_unseen_gpus(facts)]
    if not facts.gpus:
        text = "none: kernels run in Triton's interpreter on CPU processes, to read, test and try"
        fix = None if facts.environment.get("TRITON_INTERPRET") == "1" else "set TRITON_INTERPRET=1 to run here"
        return [Finding("GPUs", "note", text, fix)]
    findings = []
    for name in sorted({gpu.name for gpu in facts.gpus}):
        same = [gpu for gpu in facts.gpus if gpu.name == name]
        gpu = same[0]
        text = f"{len(same)} x {name}: {gpu.memory_bytes >> 30} GiB, {gpu.num_sms} SMs, driver {facts.driver}"
        if gpu.capability < (8, 0):
            text += f", compute capability {gpu.capability[0]}.{gpu.capability[1]}"
            findings.append(Finding("GPUs", "error", text, "kernels need compute capability 8.0 or newer"))
        else:
            findings.append(Finding("GPUs", "ok", text))
    if len({gpu.name for gpu in facts.gpus}) > 1:
        fix = "use GPUs of one kind in a group: the slowest decides, and cuBLAS may choose other kernels"
        findings.append(Finding("GPUs", "warning", "different GPUs in one machine", fix))
    return findings


def _unseen_gpus(facts: Facts) -> Finding:
    """A driver answers for GPUs that torch does not see."""
    driver, hidden = f"driver {facts.driver} has GPUs", facts.environment.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and (not hidden or hidden.startswith("-")):
        text = f"{driver}, CUDA_VISIBLE_DEVICES={hidden} hides them"
        return Finding("GPUs", "warning", text, "unset CUDA_VISIBLE_DEVICES")
    if facts.torch_cuda is None:
        text = f"{driver}, torch {facts.versions.get('torch')} is a build without CUDA"
        return Finding("GPUs", "error", text, f"pip uninstall torch, then {pip_command('torch')}")
    text = f"{driver}, torch (built for CUDA {facts.torch_cuda}) cannot use them"
    fix = "python -c 'import torch; torch.cuda.init()' says why; mostly the driver is too old"
    return Finding("GPUs", "error", text, fix)


def _links(facts: Facts) -> list[Finding]:
    if not facts.links:
        return []
    kinds = Counter(facts.links.values())
    text = ", ".join(f"{count} pairs {link}" for link, count in sorted(kinds.items()))
    if all(link.startswith("NV") for link in kinds):
        return [Finding("links", "ok", f"NVLink between all GPUs ({text})")]
    fix = "keep each tensor-parallel group on GPUs joined by NVLink; over PCIe most shapes stay native"
    return [Finding("links", "warning", f"not all GPUs are joined by NVLink ({text})", fix)]


def _peers(facts: Facts) -> list[Finding]:
    if len(facts.gpus) < 2:
        return []
    blocked = [f"{i}-{j}" for i, row in enumerate(facts.peer_access) for j, can in enumerate(row) if i < j and not can]
    if not blocked:
        return [Finding("peer access", "ok", "every GPU can read and write every other's memory")]
    islands = facts.islands
    if islands:
        text = f"GPUs reach each other's memory in islands only: {island_words(islands)}"
        fix = "keep each group inside one of them; groups with blocked pairs run natively"
        return [Finding("peer access", "warning", text, fix)]
    fix = "check the driver, IOMMU and virtualisation settings; groups with such pairs run natively"
    return [Finding("peer access", "error", f"no peer access between GPUs {', '.join(blocked)}", fix)]


def _multicast(facts: Facts) -> list[Finding]:
    if facts.multicast is None:
        return []
    state = "offered by the driver" if facts.multicast else "off or not supported"
    return [Finding("multicast", "ok", f"NVLink multicast is {state}; nothing here uses it")]


def _nccl(facts: Facts) -> list[Finding]:
    if not facts.gpus:
        return []
    environment = {**facts.nccl_files, **facts.environment}
    algorithms = environment.get("NCCL_ALGO", "")
    source = f", NCCL's files set {', '.join(sorted(facts.nccl_files))}" if facts.nccl_files else ""
    findings = [Finding("NCCL", "ok", f"version {facts.nccl}, NCCL_ALGO={algorithms or 'unset'}{source}")]
    rings = [name for name in _OWN_RINGS if environment.get(name)]
    if rings:
        text = f"{', '.join(rings)}: rings may run in another order than that of ranks"
        fix = f"unset {', '.join(rings)}, else GEMM-RS stays native where the order differs"
        findings.append(Finding("NCCL", "warning", text, fix))
    allowed, are_named = _reduce_scatter_algorithms(algorithms)
    if "ring" not in allowed or (are_named and allowed & _OTHER_ORDERS):
        text = f"NCCL_ALGO={algorithms}: sums may be taken in another order than the ring's"
        fix = "NCCL_ALGO=Ring, else GEMM-RS stays native where the bits differ"
        findings.append(Finding("NCCL", "warning", text, fix))
    if environment.get("NCCL_COLLNET_ENABLE", "0") == "1":
        text = "NCCL_COLLNET_ENABLE=1: switches may add in an order of their own"
        findings.append(Finding("NCCL", "warning", text, "NCCL_COLLNET_ENABLE=0 for sums in ring order"))
    nvls = environment.get("NCCL_NVLS_ENABLE", "2") != "0"
    if facts.multicast and nvls and "nvls" in allowed:
        text = "NCCL may reduce in the NVLink switch (NVLS), whose order is not the ring's"
        fix = "NCCL_ALGO=Ring or NCCL_NVLS_ENABLE=0, else GEMM-RS stays native where the bits differ"
        findings.append(Finding("NCCL", "warning", text, fix))
    return findings


def _reduce_scatter_algorithms(text: str) -> tuple[set[str], bool]:
    """Algorithms that ``NCCL_ALGO`` lets reduce-scatters take, and whether it names them: a list for all functions, or
    lists by function, ``^`` for all but those: ``ring,tree``, ``^nvls``, ``allreduce:tree;reducescatter:ring``."""
    names = ""
    for part in text.lower().split(";"):
        function, _, listed = part.rpartition(":")
        if function.strip() in ("", "reducescatter"):
            names = listed.strip()
    words = {word.strip() for word in names.removeprefix("^").split(",")} - {""}
    if not words or names.startswith("^"):
        return _ALGORITHMS - words, False
    return words, True


def _connections(facts: Facts) -> list[Finding]:
    if not facts.gpus:
        return []
    value = facts.environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if value == "1":
        return [Finding("queues", "ok", "CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron asks for with tensor parallelism")]
    text = f"CUDA_DEVICE_MAX_CONNECTIONS is {value or 'unset'}; Megatron asks for 1 with tensor parallelism on Hopper"
    return [Finding("queues", "note", text, "export CUDA_DEVICE_MAX_CONNECTIONS=1 (ditron_train works with either)")]


def _nvshmem(facts: Facts) -> list[Finding]:
    if not facts.gpus:
        return []
    if facts.versions.get("nvshmem4py") is None:
        text = "nvshmem4py is not installed: peer memory inside a node, NCCL between nodes"
        return [Finding("NVSHMEM", "note", text, f"{pip_command('nvshmem4py')} for groups across nodes")]
    if facts.nvshmem_library is None:
        text = (
            f"nvshmem4py {facts.versions['nvshmem4py']} is installed, but its library (libnvshmem_host.so.3) "
            "is not there"
        )
        return [Finding("NVSHMEM", "warning", text, pip_command("nvidia-nvshmem"))]
    text = (
        f"nvshmem4py {facts.versions['nvshmem4py']}, library "
        f"{facts.versions.get('nvidia-nvshmem') or facts.nvshmem_library}"
    )
    findings = [Finding("NVSHMEM", "ok", f"{text}; started at the first group that spans nodes")]
    return findings + _nvshmem_bootstrap(facts)


def _nvshmem_bootstrap(facts: Facts) -> list[Finding]:
    """Processes find each other by a unique id that torch.distributed hands round, then talk over sockets."""
    wanted = facts.environment.get("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "")
    names = tuple(wanted.lstrip("^=").split(","))
    usable = [
        interface
        for interface in facts.interfaces
        if not wanted
        or (interface in names if "=" in wanted[:2] else interface.startswith(names)) != wanted.startswith("^")
    ]  # ^: all but those named; =: whole names, else how they begin
    findings = []
    if wanted and not usable:
        text = (
            f"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME={wanted}: there is no such interface "
            f"({', '.join(facts.interfaces) or 'none'})"
        )
        findings.append(Finding("NVSHMEM", "warning", text, "name one that all nodes have, or unset it"))
    elif not facts.interfaces:
        findings.append(Finding("NVSHMEM", "note", "no network interface but the loopback: one node only", None))
    else:
        findings.append(Finding("NVSHMEM", "ok", f"bootstrap by unique id over {', '.join(usable)}"))
    other = facts.environment.get("NVSHMEM_BOOTSTRAP", "UID")
    if other.upper() != "UID":
        text = f"NVSHMEM_BOOTSTRAP={other} is not used: the bootstrap is by unique id"
        findings.append(Finding("NVSHMEM", "note", text, "unset it"))
    if not facts.infiniband:
        findings.append(Finding("NVSHMEM", "note", "no InfiniBand device: groups across nodes go through NCCL", None))
    return findings


def _copies(facts: Facts) -> list[Finding]:
    copies: list[tuple[Level, str, Sequence[str]]] = []
    copies += [("error", f"lib{name} is loaded", paths) for name, paths in facts.libraries.items()]
    copies += [("warning", f"{name} is installed", places) for name, places in facts.distributions.items()]
    findings = [
        Finding("copies", level, f"{what} {len(places)} times: {', '.join(places)}", "uninstall all but one")
        for level, what, places in copies
    ]
    return findings or [Finding("copies", "ok", "no library is loaded or installed twice")]


def _shm(facts: Facts) -> list[Finding]:
    if facts.shared_memory is None:
        fix = "mount a tmpfs there: CPU processes and NCCL use it"
        return [Finding("shared memory", "error", "there is no /dev/shm", fix)]
    total, free, writable = facts.shared_memory
    text = f"/dev/shm: {free >> 20} MiB free of {total >> 20} MiB"
    if not writable:
        return [Finding("shared memory", "error", f"{text}, not writable", "make it writable for this user")]
    if free < _SMALL_SHM_BYTES:
        return [Finding("shared memory", "warning", text, "give it more, such as docker run --shm-size=8g")]
    return [Finding("shared memory", "ok", text)]


def _tools(facts: Facts) -> list[Finding]:
    if not facts.gpus:
        return []
    findings = []
    if facts.compiler is None:
        text = "no C compiler: Triton builds a small launcher for each kernel"
        findings.append(Finding("tools", "error", text, "install gcc, or name one with CC"))
    if not facts.has_cuda_bindings:
        text = "cuda-bindings is not installed: no copy engine signals"
        findings.append(Finding("tools", "warning", text, pip_command("cuda-bindings")))
    return findings or [Finding("tools", "ok", f"C compiler {facts.compiler}, cuda-bindings")]


def _settings(facts: Facts) -> list[Finding]:
    mine: Mapping[str, str] = {n: v for n, v in facts.environment.items() if n.startswith("DITRON_")}
    try:
        get_settings()
        if all(facts.versions.get(name) is not None for name in ("torch", "triton")):
            from ditron_train.data.tuning_table import check_table
            from ditron_train.policy import check_plan

            check_table()
            check_plan()
    except SettingError as error:
        return [Finding("settings", "error", str(error), "unset it or correct it")]
    unknown = unknown_variables(mine)
    if unknown:
        return [Finding("settings", "warning", f"nothing reads {', '.join(unknown)}", "correct the name")]
    text = ", ".join(f"{name}={value}" for name, value in mine.items()) or "no DITRON_* variable is set"
    return [Finding("settings", "ok", text)]
