"""Simulated nodes: names, memory and links of their own (``tests/nodes/simulated_nodes.py``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import bodies_nodes as bodies  # noqa: E402

from tests.support.nodes import nodes_pool, run_on_nodes, unsupported_reason_nodes  # noqa: E402
from tests.support.patience import HANG_S  # noqa: E402

ROOT = Path(__file__).parents[2]


def test_names():
    assert run_on_nodes(2, 2, bodies.places) == [(["simulated0", "simulated0", "simulated1", "simulated1"], False)] * 4


def test_memory_is_a_nodes_own():
    found = run_on_nodes(2, 2, bodies.shared_memory, 2)
    assert [box for box, _ in found] == [[1, 2, 0, 0], [1, 2, 0, 0], [0, 0, 3, 4], [0, 0, 3, 4]]
    assert all("mapping the peers' shared memory failed on 4 of 4 ranks" in words for _, words in found)


def test_four_nodes_and_their_links():
    with nodes_pool(4, 2, rate_mbit=80) as pool:
        inside, between = pool.values(bodies.rates, (1 << 20,), HANG_S)[0]
        assert between < 10 * 1.5 < inside  # 80 Mbit/s; the bucket gives the first bytes away
        pool.nodes.limit(3, 20)
        assert pool.values(bodies.rates, (1 << 20,), HANG_S)[0][1] < 2.5 * 1.5


@pytest.mark.usefixtures("warm_python")
def test_command(tmp_path):
    reason = unsupported_reason_nodes()
    if reason is not None:
        pytest.skip(reason)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, socket, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "names = [None] * dist.get_world_size()\n"
        "dist.all_gather_object(names, (socket.gethostname(), os.environ['LOCAL_RANK'], os.environ['NCCL_HOSTID']))\n"
        f"open(os.path.join({str(tmp_path)!r}, f'rank{{dist.get_rank()}}'), 'w').write(repr(names))\n"
        "dist.barrier()\n"  # threads of a group that is not destroyed may end a process that has ended well
        "dist.destroy_process_group()\n"
    )
    command = [sys.executable, str(ROOT / "tests" / "nodes" / "simulated_nodes.py"), "--ranks", "1", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    wanted = repr([("simulated0", "0", "simulated0"), ("simulated1", "0", "simulated1")])
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == [wanted] * 2
