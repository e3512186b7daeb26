"""Nodes that one machine simulates: each in a network namespace of its own, with a limited link between them.

    python tests/nodes/simulated_nodes.py --nodes 2 --ranks 2 --rate-mbit 800 SCRIPT [arguments]
    python tests/nodes/simulated_nodes.py --loopback --nodes 2 --ranks 1 SCRIPT [arguments]

``-m MODULE`` may take the place of ``SCRIPT``. Every node has its own host name, ``NCCL_HOSTID``, network address and
``/dev/shm``: ranks of one node share memory, ranks of different nodes cannot. Between nodes everything passes a token
bucket (tc's tbf), in both directions; inside a node it passes the loopback device at its full rate. One torchrun agent
runs on each node. Nothing of the machine's own network is touched, and the namespaces end with their processes. Linux
with iproute2 (``ip``, ``tc``) and util-linux (``unshare``, ``nsenter``); root, or user namespaces for everybody.

Where that is forbidden, ``--loopback`` poses nodes by their ``NCCL_HOSTID`` and torchrun agent alone: between them
NCCL and gloo take sockets of the loopback device, whose rate nobody limits.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])
_TOOLS = ("ip", "tc", "unshare", "nsenter")
_DEVICE = "eth0"  # a node's link
_PORT = 29541  # of the first node's own namespace
_QUEUE_BYTES = 8 << 20  # in front of a link: a sender waits, nothing is dropped
_HOLD = "echo ready; read _"  # a namespace lives as long as the pipe of the process that holds it


def _environment() -> dict[str, str]:
    """This process's, with the folders of ``ip`` and ``tc`` on the path of users that are not root."""
    return {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}


def _own_user() -> list[str]:
    """What ``unshare`` needs where this user may make network namespaces in a user namespace only."""
    return [] if os.geteuid() == 0 and _makes([]) else ["--user", "--map-root-user"]


def _makes(user: Sequence[str]) -> bool:
    links = "ip link set lo up && ip link add br0 type bridge && ip link add v0 type veth peer name v1"
    words = f"mount -t tmpfs tmpfs /dev/shm && hostname simulated && {links} && {_bucket('v0', 100)}"
    command = ["unshare", *user, "--net", "--mount", "--uts", "sh", "-c", words]
    return subprocess.run(command, env=_environment(), capture_output=True).returncode == 0


def unsupported_reason() -> str | None:
    """Why this machine cannot pose nodes, or None."""
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_environment()["PATH"]) is None]
    if missing:
        return f"nodes cannot be simulated here: {', '.join(missing)} is not installed"
    if _makes(_own_user()):
        return None
    return "nodes cannot be simulated here: no network namespaces with veth, bridge and tbf"


def _bucket(device: str, rate_mbit: float, verb: str = "add") -> str:
    burst_bytes = max(16 << 10, int(rate_mbit * 1e6 / 8 / 100))  # of 10 ms
    return f"tc qdisc {verb} dev {device} root tbf rate {rate_mbit:g}mbit burst {burst_bytes} limit {_QUEUE_BYTES}"


class SimulatedNodes:
    """The namespaces of ``num_nodes`` nodes, until ``close``. A context manager.

    Args:
        num_nodes: How many.
        rate_mbit: Of every node's link, in each direction, in Mbit/s.

    Raises:
        RuntimeError: This machine cannot pose nodes.
    """

    def __init__(self, num_nodes: int, rate_mbit: float) -> None:
        reason = unsupported_reason()
        if reason is not None:
            raise RuntimeError(reason)
        self.num_nodes, self._processes = num_nodes, []
        self._user = _own_user()
        try:
            self._hub = self._hold(
                ["unshare", *self._user, "--net"], "ip link add br0 type bridge && ip link set br0 up"
            )
            self._nodes = [self._make_node(node, rate_mbit) for node in range(num_nodes)]
        except BaseException:
            self.close()
            raise

    def _hold(self, command: Sequence[str], words: str) -> subprocess.Popen[str]:
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        process = subprocess.Popen([*command, "sh", "-c", f"{words} && {_HOLD}"], env=_environment(), **pipes)
        self._processes.append(process)
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("nodes cannot be simulated here: a namespace could not be made")
        return process

    def _inside(self, holder: subprocess.Popen[str], *kinds: str) -> list[str]:
        user = ["--user", "--preserve-credentials"] if self._user else []
        return ["nsenter", "--target", str(holder.pid), *user, *(f"--{kind}" for kind in kinds)]

    def _make_node(self, node: int, rate_mbit: float) -> subprocess.Popen[str]:
        apart = [*self._inside(self._hub, "net"), "unshare", "--net", "--mount", "--uts"]
        names = "".join(f"{self.address(one)} simulated{one}\\n" for one in range(self.num_nodes))
        files = {"nsswitch.conf": "hosts: files\\n", "hosts": f"127.0.0.1 localhost\\n{names}"}
        own = [f"printf '{text}' >/run/{name} && mount --bind /run/{name} /etc/{name}" for name, text in files.items()]
        folders = " && ".join(f"mount -t tmpfs tmpfs {folder}" for folder in ("/dev/shm", "/run"))
        words = f"{folders} && hostname simulated{node} && ip link set lo up && {' && '.join(own)}"
        holder = self._hold(apart, words)
        link = f"link{node}"
        self._in_hub(f"ip link add {link} type veth peer name {_DEVICE} netns {holder.pid}")
        self._in_hub(f"ip link set {link} master br0 up && {_bucket(link, rate_mbit)}")
        words = f"ip addr add {self.address(node)}/16 dev {_DEVICE} && ip link set {_DEVICE} up"
        self._run([*self._inside(holder, "net"), "sh", "-c", f"{words} && {_bucket(_DEVICE, rate_mbit)}"])
        return holder

    def _in_hub(self, words: str) -> None:
        self._run([*self._inside(self._hub, "net"), "sh", "-c", words])

    def _run(self, command: Sequence[str]) -> None:
        done = subprocess.run(command, env=_environment(), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"nodes cannot be simulated here: {done.stderr.strip()}")

    @staticmethod
    def address(node: int) -> str:
        """Of the node, for the others."""
        return f"10.213.{node}.1"

    def holder(self, node: int) -> int:
        """The process whose namespaces (``user``, ``net``, ``mnt``, ``uts``) are the node's."""
        return self._nodes[node].pid

    def command(self, node: int) -> list[str]:
        """What stands in front of a command that is to run on the node, in this process's folder."""
        return [*self._inside(self._nodes[node], "net", "mount", "uts"), "env", "--chdir", os.getcwd()]

    def environment(self, node: int) -> dict[str, str]:
        """What processes of the node find beside what torchrun sets."""
        device = {f"{library}_SOCKET_IFNAME": _DEVICE for library in ("GLOO", "NCCL")}
        return {**device, "NCCL_HOSTID": f"simulated{node}", "NCCL_NET": "Socket", "GROUP_RANK": str(node)}

    def limit(self, node: int, rate_mbit: float) -> None:
        """Changes the rate of a node's link, in both directions."""
        self._in_hub(_bucket(f"link{node}", rate_mbit, "change"))
        self._run([*self._inside(self._nodes[node], "net"), "sh", "-c", _bucket(_DEVICE, rate_mbit, "change")])

    def run(self, ranks: int, arguments: Sequence[str], env: Mapping[str, str]) -> int:
        """Runs a script by one torchrun agent a node; the largest exit status."""
        agents = []
        for node in range(self.num_nodes):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(self.num_nodes)]
            torchrun += ["--node-rank", str(node), "--nproc-per-node", str(ranks), "--rdzv-backend", "static"]
            torchrun += ["--master-addr", self.address(0), "--master-port", str(_PORT)]
            environment = {**_environment(), **env, **_devices(node, ranks), **self.environment(node)}
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
            agents.append(subprocess.Popen([*self.command(node), *torchrun, *arguments], env=environment))
        try:
            return max(abs(agent.wait()) for agent in agents)
        finally:
            for agent in agents:
                agent.terminate()

    def close(self) -> None:
        """Ends the namespaces."""
        for process in reversed(self._processes):
            process.stdin.close()
            process.stdout.close()
            process.wait()
        self._processes = []

    def __enter__(self) -> SimulatedNodes:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class LoopbackNodes(SimulatedNodes):
    """Nodes without namespaces, on any machine: sockets of the loopback device are the link between them."""

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes, self._processes = num_nodes, []

    @staticmethod
    def address(node: int) -> str:
        """Of every node."""
        return "127.0.0.1"

    def command(self, node: int) -> list[str]:
        """Nothing: a command runs as it is."""
        return []

    def environment(self, node: int) -> dict[str, str]:
        """As of ``SimulatedNodes``."""
        return {**super().environment(node), **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")}


def _devices(node: int, ranks: int) -> dict[str, str]:
    """The node's GPUs; where there are not enough, processes on CPUs."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines()
    except OSError:
        listed = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(listed))))).split(",")
    mine = [visible[rank % len(visible)] for rank in range(node * ranks, (node + 1) * ranks)]  # nodes may share them
    if listed and len(set(mine)) == ranks and all(mine):
        # NVSHMEM knows nothing of simulated nodes: it would reach a GPU of another one by NVLink, past the link.
        transport = os.environ.get("DITRON_TRANSPORT", "torch")
        return {"CUDA_VISIBLE_DEVICES": ",".join(mine), "DITRON_TRANSPORT": transport}
    return {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def main() -> int:
    """Poses the nodes that the command line asks for and runs its script on them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=2, help="of a node; default: %(default)s")
    parser.add_argument("--rate-mbit", type=float, help="of every node's link; default: 1000")
    parser.add_argument("--loopback", action="store_true", help="no namespaces: the loopback device is the link")
    given, count, options = sys.argv[1:], 0, ("--nodes", "--ranks", "--rate-mbit", "--loopback", "-h", "--help")
    while count < len(given) and given[count].split("=")[0] in options:
        count += 1 if "=" in given[count] or given[count] in options[3:] else 2
    arguments, script = parser.parse_args(given[:count]), given[count:]  # what stands behind them is torchrun's
    if not script:
        parser.error("name a script, or -m and a module, as torchrun takes them, behind the options")
    if arguments.loopback and arguments.rate_mbit:
        parser.error("--loopback: the loopback device has no limit")
    reason = None if arguments.loopback else unsupported_reason()
    if reason is not None:
        print(f"{reason}; --loopback needs none", file=sys.stderr)
        return 2
    is_free = arguments.loopback
    with (
        LoopbackNodes(arguments.nodes)
        if is_free
        else SimulatedNodes(arguments.nodes, arguments.rate_mbit or 1e3) as nodes
    ):
        return nodes.run(arguments.ranks, script, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


if __name__ == "__main__":
    sys.exit(main())
