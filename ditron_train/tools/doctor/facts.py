"""Facts about a machine, read without changing anything on it."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from ditron_train.runtime.versions import driver_version, find_versions

_ENVIRONMENT = ("DITRON_", "NCCL_", "NVSHMEM_", "NVTE_", "UB_")
_VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "CUBLAS_WORKSPACE_CONFIG")
# Libraries of which a second copy in one process gives two sets of global state.
_LIBRARIES = re.compile(r"/lib(nccl|nvshmem_host|cudart|cublas|cublasLt|torch|torch_cuda|triton)(-[0-9a-f]+)?\.so")
_DISTRIBUTIONS = re.compile(r"^(torch|triton|megatron-core|nvidia-(nccl|nvshmem)-cu\d+|nvshmem4py-cu\d+)$")
_NVSHMEM_HOST = "libnvshmem_host.so.3"
_NCCL_FILES = ("/etc/nccl.conf", "~/.nccl.conf")
_LINKS_S = 60.0  # that nvidia-smi gets
_MULTICAST_SUPPORTED = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED


@dataclass(frozen=True)
class Gpu:
    """One GPU: ``capability`` as major.minor."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    num_sms: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What ``collect_facts`` found.

    Attributes:
        versions: Of everything in ``versions.SUPPORTED``, None if it is not installed.
        gpus: Visible GPUs.
        driver: Version of the NVIDIA driver, whether torch sees its GPUs or not.
        torch_cuda: Version of CUDA that torch was built with; None: without.
        nccl: Version of torch's NCCL.
        peer_access: ``[i][j]``: whether GPU i can read and write GPU j's memory.
        links: Connection of each pair of GPUs as ``nvidia-smi topo -m`` names it (``NV18``, ``PIX``, ``SYS``).
        multicast: Whether the driver offers NVLink multicast on every GPU; None if nothing could be asked.
        environment: Variables that matter here.
        nccl_files: What NCCL's configuration files set, by name of the variable; the environment overrules it.
        nvshmem_library: Where NVSHMEM's host library is; None if there is none.
        interfaces: Network interfaces besides the loopback, over which NVSHMEM's processes find each other.
        infiniband: Devices for traffic between nodes.
        shared_memory: Total and free bytes of /dev/shm and whether it is writable; None if there is none.
        libraries: Copies of one library that this process has loaded, by name.
        distributions: Places in which one distribution is installed, by name, if there are several.
        compiler: The C compiler that Triton's launcher needs.
        has_cuda_bindings: Whether the extra ``cuda`` is installed.
    """

    versions: dict[str, str | None]
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    torch_cuda: str | None = None
    nccl: str | None = None
    peer_access: tuple[tuple[bool, ...], ...] = ()
    links: dict[str, str] = field(default_factory=dict)
    multicast: bool | None = None
    environment: dict[str, str] = field(default_factory=dict)
    nccl_files: dict[str, str] = field(default_factory=dict)
    nvshmem_library: str | None = None
    interfaces: tuple[str, ...] = ()
    infiniband: tuple[str, ...] = ()
    shared_memory: tuple[int, int, bool] | None = None
    libraries: dict[str, tuple[str, ...]] = field(default_factory=dict)
    distributions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    compiler: str | None = None
    has_cuda_bindings: bool = False

    @property
    def islands(self) -> list[list[int]]:
        """GPUs in sets of two or more that all reach each other's memory, none of them the others'; empty if it is
        not so."""
        rows = [{j for j, can in enumerate(row) if can} for row in self.peer_access]
        whole = all(rows[j] == row for row in rows for j in row)
        sets = sorted({tuple(sorted(row)) for row in rows}) if whole else []
        return [list(found) for found in sets if len(found) > 1]


def island_words(islands: list[list[int]]) -> str:
    """Such as ``0, 1, 2, 3 and 4, 5, 6, 7``."""
    return " and ".join(", ".join(map(str, island)) for island in islands)


def collect_facts() -> Facts:
    """Looks at this machine and this process; without torch, at what can be seen without it."""
    versions = {**find_versions(), **{name: None for name in ("torch", "triton") if not _imports(name)}}
    return Facts(
        **(_facts_of_torch() if versions["torch"] is not None else {}),
        versions=versions,
        driver=driver_version(),
        environment=_environment(),
        nccl_files=read_nccl_files(*_NCCL_FILES),
        nvshmem_library=_nvshmem_library(),
        interfaces=tuple(name for _, name in socket.if_nameindex() if name != "lo"),
        infiniband=tuple(sorted(os.listdir("/sys/class/infiniband")))
        if os.path.isdir("/sys/class/infiniband")
        else (),
        shared_memory=_shared_memory(),
        libraries=_loaded_copies(),
        distributions=_duplicate_distributions(),
        compiler=_compiler(),
        has_cuda_bindings=_imports("cuda.bindings.driver"),
    )


def _imports(module: str) -> bool:
    """Whether a module is there and can be imported."""
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _facts_of_torch() -> dict[str, Any]:
    import torch

    from ditron_train.data.provenance import nccl_version

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "gpus": tuple(_gpu(torch.cuda.get_device_properties(index)) for index in range(count)),
        "torch_cuda": torch.version.cuda,
        "nccl": nccl_version(),
        "peer_access": tuple(
            tuple(i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)) for i in range(count)
        ),
        "links": _links() if count > 1 else {},
        "multicast": _multicast(count),
    }


def _gpu(properties: Any) -> Gpu:
    capability = (properties.major, properties.minor)
    return Gpu(properties.name, properties.total_memory, capability, properties.multi_processor_count)


def _compiler() -> str | None:
    """What Triton calls; a CC that is no program is none."""
    named = os.environ.get("CC")
    return shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")


def _environment() -> dict[str, str]:
    return {n: v for n, v in sorted(os.environ.items()) if n.startswith(_ENVIRONMENT) or n in _VARIABLES}


def read_nccl_files(*paths: str) -> dict[str, str]:
    """``NAME=value`` lines of NCCL's configuration files; a later file overrules an earlier one."""
    found: dict[str, str] = {}
    for path in paths:
        try:
            lines = Path(path).expanduser().read_text(encoding="utf-8", errors="replace").splitlines()
        except (OSError, RuntimeError):
            continue
        pairs = (line.split("#")[0].partition("=") for line in lines)
        found.update(
            {name.strip(): value.strip() for name, sign, value in pairs if sign and name.strip().startswith("NCCL_")}
        )
    return found


def _nvshmem_library() -> str | None:
    """From the distribution, or wherever the loader finds it."""
    for distribution in metadata.distributions():
        if (distribution.metadata["Name"] or "").lower().startswith("nvidia-nvshmem"):
            for file in distribution.files or ():
                if file.name == _NVSHMEM_HOST:
                    return str(distribution.locate_file(file))
    try:
        ctypes.CDLL(_NVSHMEM_HOST)
    except OSError:
        return None
    return _NVSHMEM_HOST


def _shared_memory() -> tuple[int, int, bool] | None:
    path = "/dev/shm"
    if not os.path.isdir(path):
        return None
    usage = shutil.disk_usage(path)
    return usage.total, usage.free, os.access(path, os.W_OK)


def _duplicate_distributions() -> dict[str, tuple[str, ...]]:
    places: dict[str, set[str]] = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if _DISTRIBUTIONS.match(name):
            place = f"{os.path.realpath(str(distribution.locate_file('')))} ({name} {distribution.version})"
            places.setdefault(re.sub(r"-cu\d+$", "", name), set()).add(place)
    return {name: tuple(sorted(found)) for name, found in places.items() if len(found) > 1}


def _loaded_copies() -> dict[str, tuple[str, ...]]:
    """Libraries that are mapped from more than one file, after torch and triton are loaded (``collect_facts``)."""
    paths: dict[str, set[str]] = {}
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            files = {line.split(maxsplit=5)[5].strip() for line in maps if len(line.split(maxsplit=5)) == 6}
    except OSError:
        return {}
    for path in files:
        match = _LIBRARIES.search(path)
        if match:
            paths.setdefault(match.group(1), set()).add(os.path.realpath(path))
    return {name: tuple(sorted(found)) for name, found in paths.items() if len(found) > 1}


def _links() -> dict[str, str]:
    if not shutil.which("nvidia-smi"):
        return {}
    try:
        gathered = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=_LINKS_S
        ).stdout
    except subprocess.TimeoutExpired:
        return {}
    return parse_topology(gathered)


def parse_topology(text: str) -> dict[str, str]:
    """Returns ``{"0-1": "NV18", ...}`` for the pairs of GPUs in the matrix that ``nvidia-smi topo -m`` prints."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split() for line in text.splitlines()]
    header = next((row for row in rows if row and row[0] == "GPU0" and "X" not in row), [])
    names = [name for name in header if re.fullmatch(r"GPU\d+", name)]
    links = {}
    for row in rows:
        if len(row) > len(names) and row[0] in names and row is not header:
            for name, link in zip(names, row[1:]):
                low, high = int(row[0][3:]), int(name[3:])
                if low < high:
                    links[f"{low}-{high}"] = link
    return links


def _multicast(count: int) -> bool | None:
    """Asks the driver for an attribute; nothing is created."""
    if count == 0:
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    answers = []
    for index in range(count):
        device, value = ctypes.c_int(), ctypes.c_int()
        failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index)
        if failed or driver.cuDeviceGetAttribute(ctypes.byref(value), _MULTICAST_SUPPORTED, device):
            return None
        answers.append(bool(value.value))
    return all(answers)
